"""Plots: what is drawn is what was given, and labels cover nothing."""

import itertools
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from mas_jax.evaluation import plots
from mas_jax.evaluation.plots import Curve, Point

AXES = dict(accuracy="avg@4", cost="searches a workflow")
CURVES = (
    Curve("team", (0, 1, 2, 3), (0.1, 0.3, 0.2, 0.5)),
    Curve("team", (0, 1, 2), (0.2, float("nan"), 0.4)),
    Curve("cascade", (0, 2, 4), (0.3, 0.3, 0.6)),
)
POINTS = (
    Point("untrained", 0.25, 0.21, 0.3, 1.5),
    Point("cascade", 0.5, 0.45, 0.55, 2.0),
    Point("team", 0.6, 0.55, 0.64, 2.5),
    Point("team", 0.61, 0.56, 0.65, 2.4),
)


def annotations(figure: Figure) -> list[Annotation]:
    return [text for axes in figure.axes for text in axes.texts]


def test_smoothing_by_hand():
    # the middle of three: neighbours weigh e = exp(-1/2), the slope is no matter by symmetry
    e = np.exp(-0.5)
    assert plots.smooth((0, 1, 2), (0.0, 0.0, 1.0), width=1)[1] == pytest.approx(e / (1 + 2 * e))


def test_smoothing_follows_a_line_to_both_ends_over_gaps():
    steps = np.array([0, 1, 2, 4, 5, 7, 11, 12])
    values = 3.0 - 0.5 * steps
    with_gaps = np.where(np.isin(steps, (0, 5)), np.nan, values)
    np.testing.assert_allclose(plots.smooth(steps, with_gaps, width=2), values, atol=1e-12)


def test_smoothing_is_a_weighted_line_fit():
    rng = np.random.default_rng(0)
    steps, values = np.sort(rng.choice(60, 30, replace=False)), rng.normal(size=30)
    got = plots.smooth(steps, values, width=20)  # so wide that all points are near
    for step, fitted in zip(steps, got, strict=True):
        weights = np.exp(-(((steps - step) / 20) ** 2) / 2)
        line = np.polyfit(steps, values, 1, w=np.sqrt(weights))
        assert fitted == pytest.approx(np.polyval(line, step), abs=1e-9)


def test_smoothing_leaves_out_what_it_cannot_fit():
    assert np.isnan(plots.smooth((0, 1), (np.nan, 2.0), width=1)).all()
    far = plots.smooth((0, 1, 100), (1.0, 1.0, 5.0), width=1)
    np.testing.assert_allclose(far, [1.0, 1.0, np.nan], atol=1e-12)
    assert plots.smooth((), (), width=1).shape == (0,)


def test_a_run_is_drawn_as_measured_and_smoothed_and_named_once(tmp_path):
    figure = plots.learning_curves(tmp_path / "a.png", CURVES, quantity="exact match")
    (axes,) = figure.axes
    assert len(axes.lines) == 6
    for curve, measured, smoothed in zip(CURVES, axes.lines[::2], axes.lines[1::2], strict=True):
        np.testing.assert_array_equal(measured.get_xdata(), curve.steps)
        np.testing.assert_array_equal(measured.get_ydata(), curve.values)
        expected = plots.smooth(curve.steps, curve.values, width=1.0)
        np.testing.assert_array_equal(smoothed.get_ydata(), expected)
        assert measured.get_alpha() < 0.5 and measured.get_color() == smoothed.get_color()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["team", "cascade"]
    assert axes.get_ylabel() == "exact match" and "step" in axes.get_xlabel()


def test_a_point_is_drawn_in_percent_with_its_interval(tmp_path):
    figure = plots.accuracy_against_cost(tmp_path / "a.png", POINTS, **AXES)
    (axes,) = figure.axes
    assert [(*line.get_xdata(), *line.get_ydata()) for line in axes.lines] == [
        (1.5, 25.0),
        (2.0, 50.0),
        (2.5, 60.0),
        (2.4, 61.0),
    ]
    bars = [bar.get_segments()[0].tolist() for bar in axes.collections]
    np.testing.assert_allclose(
        bars,
        [
            [[1.5, 21], [1.5, 30]],
            [[2, 45], [2, 55]],
            [[2.5, 55], [2.5, 64]],
            [[2.4, 56], [2.4, 65]],
        ],
    )
    assert [text.get_text() for text in annotations(figure)] == ["untrained", "cascade", "team"]
    assert axes.get_xlabel() == "searches a workflow"
    assert axes.get_ylabel() == "avg@4 (%), bars: 95% interval"


