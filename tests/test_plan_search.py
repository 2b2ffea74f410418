"""What arithmetic lets through to the compiler, and how the best few are shown."""

import dataclasses
import math

import jax
import pytest

from mas_jax.config import default_config, pod_config
from mas_jax.model import qwen3
from mas_jax.planning import chips, fitting, search
from mas_jax.planning.calibration import Calibration
from mas_jax.planning.compile_plan import Phase, Workload
from mas_jax.planning.cost import Cost

MODEL = qwen3.PRESETS["toy-1m"]
MIB = 2**20
PAGES = default_config().engine.num_pages
KNOBS = dict(least_pages=PAGES, headroom=fitting.HEADROOM)


def place(hbm_bytes: float) -> chips.Slice:
    """One chip of a machine that has none."""
    chip = dataclasses.replace(chips.CHIPS["v6e"], hbm_bytes=hbm_bytes)
    return chips.Slice("v6e:1x1", chip, (1, 1), tuple(jax.devices()[:1]))


def test_what_is_too_large_by_arithmetic_is_never_compiled():
    config = default_config()
    config.train.row_length = 4096
    every, none = fitting.promising(config, MODEL, place(32 * chips.GIB), "student", **KNOBS)
    assert (len(every), none) == (9, [])  # rows x remat; one device makes one mesh
    limit = sorted(one.total for one in every)[4] / fitting.HEADROOM
    some, pruned = fitting.promising(config, MODEL, place(limit + 1), "student", **KNOBS)
    assert (len(some), len(pruned)) == (5, 4)
    assert max(one.total for one in some) <= sorted(one.total for one in every)[4]


def test_where_nothing_can_be_run_the_reason_is_told(monkeypatch):
    def _refuse(*args):
        raise ValueError("why")

    monkeypatch.setattr(fitting, "guess", _refuse)
    with pytest.raises(ValueError, match="why"):
        fitting.promising(default_config(), MODEL, place(32 * chips.GIB), "student", **KNOBS)


def test_on_one_device_what_recomputes_least_comes_first():
    found, _ = fitting.promising(default_config(), MODEL, place(32 * chips.GIB), "student", **KNOBS)
    settings = [(one.config.train.remat, one.config.train.micro_rows) for one in found]
    # nothing passes over links, so that rows only take memory
    assert settings == [(remat, rows) for remat in ("none", "dots", "full") for rows in (1, 2, 4)]


def test_gathering_weights_seldom_may_be_worth_recomputing():
    def _seconds(topology: str, tensor: int, rows: int, remat: str) -> float:
        chip, shape = chips.parse_topology(topology)
        devices = chip.devices * math.prod(shape)
        config = fitting.changed(pod_config(), devices // tensor, tensor, rows, remat)
        config.train.row_length = 4096
        slice_ = chips.Slice(topology, chip, shape, ())
        return fitting.token_seconds(config, qwen3.PRESETS["qwen3-4b"], slice_)

    params = qwen3.param_count(qwen3.PRESETS["qwen3-4b"])
    # 4 passes of 2 FLOPs a weight; half of 3 x 2 bytes gathered and 2 x 4 of gradients, 2 links
    by_hand = 8 * params / 918e12 + 0.5 * params * 14 / 200e9 / (4 * 4096)
    assert _seconds("v6e:4x4", 1, 4, "full") == pytest.approx(by_hand)
    # two parts of a layer: beside it 36 layers x 2 results x 4 passes of 2,560 bf16 numbers, of
    # which each of two devices sends a half twice
    split = by_hand + 2 * 36 * 2 * 4 * 2560 * 2 / 200e9
    assert _seconds("v6e:4x4", 2, 4, "full") == pytest.approx(split)
    assert _seconds("v6e:8x8", 1, 4, "full") < _seconds("v6e:8x8", 1, 1, "dots")
    assert _seconds("v5p:2x2x2", 1, 2, "dots") < _seconds("v5p:2x2x2", 2, 4, "dots")
    assert _seconds("v5p:2x2x2", 1, 2, "dots") < _seconds("v5p:2x2x2", 1, 4, "full")


def test_the_best_few_are_shown_with_their_settings():
    config = fitting.changed(default_config(), 4, 2, 3, "dots")
    phase = Phase("gradients", 1.0, Cost(918e12, 1e9, 2.0), 300 * MIB, 100.0, 459e12, 60.0)
    one = search.Tried(fitting.Guess(config, 100.0, 50.0, 1e-6), phase, 25.0, 0.5, 7000)
    (line,) = search.lines([one], place(1024 * MIB), None)
    assert line.startswith("bound_mfu 0.50, 25 tokens/s/chip, 0.3 of 1.0 GiB, room for num_pages=7")
    (estimate,) = search.lines([one], place(1024 * MIB), Calibration(0.8, "a run"))
    assert estimate.startswith("bound_mfu 0.50 (calibrated 0.40), 25 tokens/s/chip")
    for setting in ("mesh.fsdp=4", "mesh.tensor=2", "micro_rows=12", "remat=dots"):
        assert f"--config.train.{setting}" in line
    (line,) = search.lines([dataclasses.replace(one, max_pages=0)], place(MIB), None)
    assert "DOES NOT FIT: --config" in line
    refused = dataclasses.replace(phase, error="needs 40.0 of 32.0 GiB")
    one = dataclasses.replace(one, phase=refused, max_pages=0)
    (line,) = search.lines([one], place(MIB), None)
    assert "DOES NOT FIT (needs 40.0 of 32.0 GiB): --config" in line


def test_fewer_pages_make_room_for_what_the_pool_leaves_none():
    config = default_config()
    with_pool, _ = fitting.promising(
        config, MODEL, place(32 * chips.GIB), "student", **KNOBS | dict(least_pages=9)
    )
    largest = max(with_pool, key=lambda one: one.total)
    assert largest.config.engine.num_pages == PAGES  # there is room: it stays
    room = place((largest.total - 1) / fitting.HEADROOM)
    fit, large = fitting.promising(config, MODEL, room, "student", **KNOBS | dict(least_pages=9))
    (smaller,) = (one for one in fit if one.config.engine.num_pages == 9)
    assert smaller.config.train == largest.config.train and not large
    pages = (PAGES - 9) * fitting.page_bytes(config, MODEL)
    assert largest.total - smaller.total >= pages  # the pool may be padded
    # the whole of HBM is room enough
    assert (
        len(fitting.promising(config, MODEL, room, "student", **KNOBS | dict(headroom=1.0))[0]) == 9
    )
    # pages that nobody asks to be fewer
    _, large = fitting.promising(config, MODEL, room, "student", **KNOBS)
    assert [one.config.train for one in large] == [largest.config.train]


def test_where_nothing_fits_the_smallest_is_named_and_nothing_is_compiled():
    said = []
    found = search.search(
        default_config(), MODEL, place(MIB), "student", Workload(171.0, 45.0), most=6,
        say=said.append,
    )  # fmt: skip
    assert found == []
    assert said[0].endswith("9 too large by arithmetic, 0 to compile")
    assert said[1].startswith("the smallest, fsdp=1 tensor=1 rows a device=1 remat=full")
    assert "of 0.0 GiB a device" in said[1] and "take a larger slice" in said[1]


@pytest.mark.parametrize(("tensor", "rows"), [(1, 1), (2, 4)])
def test_a_candidate_fills_the_devices(tensor, rows):
    config = fitting.changed(default_config(), 8 // tensor, tensor, rows, "full")
    assert config.train.mesh.to_dict() == dict(data=1, fsdp=8 // tensor, tensor=tensor)
    assert config.train.micro_rows == rows * 8 // tensor
