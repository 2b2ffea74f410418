"""Figures of the study: learning curves over seeds, a setting against accuracy, differences.

Figures are returned, for notebooks, in the look of `plots.py`. Must not know: which cells there
are.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from mas_jax.evaluation import plots
from mas_jax.evaluation import study as records
from mas_jax.evaluation.study import Comparison, Runs

POINTS = 100  # of accuracy in 1.0


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest of the seeds' values."""
    return min(values), max(values)


def learning(runs: Runs, cells: Sequence[str], metrics: Mapping[str, str]) -> Figure:
    """A panel for each metric (name -> title): mean over seeds, smoothed, band from lowest to
    highest; a cell without it has no line there."""
    with matplotlib.rc_context(plots.STYLE):
        columns = min(3, len(metrics))
        rows = -(-len(metrics) // columns)
        figure = Figure(figsize=(4.0 * columns, 2.9 * rows), dpi=110, layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        looks = plots.looks_of(cells)
        for axes, (name, title) in zip(panels, metrics.items(), strict=False):
            for cell in cells:
                found = [r["curves"][name] for r in runs.get(cell, {}).values()
                         if name in r["curves"]]  # fmt: skip
                if found:
                    _band(axes, np.asarray(found, np.float64), looks[cell][0], cell)
            axes.set_title(title)
            axes.set_xlabel("update")
        for axes in panels[len(metrics) :]:
            axes.set_visible(False)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(cells), 4))
        return figure


def _band(axes, values_ZX: np.ndarray, colour: str, label: str) -> None:
    """Z seeds of X updates; None in a record is NaN here."""
    steps = np.arange(1, values_ZX.shape[1] + 1)
    width = max(len(steps) / 15, 1.0)
    smoothed = np.stack([plots.smooth(steps, values, width=width) for values in values_ZX])
    axes.plot(steps, smoothed.mean(axis=0), color=colour, linewidth=1.8, label=label)
    axes.fill_between(
        steps, smoothed.min(axis=0), smoothed.max(axis=0), color=colour, alpha=0.15, linewidth=0
    )


def setting(
    runs: Runs, series: Mapping[str, Sequence[tuple[float, str]]], *, x: str, log: bool = False,
    accuracy: str = "avg@4",
) -> Figure:  # fmt: skip
    """Accuracy against a setting: for each series (label -> (value, cell) pairs) the mean over
    seeds with a bar from lowest to highest; cells without records are left out."""
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(5.6, 3.6), dpi=110, layout="constrained")
        axes = figure.subplots()
        for label, (colour, marker) in plots.looks_of(list(series)).items():
            found = [(value, [POINTS * records.accuracy(r) for r in runs[cell].values()])
                     for value, cell in series[label] if cell in runs]  # fmt: skip
            if not found:
                continue
            xs = [value for value, _ in found]
            axes.plot(xs, [fmean(ys) for _, ys in found], marker, color=colour, ls="-", label=label)
            axes.vlines(xs, *zip(*(_spread(ys) for _, ys in found), strict=True), color=colour)
        if log:
            axes.set_xscale("log")
        axes.set_xlabel(x)
        axes.set_ylabel(f"{accuracy} (%), bars: range of seeds")
        axes.legend()
        return figure


def differences(
    found: Mapping[str, Sequence[Comparison | None]], *, accuracy: str = "avg@4"
) -> Figure:
    """A row a label and in it a point with its interval for each comparison that there is."""
    with matplotlib.rc_context(plots.STYLE):
        names = list(dict.fromkeys(_pair(c) for row in found.values() for c in row if c))
        looks = plots.looks_of(names)
        height = 1.6 + 0.3 * sum(c is not None for row in found.values() for c in row)
        figure = Figure(figsize=(7.2, height), dpi=110, layout="constrained")
        axes = figure.subplots()
        ticks, y = [], 0.0
        for label, row in found.items():
            places = []
            for comparison in row:
                if comparison is None:
                    continue
                colour, marker = looks[_pair(comparison)]
                i = comparison.interval
                axes.hlines(y, POINTS * i.low, POINTS * i.high, color=colour, linewidth=1.6)
                axes.plot(POINTS * i.difference, y, marker, color=colour, markersize=6)
                places.append(y)
                y -= 1.0
            if places:
                ticks.append((fmean(places), label))
                y -= 0.6
        axes.axvline(0, color="#666666", linewidth=0.8)
        axes.set_yticks([place for place, _ in ticks], [label for _, label in ticks])
        axes.set_xlabel(f"difference of {accuracy} in points, 95% interval")
        for name, (colour, marker) in looks.items():
            axes.plot([], [], marker, color=colour, label=name)
        if names:
            figure.legend(loc="outside lower center", ncols=min(len(names), 2))
        return figure


def _pair(comparison: Comparison) -> str:
    """The two systems, without their axis."""
    first, second = (name.partition("@")[0] for name in (comparison.first, comparison.second))
    return f"{first} less {second}"


def cost_points(runs: Runs, cells: Sequence[str], cost: Sequence[str]) -> list[plots.Point]:
    """Points for `plots.accuracy_against_cost`: means over seeds, bars from lowest to highest.

    cost: keys of a workflow's cost that are added up.
    """
    found = []
    for cell in cells:
        own = list(runs.get(cell, {}).values())
        if own:
            accuracies = [records.accuracy(record) for record in own]
            spent = [
                sum(record["plays"]["free"]["per_workflow"][key] for key in cost) for record in own
            ]
            found.append(plots.Point(cell, fmean(accuracies), *_spread(accuracies), fmean(spent)))
    return found
