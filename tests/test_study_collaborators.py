"""The table of teams of a Collaborator and an Actor says what the records say."""

import pytest
from test_study import record

from mas_jax.evaluation import study_collaborators
from mas_jax.learning import study_report


def team(cell, seed, digits, tokens, *, told=0, seen=0):
    """A run of one play a problem. tokens: (input, output) of each party, of all problems."""
    one = record(cell, seed, {"a": digits})
    free = one["plays"]["free"] | {
        "num_runs": 1,
        "tokens": {
            party: dict(zip(("input", "output"), spent, strict=True))
            for party, spent in tokens.items()
        },
        "answers": {"episodes": seen, "told": told},
    }
    return one | {"plays": {"free": free}}


BOTH = {"collaborator": (40, 20), "actor": (80, 40)}
RUNS = {
    "hint": {
        0: team("hint", 0, "1100", BOTH, told=1, seen=2),
        1: team("hint", 1, "1110", BOTH, told=1, seen=4),
    },
    "alone": {0: team("alone", 0, "1000", {"actor": (60, 40)})},
}


def test_tokens_are_a_problem_of_each_party():
    # (40 + 20) / 4 and (80 + 40) / 4
    found = [study_collaborators.tokens_of(RUNS["hint"][0], p) for p in ("collaborator", "actor")]
    assert found == [15.0, 30.0]
    assert study_collaborators.tokens_of(RUNS["alone"][0], "collaborator") == 0


def test_a_row_has_means_over_seeds_and_no_share_where_nobody_tells():
    grid = study_collaborators.grid(RUNS, ["hint", "never", "alone"], title="t")
    # (50 + 75) / 2, sqrt(2 * 12.5^2); 1/2 and 1/4 of the episodes told; 120 s each
    assert grid.rows == (
        ("hint", "2", "62.5", "17.7", "15", "30", "45", "37.5%", "1,000", "2.0"),
        ("alone", "1", "25.0", "-", "0", "25", "25", "-", "1,000", "2.0"),
    )
    assert study_collaborators.told_share(RUNS["hint"][1]) == pytest.approx(0.25)


def test_a_collaborator_of_another_shape_is_compared_with_the_first_and_with_the_actor():
    digits = {
        "actor": "1000", "hint": "1101", "hint_small_base": "1001", "hint_small": "1111",
        "hint_family": "1100",
    }  # fmt: skip
    runs = {
        f"agentpo_{name}": {0: team(f"agentpo_{name}", 0, right, BOTH)}
        for name, right in digits.items()
    }
    rows = study_report.agentpo_grids(runs)[-1].rows
    found = {row[:2]: float(row[2].split()[0]) for row in rows}
    # of four problems: small 4, family 2, the first 3, untrained 2, the Actor alone 1
    for first, second, points in (
        ("hint_small", "hint", 25.0),
        ("hint_small", "actor", 75.0),
        ("hint_small", "hint_small_base", 50.0),
        ("hint_small_base", "actor", 25.0),
        ("hint_family", "hint", -25.0),
        ("hint_family", "actor", 25.0),
    ):
        assert found[f"agentpo_{first}", f"agentpo_{second}"] == points
