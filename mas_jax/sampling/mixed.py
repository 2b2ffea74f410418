"""One device call of prefill and decode work together, for the TPU's ragged paged kernel.

A flat budget of tokens holds one token of every row to decode, then the tokens of the blocks to
prefill, with nothing between. The decode rows then take up to I - 1 tokens more. Attention reads
the pages where they lie, so a call costs what its tokens cost whatever the context: one program
serves all. Elsewhere `programs.py`, whose two calls are made of dense arrays, is faster.

A layer's pool is one array of pages [M, Z, C, P]: entries 2k and 2k + 1 of a position are the key
and the value of key/value head k, C = 2K, and P is H filled up to what the kernel wants.

Dimensions: as in `programs.py`; T tokens of the budget, B rows to decode, Y = B + blocks rows in
all, X = Y + 1 row bounds. Must not know: requests, schedules, why a row is there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mas_jax.model import qwen3
from mas_jax.model.paged_attention import attend_paged
from mas_jax.sampling.programs import (
    Drawing,
    Rows,
    State,
    next_tokens,
    start,
    took,
)

Pool = list[jax.Array]  # one array of pages [M, Z, C, P] for each layer
POOL_AXES = ("replicated", "replicated", "kv_heads", "head_dim")


class Flat(NamedTuple):
    """Tokens of a call and where they go: token, position, page and place in the page [T]; page
    tables [Y, U], lengths [Y] and bounds [X] of the rows in use, which come first, and how many
    [1]; place of each row's last token in the budget [Y]. Unused places write to page 0."""

    token_T: jax.Array
    position_T: jax.Array
    page_T: jax.Array
    place_T: jax.Array
    table_YU: jax.Array
    kv_len_Y: jax.Array
    bound_X: jax.Array
    num_rows_1: jax.Array
    last_Y: jax.Array


