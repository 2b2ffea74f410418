"""What arithmetic lets through to the compiler, and how the best few are shown."""

import dataclasses

import jax
import pytest

from mas_jax.config import default_config
from mas_jax.model import qwen3
from mas_jax.planning import chips, fitting, search
from mas_jax.planning.compile_plan import Phase
from mas_jax.planning.cost import Cost

MODEL = qwen3.PRESETS["toy-1m"]
MIB = 2**20


def place(hbm_bytes: float) -> chips.Slice:
    """One chip of a machine that has none."""
    chip = dataclasses.replace(chips.CHIPS["v6e"], hbm_bytes=hbm_bytes)
    return chips.Slice("v6e:1x1", chip, (1, 1), tuple(jax.devices()[:1]))


def test_what_is_too_large_by_arithmetic_is_never_compiled():
    config = default_config()
    config.train.row_length = 4096
    every, none = search.promising(config, MODEL, place(32 * chips.GIB), "student")
    assert (len(every), none) == (9, 0)  # rows x remat; one device makes one mesh
    limit = sorted(one.total for one in every)[4] / fitting.HEADROOM
    some, pruned = search.promising(config, MODEL, place(limit + 1), "student")
    assert (len(some), pruned) == (5, 4)
    assert max(one.total for one in some) <= sorted(one.total for one in every)[4]


def test_what_recomputes_least_comes_first_and_then_what_has_most_rows():
    found, _ = search.promising(default_config(), MODEL, place(32 * chips.GIB), "student")
    settings = [(one.config.train.remat, one.config.train.micro_rows) for one in found]
    assert settings[:4] == [("none", 4), ("none", 2), ("none", 1), ("dots", 4)]
    assert settings[-1] == ("full", 1)


def test_the_best_few_are_shown_with_their_settings():
    config = fitting.changed(default_config(), 4, 2, 3, "dots")
    phase = Phase("gradients", 1.0, Cost(918e12, 1e9, 2.0), 300 * MIB, 100.0, 459e12, 60.0)
    one = search.Tried(fitting.Guess(config, 100.0, 50.0), phase, 25.0, 0.5, 7000)
    (line,) = search.lines([one], place(1024 * MIB))
    assert line.startswith("bound_mfu 0.50, 25 tokens/s/chip, 0.3 of 1.0 GiB, room for num_pages=7")
    for setting in ("mesh.fsdp=4", "mesh.tensor=2", "micro_rows=12", "remat=dots"):
        assert f"--config.train.{setting}" in line
    (line,) = search.lines([dataclasses.replace(one, max_pages=0)], place(MIB))
    assert "DOES NOT FIT" in line


@pytest.mark.parametrize(("tensor", "rows"), [(1, 1), (2, 4)])
def test_a_candidate_fills_the_devices(tensor, rows):
    config = fitting.changed(default_config(), 8 // tensor, tensor, rows, "full")
    assert config.train.mesh.to_dict() == dict(data=1, fsdp=8 // tensor, tensor=tensor)
    assert config.train.micro_rows == rows * 8 // tensor
