"""Attention of a ragged batch of rows over a paged pool of keys and values: prefill and decode.

The layout is that of the TPU kernel shipped with jax (`ragged_paged_attention`), on every platform.
A flat budget of tokens holds the new tokens of the rows, one row after another. A row's keys lie in
the pages that its line of the page table names, its new tokens' own keys included (write them
first). Entries 2k and 2k + 1 of a position are the key and the value of key/value head k.

Dimensions: T tokens of the budget, B rows, N query heads, K key/value heads, J query heads per
key/value head (N = K J), H head dim; here also M pages of the pool, Z positions of a page, C = 2K
keys and values, P head dim of the pool (H, or H and zeros), U pages of a row, X = B + 1 row bounds.
Must not know: models, parameters, who owns a page (`sampling/pages.py`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as paged_kernel

from mas_jax.model import attention

QUERY_BLOCK = 32  # tokens that the kernel handles in one step
PAGE_BLOCK = 16  # pages that it fetches at once; more of them spill its scalar registers
PAGE_BLOCK_BYTES = 2**21  # VMEM for the pages fetched at once; the kernel holds them twice
HEAD_DIM_LANES = 128  # the kernel's head dim is a multiple of this

Q_AXES = ("replicated", "heads", "head_dim")
PAGE_AXES = ("replicated", "replicated", "kv_heads", "head_dim")
TABLE_AXES = (("replicated",), ("replicated", "replicated"), ("replicated",), ("replicated",))


def _locate_tokens(
    num_tokens: int, kv_lens_B: jax.Array, cu_q_lens_X: jax.Array, num_seqs_1: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each place of the budget: its row [T], its position there [T], and if it is used [T]."""
    B = kv_lens_B.shape[0]
    place_T = jnp.arange(num_tokens, dtype=jnp.int32)
    used_B = jnp.arange(B) < num_seqs_1  # entries of later rows are undefined
    ended_TB = used_B & (cu_q_lens_X[1:] <= place_T[:, None])
    row_T = jnp.minimum(jnp.sum(ended_TB, axis=1, dtype=jnp.int32), B - 1)
    start_B, end_B = cu_q_lens_X[:-1], cu_q_lens_X[1:]
    position_T = (kv_lens_B - end_B)[row_T] + place_T
    is_used_T = used_B[row_T] & (start_B[row_T] <= place_T) & (place_T < end_B[row_T])
    return row_T, position_T, is_used_T


