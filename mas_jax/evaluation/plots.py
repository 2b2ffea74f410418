"""Plots for a README or a paper: learning curves, and accuracy against what a workflow costs.

Each is written twice: a PNG at the path given, and beside it an SVG of the same name.
A label names a system and has one colour in all panels of a figure; several runs of a system share
it. Figures are returned too, for notebooks. Must not know: where the numbers come from.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

# the palette of Okabe and Ito, told apart with any colour vision, less yellow (pale on white);
# the markers are told apart without colours
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "D", "^", "v", "p", "*", "X")
STYLE = {
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "svg.hashsalt": "mas_jax",  # equal plots are equal files
}
_DPI = 160
_TURNS = np.pi / 8 * np.array([0, 8, 1, -1, 7, -7, 2, -2, 6, -6, 3, -3, 5, -5, 4, -4])
_Size = tuple[float, float]  # inches


@dataclass(frozen=True)
class Curve:
    """One training run: the value that was measured at each step."""

    label: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Point:
    """One evaluated system: accuracy and its 95% interval in [0, 1], mean cost of a workflow."""

    label: str
    accuracy: float
    low: float
    high: float
    cost: float


def learning_curves(path: str | Path, curves: Sequence[Curve], *, quantity: str) -> Figure:
    """A PNG at `path`, and an SVG, with a line for each run: faint as measured, strong as smoothed.

    quantity: what the values are, with a unit where there is one; the title of the y axis.
    Raises: ValueError if the path does not end in .png.
    """
    with matplotlib.rc_context(STYLE):
        figure, (axes,) = _make_figure(1, size=(6.0, 4.2))
        _draw_curves(axes, curves, looks_of([curve.label for curve in curves]), quantity=quantity)
        return _save(figure, path)


def accuracy_against_cost(
    path: str | Path, points: Sequence[Point], *, accuracy: str, cost: str,
    bars: str = "95% interval",
) -> Figure:  # fmt: skip
    """A PNG at `path`, and an SVG, with a labelled marker and its interval for each system.

    accuracy: what it is, such as avg@4, shown in %; cost: such as "searches a workflow"; bars: what
    runs from a point's low to its high.
    Raises: ValueError if the path does not end in .png.
    """
    with matplotlib.rc_context(STYLE):
        figure, (axes,) = _make_figure(1, size=(6.0, 4.2))
        looks = looks_of([point.label for point in points])
        _draw_points(axes, points, looks, accuracy=accuracy, cost=cost)
        axes.set_ylabel(f"{accuracy} (%), bars: {bars}")
        _label_points(axes, points, looks)
        return _save(figure, path)


def demo(
    path: str | Path,
    curves: Sequence[Curve],
    points: Sequence[Point],
    *,
    quantity: str,
    accuracy: str,
    cost: str,
) -> Figure:
    """A PNG at `path`, and an SVG, with both plots side by side; keywords and errors as theirs."""
    with matplotlib.rc_context(STYLE):
        figure, (left, right) = _make_figure(2, size=(11.5, 4.4))
        looks = looks_of([item.label for item in (*curves, *points)])
        _draw_curves(left, curves, looks, quantity=quantity)
        _draw_points(right, points, looks, accuracy=accuracy, cost=cost)
        _label_points(right, points, looks)
        return _save(figure, path)


def smooth(steps: Sequence[float], values: Sequence[float], *, width: float) -> np.ndarray:
    """Local straight-line fit at each step, weighted by a normal density of this `width` in steps.

    Follows a slope up to both ends, where a moving mean lags. Values that are not finite are left
    out; NaN where fewer than two are near. Source: Cleveland 1979, without the robust iterations.
    """
    x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    fitted = np.full(len(steps), np.nan)
    for i, step in enumerate(steps):
        near = np.abs(x - step) <= 4 * width  # beyond, weights are below 4e-4
        if len(set(x[near])) >= 2:
            root_weights = np.exp(-(((x[near] - step) / width) ** 2) / 4)
            columns = np.stack([np.ones(near.sum()), x[near] - step], axis=1)
            fit, *_ = np.linalg.lstsq(
                columns * root_weights[:, None], y[near] * root_weights, rcond=None
            )
            fitted[i] = fit[0]
    return fitted


_Looks = dict[str, tuple[str, str]]  # label -> colour, marker


def looks_of(labels: Sequence[str]) -> _Looks:
    """Colour and marker of each label."""
    looks = zip(itertools.cycle(_COLOURS), itertools.cycle(_MARKERS), strict=True)
    return dict(zip(dict.fromkeys(labels), looks, strict=False))


def _make_figure(num_panels: int, *, size: _Size) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    figure.get_layout_engine().set(wspace=0.06)
    return figure, figure.subplots(1, num_panels, squeeze=False)[0]


def _save(figure: Figure, path: str | Path) -> Figure:
    path = Path(path)
    if path.suffix != ".png":
        raise ValueError(f"plot {path}: the name must end in .png; the SVG is put beside it")
    figure.savefig(path.with_suffix(".svg"), format="svg", metadata={"Date": None})
    figure.savefig(path, format="png")  # last: the figure's own resolution is the one it is left in
    return figure


def _draw_curves(axes: Axes, curves: Sequence[Curve], looks: _Looks, *, quantity: str) -> None:
    named = set()
    for curve in curves:
        colour, _ = looks[curve.label]
        axes.plot(curve.steps, curve.values, color=colour, alpha=0.25, linewidth=0.9)
        span = max(curve.steps, default=0) - min(curve.steps, default=0)
        smoothed = smooth(curve.steps, curve.values, width=max(span / 10, 1.0))
        label = "_" if curve.label in named else curve.label  # matplotlib leaves "_" unnamed
        axes.plot(curve.steps, smoothed, color=colour, linewidth=2.0, label=label)
        named.add(curve.label)
    axes.set_title("Learning")
    axes.set_xlabel("step (optimizer updates)")
    axes.set_ylabel(quantity)
    if named:
        axes.legend(loc="best", handlelength=1.4)


def _draw_points(
    axes: Axes, points: Sequence[Point], looks: _Looks, *, accuracy: str, cost: str
) -> None:
    for point in points:
        colour, marker = looks[point.label]
        percents = [100 * x for x in (point.accuracy, point.low, point.high)]
        axes.vlines(point.cost, *percents[1:], color=colour, linewidth=1.6, alpha=0.8)
        axes.plot(point.cost, percents[0], marker, color=colour, markersize=8, mec="white", mew=0.8)
    axes.margins(x=0.14, y=0.12)
    axes.set_title("Accuracy against cost")
    axes.set_xlabel(cost)
    axes.set_ylabel(f"{accuracy} (%), bars: 95% interval")


# --- labels beside points -------------------------------------------------------------------------


def _label_points(axes: Axes, points: Sequence[Point], looks: _Looks) -> None:
    """Writes each label once, near its last point, clear of other labels, points and bars."""
    axes.figure.draw_without_rendering()  # fixes where everything is in pixels
    taken = [box for point in points for box in _boxes(axes, point)]
    inside = axes.get_window_extent()
    for label, point in {point.label: point for point in points}.items():
        spot = (point.cost, 100 * point.accuracy)
        text = _write(axes, label, spot, colour=looks[label][0])
        extent = Text.get_window_extent(text)  # the annotation's own would count its line too
        x, y = axes.transData.transform(spot)
        choices = list(_places(extent.width, extent.height))
        boxes = [
            Bbox.from_bounds(x + dx, y + dy, extent.width, extent.height) for dx, dy in choices
        ]
        costs = [_overlap(box, taken) + _outside(box, inside) for box in boxes]
        best = int(np.argmin(costs))  # the first, hence nearest, among equals
        text.set_position([pixels * 72 / _DPI for pixels in choices[best]])
        text.set_in_layout(False)  # the axes stay where this was computed
        text.arrow_patch.set_visible(best >= 2 * _TURNS.size)  # where it is no neighbour
        taken.append(boxes[best].padded(4))


def _write(axes: Axes, label: str, spot: tuple[float, float], *, colour: str) -> Annotation:
    """The label at the spot, with a line to it; darker than the marker, to be read on white."""
    dark = tuple(0.75 * channel for channel in to_rgb(colour))
    return axes.annotate(
        label,
        spot,
        xytext=(0, 0),
        textcoords="offset points",  # not pixels: an SVG's are of another size
        va="bottom",
        color=dark,
        fontsize=9,
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
        arrowprops=dict(arrowstyle="-", color=dark, linewidth=0.7, shrinkA=0, shrinkB=5),
    )


def _boxes(axes: Axes, point: Point) -> tuple[Bbox, Bbox]:
    """What a point covers, in pixels: its marker and its bar."""
    x, y = axes.transData.transform((point.cost, 100 * point.accuracy))
    _, low = axes.transData.transform((point.cost, 100 * point.low))
    _, high = axes.transData.transform((point.cost, 100 * point.high))
    half, thin = 6 / 72 * _DPI, 2 / 72 * _DPI
    return Bbox([[x - half, y - half], [x + half, y + half]]), Bbox(
        [[x - thin, low], [x + thin, high]]
    )


def _places(width: float, height: float) -> Iterator[tuple[float, float]]:
    """Lower left corners of a label about its point in pixels, nearest and sides first."""
    for distance in np.linspace(7, 70, 10) / 72 * _DPI:
        for dx, dy in zip(np.cos(_TURNS), np.sin(_TURNS), strict=True):
            yield distance * dx + (dx - 1) / 2 * width, distance * dy + (dy - 1) / 2 * height


def _overlap(box: Bbox, taken: Sequence[Bbox]) -> float:
    """Area in pixels that is covered already."""
    x0, y0, x1, y1 = np.array([other.extents for other in taken]).T
    widths = np.minimum(box.x1, x1) - np.maximum(box.x0, x0)
    heights = np.minimum(box.y1, y1) - np.maximum(box.y0, y0)
    return float(np.sum(np.maximum(widths, 0) * np.maximum(heights, 0)))


def _outside(box: Bbox, inside: Bbox) -> float:
    """Area in pixels that lies beyond the axes."""
    shared = Bbox.intersection(box, inside)
    return box.width * box.height - (0.0 if shared is None else shared.width * shared.height)
