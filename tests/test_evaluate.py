"""The evaluation as a user runs it: real policy, engine and index; resumed, refused, counted."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from mas_jax.config import default_config
from mas_jax.learning import policy_files, scenes, workdir

COMMAND = [
    sys.executable, "launch/evaluate.py", "--config=configs/toy.py",
    "--config.evaluation.num_questions=14", "--config.evaluation.num_runs=2",
    "--config.evaluation.log_interval_s=0.5", "--config.engine.buckets=(384,)",
]  # fmt: skip
ENVIRONMENT = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",  # as the rest of the suite; two devices
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "PYTHONPATH": str(ROOT),
}


def run(*arguments, **options):
    return subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True,
        timeout=300, **options,
    )  # fmt: skip


def records(workdir, team):
    """Episodes by question and run; they are written in the order in which they end."""
    lines = (workdir / f"{team}.jsonl").read_text().splitlines()[1:]
    episodes = [json.loads(line)["episode"] for line in lines]
    return {(e["question"], e["rollout"]): e for e in episodes}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("evaluation")
    done = run(f"--workdir={workdir}")
    assert done.returncode == 0, done.stderr
    return workdir, done


def test_the_table_and_the_summary_have_the_papers_columns(evaluated):
    workdir, done = evaluated
    summary = json.loads((workdir / "summary.json").read_text())
    assert set(summary["teams"]) == {"cascade", "hierarchy"}
    for name, team in summary["teams"].items():
        assert name in done.stdout
        assert team["num_episodes"] == 28
        assert team["num_missing"] == team["num_failed"] == 0
        macro = team["macro"]
        assert 0 <= macro["all_at_k"] <= macro["avg"] <= macro["pass_at_k"] <= 1
        assert team["per_workflow"]["searches"] > 0
        assert len(team["datasets"]) == 7
    for column in ("avg@2", "pass@2", "2/2", "searches"):
        assert column in done.stdout
    assert "hierarchy less cascade, avg@2 in points" in done.stdout
    for row in ("all, macro", "p (Holm)", "gold found", "critical", "accelerator s"):
        assert row in done.stdout
    for name in ("searches", "tokens"):
        for ending in ("png", "svg"):
            assert (workdir / f"accuracy_against_{name}.{ending}").stat().st_size > 1000
    seconds = json.loads((workdir / "accelerator_s.json").read_text())
    assert min(seconds["cascade"], seconds["hierarchy"]) > 0
    num_engines, num_buckets = 2, 1
    assert summary["engine"]["compilations"] <= 2 * num_buckets * num_engines
    assert 0 < summary["engine"]["shared_tokens"] < summary["engine"]["prompt_tokens"]


def test_the_policy_behaves_as_an_instruct_model_does(evaluated):
    summary = json.loads((evaluated[0] / "summary.json").read_text())
    for team in summary["teams"].values():
        assert team["valid_action_frac"] > 0.9
        assert 0.1 < team["macro"]["avg"] < 0.55  # of 28 episodes; 15-45% of all of them
        assert 0.2 < team["per_workflow"]["searches"] < 3  # may go up or down


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_to_the_same_records(evaluated, tmp_path):
    whole, _ = evaluated
    arguments = [f"--workdir={tmp_path}"]
    process = subprocess.Popen(
        [*COMMAND, *arguments], cwd=ROOT, env=ENVIRONMENT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    path = tmp_path / "cascade.jsonl"
    for _ in range(2000):
        if path.exists() and path.read_bytes().count(b"\n") > 3:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with path.open("ab") as file:
        file.write(b'{"dataset": "cut')  # as if killed inside a line
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    for team in ("cascade", "hierarchy"):
        assert records(tmp_path, team) == records(whole, team)
    again = run(*arguments)  # nothing is left to play
    assert again.returncode == 0
    assert records(tmp_path, "cascade") == records(whole, "cascade")


@pytest.mark.slow
def test_teams_play_again_under_caps_beside_their_free_runs(evaluated, tmp_path):
    free, _ = evaluated
    done = run(
        f"--workdir={tmp_path}", "--config.evaluation.teams=('hierarchy',)",
        "--config.evaluation.caps.searches=(1,)", "--config.evaluation.caps.tokens=(120,)",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    teams = json.loads((tmp_path / "summary.json").read_text())["teams"]
    assert list(teams) == [
        "hierarchy", "hierarchy, at most 1 searches", "hierarchy, ending after 120 tokens"
    ]  # fmt: skip
    assert records(tmp_path, "hierarchy") == records(free, "hierarchy")
    searches = {name: team["per_workflow"]["searches"] for name, team in teams.items()}
    assert searches["hierarchy"] > 1 >= searches["hierarchy, at most 1 searches"] > 0
    assert searches["hierarchy, ending after 120 tokens"] < searches["hierarchy"]
    for episode in records(tmp_path, "hierarchy_at_most_1_searches").values():
        assert episode["num_searches"] <= 1


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.evaluation.num_rnus=3", 'Did you mean "num_runs"'),
        ("--config.evaluation.split=dev", "evaluation.split: 'dev'"),
        # a process each: these rules are tested without one in test_config.py and test_scenes.py
        pytest.param(
            "--config.evaluation.caps.tokens=(0,)",
            "caps.tokens=(0,) must each be at least 1",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "--config.model.checkpoint=/nowhere",
            "'/nowhere' is not a directory",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "--config.evaluation.published=True", "published numbers of", marks=pytest.mark.slow
        ),
    ],
)
def test_a_wrong_setting_is_one_clear_error(flag, message, tmp_path):
    done = run(flag, f"--workdir={tmp_path}")
    assert done.returncode != 0
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_records_of_other_settings_are_refused_and_kept(evaluated):
    workdir, _ = evaluated
    before = (workdir / "cascade.jsonl").read_bytes()
    done = run(f"--workdir={workdir}", "--config.sampling.temperature=0.5")
    assert done.returncode != 0
    assert "temperature" in done.stderr
    assert (workdir / "cascade.jsonl").read_bytes() == before


def test_a_second_evaluation_into_a_directory_is_refused_while_the_first_one_runs(evaluated):
    """Two would each play what the other is playing, and every episode would be there twice."""
    place, _ = evaluated
    before = (place / "cascade.jsonl").read_bytes()
    with workdir.only_run(place):
        done = run(f"--workdir={place}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"stopped: another run is writing to {place}")
    assert (place / "cascade.jsonl").read_bytes() == before


def test_the_shipped_policy_is_small_and_of_this_world():
    directory = policy_files.checkpoint_directory(default_config())
    assert sum(path.stat().st_size for path in directory.iterdir()) <= 5_000_000
    record = json.loads((directory / "pretrain.json").read_text())
    config = default_config()
    scene = scenes.make_scene(config, policy_files.load_tokenizer(directory))
    assert record["world"] == scene.world.fingerprint
    assert record["tokenizer"] == scene.tokenizer.fingerprint
    assert record["pretrain"] == json.loads(config.pretrain.to_json_best_effort())
    policy_files.check_chat(scene.chat, directory)
