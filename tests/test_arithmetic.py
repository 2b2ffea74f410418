"""Toy mathematics: problems that can be solved by their words, disjoint, the same everywhere."""

import numpy as np
import pytest

from mas_jax.data import arithmetic
from mas_jax.data.arithmetic import (
    OBSCURE,
    OPERATIONS,
    PRIME,
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
    # 6 + 5 = 11 = 4 (mod 7); 4 - 6 = -2 = 5; 5 * 4 = 20 = 6; 2 - 6 = -4 = 3
    assert results(6, problem.steps) == [6, 4, 5, 6, 3]
    assert problem.answer == 3
    assert problem.text == (
        "mira has 6 then gains 5 then lends 6 then scales 4 then mirrors 2 , how many"
    )
    assert problem.steps[1] == Step("minus", 6)
    assert compute("from", 5, 3) == 5  # 3 - 5 = -2
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


def test_verbs_and_operations_are_drawn_alike():
    steps = [act for problem in draw_problems(0, 2000) for act in problem.acts]
    verbs, numbers = zip(*steps, strict=True)
    counts = np.unique(verbs, return_counts=True)[1]
    assert len(counts) == 24 and counts.max() < 1.35 * counts.min()
    obscure = np.mean([verb in OBSCURE for verb in verbs])
    assert 0.30 < obscure < 0.37  # 8 of 24
    assert set(numbers) == set(range(1, PRIME))


def test_every_word_is_one_token_and_a_box_too():
    tokenizer = make_arithmetic_tokenizer({"solve"})
    assert tokenizer.vocab_size <= 1024
    problem = draw_problems(2, 1)[0]
    assert len(tokenizer.encode(f" solve {problem.text}")) == 1 + len(problem.text.split())
    assert len(tokenizer.encode(f" {boxed(6)}")) == 1
    for word in (*OPERATIONS, *arithmetic.OPERATION_OF):
        assert len(tokenizer.encode(f" {word}")) == 1
