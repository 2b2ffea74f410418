"""What a privileged branch may do to a policy: leaks and drifts by hand, and when they warn."""

import asyncio
import io
import json
import math

import numpy as np
import pytest
from evaluation_episodes import make_episode, make_trace
from rich.console import Console
from scripted_team import QUESTION, RUN, CharTokenizer, Script, make_team

from mas_jax import metrics
from mas_jax.agents.protocol import MARKERS, render
from mas_jax.agents.rollout import play_episode
from mas_jax.learning.alarms import Alarms, AlarmSettings
from mas_jax.learning.experience import divided, remembering
from mas_jax.learning.monitors import BUCKETS, Style, count_tokens, divergence, tally_leaks
from mas_jax.records import Passage, Question

SETTINGS = AlarmSettings(
    window=2, searches=0.5, valid_actions=0.8, entropy=0.25, failure_frac=0.1, distilled=(),
    privileged=("searcher",), length=0.5, growth=1.5, kl_to_start=0.5, style=0.1, leak=0.05,
)  # fmt: skip

# --- leaks ----------------------------------------------------------------------------------------


def played(*says, question=QUESTION, finds="about things"):
    """The leaks of one episode in which the single agent says this: of markers, and of answers."""
    script = Script(
        {("single", turn): text for turn, text in enumerate(says)},
        finds=lambda query: [Passage("p1", "thing", finds)],
    )
    search, texts = remembering(script.world.search)
    world = script.world.__class__(script.world.sample, search, script.world.reward)
    episode = asyncio.run(play_episode(question, 0, make_team("single"), world=world, run=RUN))
    return episode, texts


def leaks(*says, question=QUESTION, **changes):
    episode, texts = played(*says, question=question, **changes)
    found = divided(
        tally_leaks(
            [episode], {question.uid: question}, texts, markers=MARKERS["json"],
            tokenizer=CharTokenizer(),
        )
    )  # fmt: skip
    return found["leak/marker_frac"], found["leak/answer_frac"]


def test_an_answer_that_no_passage_had_told_is_a_leak():
    # the golden answer of "who made the thing" is ada
    search, answer = "<search>the thing</search>", "<answer>ada</answer>"
    assert leaks(search, answer) == (0, 1)
    assert leaks(search, answer, finds="made by Ada in 1840") == (0, 0)
    # the passage comes only after it was said
    assert leaks("<search>ada thing</search>", answer, finds="made by Ada") == (0, 1)
    # in thoughts, too; a wrong answer is none
    assert leaks("it is Ada <search>thing</search>", "<answer>bob</answer>") == (0, 1)
    assert leaks(search, "<answer>bob</answer>") == (0, 0)
    assert leaks(search, "<answer>adam</answer>") == (0, 0)


def test_what_the_question_names_or_any_text_holds_is_none():
    either = Question("toy/1", "toy", "who is older, ada or bob?", ("ada",))
    assert leaks("<answer>ada</answer>", question=either) == (0, 0)
    closed = Question("toy/1", "toy", "is it so?", ("yes",))
    assert leaks("<answer>yes</answer>", question=closed) == (0, 0)


def test_a_marker_is_a_leak_unless_question_or_passage_holds_it():
    search, answer = "<search>thing</search>", "<answer>bob</answer>"
    assert leaks("As the Protocol says <search>thing</search>", answer) == (1, 0)
    assert leaks(search, "by the reasoning\n plan <answer>bob</answer>") == (1, 0)
    assert leaks(search, "the protocol <answer>bob</answer>", finds="a Protocol of 1840") == (0, 0)
    asked = Question("toy/1", "toy", "who wrote the Kyoto Protocol?", ("ada",))
    assert leaks("<search>kyoto protocol</search>", answer, question=asked) == (0, 0)
    assert leaks(search, answer) == (0, 0)


def test_every_form_has_markers_that_its_texts_hold():
    step = {"goal": "a", "tool": "search", "query_hint": "b", "expected": "c"}
    fact = {"fact": "d", "passage_id": "p"}
    shown = {"task_type": "others", "reasoning_plan": [step], "grounding_facts": [fact]}
    ends = {"answer": "e", "answer_grounded": True}, {"partial_findings": ["f"]}
    for form, markers in MARKERS.items():
        texts = [" ".join(render(shown | end, form).split()) for end in ends]
        assert sum(any(m in text for m in markers) for text in texts) == 2
        assert all(m == m.casefold() for m in markers)


