"""Statistics of several teams on the same questions, as one JSON value and as tables.

Must not know: how episodes were played.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from mas_jax.evaluation import significance, statistics
from mas_jax.evaluation.bootstrap import Interval
from mas_jax.evaluation.records_file import Plan, fingerprint
from mas_jax.evaluation.significance import Claim, SetDifference
from mas_jax.evaluation.statistics import EpisodeScore

# what a table's cell must not be read as: Markdown's marks, and HTML
_MARKDOWN = str.maketrans({char: f"\\{char}" for char in "\\`*_[]<>|~$&"} | {"\n": " "})
_LATEX = str.maketrans(
    {char: f"\\{char}" for char in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "\n": " ",
    }
)


@dataclass(frozen=True)
class Grid:
    """One table of strings; the first `num_text` columns are text, the others are numbers."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_text: int = 1


def summary(results: Sequence[tuple[Plan, Sequence[EpisodeScore]]], *, k: int) -> dict:
    """Every team's accuracy, cost and failures; JSON values, fractions in [0, 1].

    avg is over all runs of the plan; pass_at_k and all_at_k are about k of them.
    Raises: ValueError if there is no team, one is there twice, or they differ in questions or runs.
    """
    if not results:
        raise ValueError("no team to summarise; pass at least one (plan, scores)")
    plans = [plan for plan, _ in results]
    teams = [plan.label for plan in plans]
    if len(set(teams)) < len(teams):
        raise ValueError(f"teams {teams}: one is there twice")
    for plan in plans[1:]:
        _check_comparable(plans[0], plan)
    return {
        "num_questions": len(plans[0].questions),
        "num_runs": plans[0].num_runs,
        "k": k,
        "teams": {plan.label: _team_summary(plan, scores, k) for plan, scores in results},
    }


def tables(value: Mapping) -> Group:
    """The summary for a terminal of 80 columns or more, a row for each team in every table.

    First the paper's columns, then how the teams behaved, then avg@n of each dataset.
    """
    return Group(*map(to_rich, _grids(value)))


def markdown(value: Mapping) -> str:
    """The tables of `tables` as Markdown."""
    return "\n".join(to_markdown(grid) for grid in _grids(value))


def latex(value: Mapping) -> str:
    """The tables of `tables` as LaTeX; see `to_latex`."""
    return "\n".join(to_latex(grid) for grid in _grids(value))


def to_markdown(grid: Grid) -> str:
    """A table in GitHub's Markdown under its title; whatever a cell holds is shown as it is.

    Raises: ValueError if a row is longer or shorter than the header.
    """
    _check_rows(grid)
    rule = ("---",) * grid.num_text + ("---:",) * (len(grid.header) - grid.num_text)
    lines = [[cell.translate(_MARKDOWN) for cell in line] for line in (grid.header, *grid.rows)]
    title = grid.title.translate(_MARKDOWN)
    rows = (lines[0], rule, *lines[1:])
    return f"{title}\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in rows)


def to_latex(grid: Grid) -> str:
    """A LaTeX table with its title as caption; LaTeX's special characters are escaped.

    Its document must load booktabs, and be compiled as UTF-8.
    Raises: ValueError if a row is longer or shorter than the header.
    """
    _check_rows(grid)
    columns = "l" * grid.num_text + "r" * (len(grid.header) - grid.num_text)
    header, *rows = (
        # in braces: a line that begins with [ would be read as the option of the one before
        " & ".join(f"{{{cell.translate(_LATEX)}}}" for cell in line) + r" \\"
        for line in (grid.header, *grid.rows)
    )
    return "\n".join(
        (
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{grid.title.translate(_LATEX)}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            header,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        )
    )


def set_grid(differences: Mapping[str, SetDifference], *, title: str) -> Grid:
    """A row for each set: difference and interval in points, its p, and that after Holm."""
    rows = tuple(
        (
            name,
            f"{100 * found.interval.difference:+.2f}",
            interval_text(found.interval),
            f"{found.p_value:.4f}",
            f"{found.adjusted:.4f}",
        )
        for name, found in differences.items()
    )
    return Grid(title, ("set", "difference", "interval", "p", "p (Holm)"), rows)


def claim_grid(claims: Mapping[str, Claim], *, title: str) -> Grid:
    """A row for each claim, in points: mean over seeds and its t-interval, the bootstrap intervals
    inside the seeds, and whether the claim is supported."""
    rows = tuple(
        (
            name,
            f"{100 * claim.over_seeds.difference:+.2f}",
            interval_text(claim.over_seeds),
            " ".join(interval_text(interval) for interval in claim.seeds),
            "yes" if significance.supported(claim) else "no",
        )
        for name, claim in claims.items()
    )
    return Grid(title, ("claim", "difference", "over seeds", "inside seeds", "supported"), rows)


