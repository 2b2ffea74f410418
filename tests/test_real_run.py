"""The commands for a real model, one a setting: what each asks for, says, and goes on from."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from config_files import load
from conftest import ROOT

# in the place of the programs: notes what it is asked for, makes what it would make; training
# fails while there is a file "kill"
PROGRAM = r"""#!/usr/bin/env bash
printf '%s\n' "$*" >> asked
for argument; do
  case "$argument" in
    --out=*) out="${argument#*=}" ;;
    --workdir=*) out="${argument#*=}" ;;
    --sets=*) sets="${argument#*=}" ;;
  esac
done
case "$1" in
  launch/join_corpora.py)
    mkdir "$out"
    for set in ${sets//,/ }; do
      seq 100 > "$out/$set.jsonl"
    done ;;
  launch/build_index.py) mkdir "$out" ;;
  launch/evaluate.py) mkdir -p "$out" && touch "$out/summary.json" ;;
  launch/train.py)
    if [ -e kill ]; then exit 137; fi
    mkdir -p "$out"/{student,agent,agentpo}/policy ;;
esac
"""


@dataclass(frozen=True)
class Script:
    """files: that DATA must hold; programs: that it runs, in order; killed: how many of them run
    until a killed training has ended; done: numbers of its parts that are done by then."""

    name: str
    out: str
    files: tuple[str, ...]
    programs: tuple[str, ...]
    killed: int
    done: tuple[str, ...]
    minutes: str


def with_corpora(*sets: str) -> tuple[str, ...]:
    return tuple(f"{name}{ending}.jsonl" for name in sets for ending in ("", "_corpus"))


SCRIPTS = {
    script.name: script
    for script in (
        Script(
            "smollm2_cpu", "smollm2",
            with_corpora("2wikimultihopqa", "hotpotqa", "hotpotqa_train100", "musique_train100"),
            ("join_corpora", "build_index", "evaluate", "train", "check_run"), 4,
            ("1.", "2.", "3."), "18 minutes",
        ),
        Script(
            "smollm2_mapd", "smollm2_mapd",
            with_corpora("musique", "2wikimultihopqa", "hotpotqa_train100"),
            ("join_corpora", "build_index", "build_protocols", "train", "check_run"), 4,
            ("1.", "2."), "7 minutes",
        ),
        Script(
            "smollm2_agentpo", "smollm2_agentpo", ("gsm8k_train2000.jsonl", "gsm8k.jsonl"),
            ("train", "evaluate", "check_run"), 1, ("1.",), "20 minutes",
        ),
    )
}  # fmt: skip


@pytest.fixture(params=SCRIPTS)
def script(request) -> Script:
    return SCRIPTS[request.param]


@pytest.fixture
def place(script, tmp_path) -> Path:
    """A checkout of a script alone, whose environment has such a program for python; the
    questions lie in `qa`."""
    launch, programs, data = (tmp_path / name for name in ("launch", "bin", "qa"))
    for folder in (launch, programs, data):
        folder.mkdir()
    for name in (script.name, "smollm2_common"):
        shutil.copy(ROOT / "launch" / f"{name}.sh", launch)
    (launch / "environment.sh").write_text(f'PATH="{programs}:$PATH"\n')
    (programs / "python").write_text(PROGRAM)
    (programs / "python").chmod(0o755)
    for name in script.files:
        (data / name).write_text("".join(f"{n}\n" for n in range(1, 201)))
    return tmp_path


def run(script, place, *arguments, **environment):
    return subprocess.run(
        ["bash", f"launch/{script.name}.sh", *arguments], cwd=place, capture_output=True, text=True,
        timeout=60, env=os.environ | environment,
    )  # fmt: skip


def asked(place) -> list[str]:
    """What was run since it was last asked."""
    path = place / "asked"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def programs(lines) -> list[str]:
    return [line.split()[0].removeprefix("launch/").removesuffix(".py") for line in lines]


def test_a_killed_run_goes_on_with_what_is_left(script, place):
    (place / "kill").touch()
    killed = run(script, place, "qa")
    assert killed.returncode == 137
    assert programs(asked(place)) == list(script.programs[: script.killed])
    assert "done before" not in killed.stdout
    (place / "kill").unlink()
    done = run(script, place, "qa", "--config.seed=1")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [line.split()[0] for line in said if line.endswith("done before")] == list(script.done)
    lines, out = asked(place), f"runs/{script.out}"
    once = ("join_corpora", "build_index")
    assert programs(lines) == [name for name in script.programs if name not in once]
    (train,) = (line for line in lines if line.startswith("launch/train.py"))
    assert train == (
        f"launch/train.py --config=configs/{script.name}.py --workdir={out}/training "
        "--config.seed=1"
    )
    evaluated = f"--evaluation={out}/evaluation " if "evaluate" in script.programs else ""
    assert lines[-1] == f"launch/check_run.py {evaluated}--training={out}/training"


SPLITS = {  # first and last line of what each split is of, by file
    "smollm2_mapd": {"train/musique": (1, 25), "test/musique": (26, 75)},
    "smollm2_agentpo": {
        "train/gsm8k": (1, 50), "validation/gsm8k": (51, 100), "test/gsm8k": (1, 16),
    },
}  # fmt: skip


@pytest.mark.parametrize("script", SPLITS, indirect=True)
def test_no_split_holds_anothers_questions(script, place):
    assert run(script, place, "qa").returncode == 0
    for name, (first, last) in SPLITS[script.name].items():
        found = (place / f"runs/{script.out}/data/{name}.jsonl").read_text().split()
        assert found == [str(n) for n in range(first, last + 1)]


def test_the_actor_stays_what_it_was_when_the_hints_are_evaluated():
    """The trained policy is the Collaborator's: the config names the Actor's by itself."""
    script = (ROOT / "launch" / "smollm2_agentpo.sh").read_text()
    assert '--config.model.checkpoint="$out/training/agentpo/policy"' in script
    config = load("smollm2_agentpo").get_config()
    assert config.actor.checkpoint == config.model.checkpoint == "package:smollm2"


def test_a_dry_run_says_what_is_left_and_how_long_it_takes(script, place):
    done = run(script, place, "qa", DRY_RUN="1")
    assert (done.returncode, asked(place)) == (0, [])
    numbers = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert numbers == [f"{number}." for number in range(1, len(numbers) + 1)] and len(numbers) > 3
    assert script.minutes in done.stdout
    assert not (place / "runs").exists()


@pytest.mark.parametrize("arguments", [(), ("--config.seed=1",), ("nowhere",)])
def test_a_wrong_argument_is_told_before_anything_is_done(script, place, arguments):
    done = run(script, place, *arguments)
    assert done.returncode == 2
    if arguments == ("nowhere",):
        assert f"{place}/nowhere lacks {' '.join(script.files)};" in done.stderr
    else:
        assert f"bash launch/{script.name}.sh DATA" in done.stderr
    assert asked(place) == [] and not (place / "runs").exists()


def test_a_missing_file_and_other_data_are_told(script, place):
    assert run(script, place, "qa").returncode == 0
    shutil.copytree(place / "qa", place / "more")
    asked(place)
    done = run(script, place, "more")
    assert (done.returncode, asked(place)) == (2, [])
    assert f"was begun with {place}/qa, and this is {place}/more; move" in done.stderr
    (place / "qa" / script.files[-1]).unlink()
    assert f"{place}/qa lacks {script.files[-1]};" in run(script, place, "qa").stderr
