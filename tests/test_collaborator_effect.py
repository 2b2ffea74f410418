"""What a Collaborator's words are worth: paired differences by hand."""

import numpy as np

from mas_jax.evaluation import collaborator_effect


def test_differences_are_paired_by_question_and_none_from_itself():
    means = {
        "actor": {"a": np.array([0.0, 1.0, 0.0, 0.0])},
        "hint": {"a": np.array([1.0, 1.0, 1.0, 0.0])},
        "hint, without the answer": {"a": np.array([1.0, 1.0, 0.0, 0.0])},
    }
    told = {
        "hint": {"episodes": 4, "told": 1},
        "hint, without the answer": dict(episodes=0, told=0),
    }
    rows = collaborator_effect.describe(means, told, alone="actor", free="hint")
    alone, free, without = rows
    assert [row["avg"]["difference"] for row in rows] == [0.25, 0.75, 0.5]
    assert alone["less_alone"] is None and alone["less_free"]["difference"] == -0.5
    assert free["less_alone"]["difference"] == 0.5 and free["less_free"] is None
    assert without["less_free"]["difference"] == -0.25
    # four paired gaps 0 0 -1 0: their mean is never above 0, and -0.75 or less in 5% of the draws
    assert without["less_free"]["high"] == 0.0 and without["less_free"]["low"] == -0.75
    grid = collaborator_effect.grid(rows, title="t")
    assert grid.rows[1] == ("hint", "75.00", "+50.00", grid.rows[1][3], "-", "-", "25.0% of 4")
    assert grid.rows[0][-1] == "-" and grid.rows[2][-1] == "-"


def test_without_the_actor_alone_only_controls_are_compared():
    means = {"hint": {"a": np.array([1.0])}, "under": {"a": np.array([0.0])}}
    rows = collaborator_effect.describe(means, {}, alone=None, free="hint")
    assert rows[1]["less_alone"] is None and rows[1]["less_free"]["difference"] == -1.0