def reference(
    q_TNH: jax.Array,
    kv_pages_MZCP: jax.Array,
    kv_lens_B: jax.Array,
    page_indices_BU: jax.Array,
    cu_q_lens_X: jax.Array,
    num_seqs_1: jax.Array,
) -> jax.Array:
    """Paged attention in plain jnp, [T, N, H], arguments as in `attend_paged`; softmax in float32.

    Takes page 0 of every token's row, then page 1, ... with a running maximum and sum, up to the
    last page of the longest row. Pages beyond a row's own add exact zeros, so the rest of the batch
    changes no bit of a row.
    Source: online softmax, Milakov and Gimelshein (arXiv 1805.02867).
    """
    T, N, H = q_TNH.shape
    M, Z, C, P = kv_pages_MZCP.shape
    K, J = C // 2, N // (C // 2)
    row_T, position_T, is_used_T = _locate_tokens(T, kv_lens_B, cu_q_lens_X, num_seqs_1)
    q_TKJH = q_TNH.reshape(T, K, J, H)
    floor = jnp.finfo(jnp.float32).min

    def add_page(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """State after one more page of every row: next page, running maximum and sum [T, K, J],
        output [T, K, J, H]."""
        index, max_TKJ, sum_TKJ, out_TKJH = state
        page_T = jnp.clip(page_indices_BU[row_T, index], 0, M - 1)
        kv_TZK2H = kv_pages_MZCP[page_T].reshape(T, Z, K, 2, P)[..., :H]
        visible_TZ = index * Z + jnp.arange(Z) <= position_T[:, None]
        # a slot that no token has filled may hold NaN
        v_TZKH = jnp.where(visible_TZ[:, :, None, None], kv_TZK2H[:, :, :, 1], 0)
        scores_TKJZ = H**-0.5 * jnp.einsum(
            "TKJH,TZKH->TKJZ", q_TKJH, kv_TZK2H[:, :, :, 0], preferred_element_type=jnp.float32
        )
        visible_T11Z = visible_TZ[:, None, None]
        scores_TKJZ = jnp.where(visible_T11Z, scores_TKJZ, floor)
        new_max_TKJ = jnp.maximum(max_TKJ, jnp.max(scores_TKJZ, axis=-1))
        weights_TKJZ = jnp.where(visible_T11Z, jnp.exp(scores_TKJZ - new_max_TKJ[..., None]), 0)
        kept_TKJ = jnp.exp(max_TKJ - new_max_TKJ)
        sum_TKJ = kept_TKJ * sum_TKJ + jnp.sum(weights_TKJZ, axis=-1)
        added_TKJH = jnp.einsum("TKJZ,TZKH->TKJH", weights_TKJZ, v_TZKH.astype(jnp.float32))
        return index + 1, new_max_TKJ, sum_TKJ, kept_TKJ[..., None] * out_TKJH + added_TKJH

    num_pages = jnp.max(jnp.where(is_used_T, position_T, -1)) // Z + 1
    start = (0, jnp.full((T, K, J), floor), jnp.zeros((T, K, J)), jnp.zeros((T, K, J, H)))
    state = jax.lax.while_loop(lambda state: state[0] < num_pages, add_page, start)
    _, _, sum_TKJ, out_TKJH = state
    is_used_T111 = is_used_T[:, None, None, None]
    out_TKJH = out_TKJH / jnp.where(is_used_T111, sum_TKJ[..., None], 1)
    return jnp.where(is_used_T111, out_TKJH, 0).astype(q_TNH.dtype).reshape(T, N, H)


def _check_kernel_tiles(num_kv: int, dtype: jnp.dtype) -> None:
    """Raises: ValueError if the kernel cannot tile `num_kv` keys and values of a position."""
    packed, rest = divmod(num_kv, 4 // jnp.dtype(dtype).itemsize)
    if rest or not (packed in (1, 2, 4) or packed % 8 == 0):
        raise ValueError(
            f"paged attention backend 'ragged_paged' has no tiling for {num_kv // 2} key/value "
            f"heads a device in {jnp.dtype(dtype).name}; wanted 1, 2, 4 or a multiple of 8 in "
            "bfloat16, 1, 2 or a multiple of 4 in float32; change the tensor axis of the mesh or "
            "choose 'reference'"
        )


def _ragged_paged_heads(
    q_TNH: jax.Array,
    kv_pages_MZCP: jax.Array,
    kv_lens_B: jax.Array,
    page_indices_BU: jax.Array,
    cu_q_lens_X: jax.Array,
    num_seqs_1: jax.Array,
) -> jax.Array:
    """The TPU kernel on one device, with its own heads."""
    T, _, H = q_TNH.shape
    _, Z, C, P = kv_pages_MZCP.shape
    _check_kernel_tiles(C, kv_pages_MZCP.dtype)
    kv_pages_MZCP = jnp.pad(kv_pages_MZCP, [(0, 0)] * 3 + [(0, -P % HEAD_DIM_LANES)])
    P = kv_pages_MZCP.shape[3]
    q_TNP = jnp.pad(q_TNH, [(0, 0), (0, 0), (0, P - H)])
    page_bytes = Z * C * P * kv_pages_MZCP.dtype.itemsize
    page_block = min(PAGE_BLOCK, page_indices_BU.shape[1], PAGE_BLOCK_BYTES // page_bytes)
    # block sizes are given because the kernel's own table looks at the chips of this machine, which
    # need not be those that the program is compiled for
    out_TNP = paged_kernel.ragged_paged_attention(
        q_TNP, kv_pages_MZCP, kv_lens_B, page_indices_BU, cu_q_lens_X, num_seqs_1,
        sm_scale=H**-0.5, num_kv_pages_per_block=max(1, page_block),
        num_queries_per_block=min(T, QUERY_BLOCK),
    )  # fmt: skip
    _, _, is_used_T = _locate_tokens(T, kv_lens_B, cu_q_lens_X, num_seqs_1)
    return jnp.where(is_used_T[:, None, None], out_TNP[..., :H], 0)


def ragged_paged(
    q_TNH: jax.Array,
    kv_pages_MZCP: jax.Array,
    kv_lens_B: jax.Array,
    page_indices_BU: jax.Array,
    cu_q_lens_X: jax.Array,
    num_seqs_1: jax.Array,
) -> jax.Array:
    """Paged attention by the TPU kernel, [T, N, H], arguments as in `attend_paged`; no gradient.

    Wants at least one row, and at least one new token in each. Make the pool with a head dim that
    is a multiple of 128: any other is padded here, which copies the pool in every call.
    """
    args = (q_TNH, kv_pages_MZCP, kv_lens_B, page_indices_BU, cu_q_lens_X, num_seqs_1)
    in_axes = (Q_AXES, PAGE_AXES, *TABLE_AXES)
    return attention.on_mesh(_ragged_paged_heads, args, in_axes=in_axes, out_axes=Q_AXES)


BACKENDS: dict[str, Callable[..., jax.Array]] = {
    "reference": reference,
    "ragged_paged": ragged_paged,
}


def choose(backend: str) -> str:
    """Name of the backend that runs: `backend`; for "auto" ragged_paged on TPU, else reference.

    Raises: ValueError if the backend is unknown, or ragged_paged on another platform than TPU.
    """
    here = attention.platform()
    if backend == "auto":
        return "ragged_paged" if here == "tpu" else "reference"
    if backend not in BACKENDS:
        raise ValueError(
            f"paged attention backend {backend!r} is unknown; choose 'auto' or one of "
            f"{sorted(BACKENDS)}"
        )
    if backend == "ragged_paged" and here != "tpu":
        raise ValueError(
            f"paged attention backend 'ragged_paged' runs on tpu, but this program is for {here}; "
            "choose 'auto' or 'reference'"
        )
    return backend


def attend_paged(
    q_TNH: jax.Array,
    kv_pages_MZCP: jax.Array,
    kv_lens_B: jax.Array,
    page_indices_BU: jax.Array,
    cu_q_lens_X: jax.Array,
    num_seqs_1: jax.Array,
    *,
    backend: str,
) -> jax.Array:
    """Causal attention of new tokens over their rows' pages, [T, N, H] in q's dtype; 0 if unused.

    q [T, N, H]: the new tokens of row b at cu_q_lens[b] : cu_q_lens[b + 1]; they are the last ones
    of the row's kv_lens[b] positions. kv_pages [M, Z, 2K, P >= H]: the pool, zeros beyond H.
    page_indices [B, U]: pages of each row in order; kv_lens [B], cu_q_lens [B + 1], num_seqs [1]:
    rows in use; all int32. What lies beyond num_seqs rows, or beyond a row's pages, is not read.
    backend: a key of `BACKENDS`, or "auto".
    Raises: ValueError at trace time for shapes or dtypes that do not fit together, for the cases of
    `choose` and `attention.on_mesh`, and for head counts that the kernel cannot tile.
    """
    _, N, H = q_TNH.shape
    _, _, C, P = kv_pages_MZCP.shape
    B = kv_lens_B.shape[0]
    if C % 2 or N % (C // 2) or P < H or q_TNH.dtype != kv_pages_MZCP.dtype:
        raise ValueError(
            f"attend_paged: q {q_TNH.dtype}{q_TNH.shape}, kv_pages {kv_pages_MZCP.dtype}"
            f"{kv_pages_MZCP.shape}; wanted q [T, N, H] and kv_pages [M, Z, 2K, P] of one dtype, "
            "N a multiple of K, P at least H"
        )
    tables = (kv_lens_B, page_indices_BU, cu_q_lens_X, num_seqs_1)
    shapes = [table.shape for table in tables]
    wanted = [(B,), (B, *page_indices_BU.shape[1:]), (B + 1,), (1,)]
    if shapes != wanted or any(table.dtype != jnp.int32 for table in tables):
        raise ValueError(
            f"attend_paged: kv_lens, page_indices, cu_q_lens, num_seqs have shapes {shapes} and "
            f"dtypes {[str(table.dtype) for table in tables]}; wanted {wanted}, all int32"
        )
    return BACKENDS[choose(backend)](q_TNH, kv_pages_MZCP, *tables)
