"""The second grader: by hand, against Qwen2.5-Math's verdicts, and beside the first."""

import pytest
from shared_data import lines

from mas_jax.rewards.math_equal import math_equal, normalise, number, split, unordered

CASES = "cases/math_equivalence_cases.jsonl"

EQUAL = [
    ("0.5", r"50\%"),  # 50 / 100
    ("2", "200"),  # so published tables have it: a percentage is its number
    ("3.0000", "3.0002"),  # 0.0002 / 3 is below 1e-4
    ("1,000", "1000"),
    (r"\frac43", "4/3"),
    (r"11\sqrt2", r"11\sqrt{2}"),
    (r"864 \mbox{ inches}^2", "864"),
    (r"\frac{270}7\text{ degrees}", "270/7"),
    (r"90^\circ", "90"),
    (r"\text{Evelyn}", "evelyn"),
    (r"\text{(C)}", "(C)"),
    ("6 - 5i", "-5i+6"),
    (r"\sqrt{117}", r"3\sqrt{13}"),
    ("x^4(x-1)", "x^5 - x^4"),
    (r"\frac{\pi}{2}", "1.5708"),
    ("1,-2", "-2, 1"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
    (r"(-\infty,0)\cup(1,\infty)", r"(1,\infty) \cup (-\infty,0)"),
    (r"\begin{pmatrix} -1/3 \\ 2 \end{pmatrix}", r"\begin{bmatrix}-\frac13\\ 2\end{bmatrix}"),
    ("x=5", "5"),
    ("2x+y=3", "3=y+2x"),
    ("x=1, x=2", "2 and 1"),
    (r"11,\! 111", "11111"),
    (r"x \in [-2,7]", "[-2,7]"),
    ("(p,q)=(3,2)", "(3,2)"),
    ("1.6", "1.6 cm"),
]  # fmt: skip
DIFFERENT = [
    ("3.000", "3.001"),  # 0.001 / 3 is above 1e-4
    ("(1,2)", "[1,2]"),
    ("(3,4]", "(3,4)"),
    ("(1,2)", "(2,1)"),
    ("1,2", "1,2,3"),
    ("-2,-2", "-2"),
    ("52_8", "52_9"),
    (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("x=5", "x=6"),
    ("2x+y=3", "3"),
    ("x+1", "x+2"),
    ("5", ""),
    ("", ""),
    ("10{,}000", "10000"),  # the Qwen grader's wrong verdict
]


@pytest.mark.parametrize(("gold", "prediction"), EQUAL)
def test_equal_answers_are_equal_whichever_is_the_gold_one(gold, prediction):
    assert math_equal(gold, prediction)
    assert math_equal(prediction, gold)


@pytest.mark.parametrize(("gold", "prediction"), DIFFERENT)
def test_different_answers_are_different_whichever_is_the_gold_one(gold, prediction):
    assert not math_equal(gold, prediction)
    assert not math_equal(prediction, gold)


def test_numbers_are_read_by_value():
    assert number("1,234.5") == 1234.5
    assert number("-3/4") == -0.75
    assert number(r"-\frac{3}{4}") == -0.75
    assert number("1.5e3") == 1500
    assert [number(text) for text in ("1,2", "x", "1/0", "1e999", "", "3/4/5")] == [None] * 6


def test_normalising_again_changes_nothing():
    for text in [one for pair in EQUAL + DIFFERENT for one in pair]:
        assert normalise(normalise(text)) == normalise(text)


def test_separators_in_brackets_separate_nothing():
    assert split("(1,2),[3,4)", ",") == ["(1,2)", "[3,4)"]
    assert split(r"\{1,2\}", ",") == [r"\{1,2\}"]
    assert split("1,,2", ",") == ["1", "2"]


def test_a_part_answers_one_part_only():
    assert unordered(["1", "2"], ["2", "1"], str.__eq__)
    assert not unordered(["1", "1"], ["1", "2"], str.__eq__)


def test_no_text_is_run_as_python(tmp_path):
    target = tmp_path / "written"
    assert not math_equal("5", f"__import__('pathlib').Path('{target}').touch()")
    assert not target.exists()


def test_the_qwen_graders_own_verdicts_are_met():
    rows = [row for row in lines(CASES) if row["source"] == "qwen2.5-math-grader"]
    assert len(rows) == 80
    wrong = [row for row in rows if math_equal(row["gold"], row["pred"]) != row["equivalent"]]
    assert wrong == []


def test_of_hendrycks_verdicts_those_on_the_order_of_a_list_are_not_shared():
    rows = [row for row in lines(CASES) if row["source"] == "hendrycks-is_equiv"]
    differ = [
        row["test"] for row in rows if math_equal(row["gold"], row["pred"]) != row["equivalent"]
    ]
    assert sorted(differ) == ["test_decimals", "test_order"]
