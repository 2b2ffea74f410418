"""The engine's programs as what is compiled: parameters by layer, the page pool, host arrays.

Everything here is a function of configs, settings and a mesh, so that a program can also be
compiled for chips that this machine has not got, from shapes alone. Dimensions: as in
`programs.py`. Must not know: callers, futures, why a row is there.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mas_jax.model import int8, paged_attention, qwen3, sharding
from mas_jax.sampling import mixed, programs
from mas_jax.sampling.engine_settings import EngineSettings
from mas_jax.sampling.scheduler import Block, Sequence

NUM_RESULTS = {"prefill": 3, "decode": 5, "mixed": 8}  # after the pool


def pool_shapes(
    config: qwen3.ModelConfig, settings: EngineSettings, mesh: Mesh | None, *, is_ragged: bool
) -> mixed.Pool | programs.Pool:
    """Shapes of the page pool and where they lie: `mixed.Pool` for ragged calls, else
    `programs.Pool`."""
    s, c = settings, config

    def _shape(shape: tuple[int, ...], axes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        at = None if mesh is None else sharding.named(mesh, shape, axes, name="page pool")
        return jax.ShapeDtypeStruct(shape, jnp.dtype(s.dtype), sharding=at)

    if is_ragged:
        lanes = paged_attention.HEAD_DIM_LANES
        head_dim = -(-c.head_dim // lanes) * lanes
        shape = (s.num_pages, s.page_size, 2 * c.num_kv_heads, head_dim)
        return [_shape(shape, mixed.POOL_AXES) for _ in range(c.num_layers)]
    keys = (s.num_pages, c.num_kv_heads, c.head_dim, s.page_size)
    values = (s.num_pages, c.num_kv_heads, s.page_size, c.head_dim)
    return [
        (_shape(keys, programs.KEY_AXES), _shape(values, programs.VALUE_AXES))
        for _ in range(c.num_layers)
    ]


def in_use(
    params: qwen3.Params, config: qwen3.ModelConfig, settings: EngineSettings
) -> qwen3.Params:
    """Parameters as the programs read them: the layers' matrices as `settings.weights` says, other
    matrices in `settings.dtype`, vectors as they are. Parameters that are so already stay."""
    if settings.weights == "int8":
        params = int8.quantize_params(params, qwen3.param_specs(config))

    def _leaf(is_matrix: bool, x: jax.Array | int8.Int8) -> jax.Array | int8.Int8:
        """A parameter of any shape in the type that the programs read."""
        return x.astype(settings.dtype) if is_matrix and not isinstance(x, int8.Int8) else x

    return jax.tree.map(_leaf, qwen3.decay_mask(config), params)


def shardings(params: qwen3.Params, config: qwen3.ModelConfig, mesh: Mesh) -> qwen3.Params:
    """Where parameters, as they came or `in_use`, lie on an engine's mesh; params may be shapes."""
    return int8.shardings(qwen3.param_shardings(config, mesh), params)


@functools.cache
def by_layer(
    config: qwen3.ModelConfig, settings: EngineSettings, mesh: Mesh | None
) -> Callable[[qwen3.Params], qwen3.Params]:
    """Jitted: parameters `in_use`, with a list of layers, since decode steps unroll them, and fused
    where no dimension of them is split over devices."""
    is_split = mesh is not None and mesh.size > 1

    def _layer(params, index):
        layer = jax.tree.map(lambda x: x[index], params["layers"])
        return layer if is_split else qwen3.fuse_layer(layer)

    def _by_layer(params):
        params = in_use(params, config, settings)
        layers = [_layer(params, index) for index in range(config.num_layers)]
        angles = qwen3.rotary(config, jnp.arange(settings.context))
        return params | {"layers": layers, "rotary": angles}

    if mesh is None:
        return jax.jit(_by_layer)
    shapes = jax.eval_shape(
        lambda: _by_layer(qwen3.init(config, jax.random.key(0), dtype=jnp.float32))
    )
    return jax.jit(_by_layer, out_shardings=_split_shardings(shapes, config, mesh))


