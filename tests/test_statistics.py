"""Accuracy over repeated runs and cost: hand-computed, by enumeration, and under reordering."""

import random
from dataclasses import replace
from itertools import combinations

import pytest
from evaluation_episodes import make_episode, make_plan, make_trace

from mas_jax.evaluation import statistics
from mas_jax.evaluation.statistics import all_at_k, pass_at_k, score_episode
from mas_jax.records import Failure, FailureKind


def test_one_right_run_of_four():
    # any of all four: certain; of two: 1 - C(3, 2) / C(4, 2) = 1 - 3/6; of one: 1/4
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(4, 1, 1) == 0.25
    assert all_at_k(4, 1, 1) == 0.25
    assert all_at_k(4, 1, 2) == 0.0
    assert all_at_k(4, 3, 2) == 0.5  # C(3, 2) / C(4, 2) = 3/6


def test_estimators_equal_the_share_of_all_draws():
    for num_runs in range(1, 8):
        for num_correct in range(num_runs + 1):
            runs = [1] * num_correct + [0] * (num_runs - num_correct)
            for k in range(1, num_runs + 1):
                draws = list(combinations(runs, k))
                any_right = sum(map(any, draws)) / len(draws)
                all_right = sum(map(all, draws)) / len(draws)
                assert pass_at_k(num_runs, num_correct, k) == pytest.approx(any_right, abs=1e-15)
                assert all_at_k(num_runs, num_correct, k) == pytest.approx(all_right, abs=1e-15)


def test_estimators_stay_exact_where_binomials_exceed_floats():
    # C(5000, 2500) has 1504 digits; with one right run the chance is k / n
    assert pass_at_k(5000, 1, 2500) == 0.5
    assert all_at_k(5000, 4999, 2500) == 0.5


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 2), (4, -1, 2), (0, 0, 0)])
def test_impossible_counts_are_errors(n, c, k):
    for estimator in (pass_at_k, all_at_k):
        with pytest.raises(ValueError, match=f"num_runs={n}, num_correct={c}, k={k}"):
            estimator(n, c, k)


def scores_of(rights: dict[str, str]) -> list[statistics.EpisodeScore]:
    """Scores from e.g. {"a0": "1.0F"}: right, missing, wrong, and a failure of the world."""
    scores = []
    for uid, marks in rights.items():
        for rollout, mark in enumerate(marks):
            failure = Failure(FailureKind.RETRIEVER, "down") if mark == "F" else None
            if mark != ".":
                episode = make_episode(uid, rollout, correct=(float(mark == "1"),), failure=failure)
                scores.append(score_episode(episode))
    return scores


def test_accuracy_with_fixed_denominators_by_hand():
    plan = make_plan({"a": 2, "b": 1}, num_runs=4)
    scores = scores_of({"a0": "1100", "a1": "1111", "b0": "1.F0"})
    found = statistics.accuracy_by_dataset(plan, scores, k=4)
    # a: 6 of 8 runs right, both questions once, one of two always; b: 1 of 4, the missing and the
    # failed run included
    assert found["a"] == {
        "num_questions": 2,
        "avg": 0.75,
        "candidates_mean": 0.75,
        "pass_at_k": 1.0,
        "all_at_k": 0.5,
    }
    assert found["b"] == {
        "num_questions": 1,
        "avg": 0.25,
        "candidates_mean": 0.25,
        "pass_at_k": 1.0,
        "all_at_k": 0.0,
    }
    assert statistics.macro_average(found, "avg") == 0.5  # not 7 of 12
    assert statistics.macro_average(found, "all_at_k") == 0.25
    # of two runs: a0 1 - C(2,2)/C(4,2) = 5/6 and 1/6, a1 1 and 1; b0 1 - C(3,2)/6 = 1/2 and 0
    found = statistics.accuracy_by_dataset(plan, scores, k=2)
    assert found["a"]["pass_at_k"] == pytest.approx((5 / 6 + 1) / 2)
    assert found["a"]["all_at_k"] == pytest.approx((1 / 6 + 1) / 2)
    assert (found["b"]["pass_at_k"], found["b"]["all_at_k"]) == (0.5, 0.0)


def test_no_episode_at_all_is_all_wrong():
    found = statistics.accuracy_by_dataset(make_plan({"a": 3}, num_runs=2), [], k=2)
    assert found["a"]["num_questions"] == 3
    assert [found["a"][name] for name in ("avg", "pass_at_k", "all_at_k")] == [0.0, 0.0, 0.0]
    assert set(statistics.cost_per_workflow([]).values()) == {0.0}
    assert statistics.invalid_action_frac([]) == 0.0


def test_a_missing_failed_or_wrong_run_counts_the_same():
    plan = make_plan({"a": 1, "b": 1}, num_runs=3)
    values = [
        statistics.accuracy_by_dataset(plan, scores_of({"a0": f"1{mark}1", "b0": "010"}), k=2)
        for mark in "0.F"
    ]
    assert values[0] == values[1] == values[2]


def test_order_of_episodes_changes_nothing():
    plan = make_plan({"a": 5, "b": 3}, num_runs=4)
    rng = random.Random(0)
    scores = [
        replace(score, candidates_mean=rng.randrange(6) / 5)
        for score in scores_of(
            {
                question.uid: "".join(rng.choice("01F") for _ in range(4))
                for question in plan.questions
            }
        )
    ]
    wanted = statistics.accuracy_by_dataset(plan, scores, k=4)
    for _ in range(20):
        rng.shuffle(scores)
        assert statistics.accuracy_by_dataset(plan, scores, k=4) == wanted