def _check_comparable(first: Plan, other: Plan) -> None:
    if first.num_runs != other.num_runs:
        raise ValueError(
            f"{first.label} has {first.num_runs} runs a question, {other.label} {other.num_runs}"
        )
    if fingerprint(first.questions) != fingerprint(other.questions):
        raise ValueError(f"{first.label} and {other.label} have different questions")


def _team_summary(plan: Plan, scores: Sequence[EpisodeScore], k: int) -> dict:
    datasets = statistics.accuracy_by_dataset(plan, scores, k=k)
    num_planned = len(plan.questions) * plan.num_runs
    failures = Counter(score.failure for score in scores if score.failure)
    invalid_frac = statistics.invalid_action_frac(scores)
    return {
        "macro": {
            name: statistics.macro_average(datasets, name)
            for name in ("avg", "candidates_mean", "pass_at_k", "all_at_k")
        },
        "datasets": datasets,
        "per_workflow": statistics.cost_per_workflow(scores),
        "gold_recall": statistics.mean_gold_recall(plan, scores),
        "num_episodes": len(scores),
        "num_missing": num_planned - len(scores),
        "num_failed": failures.total(),
        "failures": dict(sorted(failures.items())),
        "outcomes": dict(sorted(Counter(s.outcome for s in scores if not s.failure).items())),
        "num_actions": sum(score.num_actions for score in scores),
        "invalid_action_frac": invalid_frac,
        "valid_action_frac": 1.0 - invalid_frac,
    }


def _grids(value: Mapping) -> tuple[Grid, ...]:
    n, k, teams = value["num_runs"], value["k"], value["teams"]
    datasets = next(iter(teams.values()))["datasets"]
    return (
        Grid(
            f"{value['num_questions']} questions, {n} runs each: macro means in %, cost a workflow",
            ("team", f"avg@{n}", f"pass@{k}", f"{k}/{k}", "searches", "input", "output"),
            tuple((name, *_paper_cells(team)) for name, team in teams.items()),
        ),
        Grid(
            f"avg@{n} of all candidates, turns, critical steps, invalid actions in %",
            ("team", "all cand.", "turns", "critical", "invalid"),
            tuple((name, *_behaviour_cells(team)) for name, team in teams.items()),
        ),
        Grid(
            "Gold passages found and searches failed in %, episodes the world failed",
            ("team", "gold found", "searches failed", "failed", "missing"),
            tuple((name, *_world_cells(team)) for name, team in teams.items()),
        ),
        Grid(
            f"avg@{n} of each dataset (its number of questions) in %",
            ("team", *(f"{name} ({values['num_questions']})" for name, values in datasets.items())),
            tuple(
                (name, *(_percent(team["datasets"][dataset]["avg"]) for dataset in datasets))
                for name, team in teams.items()
            ),
        ),
    )


def _paper_cells(team: Mapping) -> tuple[str, ...]:
    cost = team["per_workflow"]
    return (
        *(_percent(team["macro"][name]) for name in ("avg", "pass_at_k", "all_at_k")),
        f"{cost['searches']:.2f}",
        f"{cost['input_tokens']:,.0f}",
        f"{cost['output_tokens']:,.0f}",
    )


def _behaviour_cells(team: Mapping) -> tuple[str, ...]:
    return (
        _percent(team["macro"]["candidates_mean"]),
        f"{team['per_workflow']['turns']:.2f}",
        f"{team['per_workflow']['critical_steps']:.2f}",
        _percent(team["invalid_action_frac"]),
    )


def _world_cells(team: Mapping) -> tuple[str, ...]:
    cost, recall = team["per_workflow"], team["gold_recall"]
    return (
        "-" if recall is None else _percent(recall),
        _percent(cost["failed_searches"] / cost["searches"] if cost["searches"] else 0.0),
        f"{team['num_failed']:,}",
        f"{team['num_missing']:,}",
    )


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}"


def to_rich(grid: Grid) -> Group:
    """Title and table for a terminal; where it is too wide, headings are folded, never a number."""
    table = Table(box=box.SIMPLE_HEAD)
    for index, name in enumerate(grid.header):
        table.add_column(
            name,
            justify="left" if index < grid.num_text else "right",
            overflow="fold",
            min_width=max(len(row[index]) for row in grid.rows),
        )
    for row in grid.rows:
        table.add_row(*row)
    return Group(Text(grid.title), table)


def interval_text(interval: Interval) -> str:
    """An interval in points."""
    return f"[{100 * interval.low:.2f}, {100 * interval.high:.2f}]"


def _check_rows(grid: Grid) -> None:
    for row in grid.rows:
        if len(row) != len(grid.header):
            raise ValueError(
                f"table {grid.title!r}: row {row} has {len(row)} cells; want {len(grid.header)}, "
                "one for each column"
            )