def _split_shardings(shapes: qwen3.Params, config: qwen3.ModelConfig, mesh: Mesh) -> qwen3.Params:
    """Of what `by_layer` makes: a layer's array lies as the stacked one without its first axis."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    if mesh.size == 1:
        return jax.tree.map(lambda _: everywhere, shapes)
    at = qwen3.param_shardings(config, mesh)
    layer = jax.tree.map(
        lambda stacked: NamedSharding(mesh, PartitionSpec(*stacked.spec[1:])), at["layers"]
    )
    layers = [layer] * config.num_layers
    return int8.shardings(at | {"layers": layers, "rotary": (everywhere, everywhere)}, shapes)


def params_shapes(
    params: qwen3.Params, config: qwen3.ModelConfig, settings: EngineSettings, mesh: Mesh
) -> qwen3.Params:
    """Shapes of what `by_layer` makes of parameters, or of their shapes, and where they lie."""
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(by_layer(config, settings, mesh), params)
    return jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
        shapes, _split_shardings(shapes, config, mesh),
    )  # fmt: skip


def lower_call(
    kind: str, config: qwen3.ModelConfig, mesh: Mesh | None, args: tuple
) -> jax.stages.Lowered:
    """A call ("prefill", "decode", "mixed") on (params, pool, ...), lowered, with the pool donated.

    Arguments may be shapes; on a mesh parameters and pool have shardings, the others are
    replicated.
    """
    function = {
        "prefill": programs.prefill,
        "decode": programs.decode,
        "mixed": functools.partial(mixed.mixed, backend="auto"),
    }[kind]

    def _run(params, pool, *rest):
        return function(params, config, pool, *rest)

    if mesh is None:
        return jax.jit(_run, donate_argnums=(1,)).lower(*args)
    everywhere = NamedSharding(mesh, PartitionSpec())
    params_at, pool_at = (jax.tree.map(lambda x: x.sharding, a) for a in args[:2])
    rest_at = jax.tree.map(lambda _: everywhere, args[2:])
    jitted = jax.jit(
        _run,
        in_shardings=(params_at, pool_at, *rest_at),
        out_shardings=(pool_at, *[everywhere] * NUM_RESULTS[kind]),
        donate_argnums=(1,),
    )
    with jax.set_mesh(mesh):
        return jitted.lower(*args)


# host arrays


def drawing(sequences: list[Sequence | None], rows: int) -> programs.Drawing:
    """How each row draws; rows without a sequence draw anything."""
    key_B2 = np.zeros((rows, 2), np.uint32)
    temperature_B, top_p_B = np.ones(rows, np.float32), np.ones(rows, np.float32)
    top_k_B = np.zeros(rows, np.int32)
    for row, sequence in enumerate(sequences):
        if sequence is not None:
            r = sequence.request
            key_B2[row] = sequence.key_data
            temperature_B[row], top_p_B[row], top_k_B[row] = r.temperature, r.top_p, r.top_k
    return programs.Drawing(key_B2, temperature_B, top_p_B, top_k_B)


def rows(
    settings: EngineSettings, bucket: int, work: list[Sequence], limits: list[int]
) -> programs.Rows:
    """Sequences to decode, at most `limits` tokens each."""
    s = settings
    rows, pages, steps = s.decode_rows, bucket // s.page_size, s.decode_steps
    token_B, position_B, limit_B, num_forced_B = (np.zeros(rows, np.int32) for _ in range(4))
    table_BU = np.zeros((rows, pages), np.int32)
    forced_BI = np.zeros((rows, steps), np.int32)
    stop_BQ = np.full((rows, s.max_stop_ids), -1, np.int32)
    limit_B[: len(limits)] = limits
    for row, sequence in enumerate(work):
        generated = sequence.num_cached - sequence.num_prompt
        token_B[row], position_B[row] = sequence.tokens[generated], sequence.num_cached
        forced = sequence.tokens[generated + 1 :][:steps]
        forced_BI[row, : len(forced)], num_forced_B[row] = forced, len(forced)
        held = sequence.pages[:pages]
        table_BU[row, : len(held)] = held
        stop_ids = sequence.request.stop.token_ids
        stop_BQ[row, : len(stop_ids)] = stop_ids
    return programs.Rows(token_B, position_B, table_BU, limit_B, forced_BI, num_forced_B, stop_BQ)


def blocks(settings: EngineSettings, bucket: int, work: list[Block]) -> programs.Blocks:
    """Blocks of prompts to prefill."""
    s = settings
    rows, pages = s.prefill_blocks, bucket // s.page_size
    tokens_BT = np.zeros((rows, s.page_size), np.int32)
    count_B, page_B = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    table_BU = np.zeros((rows, pages), np.int32)
    for row, block in enumerate(work):
        count_B[row] = len(block.tokens)
        tokens_BT[row, : len(block.tokens)] = block.tokens
        page_B[row] = len(block.table) - 1
        table_BU[row, : len(block.table)] = block.table
    return programs.Blocks(tokens_BT, count_B, page_B, table_BU)


def flat(
    settings: EngineSettings, work: list[tuple[tuple[int, ...], int, tuple[int, ...]]]
) -> mixed.Flat:
    """Rows to decode and blocks to prefill as one budget of tokens; work as in `make_flat`."""
    s = settings
    return mixed.make_flat(
        work,
        num_tokens=s.decode_rows + s.prefill_blocks * s.page_size,
        num_rows=s.decode_rows + s.prefill_blocks,
        num_pages=s.context // s.page_size,
        page_size=s.page_size,
    )
