"""The one command for a real model with protocols: what it asks for, says, and goes on from."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

SETS = ("musique", "2wikimultihopqa", "hotpotqa_train100")
# in the place of the programs: notes what it is asked for, makes what it would make; training
# fails while there is a file "kill"
PROGRAM = r"""#!/usr/bin/env bash
printf '%s\n' "$*" >> asked
case "$1" in
  launch/join_corpora.py)
    mkdir runs/smollm2_mapd/data
    for set in musique 2wikimultihopqa hotpotqa_train100; do
      seq 100 > runs/smollm2_mapd/data/$set.jsonl
    done ;;
  launch/build_index.py) mkdir runs/smollm2_mapd/data/index ;;
  launch/train.py)
    if [ -e kill ]; then exit 137; fi
    mkdir -p runs/smollm2_mapd/training/agent/policy ;;
esac
"""


@pytest.fixture
def place(tmp_path) -> Path:
    """A checkout of the script alone, whose environment has such a program for python; the
    questions lie in `qa`."""
    launch, programs, data = (tmp_path / name for name in ("launch", "bin", "qa"))
    for folder in (launch, programs, data):
        folder.mkdir()
    shutil.copy(ROOT / "launch" / "smollm2_mapd.sh", launch)
    (launch / "environment.sh").write_text(f'PATH="{programs}:$PATH"\n')
    (programs / "python").write_text(PROGRAM)
    (programs / "python").chmod(0o755)
    for name in SETS:
        for ending in (".jsonl", "_corpus.jsonl"):
            (data / f"{name}{ending}").touch()
    return tmp_path


def run(place, *arguments, **environment):
    return subprocess.run(
        ["bash", "launch/smollm2_mapd.sh", *arguments], cwd=place, capture_output=True, text=True,
        timeout=60, env=os.environ | environment,
    )  # fmt: skip


def asked(place) -> list[str]:
    """The programs that were run since it was last asked."""
    path = place / "asked"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return [line.split()[0].removeprefix("launch/").removesuffix(".py") for line in lines]


ALL = ["join_corpora", "build_index", "build_protocols", "train", "check_run"]


def test_a_killed_run_goes_on_with_what_is_left(place):
    (place / "kill").touch()
    killed = run(place, "qa")
    assert killed.returncode == 137 and asked(place) == ALL[:4]
    assert "done before" not in killed.stdout
    (place / "kill").unlink()
    done = run(place, "qa", "--config.seed=1")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [line.split()[0] for line in said if line.endswith("done before")] == ["1.", "2."]
    *_, train, check = (place / "asked").read_text().splitlines()
    assert train.endswith("--workdir=runs/smollm2_mapd/training --config.seed=1")
    assert check == "launch/check_run.py --training=runs/smollm2_mapd/training"
    assert asked(place) == ALL[2:]
    trained = (place / "runs/smollm2_mapd/data/train/musique.jsonl").read_text().split()
    tested = (place / "runs/smollm2_mapd/data/test/musique.jsonl").read_text().split()
    assert (trained, tested) == ([str(n) for n in range(1, 26)], [str(n) for n in range(26, 76)])


def test_a_dry_run_says_what_is_left_and_how_long_it_takes(place):
    done = run(place, "qa", DRY_RUN="1")
    assert (done.returncode, asked(place)) == (0, [])
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == [
        f"{number}." for number in range(1, 6)
    ]
    assert "30 minutes" in done.stdout
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "bash launch/smollm2_mapd.sh DATA"),
        (("--config.seed=1",), "bash launch/smollm2_mapd.sh DATA"),
        (("nowhere",), "nowhere lacks musique.jsonl musique_corpus.jsonl"),
    ],
)
def test_a_wrong_argument_is_told_before_anything_is_done(place, arguments, message):
    done = run(place, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert asked(place) == [] and not (place / "runs").exists()


def test_a_missing_file_and_other_data_are_told(place):
    assert run(place, "qa").returncode == 0
    shutil.copytree(place / "qa", place / "more")
    asked(place)
    done = run(place, "more")
    assert (done.returncode, asked(place)) == (2, [])
    assert f"was begun with {place}/qa, and this is {place}/more; move" in done.stderr
    (place / "qa" / "musique_corpus.jsonl").unlink()
    assert f"{place}/qa lacks musique_corpus.jsonl;" in run(place, "qa").stderr
