"""Attention for CPUs: one row at a time, query blocks against the keys before them.

For rows of up to a few thousand tokens the scores stay in the processor's cache; those after the
diagonal are never computed, and the backward pass makes them again from a saved normaliser instead
of keeping [B, N, T, S] arrays. What grows with the square of a row is a mask of one byte a pair.

Dimensions: T query positions (of a block, or of the row), S key positions up to a block's end,
B rows, N query heads, K key/value heads, J query heads per key/value head (N = K J), H head dim.
Must not know: models, parameters, meshes.
"""

import jax
import jax.numpy as jnp

MIN_BLOCK = 128  # query positions of a block: [J 128, S] matrices keep two cores busy
MAX_BLOCKS = 16  # blocks are unrolled; longer rows get longer blocks
HIDDEN = -1e30  # score of a key that a query may not see; finite: exp(HIDDEN - max) is 0


def _blocks(length: int) -> list[tuple[int, int]]:
    """Start and end of each query block of a row; the keys of a block are those before its end."""
    size = max(MIN_BLOCK, -(-length // MAX_BLOCKS))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _by_head(x_TNH: jax.Array, kv_heads: int) -> jax.Array:
    """[T, N, H] as [K, J, T, H]: the query heads of a key head stand together."""
    T, N, H = x_TNH.shape
    return x_TNH.reshape(T, kv_heads, N // kv_heads, H).transpose(1, 2, 0, 3)


def _by_position(x_KJTH: jax.Array) -> jax.Array:
    """The inverse of `_by_head`."""
    K, J, T, H = x_KJTH.shape
    return x_KJTH.transpose(2, 0, 1, 3).reshape(T, K * J, H)


def _visible(segment_ids_BT: jax.Array) -> jax.Array:
    """True where a query may see a key, [B, T, S]; one array, since tests inside every head's
    exponentials would halve their speed."""
    same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    return same_BTS & jnp.tril(jnp.ones(same_BTS.shape[1:], bool))


def _scores(q_KJTH: jax.Array, k_KSH: jax.Array, visible_TS: jax.Array) -> jax.Array:
    """Scaled scores [K, J, T, S] float32; unseen keys get `HIDDEN`."""
    scores_KJTS = jnp.einsum("KJTH,KSH->KJTS", q_KJTH, k_KSH, preferred_element_type=jnp.float32)
    return jnp.where(visible_TS, scores_KJTS * q_KJTH.shape[-1] ** -0.5, HIDDEN)


def _forward_row(
    q_TNH: jax.Array, k_SKH: jax.Array, v_SKH: jax.Array, visible_TS: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One row's output [T, N, H] and log-normalisers [K, J, T] float32."""
    K = k_SKH.shape[1]
    q_KJTH, k_KSH, v_KSH = _by_head(q_TNH, K), k_SKH.swapaxes(0, 1), v_SKH.swapaxes(0, 1)
    outs, norms = [], []
    for start, end in _blocks(q_TNH.shape[0]):
        scores_KJTS = _scores(q_KJTH[:, :, start:end], k_KSH[:, :end], visible_TS[start:end, :end])
        top_KJT1 = jnp.max(scores_KJTS, axis=-1, keepdims=True)
        weights_KJTS = jnp.exp(scores_KJTS - top_KJT1)
        total_KJT1 = jnp.sum(weights_KJTS, axis=-1, keepdims=True)
        out_KJTH = jnp.einsum(
            "KJTS,KSH->KJTH",
            weights_KJTS.astype(v_KSH.dtype),
            v_KSH[:, :end],
            preferred_element_type=jnp.float32,
        )
        outs.append((out_KJTH / total_KJT1).astype(q_TNH.dtype))
        norms.append((top_KJT1 + jnp.log(total_KJT1))[..., 0])
    return _by_position(jnp.concatenate(outs, axis=2)), jnp.concatenate(norms, axis=-1)


def _backward_row(
    q_TNH: jax.Array,
    k_SKH: jax.Array,
    v_SKH: jax.Array,
    visible_TS: jax.Array,
    out_TNH: jax.Array,
    norm_KJT: jax.Array,
    dout_TNH: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One row's cotangents of q [T, N, H], k and v [S, K, H]."""
    K, H, dtype = k_SKH.shape[1], k_SKH.shape[2], q_TNH.dtype
    q_KJTH, k_KSH, v_KSH = _by_head(q_TNH, K), k_SKH.swapaxes(0, 1), v_SKH.swapaxes(0, 1)
    dout_KJTH = _by_head(dout_TNH, K)
    # sum over keys of weight x its cotangent, as the softmax's gradient needs it
    mean_KJT = jnp.sum(dout_KJTH.astype(jnp.float32) * _by_head(out_TNH, K), axis=-1)
    dqs = []
    dk_KHS = dv_KHS = jnp.zeros((K, H, k_KSH.shape[1]), jnp.float32)
    for start, end in _blocks(q_TNH.shape[0]):
        block = (slice(None), slice(None), slice(start, end))
        scores_KJTS = _scores(q_KJTH[block], k_KSH[:, :end], visible_TS[start:end, :end])
        weights_KJTS = jnp.exp(scores_KJTS - norm_KJT[block][..., None])
        dweights_KJTS = jnp.einsum(
            "KJTH,KSH->KJTS", dout_KJTH[block], v_KSH[:, :end], preferred_element_type=jnp.float32
        )
        dscores_KJTS = weights_KJTS * (dweights_KJTS - mean_KJT[block][..., None]) * H**-0.5
        weights_KJTS, dscores_KJTS = weights_KJTS.astype(dtype), dscores_KJTS.astype(dtype)
        dqs.append(jnp.einsum("KJTS,KSH->KJTH", dscores_KJTS, k_KSH[:, :end]))
        # the small operand on the left: what a matmul wants transposed is then not the large one
        new_dk_KHS = jnp.einsum(
            "KJTH,KJTS->KHS", q_KJTH[block], dscores_KJTS, preferred_element_type=jnp.float32
        )
        new_dv_KHS = jnp.einsum(
            "KJTH,KJTS->KHS", dout_KJTH[block], weights_KJTS, preferred_element_type=jnp.float32
        )
        dk_KHS = dk_KHS.at[:, :, :end].add(new_dk_KHS)
        dv_KHS = dv_KHS.at[:, :, :end].add(new_dv_KHS)
    dk_SKH, dv_SKH = (x.transpose(2, 0, 1).astype(dtype) for x in (dk_KHS, dv_KHS))
    return _by_position(jnp.concatenate(dqs, axis=2)), dk_SKH, dv_SKH


@jax.custom_vjp
def blocked_rows(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    """Causal attention inside segments, [B, T, N, H] in q's dtype, on one device's rows.

    Source: the recomputation and the softmax's gradient are FlashAttention's (arXiv 2205.14135).
    """
    return _blocked_rows_fwd(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT)[0]


def _blocked_rows_fwd(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT):
    inputs = (q_BTNH, k_BSKH, v_BSKH)
    rows = (*inputs, _visible(segment_ids_BT))
    out_BTNH, norm_BKJT = jax.lax.map(lambda row: _forward_row(*row), rows)
    return out_BTNH, (*inputs, segment_ids_BT, out_BTNH, norm_BKJT)


def _blocked_rows_bwd(residuals, dout_BTNH):
    q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, out_BTNH, norm_BKJT = residuals
    rows = (q_BTNH, k_BSKH, v_BSKH, _visible(segment_ids_BT), out_BTNH, norm_BKJT, dout_BTNH)
    gradients = jax.lax.map(lambda row: _backward_row(*row), rows)
    return (*gradients, None)


blocked_rows.defvjp(_blocked_rows_fwd, _blocked_rows_bwd)