def make_flat(
    work: list[tuple[tuple[int, ...], int, tuple[int, ...]]],
    *,
    num_tokens: int,
    num_rows: int,
    num_pages: int,
    page_size: int,
) -> Flat:
    """The budget that holds rows of (tokens, position of the first, pages), in order; numpy."""
    token_T, position_T, page_T, place_T = (np.zeros(num_tokens, np.int32) for _ in range(4))
    table_YU = np.zeros((num_rows, num_pages), np.int32)
    kv_len_Y, last_Y = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    bound_X = np.zeros(num_rows + 1, np.int32)
    used = 0
    for row, (tokens, first, pages) in enumerate(work):
        end = used + len(tokens)
        position = first + np.arange(len(tokens))
        token_T[used:end], position_T[used:end] = tokens, position
        table_YU[row, : len(pages)] = pages[:num_pages]
        page_T[used:end] = table_YU[row, position // page_size]
        place_T[used:end] = position % page_size
        kv_len_Y[row], last_Y[row] = first + len(tokens), end - 1
        bound_X[row + 1 :] = end
        used = end
    num_rows_1 = np.asarray([len(work)], np.int32)
    return Flat(
        token_T, position_T, page_T, place_T, table_YU, kv_len_Y, bound_X, num_rows_1, last_Y
    )


def _interleave(k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
    """Keys and values of tokens as a page holds them, [B, T, C, H]."""
    B, T, K, H = k_BTKH.shape
    return jnp.stack([k_BTKH, v_BTKH], axis=3).reshape(B, T, 2 * K, H)


def _layers(params, config, pool: Pool, flat: Flat, backend: str) -> tuple[Pool, jax.Array]:
    """The pool with the tokens' keys and values, and the hidden states [T, D] after all layers."""
    cos_sin = qwen3.rotary(config, flat.position_T[None])
    x_1TD = params["embed"][flat.token_T][None].astype(pool[0].dtype)
    new_pool = []
    for layer, pages_MZCH in zip(params["layers"], pool, strict=True):
        q_1TNH, k_1TKH, v_1TKH = qwen3.project_qkv(layer, config, x_1TD, cos_sin)
        kv_TCH = _interleave(k_1TKH, v_1TKH)[0]
        padding = pages_MZCH.shape[-1] - config.head_dim
        kv_TCP = jnp.pad(kv_TCH, ((0, 0), (0, 0), (0, padding)))
        pages_MZCH = pages_MZCH.at[flat.page_T, flat.place_T].set(kv_TCP)
        new_pool.append(pages_MZCH)
        attended_TNH = attend_paged(
            q_1TNH[0], pages_MZCH, flat.kv_len_Y, flat.table_YU, flat.bound_X, flat.num_rows_1,
            backend=backend,
        )  # fmt: skip
        x_1TD = qwen3.finish_layer(layer, config, x_1TD, attended_TNH[None])
    return new_pool, x_1TD[0]


def _decode_flat(state: State, rows: Rows, page_size: int) -> Flat:
    """One more token of every decode row; a row that has ended writes to page 0."""
    B, U = rows.table_BU.shape
    page_index_B = jnp.minimum(state.position_B // page_size, U - 1)
    page_B = jnp.take_along_axis(rows.table_BU, page_index_B[:, None], axis=1)[:, 0]
    num_rows_1 = jnp.sum(rows.limit_B > 0, keepdims=True, dtype=jnp.int32)
    return Flat(
        token_T=state.token_B,
        position_T=state.position_B,
        page_T=jnp.where(state.is_active_B, page_B, 0),
        place_T=state.position_B % page_size,
        table_YU=rows.table_BU,
        kv_len_Y=state.position_B + 1,
        bound_X=jnp.minimum(jnp.arange(B + 1, dtype=jnp.int32), num_rows_1),
        num_rows_1=num_rows_1,
        last_Y=jnp.arange(B),
    )


def mixed(
    params: qwen3.Params,
    config: qwen3.ModelConfig,
    pool: Pool,
    flat: Flat,
    rows: Rows,
    drawing: Drawing,
    pause_V: jax.Array,
    *,
    backend: str,
) -> tuple:
    """The pool; what `programs.decode` returns for the decode rows; and the token, log-prob and
    nearness after each block [Y - B].

    flat holds the rows to decode first (their last tokens), then the blocks; drawing is of all Y
    rows: B places for rows to decode, then the blocks. backend: of `attend_paged`.
    """
    B, steps = rows.forced_BI.shape
    page_size = pool[0].shape[1]
    num_decode = jnp.sum(rows.limit_B > 0)
    pool, x_TD = _layers(params, config, pool, flat, backend)
    # row y of the drawing: decode rows keep their place, blocks follow the decode rows in use
    Y = flat.last_Y.shape[0]
    place_Y = jnp.arange(Y)
    used_Y = jnp.where(place_Y < B, place_Y, jnp.minimum(place_Y - B + num_decode, Y - 1))
    next_Y = flat.kv_len_Y[used_Y]
    drawn = next_tokens(params, config, x_TD[flat.last_Y[used_Y]], next_Y, drawing)
    state = start(rows, pool)
    state = took(state, pool, rows, pause_V, tuple(x_Y[:B] for x_Y in drawn))
    decode_drawing = Drawing(*(x[:B] for x in drawing))

    def _step(state: State) -> State:
        decode_flat = _decode_flat(state, rows, page_size)
        pool, x_BD = _layers(params, config, state.keys, decode_flat, backend)
        drawn = next_tokens(params, config, x_BD, state.position_B + 1, decode_drawing)
        return took(state, pool, rows, pause_V, drawn)

    state = jax.lax.while_loop(lambda s: (s.step < steps) & jnp.any(s.is_active_B), _step, state)
    results = state.tokens_BI, state.logprobs_BI, state.taken_B, state.near_B, state.step
    return state.keys, *results, *(x_Y[B:] for x_Y in drawn)