def test_shares_are_of_all_episodes_of_all_hosts():
    search, answer = "<search>the thing</search>", "<answer>ada</answer>"
    told, texts = played(search, answer, finds="made by Ada")
    leaked, _ = played(answer)
    knobs = dict(markers=(), tokenizer=CharTokenizer())
    one = tally_leaks([told, told], {QUESTION.uid: QUESTION}, texts, **knobs)
    other = tally_leaks([leaked, told], {QUESTION.uid: QUESTION}, texts, **knobs)
    assert divided(one, other)["leak/answer_frac"] == 0.25
    assert divided(tally_leaks([], {}, {}, **knobs))["leak/marker_frac"] == 0


def test_episodes_that_leak_raise_the_alarm_and_others_do_not():
    clean = leaks("<search>thing</search>", "<answer>ada</answer>", finds="made by Ada")
    by_heart = leaks("<search>thing</search>", "<answer>ada</answer>")
    marked = leaks("the protocol <search>thing</search>", "<answer>bob</answer>")

    def alarms_of(steps):
        alarms = Alarms(SETTINGS)
        lines = [dict(zip(("leak/marker_frac", "leak/answer_frac"), x, strict=True)) for x in steps]
        return [(a.step, a.name) for i, line in enumerate(lines) for a in alarms.check(i, line)]

    assert alarms_of([clean] * 5) == []
    assert alarms_of([clean, clean, clean, by_heart, clean, by_heart]) == [
        (3, "leak/answers"), (5, "leak/answers"),
    ]  # fmt: skip
    # a policy that knew the answers from the start leaks nothing
    assert alarms_of([by_heart] * 5) == []
    # but one that spoke of a protocol from the start was shown it
    assert alarms_of([marked, marked, clean, marked]) == [(0, "leak/markers"), (3, "leak/markers")]


# --- style ----------------------------------------------------------------------------------------


def test_tokens_and_pairs_of_a_turn_are_counted():
    trace = make_trace("searcher", [(1, 3, "search"), (2, 1, "answer")])
    # tokens 100 + index % 7: sampled 101 102 103, then 106
    unigrams, bigrams = count_tokens([make_episode("a0", 0, traces=(trace,))])
    assert {i: n for i, n in enumerate(unigrams) if n} == {101: 1, 102: 1, 103: 1, 106: 1}
    # 101 102 and 102 103; 103 106 are of two turns
    pairs = [(a * 1_000_003 + b) % BUCKETS for a, b in ((101, 102), (102, 103))]
    assert {i: n for i, n in enumerate(bigrams) if n} == dict.fromkeys(pairs, 1)
    assert np.sum(count_tokens([])) == 0


def test_divergence_by_hand():
    # halves against the first alone: H(3/4, 1/4) - (ln 2 + 0) / 2 = 0.562335 - 0.346574
    assert divergence(np.array([5, 5]), np.array([3, 0])) == pytest.approx(0.215762, abs=1e-6)
    assert divergence(np.array([3, 0]), np.array([0, 7])) == pytest.approx(math.log(2))
    assert divergence(np.array([2, 4]), np.array([3, 6])) == pytest.approx(0)
    assert divergence(np.array([2, 4]), np.array([0, 0])) == 0


def counted(*unigrams, bigrams=(1,)):
    counts = np.zeros((2, BUCKETS), np.int64)
    counts[0, : len(unigrams)], counts[1, : len(bigrams)] = unigrams, bigrams
    return counts.tolist()


def test_drift_by_hand():
    style = Style(2)
    assert style.add(counted(3, 1)) == style.add(counted(1, 3)) == {}
    assert style.add(counted(4, 0)) == {}  # one of the last two is still of the start
    found = style.add(counted(4, 0))
    # halves (3, 1) and (1, 3) against (4, 0) twice: H(7/8, 1/8) - H(3/4, 1/4) / 2 = 0.095602 and
    # H(5/8, 3/8) - H(3/4, 1/4) / 2 = 0.380395; against each other ln 2 - H(3/4, 1/4) = 0.130812
    assert found["style/unigram_drift"] == pytest.approx(
        (0.095602 + 0.380395) / 2 - 0.130812, abs=1e-6
    )
    assert found["style/bigram_drift"] == pytest.approx(0)
    style.add(counted(3, 1))
    # the last two are now (3, 1) and (1, 3): 0 and 0.130812, twice each
    later = style.add(counted(1, 3))["style/unigram_drift"]
    assert later == pytest.approx(-0.130812 / 2, abs=1e-6)
    assert [Style(1).add(counted(1)) for _ in range(3)] == [{}] * 3


