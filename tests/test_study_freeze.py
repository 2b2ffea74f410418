"""The frozen grid: what was written down before the runs is what would run now."""

import json

import pytest
from conftest import ROOT

from mas_jax.learning import study_freeze
from mas_jax.learning.study_agentpo import OTHER_STARTS
from mas_jax.learning.study_grid import CELLS

FROZEN = ROOT / study_freeze.FILE


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_is_as_it_was_frozen(name):
    study_freeze.check(FROZEN, name)


def changed(tmp_path, *keys, value):
    """The frozen grid with another value somewhere, as a file."""
    frozen = json.loads(FROZEN.read_text())
    section = frozen
    for key in keys[:-1]:
        section = section[key]
    section[keys[-1]] = value
    path = tmp_path / "frozen.json"
    path.write_text(json.dumps(frozen))
    return path


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("cells", "opd", "changes"), "opd: changes is .* make another cell"),
        (("defaults", "train.optimizer.learning_rate"), "defaults: train.optimizer.learning_rate"),
        (("row", "behaviour_weight"), "row: behaviour_weight is 0.1 now and 99"),
        (("evaluation", "caps"), "evaluation: caps is "),
        (("prompts", "toy"), "prompts: toy is "),
    ],
)
def test_anything_that_changed_is_refused_with_what_differs(tmp_path, keys, message):
    path = changed(tmp_path, *keys, value=99)
    with pytest.raises(ValueError, match=message):
        study_freeze.check(path, "opd")
    with pytest.raises(ValueError, match=message):
        study_freeze.freeze(path)


def test_what_a_collaborator_and_its_actor_are_is_frozen():
    cells = json.loads(FROZEN.read_text())["cells"]
    hint, solver = cells["agentpo_hint"], cells["agentpo_solver"]
    assert hint["world"] == solver["world"] != cells["agentpo_hint_100"]["world"]
    # fine-tuning the Actor starts from its weights, and tells it the same; a hint's texts are more
    assert hint["actor"] == solver["start"] != hint["start"]
    assert hint["texts"] != solver["texts"]
    assert cells["agentpo_hint@stronger"]["actor"] == "agentpo_solver"
    assert not {"actor", "texts"} & set(cells["opd"])


@pytest.mark.parametrize("team", ["hint", "hint_base", "collaborator"])
def test_collaborators_of_another_shape_differ_from_the_first_in_their_start_alone(team):
    cells = json.loads(FROZEN.read_text())["cells"]
    kind, _, state = team.partition("_")
    names = [f"agentpo_{'_'.join(filter(None, (kind, shape, state)))}" for shape in OTHER_STARTS]
    found = [cells[name] for name in (f"agentpo_{team}", *names)]
    assert len({cell["start"] for cell in found}) == len(found) == 3
    assert all(cell | {"start": ""} == found[0] | {"start": ""} for cell in found)


def test_a_new_default_that_no_cell_changes_may_come(tmp_path):
    frozen = json.loads(FROZEN.read_text())
    del frozen["defaults"]["train.tree.trees"]
    path = tmp_path / "frozen.json"
    path.write_text(json.dumps(frozen))
    study_freeze.check(path, "opd")


def test_a_new_cell_is_frozen_before_it_is_run(tmp_path):
    frozen = json.loads(FROZEN.read_text())
    del frozen["cells"]["no_signal"]
    path = tmp_path / "frozen.json"
    path.write_text(json.dumps(frozen))
    with pytest.raises(ValueError, match="no_signal is not among"):
        study_freeze.check(path, "no_signal")
    assert study_freeze.freeze(path) == ["no_signal"]
    study_freeze.check(path, "no_signal")
    assert json.loads(path.read_text()) == json.loads(FROZEN.read_text())


def test_without_a_frozen_grid_nothing_is_run(tmp_path):
    with pytest.raises(ValueError, match=r"no frozen grid at .*; run this at the top"):
        study_freeze.check(tmp_path / "frozen.json", "opd")


def test_the_text_names_the_grid_that_is_frozen():
    text = (ROOT / "notebooks" / "STUDY.md").read_text()
    assert study_freeze.digest(json.loads(FROZEN.read_text())) in text
