"""The study's records: one line a run, read back as accuracies, curves and claims over seeds.

A record is a JSON value; see `learning/study.py` for who writes it. Dimensions: Q questions.
Must not know: how a run was made.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from mas_jax.evaluation import bootstrap, significance
from mas_jax.evaluation.bootstrap import Interval
from mas_jax.evaluation.report import Grid
from mas_jax.evaluation.statistics import COSTS

Runs = Mapping[str, Mapping[int, Mapping]]  # cell -> training seed -> record
Column = Callable[[Sequence[Mapping]], str]  # what a table says of a cell's records, one a seed
# the caps that spare a cost: most tokens are those of passages that were searched for
CAPS = {"searches": ("searches_",), "tokens": ("searches_", "tokens_")}


def append(directory: Path, record: Mapping) -> None:
    """Adds a run's record to `CELL.jsonl`; of two of one seed the later counts."""
    directory.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record, sort_keys=True, allow_nan=False) + "\n"
    with (directory / f"{record['cell']}.jsonl").open("a") as file:
        file.write(line)


def read(directory: Path) -> Runs:
    """Every record of a directory by cell and seed. Raises: ValueError, naming a damaged line."""
    runs: dict[str, dict[int, Mapping]] = {}
    for path in sorted(directory.glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            try:
                record = json.loads(line)
                runs.setdefault(record["cell"], {})[record["seed"]] = record
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: no record of a run ({error}); delete the line and run "
                    "that seed again"
                ) from error
    return {cell: dict(sorted(seeds.items())) for cell, seeds in runs.items()}


Values = Mapping[str, np.ndarray]  # family -> share of right runs of each question, [Q]


def question_values(record: Mapping, play: str = "free") -> dict[str, np.ndarray]:
    """Share of a question's runs that were right, by family, [Q] in the order of the world.

    play: "free", or a cap such as "searches_1".
    """
    found = record["plays"][play]
    return {
        family: np.asarray([int(digit) for digit in digits]) / found["num_runs"]
        for family, digits in found["right"].items()
    }


def spent(record: Mapping, play: str, kind: str) -> float:
    """What a workflow cost in a play, in "searches" or "tokens" (input and output)."""
    cost = record["plays"][play]["per_workflow"]
    return sum(cost[key] for key in COSTS[kind])


def at_spend(record: Mapping, kind: str, budget: float) -> dict[str, np.ndarray] | None:
    """Question values at a mean cost of `budget`, between the two plays that cost next to it.

    Straight lines between the plays without a cap and under each cap that spares this kind, in the
    order of what they cost; those of the dearest play where none costs as much, None where all cost
    more.
    """
    names = [name for name in record["plays"] if name == "free" or name.startswith(CAPS[kind])]
    plays = sorted((spent(record, name, kind), name) for name in names)
    costs = [cost for cost, _ in plays]
    if budget < costs[0]:
        return None
    if budget >= costs[-1]:
        return question_values(record, plays[-1][1])
    above = next(index for index, cost in enumerate(costs) if cost > budget)
    (low, first), (high, second) = plays[above - 1], plays[above]
    share = (budget - low) / (high - low)
    one, other = question_values(record, first), question_values(record, second)
    return {family: (1 - share) * one[family] + share * other[family] for family in one}


def macro(values: Values) -> float:
    """The mean over families of their means over questions."""
    return fmean(float(found.mean()) for found in values.values())


def accuracy(record: Mapping, play: str = "free") -> float:
    """The macro average over families of the share of right runs."""
    return macro(question_values(record, play))


@dataclass(frozen=True)
class Comparison:
    """Two cells on the same questions, first less second.

    interval: over training seeds if there are at least two that differ, else over questions: greedy
    systems that nobody trained are the same in all. seeds: of the pairs that both cells have.
    supported: see `significance.supported`; over questions, whether the interval leaves zero out.
    """

    first: str
    second: str
    interval: Interval
    seeds: tuple[int, ...]
    supported: bool


