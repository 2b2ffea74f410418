"""The study's figures show what the records say, and live with what is missing."""

import numpy as np
import pytest
from test_study import record

from mas_jax.evaluation import study as records
from mas_jax.evaluation import study_plots


def run(cell, seed, digits, **curves):
    return record(cell, seed, {"a": digits}) | {"curves": curves}


RUNS = {
    "x": {
        0: run("x", 0, "44", searches=[1.0, 2.0, 3.0]),
        1: run("x", 1, "42", searches=[3.0, 2.0, 1.0]),
    },
    "y": {0: run("y", 0, "20", searches=[1.0, None, 1.0])},
    "x@axis": {0: run("x@axis", 0, "4" * 30)},
    "y@axis": {0: run("y@axis", 0, "20" * 15)},
}  # fmt: skip


def test_learning_shows_the_mean_of_the_seeds_and_hides_empty_panels():
    figure = study_plots.learning(RUNS, ["x", "y", "never"], {"searches": "s", "kl": "k"})
    searches, kl = figure.axes
    line = searches.get_lines()[0]
    assert line.get_label() == "x"
    np.testing.assert_allclose(line.get_ydata(), [2.0, 2.0, 2.0], atol=1e-6)
    assert len(searches.get_lines()) == 2 and not kl.get_lines()
    np.testing.assert_allclose(searches.get_lines()[1].get_ydata(), [1.0, 1.0, 1.0])


def test_a_setting_has_a_point_for_each_value_that_was_run():
    figure = study_plots.setting(RUNS, {"s": [(0.1, "x"), (0.2, "never"), (0.3, "y")]}, x="beta")
    (line,) = figure.axes[0].get_lines()
    # x: (100 + 75) / 2; y: 25
    np.testing.assert_allclose(line.get_xydata(), [[0.1, 87.5], [0.3, 25.0]])


def test_differences_have_a_row_for_each_label_and_no_point_for_what_is_missing():
    found = records.compare(RUNS, "x@axis", "y@axis")
    figure = study_plots.differences({"axis": [found, None], "empty": [None]})
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["axis"]
    points = [
        line for line in axes.get_lines() if line.get_marker() == "o" and len(line.get_xdata())
    ]
    assert points[0].get_xdata() == pytest.approx([75.0])


def test_points_have_the_mean_cost_and_the_range_of_the_seeds():
    (point,) = study_plots.cost_points(RUNS, ["x", "never"], ["input_tokens", "output_tokens"])
    assert (point.accuracy, point.low, point.high, point.cost) == (0.875, 0.75, 1.0, 120.0)
