"""The benchmarks as a whole: what is measured again, what a failure costs, and what is fitted."""

import io
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from small_benchmarks import bad, good

from mas_jax.benchmarks import device, every, growth, step
from mas_jax.model import qwen3

CONSOLE = Console(quiet=True)


def text_of(table) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_one_failure_is_reported_and_the_rest_goes_on(tmp_path):
    out = tmp_path / "all.json"
    entries = every.run({"bad": bad, "good": good}, out, again=False, console=CONSOLE)
    assert "code 1: ValueError: this one cannot run here" in entries["bad"]["failed"]
    assert "record" not in entries["bad"]
    assert entries["good"]["record"] == {"value": 1, "sizes": None}
    assert json.loads(out.read_text()) == entries


def test_what_is_there_is_kept_and_what_failed_is_tried_again(tmp_path, monkeypatch):
    out, ran = tmp_path / "all.json", []
    monkeypatch.setattr(
        every, "run_one", lambda run: ran.append(run) or {"record": 2, "seconds": 1}
    )
    there = {"a": {"record": 1, "seconds": 3.0}, "b": {"failed": "x", "seconds": 3.0}}
    out.write_text(json.dumps(there))
    benchmarks = dict.fromkeys("abc")
    found = every.run(benchmarks, out, again=False, console=CONSOLE)
    assert len(ran) == 2 and [found[name]["record"] for name in "abc"] == [1, 2, 2]
    every.run(benchmarks, out, again=False, console=CONSOLE)
    assert len(ran) == 2
    every.run(benchmarks, out, again=True, console=CONSOLE)
    assert len(ran) == 5


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\['c'\].*choose from \['a'\]"):
        every.main({"a": good}, tmp_path / "all.json", ["c"], again=False)


def test_the_table_has_a_line_of_every_committed_record_and_of_a_failure():
    records = Path(every.__file__).parent / "records"
    entries = {
        path.stem: {"record": json.loads(path.read_text()), "seconds": 60.0}
        for path in sorted(records.glob("*.json"))
        if path.stem in every.HEADLINES
    }
    assert {"encoder", "model", "retrieval", "rollout", "update"} <= entries.keys()
    text = text_of(every.table(entries | {"loop": {"failed": "no room", "seconds": 1.0}}))
    assert all(name in text for name in entries) and "no room" in text
    # the update's record: 1.42 ahead of TRL at 1M
    case = entries["update"]["record"]["cases"][0]
    assert ("toy-1m", case["ratios"]["trl"]) in [
        (line[0], line[2]) for line in every.HEADLINES["update"](entries["update"]["record"])
    ]


# --- growth ---------------------------------------------------------------------------------------


def test_an_exponent_by_hand():
    # log2: x = 0, 1, 2; y = 0, 1, 3. slope = ((-1)(-4/3) + (1)(5/3)) / 2 = 3/2; residuals 1/6,
    # -2/6, 1/6, squares 6/36; error = sqrt((1/6) / (3 - 2) / 2)
    exponent, error = growth.fit([1, 2, 4], [1, 2, 8])
    assert exponent == pytest.approx(1.5)
    assert error == pytest.approx(math.sqrt(1 / 12))


def test_an_exact_power_has_no_error_and_two_points_have_none_to_tell():
    sizes = [64, 128, 512, 1024]
    assert growth.fit(sizes, [3e-3 * n**1.1 for n in sizes]) == pytest.approx((1.1, 0.0), abs=1e-6)
    exponent, error = growth.fit([1, 10], [1, 100])
    assert exponent == pytest.approx(2.0) and math.isnan(error)
    with pytest.raises(ValueError, match="no exponent"):
        growth.fit([1, 2], [0.0, 1.0])


def squares(sizes, runs):
    return [growth.Line("squares", tuple(sizes), tuple(float(n) ** 2 for n in sizes), ideal=2.0)]


