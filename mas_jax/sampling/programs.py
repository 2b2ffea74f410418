"""The engine's device calls: prefill pages of prompts, decode several tokens a row.

A layer's pool is its pages of keys [M, K, H, Z], positions last, and of values [M, K, Z, H]: as the
two matmuls of attention read them fastest on CPUs (0.19 ms for 64 rows of 128 positions, against
0.29 with both alike). A call's shapes are fixed by the settings and its context bucket, so a row's
result is bitwise the same whatever else is in the call.

`prefill` takes blocks: up to one page of consecutive prompt tokens that starts at a page boundary.
It writes their keys and values before any block attends, so blocks of one prompt may go together.
`decode` gathers the pages of each row into one slab a layer, takes up to I tokens a row on it, and
writes the new keys and values back: on CPUs a gather a token costs more than the token.

Dimensions: B rows, T tokens of a block (T = Z), S context positions, D model, V vocabulary, N query
heads, K key/value heads, J query heads for each, H head dim, L layers; here also M pages of the
pool, Z positions of a page, U pages of a row's context, I decode steps of a call.
Must not know: requests, schedules, why a row is there.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mas_jax.model import qwen3, sharding
from mas_jax.sampling.draw import draw, uniforms

Pool = list[tuple[jax.Array, jax.Array]]  # keys [M, K, H, Z] and values [M, K, Z, H] of each layer
KEY_AXES = ("replicated", "kv_heads", "head_dim", "replicated")
VALUE_AXES = ("replicated", "kv_heads", "replicated", "head_dim")


class Drawing(NamedTuple):
    """How each row draws: [B, 2] uint32 key data, and [B] temperature, top-p and top-k (0: all)."""

    key_B2: jax.Array
    temperature_B: jax.Array
    top_p_B: jax.Array
    top_k_B: jax.Array


class Blocks(NamedTuple):
    """Blocks of prompts: tokens [B, T], how many are real [B], page tables [B, U].

    The block's own page is the one at place `page_B` of its table; a row with 0 tokens is unused.
    """

    tokens_BT: jax.Array
    count_B: jax.Array
    page_B: jax.Array
    table_BU: jax.Array


class Rows(NamedTuple):
    """Rows to decode: the last token [B], its position [B], page tables [B, U], and what ends one.

    limit_B: tokens to take at most, 0 for an unused row. forced_BI, num_forced_B: tokens that were
    drawn before and are taken again. stop_BQ: token ids that end the row (-1: none).
    """

    token_B: jax.Array
    position_B: jax.Array
    table_BU: jax.Array
    limit_B: jax.Array
    forced_BI: jax.Array
    num_forced_B: jax.Array
    stop_BQ: jax.Array


def _angles(params: qwen3.Params, position_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `qwen3.rotary` gives, read off a table: XLA on CPUs would form every cosine anew for
    every element of every layer."""
    cos_S1R, sin_S1R = params["rotary"]
    return cos_S1R[position_BT], sin_S1R[position_BT]


