"""The monitors on the records of evaluations, and the limits of alarms on figures of real runs."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from evaluation_episodes import make_episode, make_plan, make_trace
from scripted_team import CharTokenizer

from mas_jax.config import default_config
from mas_jax.evaluation import records_file
from mas_jax.learning import drift_of_records, monitors
from mas_jax.learning.alarms import Alarms, AlarmSettings
from mas_jax.records import Question

SETTINGS = AlarmSettings(
    **default_config().train.alarms.to_dict(), distilled=(), privileged=("searcher",)
)
STRICT = dataclasses.replace(SETTINGS, style=0.05)

# --- figures of real runs -------------------------------------------------------------------------

# 40 updates in the study's world, seed 0: MAPD (coefficient 0.05 and 0.5), GRPO alone,
# MAPD with another question's protocol. Means of the first ten steps' searches and
# lengths; steps 12, 20, 28, 36, 39 and the one of the greatest length, with the KL to the start;
# the largest of both drifts over all steps, which GRPO alone was not measured for
TRAINED = {
    "mapd": (1.59, 14.59, [
        (1.82, 16.2, 0.007), (1.73, 15.7, 0.047), (1.97, 17.9, 0.081),
        (1.78, 16.5, 0.061), (2.03, 18.6, 0.025), (1.65, 15.0, 0.053),
    ], (0.0076, 0.0149)),
    "mapd_0.5": (1.55, 14.41, [
        (1.68, 15.8, 0.011), (1.69, 15.5, 0.064), (2.03, 17.7, 0.06),
        (1.76, 16.6, 0.086), (2.17, 19.9, 0.071), (1.68, 15.9, 0.152),
    ], (0.0074, 0.011)),
    "mapd_grpo": (1.59, 14.55, [
        (1.8, 16.2, 0.012), (1.78, 16.2, 0.068), (2.0, 18.2, 0.019),
        (1.82, 16.6, 0.022), (2.25, 20.0, 0.04), (1.93, 16.9, 0.082),
    ], None),
    "mapd_wrong": (1.59, 14.56, [
        (1.82, 16.4, 0.012), (1.71, 15.6, 0.043), (1.96, 18.2, 0.101),
        (1.82, 16.7, 0.05), (2.06, 18.9, 0.061), (1.66, 14.9, 0.077),
    ], (0.0076, 0.0157)),
    "mapd_without_facts": (1.59, 14.57, [
        (1.82, 16.3, 0.023), (1.72, 15.6, 0.022), (1.95, 17.8, 0.124),
        (1.75, 16.2, 0.051), (2.01, 18.5, 0.049), (1.58, 14.5, 0.075),
    ], (0.0103, 0.0211)),
}  # fmt: skip
NAMES = ("rollout/searches", "rollout/searcher/length", "update/searcher/kl_to_start")
DRIFTS = ("style/unigram_drift", "style/bigram_drift")


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("settings", [SETTINGS, STRICT], ids=["default", "strict"])
def test_no_trained_run_that_was_well_raises_an_alarm(name, settings):
    searches, length, steps, drifts = TRAINED[name]
    norm = dict(zip(NAMES, (searches, length, 0.0), strict=True))
    lines = [norm] * settings.window + [dict(zip(NAMES, x, strict=True)) for x in steps]
    lines[-1] |= dict(zip(DRIFTS, drifts or (), strict=False))
    alarms = Alarms(settings)
    assert [alarm for i, line in enumerate(lines) for alarm in alarms.check(i, line)] == []


# of 560 held-out questions, four runs each, against the untrained policy's: launch/compare_drift.py
EVALUATED = {  # searches, tokens an agent sampled, valid actions, drift of unigrams, of bigrams
    "protocol_base": (1.44, 13.6, 0.997, -0.0030, -0.0243),
    "mapd_grpo": (1.84, 16.7, 0.992, 0.0037, 0.0039),
    "mapd_grpo_long": (1.76, 16.1, 0.995, 0.0072, 0.0096),
    "mapd": (1.76, 16.2, 0.993, 0.0058, 0.0072),
    "mapd_0.5": (1.85, 17.5, 0.984, 0.0107, 0.0150),
    "mapd_raw_one": (1.86, 17.3, 0.993, 0.0028, 0.0024),
    # imitates what it cannot say at all: 10 points of accuracy where GRPO alone has 53
    "mapd_raw_team": (1.74, 35.4, 0.748, 0.0558, 0.0957),
}
MEASURED = (
    "rollout/searches", "rollout/searcher/length", "rollout/valid_action_frac", *DRIFTS
)  # fmt: skip


def alarms_of(name, settings):
    values, start = (
        dict(zip(MEASURED, x, strict=True)) for x in (EVALUATED[name], EVALUATED["protocol_base"])
    )
    return [alarm.name for alarm in drift_of_records.check(values, start, settings)]


def test_of_the_evaluated_only_the_one_that_drifted_raises_alarms():
    for name in EVALUATED.keys() - {"mapd_raw_team"}:
        assert alarms_of(name, SETTINGS) == alarms_of(name, STRICT) == []
    # its drift of bigrams is just within the default; length and valid actions are not
    others = ["length/searcher", "valid_actions"]
    assert alarms_of("mapd_raw_team", SETTINGS) == others
    assert alarms_of("mapd_raw_team", STRICT) == [*others, "style/unigrams", "style/bigrams"]


# --- measuring ------------------------------------------------------------------------------------


def spoken(uid, rollout, told, said, *more):
    """An episode of the single agent: what it was told and what it said, in turn."""
    tokenizer = CharTokenizer()
    texts = [told, said, *more]
    steps = [
        (len(t), len(s), "answer") for t, s in zip(texts[::2], texts[1::2], strict=True)
    ]  # fmt: skip
    trace = make_trace("searcher", steps, path="single")
    tokens = tuple(token for text in texts for token in tokenizer.encode(text))
    assert len(tokens) == len(trace.tokens)
    trace = dataclasses.replace(trace, tokens=tokens, question=uid, rollout=rollout)
    return make_episode(uid, rollout, team="single", traces=(trace,))


QUESTION = Question("a0", "a", "who made it", ("ada",))


def measure(episodes, start):
    return drift_of_records.measure(
        episodes, start, {"a0": QUESTION}, markers=("plan",), tokenizer=CharTokenizer()
    )


def test_leaks_are_told_by_what_the_conversation_shows():
    start = [spoken("a0", n, "q", "abba") for n in range(2)]
    told = spoken("a0", 0, "q", "it is", "made by ada, a plan", "ada, by plan")
    unknown = spoken("a0", 1, "q", "it is", "made by bob", "ada")
    # what comes after it was said tells nothing
    late = spoken("a0", 2, "q", "the plan", "a plan by ada", "no")
    found = measure([told, unknown, late, told], start)
    assert (found["leak/marker_frac"], found["leak/answer_frac"]) == (0.25, 0.25)
    assert measure(start, start)["leak/marker_frac"] == 0


def test_drift_is_of_every_other_episode_by_hand():
    start = [spoken("a0", n, "q", text) for n, text in enumerate(("aaab", "abbb"))]
    other = [spoken("a0", n, "q", "aaaa") for n in (1, 0)]
    # halves (3, 1) and (1, 3) against (4, 0) twice, as in test_monitors.py
    assert measure(other, start)["style/unigram_drift"] == pytest.approx(
        (0.095602 + 0.380395) / 2 - 0.130812, abs=1e-6
    )
    # the start from itself: 0 and 0.130812, twice each
    assert measure(start, start)["style/unigram_drift"] == pytest.approx(-0.130812 / 2, abs=1e-6)
    counts = np.asarray([monitors.count_tokens([episode]) for episode in start])
    assert monitors.drift(counts, counts)["style/unigram_drift"] == pytest.approx(
        -0.130812 / 2, abs=1e-6
    )


# --- the command ----------------------------------------------------------------------------------


def write(path, episodes, **settings):
    plan = make_plan({"a": 1}, len(episodes), "single", **settings)
    records_file.resume(path, plan)
    with path.open("ab") as file:
        file.writelines(records_file.record_line(plan.questions[0], e) for e in episodes)
    return plan


def test_files_of_whatever_plan_are_read_with_their_questions(tmp_path):
    path = tmp_path / "a.jsonl"
    episodes = [spoken("a0", n, "q", "abba") for n in range(2)]
    plan = write(path, episodes, tokenizer="t")
    header, questions, found = records_file.read_any(path)
    assert header["settings"] == {"tokenizer": "t"} and header["num_runs"] == 2
    assert found == episodes == list(records_file.read(path, plan))
    assert questions == {"a0": plan.questions[0]}
    for text in ("", "nothing\n", "[1]\n", '{"format": 9}\n'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a file of records: its first line"):
            records_file.read_any(path)


def compare(*arguments):
    policy = ROOT / "mas_jax" / "assets" / "protocol_policy"
    return subprocess.run(
        [sys.executable, "launch/compare_drift.py", f"--policy={policy}", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_the_command_prints_a_row_a_system_and_its_alarms(tmp_path):
    start, long = tmp_path / "start.jsonl", tmp_path / "long.jsonl"
    write(start, [spoken("a0", n, "q", "abba") for n in range(2)])
    write(long, [spoken("a0", n, "q", "cd" * 9) for n in range(2)])
    done = compare(start, long)
    assert done.returncode == 0, done.stderr
    (row,) = [line.split() for line in done.stdout.splitlines() if line.startswith("  long")]
    assert row[4:6] == ["0.6931", "0.6931"]  # nothing in common: ln 2
    assert "start: no alarm\n" in done.stdout
    told = "ALARM length/searcher: rollout/searcher/length is 18, above 6, which is 1.5 of the 4"
    assert f"long: {told} of the start\n" in done.stdout
    told = "ALARM style/unigrams: style/unigram_drift is 0.693, above 0.1"
    assert f"long: {told}\n" in done.stdout
    write(tmp_path / "other.jsonl", [spoken("a0", 0, "q", "abba")])
    done = compare(start, tmp_path / "other.jsonl")
    assert done.returncode != 0 and "differ in num_runs" in done.stderr + done.stdout