def test_an_axis_is_measured_once_and_again_when_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(growth, "apart", lambda function, *arguments: function(*arguments))
    out = tmp_path / "growth.json"
    axes = {"n": growth.Axis((1, 2, 4), 1, squares)}
    record = growth.run(axes, out, again=False, console=CONSOLE)
    assert record["axes"]["n"]["lines"][0]["exponent"] == pytest.approx(2.0)
    stored = record["axes"]["n"]["seconds"]
    assert growth.run(axes, out, again=False, console=CONSOLE)["axes"]["n"]["seconds"] == stored
    assert growth.run(axes, out, again=True, console=CONSOLE)["axes"]["n"]["seconds"] != stored
    assert "| n | 1 - 4 | squares | 1 / 16 | 2.00 ± 0.00 | 2.00 | - |" in growth.markdown(record)


def test_a_linear_ideal_is_judged():
    def _row(exponent):
        line = dict(what="w", sizes=[1, 2], seconds=[1, 2], ideal=1.0, exponent=exponent)
        axis = {"lines": [line | {"standard_error": 0.01}]}
        return growth.markdown({"axes": {"a": axis}}).splitlines()[-1]

    assert _row(1.1).endswith("| yes |") and _row(1.11).endswith("| NO |")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("episodes", (2, 4)), ("context", (32, 64)), ("corpus", (100, 200)), ("devices", (1, 2))],
)
def test_every_axis_runs_at_a_small_size(tmp_path, name, sizes):
    axes = {name: growth.Axis(sizes, 1, growth.AXES[name].measure)}
    record = growth.run(axes, tmp_path / "growth.json", again=False, console=CONSOLE)
    lines = record["axes"][name]["lines"]
    assert len(lines) >= 2 and all(np.isfinite(line["exponent"]) for line in lines)


# --- one device -----------------------------------------------------------------------------------


def test_forward_flops_by_hand():
    config = qwen3.ModelConfig(
        vocab_size=10, num_layers=1, model_dim=4, ffw_dim=4, num_heads=1, num_kv_heads=1,
        head_dim=4, rope_theta=1e4, max_positions=64,
    )  # fmt: skip
    layers = qwen3.param_count(config) - 40  # tied: the embedding is the head
    # two sequences of 3 and 5 tokens; attention 2 x 1 layer x 4 wide x (9 + 25)
    attention = 2 * 4 * 34
    both = (step.forward_flops(config, [3, 5], with_head=h) for h in (False, True))
    assert list(both) == [2 * layers * 8 + attention, 2 * (layers + 40) * 8 + attention]


def test_rows_are_halved_until_they_fit():
    # Qwen3-4B in bfloat16: 8.04 GB and 147,456 x 2,048 = 0.302 GB a row, both twice
    rows = [
        device.decode_rows(qwen3.PRESETS["qwen3-4b"], device.SHAPE, itemsize=2, limit=int(gb * 1e9))
        for gb in (140, 80, 32)  # 0.8 of which are 112, 64 and 25.6: 93.4, 54.8 and 25.8, 20.9
    ]
    assert rows == [128, 64, 8]


def test_the_device_benchmark_runs_its_parts_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setitem(qwen3.PRESETS, "tiny", qwen3.ModelConfig(
        vocab_size=64, num_layers=1, model_dim=32, ffw_dim=32, num_heads=2, num_kv_heads=1,
        head_dim=16, rope_theta=1e4, max_positions=64,
    ))  # fmt: skip
    out = tmp_path / "device.json"
    record = device.run(["tiny"], device.SMALL, out, dtype="float32", limit_s=600)
    assert json.loads(out.read_text()) == record
    parts = record["models"]["tiny"]
    wanted = {name for pairs in device.CELLS.values() for pair in pairs for name in pair}
    found = {name: x for part in parts.values() for name, x in part.items() if name != "seconds"}
    assert found.keys() == wanted | {"decode_rows"} and found["decode_rows"] == 4
    assert all(0 < found[name] < 1 for name in ("mfu", "prefill_share"))
    late = device.run(["tiny"], device.SMALL, out, dtype="float32", limit_s=-1)
    assert all(set(part) == {"skipped"} for part in late["models"]["tiny"].values())
    assert text_of(device.table(late)).count(" - ") == 8


def test_a_part_that_does_not_fit_is_reported():
    def _part(model):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nand much more")

    assert device.run_part(_part, None)["failed"] == "RESOURCE_EXHAUSTED: out of memory"


def test_a_cpu_without_named_sizes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no accelerator here"):
        device.main(tmp_path / "device.json", None)
