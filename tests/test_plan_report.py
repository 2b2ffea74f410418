"""What a plan says: published model FLOPs, totals by hand, advice where something does not fit."""

import dataclasses
from types import SimpleNamespace

import pytest

from mas_jax.config import default_config
from mas_jax.model import qwen3
from mas_jax.planning import chips, kept, report
from mas_jax.planning.calibration import Calibration
from mas_jax.planning.compile_plan import Phase, Plan, Workload, forward_flops, matmul_params
from mas_jax.planning.cost import Collective, Cost

GIB = chips.GIB


@pytest.mark.parametrize(
    ("name", "forward_gflops", "attention_gflops"),
    [("qwen3-0.6b", 1.19, 1.41), ("qwen3-4b", 8.04, 3.62), ("qwen3-8b", 15.1, 3.62)],
)
def test_model_flops_are_the_published_ones(name, forward_gflops, attention_gflops):
    # METHODS 8.4: forward a token, and what causal attention adds at 4k to a training token
    config = qwen3.PRESETS[name]
    matmuls = 2 * matmul_params(config)
    assert matmuls == pytest.approx(forward_gflops * 1e9, rel=0.01)
    attention = 3 * (forward_flops(config, 1, 4096, scored_frac=1.0) / 4096 - matmuls)
    assert attention == pytest.approx(attention_gflops * 1e9, rel=0.01)


def test_the_head_counts_for_scored_tokens_alone():
    config = qwen3.PRESETS["qwen3-4b"]
    every, tenth = (forward_flops(config, 2, 100, scored_frac=f) for f in (1.0, 0.1))
    assert every - tenth == pytest.approx(0.9 * 2 * 151936 * 2560 * 200)


def phase(name: str = "gradients", *, gib: float = 20.0, error: str = "") -> Phase:
    """A phase of two runs, each of 3 s, one of them waiting."""
    waiting = Collective("all-gather", 4, 1.0, 5e9, 1.0, 1.0, 0.5)
    cost = Cost() if error else Cost(918e12, 1e9, 2.0, {("all-gather", 4): waiting})
    return Phase(name, 2.0, cost, gib * GIB, 12_000.0, 4 * 918e12, 10.0, error)


def plan(*phases: Phase, held: dict[str, float]) -> Plan:
    chip, shape = chips.parse_topology("v6e:2x2")
    place = chips.Slice("v6e:2x2", chip, shape, tuple("abcd"))
    run = SimpleNamespace(
        place=place, held={name: gib * GIB for name, gib in held.items()},
        config=default_config(), num_engines=2, sampler_mesh=SimpleNamespace(size=2),
        stage="stage", settings=SimpleNamespace(decode_rows=64),
    )  # fmt: skip
    return Plan(run, Workload(), phases)


def test_totals_follow_from_the_phases():
    found = plan(phase(), held={"weights": 10.0})
    assert found.step_s == 6.0
    assert found.questions_per_hour == 600 * found.run.config.train.questions
    assert found.chip_hours(300) == pytest.approx(300 * 6 / 3600 * 4)
    one = found.phases[0]
    # four devices at peak for 3 s could do 12 x 918 TFLOP
    assert one.bound_mfu(found.run.place) == pytest.approx(1 / 3)
    assert one.exposed_frac == pytest.approx(0.5 / 3)
    line = report.rows(found)[0]
    assert line[:4] == ["gradients", "2", "20.0", "918.00"]
    assert line[5:] == ["5.00", "33", "17", "6.00", "100", "1,000", "0.33", "-"]


def test_decoding_is_compared_with_the_bytes_that_it_must_read():
    # v6e reads 1,638 GB/s: a quarter of that in the 3 s of a run is a twelfth
    decode = dataclasses.replace(phase("decode"), needed_bytes=1638e9 / 4)
    found = plan(decode, held={"weights": 10.0})
    assert decode.roof_frac(found.run.place) == pytest.approx(1 / 12)
    assert report.rows(found)[0][-1] == "8"


