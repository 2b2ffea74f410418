"""The study's records: one line a run, read back as accuracies, curves and claims over seeds.

A record is a JSON value; see `learning/study.py` for who writes it. Dimensions: Q questions.
Must not know: how a run was made.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from mas_jax.evaluation import bootstrap, significance
from mas_jax.evaluation.bootstrap import Interval
from mas_jax.evaluation.report import Grid

Runs = Mapping[str, Mapping[int, Mapping]]  # cell -> training seed -> record


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


def question_values(record: Mapping, play: str = "free") -> dict[str, np.ndarray]:
    """Share of a question's runs that were right, by family, [Q] in the order of the world.

    play: "free", "searches" or "tokens": without a cap, or under one on these.
    """
    found = record["plays"][play]
    return {
        family: np.asarray([int(digit) for digit in digits]) / found["num_runs"]
        for family, digits in found["right"].items()
    }


def accuracy(record: Mapping, play: str = "free") -> float:
    """The macro average over families of the share of right runs."""
    return fmean(float(values.mean()) for values in question_values(record, play).values())


@dataclass(frozen=True)
class Comparison:
    """Two cells on the same questions, first less second.

    interval: over training seeds if there are at least two, else over questions. seeds: of the
    pairs that both cells have. supported: see `significance.supported`; with one seed, whether
    the interval over questions leaves zero out.
    """

    first: str
    second: str
    interval: Interval
    seeds: tuple[int, ...]
    supported: bool


def compare(runs: Runs, first: str, second: str, *, play: str = "free") -> Comparison | None:
    """The difference of two cells over the seeds that both have; None if there is none."""
    seeds = sorted(set(runs.get(first, ())) & set(runs.get(second, ())))
    pairs = [
        tuple(question_values(runs[cell][seed], play) for cell in (first, second)) for seed in seeds
    ]
    if not pairs:
        return None
    if len(pairs) == 1:
        interval = bootstrap.paired(*pairs[0])
        supported = interval.low > 0 or interval.high < 0
    else:
        claim = significance.compare_seeds(pairs)
        interval, supported = claim.over_seeds, significance.supported(claim)
    return Comparison(first, second, interval, tuple(seeds), supported)


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


def cell_grid(runs: Runs, cells: Sequence[str], *, title: str) -> Grid:
    """A row a cell that was run: means over its seeds, and the spread of avg@4 over them."""
    header = (
        "cell", "seeds", "avg@4", "sd", "pass@4", "4/4", "searches", "input", "output",
        "at equal searches", "at equal tokens", "training tokens", "training min",
    )  # fmt: skip
    rows = []
    for cell in cells:
        records = list(runs.get(cell, {}).values())
        if not records:
            continue
        averages = [100 * accuracy(record) for record in records]
        free = ("plays", "free")
        rows.append(
            (
                cell,
                str(len(records)),
                f"{fmean(averages):.1f}",
                f"{np.std(averages, ddof=1):.1f}" if len(records) > 1 else "-",
                f"{100 * _mean(records, *free, 'pass_at_k'):.1f}",
                f"{100 * _mean(records, *free, 'all_at_k'):.1f}",
                f"{_mean(records, *free, 'per_workflow', 'searches'):.2f}",
                f"{_mean(records, *free, 'per_workflow', 'input_tokens'):.0f}",
                f"{_mean(records, *free, 'per_workflow', 'output_tokens'):.0f}",
                f"{fmean(100 * accuracy(r, 'searches') for r in records):.1f}",
                f"{fmean(100 * accuracy(r, 'tokens') for r in records):.1f}",
                f"{_mean(records, 'training', 'training_tokens'):,.0f}",
                f"{_mean(records, 'train_s') / 60:.1f}",
            )
        )
    return Grid(title, header, tuple(rows), num_text=1)


def comparison_grid(
    runs: Runs, pairs: Sequence[tuple[str, str]], *, title: str, play: str = "free"
) -> Grid:
    """A row for each pair of cells of which both were run."""
    found = [compare(runs, *pair, play=play) for pair in pairs]
    rows = tuple(
        (c.first, c.second, shown(c), str(len(c.seeds)), "yes" if c.supported else "no")
        for c in found
        if c is not None
    )
    header = ("cell", "less", "points, 95%", "seeds", "supported")
    return Grid(title, header, rows, num_text=2)
