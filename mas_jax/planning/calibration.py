"""How much of the bound real runs reach: two published training runs, planned by ourselves.

The bound is what the chips' peaks allow a program; a run that somebody measured says which part of
that there is in practice. Every figure that is called calibrated is the bound times such a part:
an estimate. Must not know: tables, flags.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from ml_collections import ConfigDict

from mas_jax.config import pod_config
from mas_jax.config_systems import sft_cascade
from mas_jax.model import qwen3
from mas_jax.planning import chips, compile_plan, run_programs

RECORD = Path(__file__).parent / "records" / "calibration.json"
LLAMA2_70B = qwen3.ModelConfig(
    vocab_size=32000, num_layers=80, model_dim=8192, ffw_dim=28672, num_heads=64, num_kv_heads=8,
    head_dim=128, rope_theta=1e4, max_positions=4096, norm_eps=1e-5, tied=False,
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A training run that somebody measured.

    recomputed: matrices of a layer, of D x F each, whose products its backward pass makes again,
    where ours (remat="full") makes all. is_whole_square: attention was counted twice, without the
    causal half.
    """

    name: str
    model: qwen3.ModelConfig
    topology: str
    row_length: int
    rows_a_chip: int
    recomputed: int
    mfu: float
    is_whole_square: bool


# METHODS 8.2; rows and recomputation: AI-Hypercomputer/maxtext, benchmarks/maxtext_*_model_configs
# (llama3_1_8b_8192: everything of a layer but its feed-forward is kept on the host;
# llama2_70b_v5p_128: all products kept but the feed-forward's first two)
PUBLISHED = (
    Published("Llama-3.1-8B on v6e-256", qwen3.PRESETS["llama-3.1-8b"], "v6e:16x16", 8192, 4, 3,
              0.455, False),
    Published("Llama-2-70B on v5p-512", LLAMA2_70B, "v5p:4x8x8", 4096, 4, 2, 0.654, True),
)  # fmt: skip


def training_config(published: Published) -> ConfigDict:
    """One update of plain next-token training on full rows, as the published run made it."""
    chip, shape = chips.parse_topology(published.topology)
    num_chips = chips.Slice(published.topology, chip, shape, ()).num_chips
    config, rows = sft_cascade(pod_config(fsdp=num_chips)), num_chips * published.rows_a_chip
    config.train.update(dict(questions=rows, micro_rows=rows, row_length=published.row_length))
    config.engine.num_pages = 1024  # nothing is sampled
    return config


def measured_mfu(published: Published) -> float:
    """The published MFU with the causal half of attention counted alone, METHODS 8.5."""
    if not published.is_whole_square:
        return published.mfu
    model, length = published.model, published.row_length
    matmuls = 2 * compile_plan.matmul_params(model) * length
    half = compile_plan.forward_flops(model, 1, length, scored_frac=1.0) - matmuls
    return published.mfu * (matmuls + half) / (matmuls + 2 * half)


def calibrate(published: Published) -> dict:
    """A record: the bound of our own step of that shape, and the published figure beside it."""
    place = chips.make_slice(published.topology)
    config = training_config(published)
    run = run_programs.make_run(config, published.model, place, config.train.stages[-1])
    # every token is learned from
    workload = compile_plan.Workload(0.0, float(published.row_length), published.row_length)
    only = ("gradients", "optimizer")
    phases = {p.name: p for p in compile_plan.make_plan(run, workload, only=only)}
    update = [phases[name] for name in only]
    needed, layer = update[0].model_flops, compile_plan.layer_params(published.model)
    kept = 1 - published.recomputed * published.model.num_layers * (
        published.model.model_dim * published.model.ffw_dim / layer
    )
    peak = place.peak_flops * len(place.devices)
    again_s = 2 * layer * update[0].tokens / peak
    full_s = sum(phase.seconds for phase in update)
    bound_s = full_s - kept * again_s
    bound, measured = needed / (peak * bound_s), measured_mfu(published)
    return dict(
        name=published.name, topology=published.topology, chip=published.topology.split(":")[0],
        row_length=published.row_length, rows_a_chip=published.rows_a_chip,
        step_s=round(full_s, 3), step_with_their_remat_s=round(bound_s, 3),
        waits_s=round(sum(phase.cost.exposed_s for phase in update), 3),
        gradients_gib=round(update[0].hbm_bytes / chips.GIB, 1),
        bound_mfu=round(bound, 3), published_mfu=published.mfu,
        published_mfu_causal=round(measured, 3), ratio=round(measured / bound, 3),
        compile_s=round(sum(phase.compile_s for phase in update)),
    )  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """Which part of the bound is expected, and where that is from."""

    ratio: float
    source: str


def read_calibration(topology: str, path: Path = RECORD) -> Calibration | None:
    """Of the run on the same kind of chip, else the mean of all; None without a record."""
    if not path.exists():
        return None
    records = json.loads(path.read_text())
    same = [record for record in records if record["chip"] == topology.split(":")[0]]
    used = same or records
    if not used:
        return None
    ratio = sum(record["ratio"] for record in used) / len(used)
    names = " and ".join(record["name"] for record in used)
    return Calibration(ratio, names if len(used) == 1 else f"the mean of {names}")


def lines(records: list[dict]) -> list[str]:
    """The records as a table, bound and published side by side."""
    head = (
        f"{'run':<26}{'bound MFU':>10}{'published':>11}{'causal':>8}{'ratio':>7}"
        f"{'step s':>8}{'waits s':>9}"
    )
    return [head, "-" * len(head)] + [
        f"{r['name']:<26}{r['bound_mfu']:>10.3f}{r['published_mfu']:>11.3f}"
        f"{r['published_mfu_causal']:>8.3f}{r['ratio']:>7.3f}"
        f"{r['step_with_their_remat_s']:>8.2f}{r['waits_s']:>9.2f}"
        for r in records
    ]


def markdown(records: list[dict]) -> list[str]:
    """The README's table of them."""
    head = ("run", "bound MFU", "published", "with causal attention", "part of the bound")
    table = [head, ("---",) * len(head)] + [
        (
            r["name"], f"{r['bound_mfu']:.3f}", f"{r['published_mfu']:.3f}",
            f"{r['published_mfu_causal']:.3f}", f"{r['ratio']:.2f}",
        )
        for r in records
    ]  # fmt: skip
    return ["| " + " | ".join(cells) + " |" for cells in table]


def keep(records: list[dict], path: Path = RECORD) -> None:
    """Writes the records where `read_calibration` finds them."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(records, indent=1) + "\n")
