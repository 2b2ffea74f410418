"""Which part of its bound a measured run reached, and what is written down about it."""

import json

import pytest

from mas_jax.planning import calibration
from mas_jax.planning.calibration import PUBLISHED, RECORD, read_calibration


def test_attention_that_was_counted_twice_is_taken_out():
    eight, seventy = PUBLISHED
    assert calibration.measured_mfu(eight) == 0.455
    # a token of Llama-2-70B at 4k: 68.7 GFLOP of 2 N, 80 x 64 x 128 x 4096 x 2 of attention, halved
    matmuls, whole = 2 * 68.7e9, 2 * 2 * 80 * 64 * 128 * 4096
    wanted = 0.654 * (matmuls + whole / 2) / (matmuls + whole)
    assert calibration.measured_mfu(seventy) == pytest.approx(wanted, rel=0.002)


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda p: p.topology)
def test_the_planned_step_is_one_update_on_as_many_rows(published):
    t = calibration.training_config(published).train
    assert (t.questions * t.group_size, t.micro_rows, t.mesh.fsdp) == (1024, 1024, 256)
    assert t.row_length == published.row_length


def test_a_chip_takes_its_own_run_and_another_the_mean(tmp_path):
    path = tmp_path / "calibration.json"
    assert read_calibration("v6e:4x4", path) is None
    calibration.keep(
        [dict(name="A", chip="v6e", ratio=0.6), dict(name="B", chip="v5p", ratio=0.8)], path
    )
    assert read_calibration("v6e:4x4", path) == calibration.Calibration(0.6, "A")
    found = read_calibration("v5e:4x4", path)
    assert found.ratio == pytest.approx(0.7)
    assert found.source == "the mean of A and B"


def test_the_record_has_both_runs_and_its_ratios_follow():
    records = json.loads(RECORD.read_text())
    assert [r["name"] for r in records] == [p.name for p in PUBLISHED]
    for record, published in zip(records, PUBLISHED, strict=True):
        measured = calibration.measured_mfu(published)
        assert record["ratio"] == pytest.approx(measured / record["bound_mfu"], rel=0.01)
        assert 0 < record["ratio"] <= 1  # a run cannot beat what the chips' peaks allow
    table = calibration.lines(records)
    assert len(table) == 2 + len(records)
    assert all(r["name"] in line for r, line in zip(records, table[2:], strict=True))
