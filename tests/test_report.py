"""The summary of several teams and its tables, by hand."""

import io
import json
import re
from dataclasses import replace

import pytest
from evaluation_episodes import make_episode, make_plan, make_trace
from markdown_it import MarkdownIt
from rich.console import Console

from mas_jax.evaluation import report
from mas_jax.evaluation.bootstrap import Interval
from mas_jax.evaluation.report import Grid, to_latex, to_markdown
from mas_jax.evaluation.significance import Claim, SetDifference
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
        "critical_steps": 4 * 2 / 5,
    }
    assert team["gold_recall"] is None  # no question says what its gold is
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
    ["team", "all cand.", "turns", "critical", "invalid"],
    ["cascade", "50.00", "1.60", "1.60", "25.00"],
    ["hierarchy", "100.00", "0.00", "0.00", "0.00"],
    ["team", "gold found", "searches failed", "failed", "missing"],
    ["cascade", "-", "20.00", "1", "1"],
    ["hierarchy", "-", "0.00", "0", "0"],
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
    assert [len(rule) for rule in rules] == [7, 5, 5, 3]


# --- one table, two languages ---------------------------------------------------------------------

# what each language reads as its own, and what is only text
ODD = Grid(
    "a | b_c",
    ("system", "x|y", "50%"),
    (
        ("no_signal *new*", "[1, 2]", "a\\b"),
        ("<b> & `c`", "~~5~~ ^2", "$1 #2 {3}"),
        ("two\nlines", "-1.0", "é"),
    ),
)


def test_a_markdown_reader_sees_what_the_cells_hold():
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(to_markdown(ODD))
    inline = [token for token in tokens if token.type == "inline"]
    # a cell in which a mark is read has children other than text
    kinds = {child.type for token in inline for child in token.children}
    assert kinds <= {"text", "text_special"}
    texts = ["".join(child.content for child in token.children) for token in inline]
    rows = [[cell.replace("\n", " ") for cell in row] for row in (ODD.header, *ODD.rows)]
    assert texts == [ODD.title, *(cell for row in rows for cell in row)]


def test_latex_by_hand():
    text = to_latex(ODD)
    assert text.split("\n") == [
        r"\begin{table}",
        r"\centering",
        r"\caption{a \textbar{} b\_c}",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"{system} & {x\textbar{}y} & {50\%} \\",
        r"\midrule",
        r"{no\_signal *new*} & {[1, 2]} & {a\textbackslash{}b} \\",
        r"{\textless{}b\textgreater{} \& `c`} & {\textasciitilde{}\textasciitilde{}5"
        r"\textasciitilde{}\textasciitilde{} \textasciicircum{}2} & {\$1 \#2 \{3\}} \\",
        r"{two lines} & {-1.0} & {é} \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
        "",
    ]


def test_columns_of_text_stand_left_and_numbers_right():
    two = Grid("t", ("stage", "role", "tokens"), (("teacher", "searcher", "1"),), num_text=2)
    assert "{llr}" in to_latex(two)
    assert "| --- | --- | ---: |" in to_markdown(two)


def test_a_row_of_another_length_is_an_error():
    bad = Grid("t", ("a", "b"), (("1", "2"), ("3",)))
    for write in (to_markdown, to_latex):
        with pytest.raises(ValueError, match=r"table 't': row \('3',\) has 1 cells; want 2"):
            write(bad)


def test_the_latex_of_a_summary_holds_the_same_rows():
    text = report.latex(report.summary(results(), k=2))
    lines = [line.removesuffix(r" \\") for line in text.split("\n") if line.endswith(r"\\")]
    assert [[cell.strip("{}") for cell in line.split(" & ")] for line in lines] == ROWS
    assert text.count(r"\begin{table}") == 4
    assert r"macro means in \%" in text


def test_differences_of_sets_by_hand():
    found = SetDifference(Interval(0.0123, -0.01, 0.034, 0.95), 0.2, 0.6)
    table = report.set_grid({"nq": found}, title="t")
    assert table.rows == (("nq", "+1.23", "[-1.00, 3.40]", "0.2000", "0.6000"),)


def test_claims_by_hand():
    inside = (Interval(0.02, 0.01, 0.03, 0.95), Interval(0.04, 0.02, 0.06, 0.95))
    yes = Claim(inside, Interval(0.03, 0.005, 0.055, 0.95))
    no = Claim(inside, Interval(0.03, -0.01, 0.07, 0.95))
    table = report.claim_grid({"a - b": yes, "a - c": no}, title="t")
    both = "[1.00, 3.00] [2.00, 6.00]"
    assert table.rows == (
        ("a - b", "+3.00", "[0.50, 5.50]", both, "yes"),
        ("a - c", "+3.00", "[-1.00, 7.00]", both, "no"),
    )
