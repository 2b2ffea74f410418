"""The table of models and slices: its records, and the README's copy of it."""

import json
from pathlib import Path

import pytest

from mas_jax.config import pod_config
from mas_jax.model import qwen3
from mas_jax.planning import calibration, chips, fitting, kept, table

README = Path(__file__).parents[1] / "README.md"


def test_every_model_meets_every_slice_and_the_first_row_comes_first():
    assert len(set(table.CELLS)) == len(table.CELLS) == 24
    assert {model for model, _ in table.CELLS[:6]} == {"qwen3-4b"}
    assert {place for _, place in table.CELLS[6:12]} == {"v5p:2x2x2", "v6e:4x4"}


def test_the_readme_shows_the_records():
    lines = README.read_text().splitlines()
    for line in table.markdown().splitlines():
        assert line in lines
    for line in kept.markdown().splitlines():
        assert line in lines
    for line in calibration.markdown(json.loads(calibration.RECORD.read_text())):
        assert line in lines
    shown = [line for line in lines if line.startswith("| qwen3-") and ":" in line.split("|")[2]]
    assert len(shown) == len(table.read())


def test_more_is_kept_the_less_is_recomputed():
    model = qwen3.PRESETS["qwen3-4b"]
    config = pod_config(fsdp=8)

    def _bytes(remat: str, rows: int = 1, tensor: int = 1) -> float:
        one = fitting.changed(config, 8 // tensor, tensor, rows, remat)
        return fitting.activation_bytes(one, model)

    assert _bytes("full") < _bytes("dots") < _bytes("none")
    assert _bytes("dots", rows=1) < _bytes("dots", rows=2)
    # two rows more of 8,192 tokens, 36 layers of 2,560 in bf16, and a layer's work
    work = 4 * 2560 + 2 * (32 + 16) * 128 + 4 * 9728
    more = 2 * 8192 * 2 * (36 * 2560 + work)
    assert _bytes("full", rows=4) - _bytes("full", rows=2) == pytest.approx(more)


def test_a_page_is_two_arrays_a_layer():
    config, model = pod_config(tensor=4), qwen3.PRESETS["qwen3-4b"]
    # 147,456 bytes a token (METHODS 8.4), 16 positions, four devices
    assert fitting.page_bytes(config, model) == 147456 * 16 / 4
    sized = fitting.sized_pool(config, model, positions=2048)
    assert sized.engine.num_pages == config.engine.decode_rows * 128 * 9 // 8


def test_an_engine_has_as_few_devices_as_hold_its_weights():
    def _tensor(topology: str, name: str) -> int:
        chip, shape = chips.parse_topology(topology)
        own = tuple(_Device() for _ in range(4))
        place = chips.Slice(topology, chip, shape, own)
        model, config = qwen3.PRESETS[name], pod_config(tensor=1)
        config.engine.decode_rows = 128
        config = fitting.sized_pool(config, model, positions=2048)
        return fitting.engine_tensor(config, model, place)

    # 8 GB of weights and 43 of pages, on chips of 102, 34 and 17 GB
    assert _tensor("v5p:2x2x2", "qwen3-4b") == 1
    assert _tensor("v6e:4x4", "qwen3-4b") == 4
    assert _tensor("v5e:4x4", "qwen3-4b") == 4  # a host's four, though more than 60%


class _Device:
    process_index = 0
