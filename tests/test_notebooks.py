"""Notebooks run from top to bottom, with the records that are shipped."""

import re

import nbformat
import pytest
from conftest import ROOT
from nbclient import NotebookClient

from mas_jax.evaluation import study as records
from mas_jax.learning import study_report

NUM_PICTURES = {"ablations": 6, "protocols": 3, "collaborators": 4}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def run(path) -> tuple[list[str], int]:
    """What the cells of a notebook print, cell by cell, and how many pictures they show; an
    exception in one is raised here."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": path.parent}}
    NotebookClient(notebook, timeout=900, resources=where).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    texts = ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]
    shown = [output.get("data", {}) for cell in cells for output in cell.outputs]
    return texts, sum("image/png" in data for data in shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path, monkeypatch):
    monkeypatch.delenv("RETRAIN", raising=False)
    texts, num_pictures = run(path)
    assert any("runs of" in text for text in texts)
    assert num_pictures == NUM_PICTURES[path.stem]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_kept_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.outputs for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.slow
def test_a_small_team_is_trained_live(monkeypatch):
    monkeypatch.setenv("RETRAIN", "1")
    assert "after 3 updates" in run(ROOT / "notebooks" / "ablations.ipynb")[0][-1]


@pytest.mark.parametrize("name", ["STUDY", "MAPD", "AGENTPO"])
def test_the_text_says_what_the_records_say(name):
    # rows such as | ... `opd` - `no_signal` | ... | +4.1 [1.0, 7.2] | 3 | ... |
    runs = study_report.read(ROOT / "notebooks" / "results", ROOT / "notebooks" / "frozen.json")
    text = (ROOT / "notebooks" / f"{name}.md").read_text()
    row = r"^\|.*?`(\S+)` - `(\S+)`.*\| ([+-][\d.]+ \[.*?\]) \| (\d+) \|"
    rows = re.findall(row, text, re.M)
    for first, second, points, seeds in rows:
        found = records.compare(runs, first, second)
        assert (points, int(seeds)) == (records.shown(found), len(found.seeds)), (first, second)
    assert len(rows) >= 5 or not runs
    assert len(text.splitlines()) <= 120  # two pages
