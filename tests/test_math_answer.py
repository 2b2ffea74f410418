"""Answers in boxes, and the first grader against math-verify's own verdicts."""

import signal
import threading
import time

import pytest
from hypothesis import given, settings, strategies
from shared_data import lines

from mas_jax.rewards.math_answer import extract, graded_text, is_bare, is_equivalent

CASES = "cases/math_equivalence_cases.jsonl"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{5} or rather \boxed{7}", "7"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{5} and then \boxed{7", "5"),  # cut by the length limit
        (r"\boxed{5}, as the \boxed{} asks", "5"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),  # escaped braces neither open nor close
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"} { \boxed{3}", "3"),
        (r"\fbox{9}", "9"),
        (r"\boxed {9}", "9"),
        (r"\\boxed{9}", "9"),  # escaped once more in JSON
        (r"a \\\boxed{9}", "9"),  # behind a line's end
        (r"\boxed{", None),
        (r"\boxed{ }", None),
        (r"\boxed{\{1}", r"\{1"),
        ("5", None),
        ("", None),
    ],
)
def test_the_answer_is_the_last_complete_box(text, content):
    assert extract(text) == content


BALANCED = strategies.recursive(
    strategies.text("ab1 +\n.", min_size=1),
    lambda inner: strategies.lists(inner, min_size=1, max_size=3).map(
        lambda parts: r"\frac{" + "}{".join(parts) + r"} \{"
    ),
    max_leaves=8,
)


@given(BALANCED.filter(str.strip), strategies.text(r"x }\.", max_size=9))
@settings(deadline=None)
def test_whatever_is_balanced_is_taken_whole_and_what_is_around_it_does_not_matter(content, around):
    assert extract(rf"{around} \boxed{{{content}}} then {around}") == content.strip()
    assert extract(rf"\boxed{{9}} \boxed{{{content}}} \boxed{{{content}") == content.strip()


def test_a_long_text_of_open_boxes_takes_no_quadratic_time():
    text = r"\boxed{" * 200_000 + "7}"
    start = time.process_time()
    assert extract(text) == "7"
    assert (
        time.process_time() - start < 5
    )  # one pass takes 0.3 s; a rescan of each would take hours


def test_a_window_takes_the_end_of_the_text_in_place_of_the_box():
    assert graded_text(r"\boxed{5} is it", window=0) == "5"
    assert graded_text("no box", window=0) is None
    assert graded_text("x" * 400 + "end", window=300) == "x" * 297 + "end"


@pytest.mark.parametrize(
    ("gold", "prediction", "expected"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\sqrt{12}", r"2\sqrt{3}", True),
        ("10{,}000", "10000", True),
        (r"\text{(C)}", "C", True),
        ("x=5", "5", True),
        (r"\$32,\!348", "32348", True),
        ("1,-2", "-2, 1", True),
        ("50", "50 miles per hour", True),
        (r"\frac{1}{2}", r"\dfrac{1}{2}.", True),
        ("5", "The final answer is 5", True),
        # no false positives of intervals and points, in either direction
        ("(1,2)", "[1,2]", False),
        ("[1,2]", "(1,2)", False),
        ("(3,4]", "(3,4)", False),
        ("(1,2)", "(2,1)", False),
        ("2", "200", False),
        ("5", "", False),
        ("", "", False),
    ],
)
def test_answers_alone_are_compared_by_what_they_say(gold, prediction, expected):
    assert is_equivalent(gold, prediction) is expected


def test_the_verdict_depends_on_which_of_the_two_is_the_answer():
    # -2 <= x <= 7 may answer no question for a set, but a set may answer one for the relation
    assert is_equivalent(r"-2 \le x \le 7", r"x \in [-2,7]")
    assert not is_equivalent(r"x \in [-2,7]", r"-2 \le x \le 7")
    either = {"allow_set_relation_comp": True}
    assert is_equivalent(r"x \in [-2,7]", r"-2 \le x \le 7", options=either)


def test_an_unknown_option_is_an_error_that_names_those_there_are():
    with pytest.raises(ValueError, match=r"\['exact'\] are unknown.*precision"):
        is_equivalent("1", "1", options={"exact": True})
    with pytest.raises(ValueError, match=r"match_types \['string'\]"):
        is_equivalent("1", "2", options={"match_types": ["string"]})


def test_it_works_in_any_thread_and_sets_no_signal():
    before, found = signal.getsignal(signal.SIGALRM), []
    thread = threading.Thread(target=lambda: found.append(is_equivalent("x+1", "1+x")))
    thread.start()
    thread.join()
    assert found == [True]
    assert signal.getsignal(signal.SIGALRM) is before


def test_an_answer_is_told_from_a_sentence():
    assert is_bare(r"\frac{1}{2}") and is_bare("28 percent") and is_bare(r"5 \text{ miles an hour}")
    assert is_bare(r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}")
    assert not is_bare("$5$") and not is_bare(r"\boxed{5}") and not is_bare(r"\(5\)")
    assert not is_bare("the answer is 5")


def test_math_verifys_own_verdicts_are_met_under_the_options_of_each():
    rows = [row for row in lines(CASES) if row["source"] == "math-verify"]
    assert len(rows) == 186
    wrong = [
        (row["gold"], row["pred"])
        for row in rows
        if is_equivalent(row["gold"], row["pred"], options=row["options"]) != row["equivalent"]
    ]
    assert wrong == []


# what the rows ask of the library that is not asked by default
DIFFER = {
    ("$(\\frac{3}{5},\\frac{8}{3}]$", "$(0.6,2.6667]$"): "2 decimals suffice; ours must agree in 6",
    ("$f(x)$", "$f(y)$"): "names of variables do not count; here they do",
    (
        "$9$",
        "Answer \\( \n 9 \n \\)",
    ): "LaTeX alone is looked for, and not over lines; we see the 9",
    ("$9$", "Answer $ \n 9 \n $"): "the same with dollars",
    ("1000.99", "1000,99"): "no LaTeX: a decimal comma; in a box it stands between two answers",
    ("1,22", "1.22"): "the same",
}


def test_six_of_them_differ_without_their_options_and_it_is_known_why():
    rows = [row for row in lines(CASES) if row["source"] == "math-verify"]
    differ = {
        (row["gold"], row["pred"])
        for row in rows
        if is_equivalent(row["gold"], row["pred"]) != row["equivalent"]
    }
    assert differ == DIFFER.keys()


def test_it_reads_thousands_that_the_qwen_grader_does_not():
    (row,) = [row for row in lines(CASES) if row["gold"] == "10{,}000" and row["pred"] == "10000"]
    assert row["source"] == "qwen2.5-math-grader" and row["equivalent"] is False
    assert is_equivalent(row["gold"], row["pred"])