def test_samples_of_one_source_drift_little_and_of_another_much():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(300, 0.3), 2)

    def step(source, size):
        return np.stack([np.pad(rng.multinomial(size, source), (0, BUCKETS - 300))] * 2)

    for size, noise in ((900, 0.01), (20, 0.06)):  # also where few samples differ by much
        same, other = Style(4), Style(4)
        for i in range(8):
            stays, goes = same.add(step(p[0], size)), other.add(step(p[i // 4], size))
        assert abs(stays["style/unigram_drift"]) < noise < 0.1 < goes["style/unigram_drift"]


def test_a_style_from_its_saved_state_measures_as_before():
    rng = np.random.default_rng(1)
    steps = [rng.integers(0, 3, (2, BUCKETS)) for _ in range(9)]
    whole = Style(3)
    expected = [whole.add(counts) for counts in steps]
    assert sum(map(bool, expected)) == 4
    for cut in range(9):
        before = Style(3)
        for counts in steps[:cut]:
            before.add(counts)
        resumed = Style.from_state(json.loads(json.dumps(before.state)))
        assert [resumed.add(counts) for counts in steps[cut:]] == expected[cut:]


# --- limits ---------------------------------------------------------------------------------------


def raised_over(metric, values, settings=SETTINGS):
    alarms = Alarms(settings)
    return [
        (step, alarm.name)
        for step, value in enumerate(values) for alarm in alarms.check(step, {metric: value})
    ]  # fmt: skip


def test_length_and_searches_may_neither_collapse_nor_grow():
    # norm 2: bad below 1 and above 3, good again from 1.5 to 2.5
    values = [1, 3, 0.9, 1.4, 0.9, 1.5, 0.9, 2.5, 3.1, 2.6, 3.1, 2.5, 3.1, 3.0]
    steps = (2, 6, 8, 12)
    for metric, name in (
        ("rollout/searcher/length", "length/searcher"), ("rollout/searches", "searches"),
    ):  # fmt: skip
        assert raised_over(metric, values) == [(step, name) for step in steps]
    alarms = Alarms(SETTINGS)
    for step in range(2):
        alarms.check(step, {"rollout/searches": 2.0})
    (alarm,) = alarms.check(2, {"rollout/searches": 3.5})
    assert alarm.message == (
        "rollout/searches is 3.5, above 3, which is 1.5 of the 2 of the run's first 2 steps"
    )


@pytest.mark.parametrize(
    ("metric", "name", "limit"),
    [
        ("update/searcher/kl_to_start", "kl_to_start/searcher", 0.5),
        ("style/unigram_drift", "style/unigrams", 0.1),
        ("style/bigram_drift", "style/bigrams", 0.1),
        ("leak/marker_frac", "leak/markers", 0.05),
    ],
)
def test_what_has_a_limit_of_its_own(metric, name, limit):
    values = [limit, 1.01 * limit, 0.51 * limit, 1.01 * limit, 0.5 * limit, 1.01 * limit]
    assert raised_over(metric, values) == [(1, name), (5, name)]


def test_without_a_privileged_branch_none_of_it_is_watched():
    plain = AlarmSettings(
        window=2, searches=0.5, valid_actions=0.8, entropy=0.25, failure_frac=0.1, distilled=()
    )
    for metric in (
        "rollout/searcher/length", "rollout/searches", "update/searcher/kl_to_start",
        "style/unigram_drift", "leak/marker_frac", "leak/answer_frac",
    ):  # fmt: skip
        assert raised_over(metric, [2, 2, 99, 99], plain) == []
    assert raised_over("rollout/leader/length", [2, 2, 99]) == []  # not a role with a view


def test_a_run_resumed_from_its_file_warns_like_the_uninterrupted_one(tmp_path):
    rng = np.random.default_rng(2)
    scales = {
        "rollout/searches": 2, "rollout/searcher/length": 60, "style/unigram_drift": 0.2,
        "style/bigram_drift": 0.2, "leak/marker_frac": 0.1, "leak/answer_frac": 0.2,
        "update/searcher/kl_to_start": 1,
    }  # fmt: skip
    lines = [{name: float(scale * rng.random()) for name, scale in scales.items()}] * 2
    for _ in range(30):
        lines.append({name: float(scale * 2 * rng.random()) for name, scale in scales.items()})
    whole = Alarms(SETTINGS)
    expected = [whole.check(step, line) for step, line in enumerate(lines)]
    assert len({alarm.name for found in expected for alarm in found}) == len(scales)
    for cut in (1, 2, 9, 20):
        with metrics.Writer(
            tmp_path, active=True, console=Console(file=io.StringIO()), total_steps=32,
            start_step=0, log_interval_s=1e9,
        ) as writer:  # fmt: skip
            for step, line in enumerate(lines[:cut]):
                writer.write(step, line)
        resumed = Alarms.from_history(SETTINGS, metrics.read(tmp_path / metrics.FILE))
        rest = [resumed.check(cut + i, line) for i, line in enumerate(lines[cut:])]
        assert rest == expected[cut:]
