"""The summary of several teams and its tables, by hand."""

import io
import json
import re
from dataclasses import replace

import pytest
from evaluation_episodes import make_episode, make_plan, make_trace
from rich.console import Console

from mas_jax.evaluation import report
from mas_jax.evaluation.statistics import score_episode
from mas_jax.records import Failure, FailureKind

CASCADE = make_plan({"nq": 2, "bamboogle": 1}, num_runs=2)
HIERARCHY = replace(CASCADE, team="hierarchy")


def results():
    """Two teams; the cascade misses an episode and lost one, the hierarchy has every one."""
    searcher = make_trace("searcher", [(100, 10, "search"), (50, 20, "invalid")])
    answers = tuple(make_trace("answerer", [(1000, 5, "answer")], candidate=c) for c in range(2))
    played = dict(traces=(searcher, *answers), num_searches=1, turns_used=2)
    down = Failure(FailureKind.RETRIEVER, "down")
    cascade = [
        make_episode("nq0", 0, correct=(1.0, 0.0), **played),
        make_episode("nq0", 1, correct=(1.0, 1.0), **played),
        make_episode("nq1", 0, correct=(0.0, 1.0), **played),
        make_episode("nq1", 1, failed_searches=1, num_searches=1, failure=down),
        make_episode("bamboogle0", 0, correct=(1.0, 1.0), **played),
    ]
    hierarchy = [
        make_episode(question.uid, rollout, team="hierarchy", correct=(1.0,), num_searches=6)
        for question in HIERARCHY.questions
        for rollout in range(2)
    ]
    return [
        (CASCADE, [score_episode(episode) for episode in cascade]),
        (HIERARCHY, [score_episode(episode) for episode in hierarchy]),
    ]


def test_the_summary_by_hand():
    value = report.summary(results(), k=2)
    assert (value["num_questions"], value["num_runs"], value["k"]) == (3, 2, 2)
    team = value["teams"]["cascade"]
    # nq: 2 of 4 runs, one of two questions at all, one always; bamboogle: 1 of 2, once, not always
    assert team["datasets"]["nq"] == {
        "num_questions": 2,
        "avg": 0.5,
        "candidates_mean": (0.5 + 1.0 + 0.5) / 4,
        "pass_at_k": 0.5,
        "all_at_k": 0.5,
    }
    assert team["datasets"]["bamboogle"] == {
        "num_questions": 1,
        "avg": 0.5,
        "candidates_mean": 0.5,
        "pass_at_k": 1.0,
        "all_at_k": 0.0,
    }
    assert team["macro"] == {
        "avg": 0.5,
        "candidates_mean": 0.5,
        "pass_at_k": 0.75,
        "all_at_k": 0.25,
    }
    # four episodes of 100 + 160 + 1000 in, 30 + 2 * 5 out, and a failed one that spent a search
    assert team["per_workflow"] == {
        "searches": 1.0,
        "failed_searches": 0.2,
        "input_tokens": 4 * 1260 / 5,
        "output_tokens": 4 * 40 / 5,
        "turns": 4 * 2 / 5,
    }
    assert (team["num_episodes"], team["num_missing"], team["num_failed"]) == (5, 1, 1)
    assert team["failures"] == {"retriever": 1}
    assert team["outcomes"] == {"answered": 4}
    assert (team["num_actions"], team["invalid_action_frac"]) == (16, 0.25)
    assert team["valid_action_frac"] == 0.75
    assert value["teams"]["hierarchy"]["macro"]["all_at_k"] == 1.0


def test_the_summary_is_json_and_independent_of_the_order_of_episodes():
    value = report.summary(results(), k=2)
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    assert report.summary([(plan, scores[::-1]) for plan, scores in results()], k=2) == value


def test_teams_that_cannot_be_compared_are_errors():
    (plan, scores), other = results()
    with pytest.raises(ValueError, match="no team"):
        report.summary([], k=2)
    with pytest.raises(ValueError, match="one is there twice"):
        report.summary([(plan, scores), (plan, scores)], k=2)
    with pytest.raises(ValueError, match="cascade has 2 runs a question, more 3"):
        report.summary([(plan, scores), (replace(plan, team="more", num_runs=3), [])], k=2)
    fewer = replace(other[0], questions=plan.questions[:2])
    with pytest.raises(ValueError, match="cascade and hierarchy have different questions"):
        report.summary([(plan, scores), (fewer, [])], k=2)
    with pytest.raises(ValueError, match="k=3"):
        report.summary(results(), k=3)


def rendered(value: dict, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(report.tables(value))
    return console.file.getvalue()


ROWS = [
    ["team", "avg@2", "pass@2", "2/2", "searches", "input", "output"],
    ["cascade", "50.00", "75.00", "25.00", "1.00", "1,008", "32"],
    ["hierarchy", "100.00", "100.00", "100.00", "6.00", "0", "0"],
    ["team", "all cand.", "turns", "invalid", "failed", "missing"],
    ["cascade", "50.00", "1.60", "25.00", "1", "1"],
    ["hierarchy", "100.00", "0.00", "0.00", "0", "0"],
    ["team", "nq (2)", "bamboogle (1)"],
    ["cascade", "50.00", "50.00"],
    ["hierarchy", "100.00", "100.00"],
]


def test_the_tables_on_a_terminal_hold_the_papers_columns():
    text = rendered(report.summary(results(), k=2), width=80)
    assert "3 questions, 2 runs each" in text
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.split("\n")]
    assert [line for line in lines if line in ROWS] == ROWS


def test_seven_datasets_fit_in_eighty_columns_with_every_number_whole():
    names = ["nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"]
    plan = make_plan(dict.fromkeys(names, 1), num_runs=4)
    right = [
        score_episode(make_episode(question.uid, rollout, correct=(1.0,)))
        for question in plan.questions
        for rollout in range(4)
    ]
    text = rendered(report.summary([(plan, right)], k=4), width=80)
    assert max(map(len, text.split("\n"))) <= 80
    assert ["cascade", *["100.00"] * 7] in [line.split() for line in text.split("\n")]
    assert "…" not in text


def test_the_markdown_holds_the_same_rows():
    text = report.markdown(report.summary(results(), k=2))
    lines = [line for line in text.split("\n") if line.startswith("|")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = [row for row in found if set("".join(row)) == {"-", ":"}]
    assert [row for row in found if row not in rules] == ROWS
    assert [len(rule) for rule in rules] == [7, 6, 3]