def test_a_plan_is_kept_with_what_was_printed(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "RECORDS", tmp_path / "plans")
    decode = dataclasses.replace(phase("decode"), needed_bytes=1638e9 / 4)
    whole = plan(
        phase("score of teacher"), phase(), phase("prefill"), decode, held={"weights": 10.0}
    )
    text = report.text(whole, steps=300, calibration=None)
    kept.keep("one", whole, steps=300, config="toy.py", changes=["seed=1"], text=text)
    (record,) = kept.read()
    assert record["printed"] == text.splitlines()
    assert (record["config"], record["changes"], record["stage"]) == ("toy.py", ["seed=1"], "stage")
    # one of three seconds of a third of the peak; half a second is the longest wait of each
    assert record["train_bound_mfu"] == record["score_bound_mfu"] == 0.333
    assert set(record["longest_wait_frac"].values()) == {0.167}
    assert record["bound_step_s"] == 24.0
    assert record["bound_chip_hours"] == pytest.approx(4 * 300 * 24 / 3600)
    cells = kept.row(record).strip("| ").split(" | ")
    assert cells[0] == "toy.py, stage" and cells[4] == "20.0 of 32"
    assert cells[8].startswith("17%, ")
    # v6e reached 0.775 of its bound
    assert cells[5] == "0.33 / 0.26" and cells[10] == "8 / 10"


def test_a_plan_that_could_not_be_compiled_is_kept_without_times(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "RECORDS", tmp_path)
    broken = plan(phase(gib=40.0, error="needs 40.0 of 31.2 GiB"), held={"weights": 8.0})
    kept.keep("one", broken, steps=3, config="toy.py", changes=[], text="x")
    (record,) = kept.read()
    assert not record["is_fitting"] and "train_bound_mfu" not in record
    assert record["advice"] == report.advice(broken)
    assert kept.row(record).count("| - ") == 6


def test_an_estimate_says_that_it_is_one_and_whose_part_of_the_bound_it_takes():
    found = plan(phase(), held={"weights": 10.0})
    text = report.text(found, steps=300, calibration=Calibration(0.5, "a run"))
    assert "calibrated (an estimate: 0.50 of the bound, as a run reached)" in text
    assert "a step takes 12.0 s" in text
    assert "MFU gradients 0.17" in text
    assert "calibrated" not in report.text(found, steps=300, calibration=None)


def test_what_fits_gets_no_advice():
    found = plan(phase(), held={"weights": 10.0})
    assert found.fits
    assert report.advice(found) == []
    assert "DOES NOT FIT" not in report.text(found, steps=10, calibration=None)


@pytest.mark.parametrize(
    ("held", "gib", "said"),
    [
        ({"weights": 8.0, "page pool": 20.0}, 35.0, "page pool (20.0 GiB): try fewer engine.num"),
        ({"optimizer state": 27.0, "weights": 4.0}, 36.0, "optimizer state (27.0 GiB): try a lar"),
        ({"teacher teacher": 31.0}, 36.0, "teacher (31.0 GiB): try a larger train.mesh.fsdp"),
        ({"weights": 8.0}, 40.0, "its own work (32.0 GiB): try train.micro_rows"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_the_setting_to_change(held, gib, said):
    found = plan(phase("optimizer", gib=1.0), phase(gib=gib), held=held)
    assert not found.fits
    (line,) = report.advice(found)
    start = f"DOES NOT FIT: gradients needs {gib:.1f} GiB a device, {gib - 32:.1f} too many"
    assert line.startswith(start)
    assert said in line


def test_a_run_that_holds_too_much_gets_one_line():
    found = plan(
        phase("optimizer", gib=44.0, error="x"), phase(gib=44.0, error="x"),
        held={"weights": 10.0, "optimizer state": 20.0, "page pool": 6.0, "teacher one": 8.0},
    )  # fmt: skip
    (line,) = report.advice(found)
    assert line.startswith("DOES NOT FIT: the run itself holds 44.0 GiB a device, 12.0 too many;")
    assert "optimizer state (20.0 GiB): try a larger" in line
    assert "teacher one (8.0 GiB): try a larger train.mesh.fsdp" in line
    assert "page pool" not in line


def test_a_program_that_could_not_be_compiled_is_no_crash():
    found = plan(phase(gib=40.0, error="needs 40.0 of 31.2 GiB"), held={"weights": 8.0})
    assert not found.fits
    text = report.text(found, steps=10, calibration=None)
    assert "DOES NOT FIT: gradients needs 40.0 GiB" in text
    assert "0 questions an hour" in text
