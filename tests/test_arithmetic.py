"""Toy mathematics: problems that can be solved by their words, disjoint, the same everywhere."""

import numpy as np
import pytest

from mas_jax.data import arithmetic
from mas_jax.data.arithmetic import (
    OBSCURE,
    OPERATIONS,
    RANGES,
    SPLITS,
    Problem,
    Step,
    boxed,
    compute,
    draw_problems,
    make_arithmetic,
    make_arithmetic_tokenizer,
    parse_problem,
    results,
)


def test_a_problem_is_worked_out_step_by_step():
    problem = Problem("mira", 6, (("gains", 5), ("lends", 6), ("scales", 4), ("mirrors", 2)))
    # 6 + 5 = 11; 11 - 6 = 5; 5 * 4 = 20, at most 12; 2 - 12 = -10, at least 0
    assert results(6, problem.steps) == [6, 11, 5, 12, 0]
    assert problem.answer == 0
    assert problem.text == (
        "mira has 6 then gains 5 then lends 6 then scales 4 then mirrors 2 , how many"
    )
    assert problem.steps[1] == Step("minus", 6)
    assert compute("from", 5, 8) == 3
    with pytest.raises(ValueError, match="'over' is no operation"):
        compute("over", 1, 1)


def test_a_wording_is_read_back_and_another_text_is_no_problem():
    for problem in draw_problems(3, 50):
        assert parse_problem(problem.text) == problem
    for text in ("", "mira has 6 , how many", "mira has 6 then flies 5 , how many",
                 "mira has 6 then gains 40 , how many"):  # fmt: skip
        assert parse_problem(text) is None


def test_splits_are_disjoint_and_do_not_depend_on_how_much_is_trained_on():
    few, many = (make_arithmetic(5, train=n, held_out=40) for n in (10, 300))
    assert few.questions["test"] == many.questions["test"]
    assert few.questions["validation"] == many.questions["validation"]
    texts = [{q.text for q in many.questions[split]} for split in SPLITS]
    assert [len(found) for found in texts] == [300, 40, 40]
    assert len(set.union(*texts)) == 380
    assert few.fingerprint != many.fingerprint
    assert many.fingerprint == make_arithmetic(5, train=300, held_out=40).fingerprint
    for question in many.questions["test"]:
        assert question.golden_answers == (str(parse_problem(question.text).answer),)
        assert question.dataset == f"arithmetic{question.hops}"
    with pytest.raises(ValueError, match="held_out=0"):
        make_arithmetic(0, train=5, held_out=0)


def test_problems_can_be_kept_from_a_set_of_texts():
    first = {problem.text for problem in draw_problems(1, 20)}
    assert not first & {problem.text for problem in draw_problems(1, 20, without=first)}


def test_verbs_of_an_operation_are_drawn_alike_and_numbers_of_its_range():
    steps = [act for problem in draw_problems(0, 2000) for act in problem.acts]
    verbs = [verb for verb, _ in steps]
    for own in arithmetic.VERBS.values():
        counts = [verbs.count(verb) for verb in own]
        assert 100 < max(counts) < 1.5 * min(counts)
    obscure = np.mean([verb in OBSCURE for verb in verbs])
    assert 0.31 < obscure < 0.36  # 8 of 24
    for operation, (first, last) in RANGES.items():
        own = {n for verb, n in steps if arithmetic.OPERATION_OF[verb] == operation}
        assert own == set(range(first, last + 1))
    problems = draw_problems(0, 2000)
    times = np.unique([problem.answer for problem in problems], return_counts=True)[1]
    assert len(times) == 13 and times.max() < 0.2 * len(problems)  # guessing helps little


def test_no_result_of_a_problem_leaves_the_numbers():
    for problem in draw_problems(4, 300):
        value = problem.start
        for step in problem.steps:  # without an end at 0 or 12
            value = {
                "plus": value + step.number, "minus": value - step.number,
                "times": value * step.number, "from": step.number - value,
            }[step.operation]  # fmt: skip
            assert 0 <= value <= 12
        assert value == problem.answer


def test_every_word_is_one_token_and_a_box_too():
    tokenizer = make_arithmetic_tokenizer({"solve"})
    assert tokenizer.vocab_size <= 1024
    problem = draw_problems(2, 1)[0]
    assert len(tokenizer.encode(f" solve {problem.text}")) == 1 + len(problem.text.split())
    assert len(tokenizer.encode(f" {boxed(12)}")) == 1
    for word in (*OPERATIONS, *arithmetic.OPERATION_OF):
        assert len(tokenizer.encode(f" {word}")) == 1
