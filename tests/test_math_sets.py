"""What counts as right in each set of problems, the reward of solutions, how graders agree."""

import asyncio
from fractions import Fraction

import pytest
from shared_data import lines, shared

from mas_jax.data import problems
from mas_jax.records import Problem, Question
from mas_jax.rewards.math_sets import (
    Job,
    Opinions,
    agreement,
    answers,
    ask_both,
    exact,
    grade,
    is_solved,
    make_job,
    quantity,
    second_opinion,
    solution_reward,
    vote_equality,
)
from mas_jax.rewards.math_workers import Limits, Workers


@pytest.fixture(scope="module")
def workers():
    with Workers(1, limits=Limits(cpu_s=20)) as found:
        yield found


def solved(dataset, gold, prediction, **fields):
    return is_solved(Job(dataset, (gold,), prediction, **fields))


def test_plain_numbers_are_read_exactly():
    assert exact("033") == 33 and exact("33.0") == 33 and exact("$-1.$") == -1
    assert exact("1,000") == exact(r"\$1{,}000") == exact(r"1,\!000") == 1000
    assert exact("0.1") == Fraction(1, 10)
    assert [exact(text) for text in ("12,34", "2^5", "1e3", "x", "", "9" * 101)] == [None] * 6


@pytest.mark.parametrize(
    ("gold", "prediction", "expected"),
    [
        ("33", "033", True),
        ("33", "33.0", True),
        ("33", "33.001", False),  # within 1e-4, but no integer
        ("33", "3300", False),  # a percentage to the other grader
        ("33", r"\frac{66}{2}", True),
        ("204", r"204 \text{ minutes}", True),
        ("204", "m+n = 204", True),
        ("1080", "1,080", True),
    ],
)
@pytest.mark.parametrize("dataset", ["aime24", "amc23", "amc83", "gsm8k"])
def test_integers_are_compared_exactly(dataset, gold, prediction, expected):
    assert solved(dataset, gold, prediction) is expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4.5e33", 4.5e33),
        (r"4.5 \times 10^{33} \text{ erg/s}", 4.5e33),
        (r"1.07 \cdot 10^{16} \Omega", 1.07e16),
        ("10^{-5}", 1e-5),
        ("1.6 cm", 1.6),
        (r"1.6\,\mathrm{~cm}", 1.6),
        (r"$300 \mathrm{~km} / \mathrm{s}$", 300.0),
        ("6.5 m s^{-1}", 6.5),
        (r"45^\circ", 45.0),
        ("-1./3", -1 / 3),
        (r"\frac{1}{4}", 0.25),
        ("1,000 m", 1000.0),
        ("4t", None),
        (r"2 \pi", None),
        (r"3 \sqrt{2}", None),
        ("3 + 4", None),
        ("1e400", None),
        ("x", None),
        ("", None),
    ],
)
def test_a_quantity_is_a_number_with_or_without_a_unit(text, value):
    assert quantity(text) == (value if value is None else pytest.approx(value, rel=1e-12))


@pytest.mark.parametrize(
    ("gold", "prediction", "expected"),
    [
        ("3.61e-10", r"3.61 \times 10^{-10} \mathrm{~m}", True),
        ("3.61e-10", "0", False),  # both 0 in the library's 6 decimals
        ("1.6", "1.5999", True),  # 1e-4 / 1.6 is below 1e-4
        ("1.6", "1.59", False),
        ("np.arcsin(10/13)", r"\arcsin(10/13)", True),
        ("7.6 Z", "7.6", False),  # a variable, not a unit
        ("c^{2}+$ $b", "b + c^2", True),
    ],
)
def test_minervas_numbers_are_compared_by_size_and_without_units(gold, prediction, expected):
    assert solved("minerva_math", gold, prediction) is expected


def test_a_list_of_answers_is_read_as_its_parts():
    assert answers("69$,$84") == ["69", "84"]
    assert answers(r"\{1, \frac{1}{2}\}") == ["1", r"\frac{1}{2}"]
    assert answers(r"x=1 \text{ or } x=2") == ["x=1", "x=2"]
    assert answers("(1,8,19), (2,7,13)") == ["(1,8,19)", "(2,7,13)"]
    assert answers(r"1 \pm \sqrt{2}") == [r"1 + \sqrt{2}", r"1 - \sqrt{2}"]


@pytest.mark.parametrize(
    ("gold", "prediction", "expected"),
    [
        ("69$,$84", "84, 69", True),
        ("69$,$84", "69", False),
        ("69$,$84", "69, 84, 85", False),
        ("-2,-2", "-2", False),
        ("2,-2", r"\pm 2", True),
        ("1,2", r"x = 2 \text{ and } x = 1", True),
        ("(2,2),(2,3)", "(2,3), (2,2)", True),
        ("(2,2),(2,3)", "(2,2), (3,2)", False),  # a pair has an order
        (r"\frac{1}{3},-2,5", "5, -2, 0.333333333", True),
    ],
)
def test_several_answers_are_asked_for_in_any_order(gold, prediction, expected):
    assert solved("olympiadbench", gold, prediction, is_multiple=True) is expected