def test_the_panels_of_the_demo_agree_on_colours(tmp_path):
    figure = plots.demo(tmp_path / "a.png", CURVES, POINTS, quantity="reward", **AXES)
    left, right = figure.axes
    team, cascade = (to_hex(left.lines[i].get_color()) for i in (0, 4))
    colours = [to_hex(line.get_color()) for line in right.lines]
    assert colours[1:] == [cascade, team, team]
    assert len({colours[0], team, cascade}) == 3


def test_the_file_is_a_png_of_the_figure(tmp_path):
    figure = plots.demo(tmp_path / "demo.png", CURVES, POINTS, quantity="reward", **AXES)
    content = (tmp_path / "demo.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == figure.canvas.get_width_height()


SVG = "{http://www.w3.org/2000/svg}"


def outlines(path):
    """Of the texts of an SVG that are drawn as outlines, their boxes in points from below left."""
    root = ElementTree.parse(path).getroot()
    height = float(root.get("height").removesuffix("pt"))
    boxes = []
    for group in root.iter(f"{SVG}g"):
        paths = group.findall(f"{SVG}path")
        if group.get("id", "").startswith("text_") and paths:
            numbers = [float(x) for x in re.findall(r"[-0-9.]+", paths[-1].get("d"))]
            x, y = np.array(numbers[::2]), height - np.array(numbers[1::2])
            boxes.append(Bbox([[x.min(), y.min()], [x.max(), y.max()]]))
    return boxes


@pytest.mark.parametrize(
    ("plot", "values", "names"),
    [
        (plots.learning_curves, CURVES, dict(quantity="reward")),
        (plots.accuracy_against_cost, POINTS, AXES),
    ],
)
def test_an_svg_of_the_same_size_lies_beside_the_png_and_equal_plots_are_equal_files(
    tmp_path, plot, values, names
):
    figure = plot(tmp_path / "one.png", values, **names)
    root = ElementTree.parse(tmp_path / "one.svg").getroot()
    assert root.tag == f"{SVG}svg"
    size = [float(root.get(name).removesuffix("pt")) for name in ("width", "height")]
    np.testing.assert_allclose(size, figure.get_size_inches() * 72, atol=0.01)
    plot(tmp_path / "two.png", values, **names)
    for ending in ("png", "svg"):
        one, two = ((tmp_path / f"{name}.{ending}").read_bytes() for name in ("one", "two"))
        assert one == two


def test_labels_of_the_svg_lie_where_those_of_the_png_do(tmp_path):
    figure = plots.accuracy_against_cost(tmp_path / "a.png", POINTS, **AXES)
    drawn = outlines(tmp_path / "a.svg")
    assert len(drawn) == 3
    for text in annotations(figure):
        box = Text.get_window_extent(text)
        left, low, right, high = np.array([box.x0, box.y0, box.x1, box.y1]) * 72 / figure.dpi
        # the outline fills the box from side to side; fonts of 72 and 160 dots an inch differ a bit
        (one,) = [o for o in drawn if abs(o.x0 - left) < 2 and abs(o.x1 - right) < 2]
        assert low - 1 < one.y0 < one.y1 < high + 1


def test_another_ending_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.png"):
        plots.learning_curves(tmp_path / "a.svg", CURVES, quantity="reward")


def test_a_plot_of_nothing_is_empty(tmp_path):
    figure = plots.demo(tmp_path / "a.png", (), (), quantity="reward", **AXES)
    assert (tmp_path / "a.png").exists()
    assert not [line for axes in figure.axes for line in axes.lines]


@pytest.mark.parametrize("spread", [1.0, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_labels_cover_neither_each_other_nor_points_nor_bars(tmp_path, seed, spread):
    rng = np.random.default_rng(seed)
    labels = ("untrained cascade", "untrained hierarchy", "teacher", "teacher in the hierarchy")
    labels = (*labels, "no Searcher signal", "trained team")
    accuracies = 0.5 + spread * rng.uniform(-0.2, 0.2, 6)
    costs = 2.0 + spread * rng.uniform(-1, 1, 6)
    points = [
        Point(label, x, x - 0.02, x + 0.02, cost)
        for label, x, cost in zip(labels, accuracies, costs, strict=True)
    ]
    figure = plots.accuracy_against_cost(tmp_path / "a.png", points, **AXES)
    (axes,) = figure.axes
    boxes = [Text.get_window_extent(text) for text in annotations(figure)]
    assert len(boxes) == 6
    for one, other in itertools.combinations(boxes, 2):
        assert Bbox.intersection(one, other) is None
    frame = axes.get_window_extent()
    for box in boxes:
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1
        assert frame.y0 <= box.y0 and box.y1 <= frame.y1
        for point in points:
            for percent in np.linspace(100 * point.low, 100 * point.high, 21):
                assert not box.contains(*axes.transData.transform((point.cost, percent)))
