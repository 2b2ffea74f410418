"""Causal attention inside segments, behind one function with explicit backends.

Dimensions: B rows, T query positions, S key positions, N query heads, K key/value heads,
J query heads per key/value head (N = K J), H head dim. Must not know: models, parameters.
"""

import jax
import jax.numpy as jnp


def reference(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    """Softmax attention in plain jnp, float32 softmax: the specification of every other backend.

    Token t sees token s of its row if s <= t and both carry the same segment id. Returns [B,T,N,H].
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKJH = q_BTNH.reshape(B, T, K, N // K, H)
    scores_BKJTS = jnp.einsum(
        "BTKJH,BSKH->BKJTS", q_BTKJH, k_BSKH, preferred_element_type=jnp.float32
    )
    same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    visible_BTS = same_BTS & jnp.tril(jnp.ones((T, T), bool))
    scores_BKJTS = jnp.where(visible_BTS[:, None, None], scores_BKJTS * H**-0.5, -jnp.inf)
    weights_BKJTS = jax.nn.softmax(scores_BKJTS, axis=-1).astype(v_BSKH.dtype)
    return jnp.einsum("BKJTS,BSKH->BTKJH", weights_BKJTS, v_BSKH).reshape(B, T, N, H)


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    backend: str,
) -> jax.Array:
    """Causal attention that never crosses a segment, [B, T, N, H] in q's dtype."""
    return reference(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT)