def test_the_tolerance_of_a_rounded_answer_is_absolute():
    for prediction, expected in [("4.3", True), (r"4.1\%", True), ("4.31", False), ("4", False)]:
        assert solved("olympiadbench", "4.2", prediction, tolerance=0.1) is expected
    assert not solved("olympiadbench", "4.2", "4.3")


def test_any_golden_answer_will_do_and_other_sets_go_by_value():
    assert is_solved(Job("math", ("1", r"\frac{1}{2}"), "0.5"))
    assert not is_solved(Job("math", ("1", r"\frac{1}{2}"), "0.6"))


def test_the_second_grader_is_asked_without_the_rule_of_the_set():
    job = Job("aime24", ("33",), "3300")
    assert second_opinion(job) and not is_solved(job)
    problem = Problem("u", "aime24", "?", ("33",))
    assert not grade(make_job(problem, "3300"))
    assert grade(make_job(problem, "3300", grader="second"))
    with pytest.raises(ValueError, match="grader='third'"):
        make_job(problem, "3300", grader="third")


def test_a_solution_is_rewarded_for_its_last_box(workers):
    reward = solution_reward(workers)
    problem = Problem("u", "olympiadbench", "?", ("1,2",), is_multiple=True)
    solutions = (r"first \boxed{1}, then \boxed{2, 1}", r"\boxed{2}", "1 and 2", r"\boxed{1,2")
    assert asyncio.run(reward(problem, solutions)) == (1.0, 0.0, 0.0, 0.0)
    assert workers.counts["no answer"] == 2
    plain = Question("v", "math", "?", ("5",))
    window = solution_reward(workers, window=20)
    assert asyncio.run(window(plain, (r"\boxed{7} no: the answer is $5$", "$7$"))) == (1.0, 0.0)


def test_a_hostile_solution_is_rewarded_with_nothing_and_the_others_as_ever():
    with Workers(1, limits=Limits(cpu_s=1)) as workers:
        reward = solution_reward(workers)
        question = Question("u", "math", "?", ("5",))
        solutions = (r"\boxed{5}", r"\boxed{99999999999!}", r"\boxed{x=5}")
        assert asyncio.run(reward(question, solutions)) == (1.0, 0.0, 1.0)
        assert workers.counts == {"jobs": 3, "time": 1}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("1,000", "1000.0", True), (r"\frac{1}{2}", "0.5", True), ("x=5", "5", True),
        ("5", "x=5", True), ("(1, 2)", r"\left(1,2\right)", True), ("33", "3300", False),
        ("a", "b", False), ("(1,2)", "(2,1)", False),
    ],
)  # fmt: skip
def test_answers_are_one_in_a_vote_by_value_whichever_comes_first(workers, first, second, expected):
    assert asyncio.run(vote_equality(workers)(first, second)) == expected


def test_disagreements_of_the_graders_are_counted_and_shown(workers):
    problem = Problem("u", "math", "?", ("50",))
    predictions = ("50", "0.5", "49", "10{,}000")

    async def ask():
        return [await ask_both(problem, text, workers) for text in predictions]

    found = asyncio.run(ask())
    thousands = Problem("v", "math", "?", ("10{,}000",))
    found.append(asyncio.run(ask_both(thousands, "10000", workers)))
    counted = agreement(found)
    # 50 both; 0.5 is 50% to the second; 49 and 10{,}000 neither; the first reads 10{,}000
    assert (counted.both, counted.neither) == (1, 2)
    assert counted.only_second == (Opinions("u", ("50",), "0.5", False, True),)
    assert counted.only_first == (Opinions("v", ("10{,}000",), "10000", True, False),)
    text = counted.text(examples=1)
    assert text.splitlines()[0] == (
        "graders agree on 3 of 5: right 1, wrong 2; only the first says right 1, only the second 1"
    )
    assert "only the second: u: '50' against '0.5'" in text
    assert len(counted.text(examples=0).splitlines()) == 1


def test_the_graders_differ_on_few_of_the_cases_that_were_graded_elsewhere():
    rows = lines("cases/math_equivalence_cases.jsonl")
    rows = [row for row in rows if row["source"] != "math-verify"]
    found = [
        Opinions("", (row["gold"],), row["pred"], *(
            grade(make_job(Question("", "math", "?", (row["gold"],)), row["pred"], grader=name))
            for name in ("first", "second")
        ))
        for row in rows
    ]  # fmt: skip
    counted = agreement(found)
    assert counted.both + counted.neither == 89
    assert [(one.golds, one.prediction) for one in counted.only_first] == [(("10{,}000",), "10000")]
    assert counted.only_second == ()


UNREADABLE = {"t(0,4]"}  # the set's slip: nothing but its own text answers that problem


@pytest.mark.parametrize("name", [name for name in problems.TEST_SETS if name != "amc83"])
def test_every_golden_answer_solves_its_problem_in_other_words(name, workers):
    """Written as models write them: another fraction, spaces, a full stop in the box."""
    found = problems.read_jsonl(shared(f"math/{name}.jsonl"), split="test")[:100]
    wrong = []
    for problem in found:
        gold = problem.golden_answers[0]
        prediction = gold.replace(r"\frac", r"\dfrac").replace(",", ", ") + "."
        if gold in UNREADABLE:
            continue
        if not workers.grade(make_job(problem, prediction)).is_correct:
            wrong.append((gold, prediction))
    assert wrong == []
