"""Settings that should fit a slice, by arithmetic alone: what to compile first, and what never.

Dimensions: as in the model. Must not know: the compiler, tables.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ml_collections import ConfigDict

from mas_jax.model import qwen3
from mas_jax.planning import run_programs
from mas_jax.planning.chips import Slice

HEADROOM = 0.92  # of HBM: the compiler leaves gaps, and the program takes room itself
ALL = 1.0  # of it: what may just fit, the compiler decides
UNCOVERED = 0.5  # of the time in which weights pass over the links; of layers' results all of it
# by remat policy: forward passes of matmuls that an update takes (elementwise work is a fiftieth),
# and how often the weights come together for them
PASSES = {"none": (3.0, 2), "dots": (3.06, 2), "full": (4.0, 3)}


@dataclass(frozen=True)
class Guess:
    """A config, the bytes that a device is thought to hold while gradients are made, and the
    device-seconds that a token of them takes."""

    config: ConfigDict
    held: float
    activations: float
    token_s: float

    @property
    def total(self) -> float:
        """Of both."""
        return self.held + self.activations

    @property
    def name(self) -> str:
        """What differs between candidates."""
        t = self.config.train
        rows = t.micro_rows // (t.mesh.data * t.mesh.fsdp)
        return (
            f"fsdp={t.mesh.fsdp} tensor={t.mesh.tensor} rows a device={rows} remat={t.remat} "
            f"num_pages={self.config.engine.num_pages}"
        )


def activation_bytes(config: ConfigDict, model: qwen3.ModelConfig) -> float:
    """That a device keeps for the backward pass of a micro-batch, in the computing dtype, with the
    gradient of all weights in theirs and the head's logits of a chunk."""
    t = config.train
    tokens = t.micro_rows * t.row_length / (t.mesh.data * t.mesh.fsdp)
    width, parts = (2 if t.dtype == "bfloat16" else 4), t.mesh.tensor
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    attended = model.num_heads * model.head_dim
    layer = {  # elements a token
        "full": model.model_dim,
        "dots": 2 * model.model_dim + (heads + 2 * attended + 2 * model.ffw_dim) / parts,
        "none": 6 * model.model_dim + (2 * heads + 2 * attended + 4 * model.ffw_dim) / parts,
    }[t.remat]
    working = 4 * model.model_dim + (2 * heads + 4 * model.ffw_dim) / parts  # of one layer
    kept = tokens * width * (model.num_layers * layer + working)
    head = 4 * model.vocab_size / parts * (t.chunk + 2 * model.model_dim)
    gradient = 4.0 * qwen3.param_count(model) / (t.mesh.fsdp * t.mesh.tensor)
    return kept + head + gradient


def token_seconds(config: ConfigDict, model: qwen3.ModelConfig, place: Slice) -> float:
    """Device-seconds for a token of an update's gradients, at the chip's peaks: its matmuls, and
    its share of what it waits for on the links. Those are a micro-batch's weights (bfloat16,
    gathered) and their gradients (float32, there and back), and with split layers every layer's
    results."""
    t, tensor = config.train, config.train.mesh.tensor
    passes, gathers = PASSES[t.remat]
    tokens = t.micro_rows * t.row_length / (t.mesh.data * t.mesh.fsdp)  # of `tensor` devices
    links = sum(place.links(axis) for axis, size in enumerate(place.shape) if size > 1)
    bandwidth = max(links, 1) * place.chip.link_bandwidth / place.chip.devices
    params = qwen3.param_count(model)
    weights = params * (2 * gathers + 8) / tokens if t.mesh.data * t.mesh.fsdp > 1 else 0.0
    # two results of each layer and pass, summed over its parts: a reduction moves each part twice
    results = model.num_layers * 2 * passes * model.model_dim * 2 * 2 * (tensor - 1)
    return 2 * passes * params / place.peak_flops + (UNCOVERED * weights + results) / bandwidth


def guess(config: ConfigDict, model: qwen3.ModelConfig, place: Slice, stage: str) -> Guess:
    """Of a config. Raises: ValueError for meshes that do not fit the slice or the model."""
    run = run_programs.make_run(config, model, place, stage)
    return Guess(
        config, sum(run.held.values()), activation_bytes(config, model),
        token_seconds(config, model, place),
    )  # fmt: skip


def candidates(config: ConfigDict, model: qwen3.ModelConfig, place: Slice) -> Iterator[ConfigDict]:
    """The config with each mesh, rows a device and remat policy that is worth a thought."""
    devices = len(place.devices)
    for tensor in (1, 2, 4, 8):
        if model.num_kv_heads % tensor or devices % tensor:
            continue
        for rows in (1, 2, 4):
            for remat in PASSES:
                yield changed(config, devices // tensor, tensor, rows, remat)


def changed(config: ConfigDict, fsdp: int, tensor: int, rows: int, remat: str) -> ConfigDict:
    """A copy with another mesh, rows a device and remat policy."""
    config = ConfigDict(config.to_dict())
    config.train.mesh.update(dict(data=1, fsdp=fsdp, tensor=tensor))
    config.train.update(dict(micro_rows=rows * fsdp, remat=remat))
    return config


def page_bytes(config: ConfigDict, model: qwen3.ModelConfig) -> float:
    """Of a page of the sampler's pool on one device."""
    width = 2 if config.engine.dtype == "bfloat16" else 4
    item = 2 * model.num_layers * model.num_kv_heads * model.head_dim / config.mesh.tensor
    return width * item * config.engine.page_size


def sized_pool(config: ConfigDict, model: qwen3.ModelConfig, *, positions: int) -> ConfigDict:
    """A copy whose pool holds every decode row at so many positions, and an eighth more."""
    config = ConfigDict(config.to_dict())
    rows, size = config.engine.decode_rows, config.engine.page_size
    config.engine.num_pages = rows * -(-positions // size) * 9 // 8
    return config


def engine_tensor(config: ConfigDict, model: qwen3.ModelConfig, place: Slice) -> int:
    """Devices of an engine: as few as hold the bf16 weights and the config's pages in 60% of
    their memory, at most a host's or one a key/value head."""
    own, tensor = sum(d.process_index == 0 for d in place.devices), 1
    needed = 2 * qwen3.param_count(model)
    needed += config.engine.num_pages * page_bytes(config, model) * config.mesh.tensor
    most = min(own, model.num_kv_heads)
    while 2 * tensor <= most and needed / tensor > 0.6 * place.hbm_bytes:
        tensor *= 2
    return tensor


def promising(
    config: ConfigDict,
    model: qwen3.ModelConfig,
    place: Slice,
    stage: str,
    *,
    least_pages: int,
    headroom: float,
) -> tuple[list[Guess], list[Guess]]:
    """Candidates that should fit, the fastest by arithmetic first, and those that should not, the
    smallest first. One that the config's pool leaves no room has so few pages as least_pages.
    headroom: share of HBM that a candidate may take.

    Raises: ValueError if none can be run at all, for the last one's reason."""
    found, refused, limit = [], None, headroom * place.hbm_bytes
    for one in candidates(config, model, place):
        try:
            found.append(guess(one, model, place, stage))
            if found[-1].total > limit and least_pages < one.engine.num_pages:
                one.engine.num_pages = least_pages
                found[-1] = guess(one, model, place, stage)
        except ValueError as error:  # a mesh that the slice's axes or the config's rows do not make
            refused = error
    if not found:
        raise refused
    fit = sorted((g for g in found if g.total <= limit), key=lambda g: (g.token_s, g.total))
    return fit, sorted((g for g in found if g.total > limit), key=lambda g: g.total)
