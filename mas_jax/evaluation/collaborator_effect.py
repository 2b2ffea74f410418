"""What a Collaborator's words are worth: a team beside its Actor alone and under controls.

A hint that helps because it holds the answer loses its worth without it; one that helps whatever it
says keeps it with another problem's. Must not know: how episodes are played.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from mas_jax.evaluation import bootstrap
from mas_jax.evaluation.report import Grid, interval_text
from mas_jax.evaluation.significance import Values


def describe(
    means: Mapping[str, Values],
    told: Mapping[str, Mapping[str, int]],
    *,
    alone: str | None,
    free: str,
) -> list[dict]:
    """A row for each system, as JSON: its macro average, and the paired differences from the Actor
    alone and from the Collaborator under no control, each with its 95% interval over questions,
    None from itself; and among how many episodes the Collaborator told the answer.

    means: of questions, by system. told: as `answers_told.count`, of systems with a Collaborator;
    under a control it counts what was said, not what was passed on. alone, free: those systems'
    names, None without the Actor alone. Raises: as `bootstrap.paired`.
    """
    return [
        {
            "system": name,
            "avg": dataclasses.asdict(bootstrap.interval(values)),
            "less_alone": _difference(means, name, alone),
            "less_free": _difference(means, name, free),
            "answers_told": dict(told[name]) if name in told else None,
        }
        for name, values in means.items()
    ]


def _difference(means: Mapping[str, Values], name: str, other: str | None) -> dict | None:
    if other is None or name == other:
        return None
    return dataclasses.asdict(bootstrap.paired(means[name], means[other]))


def grid(rows: Sequence[Mapping], *, title: str) -> Grid:
    """The rows of `describe` in points; told: in % of the episodes whose problem does not hold its
    own answer."""
    return Grid(
        title,
        ("system", "avg", "less alone", "interval", "less uncontrolled", "interval", "told"),
        tuple(
            (
                row["system"],
                f"{100 * row['avg']['difference']:.2f}",
                *_cells(row["less_alone"]),
                *_cells(row["less_free"]),
                _told(row["answers_told"]),
            )
            for row in rows
        ),
    )


def _cells(found: Mapping | None) -> tuple[str, str]:
    if found is None:
        return "-", "-"
    return f"{100 * found['difference']:+.2f}", interval_text(bootstrap.Interval(**found))


def _told(counts: Mapping[str, int] | None) -> str:
    if not counts or not counts["episodes"]:
        return "-"
    return f"{100 * counts['told'] / counts['episodes']:.1f}% of {counts['episodes']:,}"
