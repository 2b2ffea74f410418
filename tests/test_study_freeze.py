"""The frozen grid: what was written down before the runs is what would run now."""

import json

import pytest
from conftest import ROOT

from mas_jax.learning import study_freeze
from mas_jax.learning.study_grid import CELLS

FROZEN = ROOT / study_freeze.FILE


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_is_as_it_was_frozen(name):
    study_freeze.check(FROZEN, name)


def test_a_cell_that_changed_is_refused_with_what_differs(tmp_path):
    frozen = json.loads(FROZEN.read_text())
    frozen["opd"]["changes"]["train.questions"] = 99
    path = tmp_path / "frozen.json"
    path.write_text(json.dumps(frozen))
    with pytest.raises(ValueError, match=r"opd: changes is .* make another cell"):
        study_freeze.check(path, "opd")
    with pytest.raises(ValueError, match="opd: changes"):
        study_freeze.freeze(path)


def test_a_new_cell_is_frozen_before_it_is_run(tmp_path):
    frozen = json.loads(FROZEN.read_text())
    del frozen["no_signal"]
    path = tmp_path / "frozen.json"
    path.write_text(json.dumps(frozen))
    with pytest.raises(ValueError, match="no_signal is not among"):
        study_freeze.check(path, "no_signal")
    assert study_freeze.freeze(path) == ["no_signal"]
    study_freeze.check(path, "no_signal")
    assert path.read_bytes() != b""
    assert json.loads(path.read_text())["opd"] == frozen["opd"]
