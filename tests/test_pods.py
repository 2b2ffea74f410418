"""What would be run on rented chips, by dry run."""

import os
import shlex
import subprocess

import pytest
import yaml
from test_layers import ROOT

SCRIPT = ROOT / "launch" / "tpu_pod.sh"


def dry_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60,
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "DRY_RUN": "1"} | environment,
    )  # fmt: skip


def commands(*arguments: str, **environment: str) -> list[list[str]]:
    """The commands of a dry run, as their arguments."""
    done = dry_run(*arguments, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return [shlex.split(line) for line in done.stdout.splitlines()]


def test_a_slice_is_made_with_what_the_environment_says():
    create, mount = commands("create", BUCKET="b", NAME="n", ZONE="z", TYPE="v6e-16", VERSION="v")
    made = "gcloud compute tpus tpu-vm create n --zone=z --accelerator-type=v6e-16 --version=v"
    assert shlex.join(create) == made
    assert shlex.join(mount[:-1]) == "gcloud compute tpus tpu-vm ssh n --zone=z --worker=all"
    assert mount[-1].endswith("gcsfuse --implicit-dirs --rename-dir-limit=100000 b /mnt/runs")


def test_the_package_is_installed_on_every_host():
    archive, copy, install = commands("install")
    assert archive[:3] == ["git", "archive", "--format=tar.gz"]
    assert copy[5] == archive[3].removeprefix("--output=")
    assert copy[-1] == "--worker=all"
    assert "pip install --quiet --constraint launch/constraints.txt '.[tpu]'" in install[-1]


def test_the_same_command_runs_on_every_host_with_its_arguments_whole():
    (run,) = commands("run", "--config=configs/opd.py", "--config.data.corpus=a b", BUCKET="b")
    assert "--worker=all" in run
    told = shlex.split(run[-1].removeprefix("--command="))
    assert told[-4:] == [
        "launch/train.py", "--config=configs/opd.py", "--config.data.corpus=a b",
        "--workdir=/mnt/runs/opd",
    ]  # fmt: skip


def test_results_are_fetched_and_the_slice_given_back():
    (fetch,) = commands("fetch", "here", BUCKET="b", RUN="r")
    assert fetch == ["gcloud", "storage", "rsync", "--recursive", "gs://b/r", "here"]
    (delete,) = commands("delete", NAME="n")
    assert delete[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "delete", "n"]


@pytest.mark.parametrize("arguments", [(), ("destroy",), ("fetch",)])
def test_a_wrong_word_shows_the_usage(arguments):
    done = dry_run(*arguments, BUCKET="b")
    assert (done.returncode, done.stdout) == (2, "")
    assert "bash launch/tpu_pod.sh create" in done.stderr


@pytest.mark.parametrize("arguments", [("create",), ("run",), ("fetch", "here")])
def test_a_missing_bucket_is_one_clear_error(arguments):
    done = dry_run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("BUCKET is not set; name the storage bucket")


def test_the_manifest_gives_every_host_of_its_slice_one_process():
    service, job = yaml.safe_load_all((ROOT / "launch" / "gke.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    chips = 1
    for size in pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"):
        chips *= int(size)
    (container,) = pod["containers"]
    each = container["resources"]["limits"]["google.com/tpu"]
    assert container["resources"]["requests"]["google.com/tpu"] == each
    assert spec["completions"] == spec["parallelism"] == chips // each
    assert spec["completionMode"] == "Indexed"
    # the hosts' names, by which they find each other, come from the service
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert (ROOT / container["command"][1]).exists()
    assert (ROOT / container["command"][2].removeprefix("--config=")).exists()
    _, again, ends = spec["podFailurePolicy"]["rules"]
    assert 75 in again["onExitCodes"]["values"]
    assert ends["action"] == "FailJob"
