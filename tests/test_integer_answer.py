"""Integer answers: the last complete box or tag, and numbers that are equal however written."""

import pytest

from mas_jax.rewards.integer_answer import extract, integer_match, same_integer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{3}, no: \boxed{14}", "14"),
        (r"\boxed{3} and then \boxed{14", "3"),  # the last one that is complete
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed{}", None),
        ("it is <answer> 5</answer> or <answer>6</answer>", "6"),
        (r"<answer>5</answer> \boxed{8}", "8"),
        ("no answer", None),
        ("", None),
        (r"\boxed{\boxed{4}}", "4"),
    ],
)
def test_the_answer_is_the_last_complete_box_or_tag(text, answer):
    assert extract(text) == answer


def test_equal_numbers_match_and_nothing_else_does():
    assert same_integer("033", "33") and same_integer("-4", " -4 ")
    for other in ("33.0", "3 3", "x", "", "34", "-33"):
        assert not same_integer("33", other)
    assert integer_match("7", ("6", "07")) == 1.0
    assert integer_match("", ("7",)) == 0.0