def test_unplanned_and_repeated_episodes_are_errors():
    plan = make_plan({"a": 1}, num_runs=2)
    for uid, rollout in (("b0", 0), ("a0", 2), ("a0", -1)):
        score = score_episode(make_episode(uid, rollout))
        with pytest.raises(ValueError, match="not in the plan"):
            statistics.accuracy_by_dataset(plan, [score], k=1)
    score = score_episode(make_episode("a0", 0))
    with pytest.raises(ValueError, match="there twice"):
        statistics.accuracy_by_dataset(plan, [score, score], k=1)


def test_the_first_candidate_is_the_answer_of_a_run():
    score = score_episode(make_episode("a0", 0, correct=(0.0, 1.0, 1.0, 1.0, 1.0)))
    assert (score.correct, score.candidates_mean) == (False, 0.8)
    score = score_episode(make_episode("a0", 0, correct=(1.0, 0.0, 0.0, 0.0, 0.0)))
    assert (score.correct, score.candidates_mean) == (True, 0.2)
    score = score_episode(make_episode("a0", 0, correct=()))
    assert (score.correct, score.candidates_mean) == (False, 0.0)


def test_a_failure_of_the_world_counts_as_wrong_whatever_was_answered():
    failure = Failure(FailureKind.REWARD, "late")
    score = score_episode(make_episode("a0", 0, correct=(1.0, 1.0), failure=failure))
    assert (score.correct, score.candidates_mean, score.failure) == (False, 0.0, "reward")


def test_tokens_of_a_two_turn_trace():
    # prompts of 10 and of 10 + 4 + 6 = 20 tokens, 4 and 3 sampled
    trace = make_trace("searcher", [(10, 4, "search"), (6, 3, "report")])
    score = score_episode(make_episode("a0", 0, traces=(trace,)))
    assert (score.input_tokens, score.output_tokens) == (30, 7)
    assert (score.num_actions, score.invalid_actions) == (2, 0)


def test_candidates_of_one_request_share_one_prompt():
    searcher = make_trace("searcher", [(10, 4, "report")])
    candidates = [
        make_trace("answerer", [(50, 2 + index, "answer")], candidate=index) for index in range(5)
    ]
    score = score_episode(make_episode("a0", 0, traces=(searcher, *candidates)))
    assert score.input_tokens == 10 + 50
    assert score.output_tokens == 4 + 2 + 3 + 4 + 5 + 6
    # in any order, and also where the first candidate is absent
    assert statistics.count_input_tokens(candidates[::-1]) == 50
    assert statistics.count_input_tokens(candidates[2:]) == 50


def test_a_candidate_that_is_asked_again_pays_for_its_second_prompt():
    retried = make_trace("answerer", [(50, 2, "invalid"), (8, 2, "answer")], candidate=0)
    other = make_trace("answerer", [(50, 2, "invalid"), (8, 3, "answer")], candidate=1)
    assert statistics.count_input_tokens([retried, other]) == 50 + 60 + 60


def test_a_trace_without_a_generation_sent_nothing():
    assert statistics.count_input_tokens([make_trace("searcher", [])]) == 0


def test_equal_prompts_of_two_agents_are_two_requests():
    searchers = [make_trace("searcher", [(10, 4, "report")], path=f"w0.s{i}") for i in range(2)]
    assert statistics.count_input_tokens(searchers) == 20


def test_gold_recall_by_hand():
    plan = make_plan({"a": 3}, num_runs=1)
    passages = replace(plan.questions[0], gold_passages=("p1", "p2"))
    pages = replace(plan.questions[1], gold_passages=("p1",), gold_titles=("Ada", '"Bob"'))
    found = (("p1", "Ada"), ("p9", "Bob"))
    assert statistics.gold_recall(passages, found) == 0.5
    assert statistics.gold_recall(pages, found) == 1.0
    assert statistics.gold_recall(plan.questions[2], found) is None
    plan = replace(plan, questions=(passages, pages, plan.questions[2]))
    scores = [
        score_episode(make_episode("a0", 0, retrieved=found)),
        score_episode(make_episode("a1", 0, retrieved=found[:1])),
        score_episode(make_episode("a2", 0, retrieved=found)),
    ]
    assert statistics.mean_gold_recall(plan, scores) == (0.5 + 0.5) / 2
    assert statistics.mean_gold_recall(plan, scores[2:]) is None


def test_cost_is_a_mean_over_the_recorded_episodes():
    trace = make_trace("searcher", [(10, 4, "search"), (6, 3, "invalid")])
    failure = Failure(FailureKind.RETRIEVER, "down")
    scores = [
        score_episode(
            make_episode("a0", 0, traces=(trace,), num_searches=5, failed_searches=1, turns_used=7)
        ),
        score_episode(make_episode("a0", 1, traces=(), num_searches=2, failure=failure)),
    ]
    assert statistics.cost_per_workflow(scores) == {
        "searches": 3.5,
        "failed_searches": 0.5,
        "input_tokens": 15.0,
        "output_tokens": 3.5,
        "turns": 3.5,
        "critical_steps": 1.0,
    }
    assert statistics.invalid_action_frac(scores) == 0.5