def compare(
    runs: Runs,
    first: str,
    second: str,
    *,
    values: Callable[[Mapping], Values | None] = question_values,
) -> Comparison | None:
    """The difference of two cells over the seeds that both have; None if there is none.

    values: of a record, which is left out with its seed where it has none.
    """
    pairs = {}
    for seed in sorted(set(runs.get(first, ())) & set(runs.get(second, ()))):
        pair = tuple(values(runs[cell][seed]) for cell in (first, second))
        if None not in pair:
            pairs[seed] = pair
    if not pairs:
        return None
    first_pair, *others = pairs.values()
    if all(_same(first_pair, other) for other in others):
        interval = bootstrap.paired(*first_pair)
        supported = interval.low > 0 or interval.high < 0
    else:
        claim = significance.compare_seeds(list(pairs.values()))
        interval, supported = claim.over_seeds, significance.supported(claim)
    return Comparison(first, second, interval, tuple(pairs), supported)


def _same(one: Sequence[Values], other: Sequence[Values]) -> bool:
    """Whether a pair of cells did the same on every question in two seeds."""
    return all(
        np.array_equal(a[family], b[family])
        for a, b in zip(one, other, strict=True) for family in a
    )  # fmt: skip


def shown(comparison: Comparison) -> str:
    """A difference in points with its interval, such as "+4.1 [1.0, 7.2]"."""
    i = comparison.interval
    return f"{100 * i.difference:+.1f} [{100 * i.low:.1f}, {100 * i.high:.1f}]"


def _mean(records: Sequence[Mapping], *keys: str) -> float:
    values = []
    for record in records:
        for key in keys:
            record = record[key]
        values.append(record)
    return fmean(values)


def trained_tokens(runs: Runs, record: Mapping, sources: Mapping[str, Sequence[str]]) -> int:
    """Tokens of all updates that a record's policy needed: its own, and of the cells that `sources`
    names for it, with the same seed."""
    others = [runs[name][record["seed"]] for name in sources.get(record["cell"], ())
              if record["seed"] in runs.get(name, {})]  # fmt: skip
    return sum(one["training"]["training_tokens"] for one in (record, *others))


def average(records: Sequence[Mapping]) -> str:
    """Mean accuracy of a cell's records, in points."""
    return f"{fmean(100 * accuracy(record) for record in records):.1f}"


def deviation(records: Sequence[Mapping]) -> str:
    """Standard deviation of accuracy over the seeds, in points; "-" for one seed."""
    averages = [100 * accuracy(record) for record in records]
    return f"{np.std(averages, ddof=1):.1f}" if len(records) > 1 else "-"


def update_tokens(records: Sequence[Mapping]) -> str:
    """Mean tokens of a run's own updates."""
    return f"{_mean(records, 'training', 'training_tokens'):,.0f}"


def minutes(records: Sequence[Mapping]) -> str:
    """Mean minutes of a run, of training and evaluation."""
    seconds = [record["train_s"] + record["evaluation_accelerator_s"] for record in records]
    return f"{fmean(seconds) / 60:.1f}"


def column_grid(
    runs: Runs, cells: Sequence[str], columns: Mapping[str, Column], *, title: str
) -> Grid:
    """A row a cell that was run: its name, how many seeds, and what each column says of them."""
    rows = tuple(
        (cell, str(len(runs[cell])), *(say(list(runs[cell].values())) for say in columns.values()))
        for cell in cells
        if runs.get(cell)
    )
    return Grid(title, ("cell", "seeds", *columns), rows, num_text=1)


