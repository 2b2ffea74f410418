"""A stage on two processes, which the toy script plays: its numbers are those of one process, and a
world that fails one of them ends both. The certificate of a teacher is one for all processes."""

import json
import re

import pytest
from small_runs import save_start, written
from test_hosts import ended, start

TRAIN = """
import dataclasses, sys
from pathlib import Path
import jax
from rich.console import Console
from mas_jax.learning import hosts, loop
hosts.initialize()
from small_runs import scripted_stage, small_config
policy, place, way = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
config = small_config(
    policy, train__questions=4, train__mesh__data=2,
    train__drift_frac=1.0, rollout__min_episodes=4, rollout__failure_frac=0.4)
stage = scripted_stage(config, place, "teacher", chaotic=False, keep_episodes=True)
hosts.introduce(stage.mesh)
async def down(queries, k):
    raise OSError(f"no route to host {jax.process_index()}")
if way == "down" and jax.process_index() == 1:
    stage = dataclasses.replace(stage, world=dataclasses.replace(stage.world, search=down))
with hosts.together():
    loop.train(stage, place, Console(quiet=True))
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Trains for two steps; workdir, and what each process returned and said."""
    folder = tmp_path_factory.mktemp("stage")
    policy, script = save_start(folder / "policy"), folder / "train.py"
    script.write_text(TRAIN)

    def _train(processes, way="well"):
        place = folder / f"{processes}_{way}"
        arguments = (script, policy, place, way)
        return place, ended(start(*arguments, processes=processes, devices=2 // processes))

    return _train


def test_metrics_are_those_of_one_process_and_all_episodes_are_kept(played):
    (alone, [said]), (place, both) = played(1), played(2)
    assert [code for code, _, _ in (said, *both)] == [0, 0, 0], said[2] + both[0][2] + both[1][2]
    want, lines = written(alone), written(place)
    assert [line["step"] for line in lines] == [0, 1]
    for line, other in zip(lines, want, strict=True):
        assert line.keys() == other.keys()
        for name, value in other.items():
            if name != "batch/padding_frac":
                tolerance = 1e-3 if name.startswith("update/") else 1e-6  # the update's roundings
                assert line[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    assert lines[0]["rollout/episodes"] == 8
    assert 0 < lines[0]["rollout/em"] < 1
    files = sorted(path.name for path in (place / "episodes").iterdir())
    assert files == [f"00000{step}.{host}-of-2.jsonl" for step in (0, 1) for host in (0, 1)]


def test_a_world_that_fails_one_process_ends_both_with_its_words(played):
    place, results = played(2, "down")
    said = [errors for _, _, errors in results]
    assert [code for code, _, _ in results] == [1, 1], "".join(said)
    words = (
        r"TooManyFailures: \d of 4 episodes failed, more than 0\.4 of them; retriever: \d, such as"
    )
    assert re.search(rf"(?m)^mas_jax\.agents\.rollout\.{words}", said[1])
    assert re.search(rf"(?m)^stopped: process 1: {words} .*no route to host 1", said[0])
    assert not (place / "checkpoints").exists()


CERTIFY = """
import sys
from pathlib import Path
import jax
from rich.console import Console
from mas_jax.learning import certificate, hosts, pipeline
hosts.initialize()
from small_runs import small_config, small_pipeline
policy, place = Path(sys.argv[1]), Path(sys.argv[2])
count, own = jax.process_count(), str(jax.process_index())
config = small_config(policy, train__questions=count, train__mesh__data=count)
with hosts.together():
    for name in sys.argv[3:]:
        made = small_pipeline(config, place / name / own)  # what one sees of a shared directory
        try:
            pipeline.certify(made, policy, Console(width=200))
        except certificate.NotCertified as error:
            print(f"not certified: {error}")
"""


def certified(tmp_path, processes: int, *names: str) -> list[str]:
    """What all processes print, alike, of each named run, of whose folder each has a view of its
    own."""
    policy, script = save_start(tmp_path / "policy"), tmp_path / "certify.py"
    script.write_text(CERTIFY)
    results = ended(start(script, policy, tmp_path, *names, processes=processes, devices=1))
    assert [code for code, _, _ in results] == [0] * processes, "".join(e for *_, e in results)
    (said,) = {
        tuple(line for line in output.splitlines() if "certified" in line)  # not gloo's own
        for _, output, _ in results
    }
    assert len(said) == len(names)
    return list(said)


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_processes_go_by_the_certificate_that_the_first_one_has(tmp_path, processes):
    accuracy = {"start": 0.25, "teacher": 0.375}
    for name, low in (("better", 0.01), ("worse", -0.01)):  # the other processes see none of it
        path = tmp_path / name / "0" / "teacher" / "certificate.json"
        path.parent.mkdir(parents=True)
        path.write_text(
            json.dumps({"accuracy": accuracy, "difference": 0.125, "low": low, "high": 0.5})
        )
    better, worse = certified(tmp_path, processes, "better", "worse")
    told = "teacher 37.5 against 25.0 untrained on validation questions: +12.5 [{:.1f}, 50.0]"
    assert better == f"certified: {told.format(1)}"
    assert worse.startswith(f"not certified: {told.format(-1)}; ")


@pytest.mark.slow
def test_without_a_certificate_all_processes_play_and_the_first_one_writes_it(tmp_path):
    (tmp_path / "played" / "0" / "teacher").mkdir(parents=True)
    (played,) = certified(tmp_path, 4, "played")
    # the teacher is the start, which every process learns of questions that it did not play
    found = json.loads((tmp_path / "played/0/teacher/certificate.json").read_text())
    assert found["difference"] == found["low"] == found["high"] == 0
    percent = f"{100 * found['accuracy']['start']:.1f}"
    assert played.startswith(f"not certified: teacher {percent} against {percent} untrained")
    places = [path.parts[-3] for path in (tmp_path / "played").rglob("certificate.json")]
    assert places == ["0"]