def _attend(
    config: qwen3.ModelConfig,
    q_BTNH: jax.Array,
    k_BKHS: jax.Array,
    v_BKSH: jax.Array,
    position_BT: jax.Array,
) -> jax.Array:
    """Causal attention of queries at their positions over contexts, [B, T, N, H].

    Softmax in float32. Places beyond a query's position may hold anything finite.
    """
    B, T, N, H = q_BTNH.shape
    K, S = config.num_kv_heads, k_BKHS.shape[3]
    q_BTKJH = q_BTNH.astype(jnp.float32).reshape(B, T, K, N // K, H) * H**-0.5
    to_float = dict(preferred_element_type=jnp.float32)
    score_BKTJS = jnp.einsum("BTKJH,BKHS->BKTJS", q_BTKJH, k_BKHS, **to_float)
    visible_B1T1S = (jnp.arange(S) <= position_BT[..., None])[:, None, :, None, :]
    score_BKTJS = jnp.where(visible_B1T1S, score_BKTJS, jnp.finfo(jnp.float32).min)
    weight_BKTJS = jnp.exp(score_BKTJS - jnp.max(score_BKTJS, axis=-1, keepdims=True))
    out_BKTJH = jnp.einsum("BKTJS,BKSH->BKTJH", weight_BKTJS, v_BKSH, **to_float)
    out_BKTJH = out_BKTJH / jnp.sum(weight_BKTJS, axis=-1)[..., None]
    return jnp.moveaxis(out_BKTJH, 1, 2).reshape(q_BTNH.shape).astype(q_BTNH.dtype)


def _gather(layer: tuple[jax.Array, jax.Array], table_BU: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys [B, K, H, S] and values [B, K, S, H] of each row's pages.

    NaN in a place that attention masks would still reach the sum as 0 * NaN; pools start as zeros.
    """
    k_MKHZ, v_MKZH = layer
    _, K, H, Z = k_MKHZ.shape
    B, U = table_BU.shape
    k_BKHUZ = jnp.transpose(k_MKHZ[table_BU], (0, 2, 3, 1, 4))
    v_BKUZH = jnp.swapaxes(v_MKZH[table_BU], 1, 2)
    return k_BKHUZ.reshape(B, K, H, U * Z), v_BKUZH.reshape(B, K, U * Z, H)


def next_tokens(
    params: qwen3.Params,
    config: qwen3.ModelConfig,
    x_BD: jax.Array,
    position_B: jax.Array,
    drawing: Drawing,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens at `position_B`, their log-probs and whether they were near [B], see `draw`, from the
    hidden states [B, D] before them."""
    normed_BD = qwen3.rms_norm(x_BD, params["final_norm"], eps=config.norm_eps)
    unembed_VD = qwen3.unembedding(params, config).astype(normed_BD.dtype)
    logits_BV = jnp.einsum("BD,VD->BV", normed_BD, unembed_VD, preferred_element_type=jnp.float32)
    # each device forms its part and then gathers logits: asked for all of them at once, XLA gathers
    # the unembedding, 780 MB of Qwen3-4B's a step
    logits_BV = sharding.constrain(logits_BV, ("replicated", "vocab"))
    logits_BV = sharding.constrain(logits_BV, ("replicated", "replicated"))
    uniform_B = uniforms(drawing.key_B2, position_B)
    return draw(logits_BV, uniform_B, *drawing[1:])


def prefill(
    params: qwen3.Params,
    config: qwen3.ModelConfig,
    pool: Pool,
    blocks: Blocks,
    drawing: Drawing,
) -> tuple[Pool, jax.Array, jax.Array, jax.Array]:
    """The pool with each block's page filled, and after each block the token [B], its log-prob [B]
    and whether its draw was near [B].

    params: with `layers` a list of each layer's parameters, and `rotary` the cosines and sines of
    every position of the context. The draw after a block means something
    for the last one of a prompt.
    """
    T = blocks.tokens_BT.shape[1]
    position_BT = blocks.page_B[:, None] * T + jnp.arange(T)
    cos_sin = _angles(params, position_BT)
    own_page_B = jnp.take_along_axis(blocks.table_BU, blocks.page_B[:, None], axis=1)[:, 0]
    x_BTD = params["embed"][blocks.tokens_BT].astype(pool[0][0].dtype)
    new_pool = []
    for layer, (k_MKHZ, v_MKZH) in zip(params["layers"], pool, strict=True):
        q_BTNH, k_BTKH, v_BTKH = qwen3.project_qkv(layer, config, x_BTD, cos_sin)
        k_MKHZ = k_MKHZ.at[own_page_B].set(jnp.moveaxis(k_BTKH, 1, 3))
        v_MKZH = v_MKZH.at[own_page_B].set(jnp.swapaxes(v_BTKH, 1, 2))
        new_pool.append((k_MKHZ, v_MKZH))
        k_BKHS, v_BKSH = _gather(new_pool[-1], blocks.table_BU)
        attended_BTNH = _attend(config, q_BTNH, k_BKHS, v_BKSH, position_BT)
        x_BTD = qwen3.finish_layer(layer, config, x_BTD, attended_BTNH)
    last_B = jnp.maximum(blocks.count_B - 1, 0)
    x_BD = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)[:, 0]
    next_B = blocks.page_B * T + blocks.count_B
    return new_pool, *next_tokens(params, config, x_BD, next_B, drawing)


class State(NamedTuple):
    """What a decode step changes, letters as in `Rows`; near_B: draws near a boundary; keys:
    wherever keys and values live."""

    step: jax.Array
    token_B: jax.Array
    position_B: jax.Array
    taken_B: jax.Array
    is_active_B: jax.Array
    tokens_BI: jax.Array
    logprobs_BI: jax.Array
    near_B: jax.Array
    keys: Any


def start(rows: Rows, keys: Any) -> State:
    """The state before the first step."""
    B, steps = rows.forced_BI.shape
    return State(
        step=jnp.int32(0),
        token_B=rows.token_B,
        position_B=rows.position_B,
        taken_B=jnp.zeros((B,), jnp.int32),
        is_active_B=rows.limit_B > 0,
        tokens_BI=jnp.full((B, steps), -1, jnp.int32),
        logprobs_BI=jnp.zeros((B, steps), jnp.float32),
        near_B=jnp.zeros((B,), jnp.int32),
        keys=keys,
    )


def took(
    state: State,
    keys: Any,
    rows: Rows,
    pause_V: jax.Array,
    drawn: tuple[jax.Array, jax.Array, jax.Array],
) -> State:
    """The state after each active row took what `next_tokens` drew for it."""
    drawn_B, logprob_B, is_near_B = drawn
    is_forced_B = state.step < rows.num_forced_B
    token_B = jnp.where(is_forced_B, rows.forced_BI[:, state.step], drawn_B)
    active_B = state.is_active_B
    taken_B = state.taken_B + active_B
    is_stop_B = jnp.any(token_B[:, None] == rows.stop_BQ, axis=1) | pause_V[token_B]
    ends_B = (is_stop_B & ~is_forced_B) | (taken_B >= rows.limit_B)
    return State(
        step=state.step + 1,
        token_B=jnp.where(active_B, token_B, state.token_B),
        position_B=state.position_B + active_B,
        taken_B=taken_B,
        is_active_B=active_B & ~ends_B,
        tokens_BI=state.tokens_BI.at[:, state.step].set(jnp.where(active_B, token_B, -1)),
        logprobs_BI=state.logprobs_BI.at[:, state.step].set(jnp.where(active_B, logprob_B, 0.0)),
        near_B=state.near_B + (active_B & is_near_B & ~is_forced_B),
        keys=keys,
    )


def _decode_step(params, config, rows: Rows, drawing: Drawing, pause_V, state: State) -> State:
    """Every row takes one more token; only active ones remember it."""
    row_B = jnp.arange(state.token_B.shape[0])
    cos_sin = _angles(params, state.position_B[:, None])
    x_B1D = params["embed"][state.token_B][:, None].astype(state.keys[0][0].dtype)
    slabs = []
    for layer, (k_BKHS, v_BKSH) in zip(params["layers"], state.keys, strict=True):
        q_B1NH, k_B1KH, v_B1KH = qwen3.project_qkv(layer, config, x_B1D, cos_sin)
        k_BKHS = k_BKHS.at[row_B, :, :, state.position_B].set(k_B1KH[:, 0], mode="drop")
        v_BKSH = v_BKSH.at[row_B, :, state.position_B].set(v_B1KH[:, 0], mode="drop")
        slabs.append((k_BKHS, v_BKSH))
        attended_B1NH = _attend(config, q_B1NH, k_BKHS, v_BKSH, state.position_B[:, None])
        x_B1D = qwen3.finish_layer(layer, config, x_B1D, attended_B1NH)
    drawn = next_tokens(params, config, x_B1D[:, 0], state.position_B + 1, drawing)
    return took(state, slabs, rows, pause_V, drawn)


def _write_back(
    layer: tuple[jax.Array, jax.Array],
    slabs: tuple[jax.Array, jax.Array],
    rows: Rows,
    taken_B: jax.Array,
    steps: int,
) -> tuple[jax.Array, jax.Array]:
    """A layer's pages with each row's new keys and values; page 0 takes what is not wanted."""
    (k_MKHZ, v_MKZH), (k_BKHS, v_BKSH) = layer, slabs
    Z, S = k_MKHZ.shape[3], k_BKHS.shape[3]
    place_BI = rows.position_B[:, None] + jnp.arange(steps)
    is_new_BI = (jnp.arange(steps) < taken_B[:, None]) & (place_BI < S)
    inside_BI = jnp.minimum(place_BI, S - 1)
    page_BI = jnp.take_along_axis(rows.table_BU, inside_BI // Z, axis=1)
    page_BI, place_BI = jnp.where(is_new_BI, page_BI, 0), inside_BI % Z
    k_BKHI = jnp.take_along_axis(k_BKHS, inside_BI[:, None, None], axis=3)
    v_BKIH = jnp.take_along_axis(v_BKSH, inside_BI[:, None, :, None], axis=2)
    return (
        k_MKHZ.at[page_BI, :, :, place_BI].set(jnp.moveaxis(k_BKHI, 3, 1)),
        v_MKZH.at[page_BI, :, place_BI].set(jnp.swapaxes(v_BKIH, 1, 2)),
    )


def decode(
    params: qwen3.Params,
    config: qwen3.ModelConfig,
    pool: Pool,
    rows: Rows,
    drawing: Drawing,
    pause_V: jax.Array,
    min_active: jax.Array,
) -> tuple[Pool, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """The pool, tokens [B, I] (-1 after a row's end), log-probs [B, I], tokens taken [B], of these
    near a boundary [B], and steps made.

    A row ends at its limit, at a stop token, or at a token with pause_V [V] True, where the host
    has to look. The call ends when fewer than `min_active` rows go on (at least one: always 1 or
    more steps are made).
    """
    steps = rows.forced_BI.shape[1]
    state = start(rows, [_gather(layer, rows.table_BU) for layer in pool])

    def _goes_on(state: State) -> jax.Array:
        num_active = jnp.sum(state.is_active_B)
        enough = num_active >= jnp.where(state.step == 0, 1, jnp.maximum(min_active, 1))
        return (state.step < steps) & enough

    def _step(state: State) -> State:
        return _decode_step(params, config, rows, drawing, pause_V, state)

    state = jax.lax.while_loop(_goes_on, _step, state)
    pool = [
        _write_back(layer, slabs, rows, state.taken_B, steps)
        for layer, slabs in zip(pool, state.keys, strict=True)
    ]
    return pool, state.tokens_BI, state.logprobs_BI, state.taken_B, state.near_B, state.step