def cell_grid(
    runs: Runs, cells: Sequence[str], sources: Mapping[str, Sequence[str]], *,
    budgets: Mapping[str, float], title: str,
) -> Grid:  # fmt: skip
    """A row a cell that was run: means over its seeds, and the spread of avg@4 over them.

    sources: as in `trained_tokens`. budgets: a mean cost by kind, at which accuracy is shown too;
    in brackets how many seeds can be played at it, where not all can.
    """
    free = ("plays", "free")
    workflow = (*free, "per_workflow")
    columns = {
        "avg@4": average,
        "sd": deviation,
        "pass@4": lambda records: f"{100 * _mean(records, *free, 'pass_at_k'):.1f}",
        "4/4": lambda records: f"{100 * _mean(records, *free, 'all_at_k'):.1f}",
        "searches": lambda records: f"{_mean(records, *workflow, 'searches'):.2f}",
        "input": lambda records: f"{_mean(records, *workflow, 'input_tokens'):.0f}",
        "output": lambda records: f"{_mean(records, *workflow, 'output_tokens'):.0f}",
        **{
            f"at {budget:g} {kind}": functools.partial(_at_budget, kind=kind, budget=budget)
            for kind, budget in budgets.items()
        },
        "trained tokens": update_tokens,
        "with its teacher's": lambda records: (
            f"{fmean(trained_tokens(runs, record, sources) for record in records):,.0f}"
        ),
        "minutes": minutes,
    }
    return column_grid(runs, cells, columns, title=title)


def _at_budget(records: Sequence[Mapping], *, kind: str, budget: float) -> str:
    found = [at_spend(record, kind, budget) for record in records]
    known = [100 * macro(values) for values in found if values is not None]
    if not known:
        return "-"
    return f"{fmean(known):.1f}" + (f" ({len(known)})" if len(known) < len(found) else "")


def family_grid(runs: Runs, cells: Sequence[str], *, title: str) -> Grid:
    """avg@4 of every family, means over seeds; "-" for a family that is not in the cell's world."""
    found = {
        cell: [question_values(record) for record in runs[cell].values()]
        for cell in cells
        if cell in runs
    }
    families = list(dict.fromkeys(f for values in found.values() for f in values[0]))
    rows = tuple(
        (
            cell,
            *(f"{100 * fmean(float(v[family].mean()) for v in values):.1f}"
              if family in values[0] else "-" for family in families),
        )
        for cell, values in found.items()
    )  # fmt: skip
    return Grid(title, ("cell", *families), rows, num_text=1)


def comparison_grid(
    runs: Runs, pairs: Sequence[tuple[str, str]], *, title: str,
    values: Callable[[Mapping], Values | None] = question_values,
) -> Grid:  # fmt: skip
    """A row for each pair of cells of which both were run; values: as in `compare`."""
    found = [compare(runs, *pair, values=values) for pair in pairs]
    rows = tuple(
        (c.first, c.second, shown(c), str(len(c.seeds)), "yes" if c.supported else "no")
        for c in found
        if c is not None
    )
    header = ("cell", "less", "points, 95%", "seeds", "supported")
    return Grid(title, header, rows, num_text=2)


def equivalence_grid(
    runs: Runs, pairs: Sequence[tuple[str, str]], *, margin: float, title: str
) -> Grid:
    """A row for each pair that has at least two seeds in common: whether they were shown to differ
    by less than the margin, by two one-sided t-tests over seeds."""
    rows = []
    for first, second in pairs:
        seeds = sorted(set(runs.get(first, ())) & set(runs.get(second, ())))
        if len(seeds) < 2:
            continue
        differences = [accuracy(runs[first][s]) - accuracy(runs[second][s]) for s in seeds]
        found = significance.equivalence_over_seeds(differences, margin=margin)
        i = found.interval
        points = f"{100 * i.difference:+.1f} [{100 * i.low:.1f}, {100 * i.high:.1f}]"
        shown_equal = "yes" if found.equivalent else "not shown"
        rows.append((first, second, points, str(len(seeds)), f"{found.p_value:.3f}", shown_equal))
    header = ("cell", "less", "points, 90%", "seeds", "p", "equal")
    return Grid(title, header, tuple(rows), num_text=2)
