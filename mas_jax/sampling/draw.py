"""Drawing tokens: one uniform number a row, and the log-prob under the distribution drawn from.

Dimensions: B rows, V vocabulary; here also G blocks of W vocabulary entries.
Must not know: models, requests, prompts.
"""

import jax
import jax.numpy as jnp

NEVER = -jnp.inf
NEAR = 1e-4  # of a boundary between two tokens: another rounding may draw the other one


def uniforms(key_data_B2: jax.Array, position_B: jax.Array) -> jax.Array:
    """One number in [0, 1) a row, [B] float32, from its key [B, 2] uint32 and token position."""

    def _one(key_data_2, position):
        key = jax.random.wrap_key_data(key_data_2, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position))

    return jax.vmap(_one)(key_data_B2, position_B)


def _thresholds(scaled_BV: jax.Array, top_p_B: jax.Array, top_k_B: jax.Array) -> jax.Array:
    """The smallest logit that top-k, then top-p of what it leaves, keep; -inf keeps all, [B]."""
    vocab_size = scaled_BV.shape[1]
    sorted_BV = -jnp.sort(-scaled_BV, axis=1)
    k_B = jnp.where((top_k_B > 0) & (top_k_B < vocab_size), top_k_B, vocab_size)
    rank_V = jnp.arange(vocab_size)
    kept_BV = rank_V < k_B[:, None]
    p_BV = jax.nn.softmax(jnp.where(kept_BV, sorted_BV, NEVER), axis=1)
    before_BV = jnp.cumsum(p_BV, axis=1) - p_BV
    kept_BV &= (before_BV < top_p_B[:, None]) | (rank_V == 0)
    last_B = jnp.sum(kept_BV, axis=1) - 1
    threshold_B = jnp.take_along_axis(sorted_BV, last_B[:, None], axis=1)[:, 0]
    return jnp.where((k_B == vocab_size) & (top_p_B >= 1.0), NEVER, threshold_B)


def _pick(weight_BV: jax.Array, uniform_B: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Index [B] drawn in proportion to the weights, their sum [B], and if the draw was NEAR [B].

    Blocks first, then inside: two short cumulative sums instead of one over the vocabulary, which
    is slow on CPUs.
    """
    rows, vocab_size = weight_BV.shape
    width = 1 << max(4, (vocab_size.bit_length() + 1) // 2)
    num_blocks = -(-vocab_size // width)
    padding = num_blocks * width - vocab_size
    weight_BGW = jnp.pad(weight_BV, ((0, 0), (0, padding))).reshape(rows, num_blocks, width)
    ends_BG = jnp.cumsum(jnp.sum(weight_BGW, axis=2), axis=1)
    total_B = ends_BG[:, -1]
    target_B = uniform_B * total_B
    block_B = _first_above(ends_BG, target_B)
    before_B = jnp.where(
        block_B > 0, jnp.take_along_axis(ends_BG, block_B[:, None] - 1, axis=1)[:, 0], 0.0
    )
    inside_BW = jnp.take_along_axis(weight_BGW, block_B[:, None, None], axis=1)[:, 0]
    inner_ends_BW = jnp.cumsum(inside_BW, axis=1)
    place_B = _first_above(inner_ends_BW, target_B - before_B)
    inner_B = target_B - before_B
    gap_BW = jnp.abs(inner_ends_BW - inner_B[:, None])
    is_near_B = jnp.minimum(jnp.min(gap_BW, axis=1), inner_B) < NEAR * total_B
    return block_B * width + place_B, total_B, is_near_B


def _first_above(ends_BG: jax.Array, target_B: jax.Array) -> jax.Array:
    """First place where a cumulative sum passes the target, [B]; by rounding none may: the last
    place that adds anything."""
    count_B = jnp.sum(ends_BG <= target_B[:, None], axis=1)
    last_B = jnp.argmax(ends_BG >= ends_BG[:, -1:], axis=1)
    return jnp.minimum(count_B, last_B)


def draw(
    logits_BV: jax.Array,
    uniform_B: jax.Array,
    temperature_B: jax.Array,
    top_p_B: jax.Array,
    top_k_B: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens [B] int32, their log-probs [B] under the distribution they were drawn from, and if the
    uniform number was within NEAR of drawing another token [B].

    That is softmax(logits / temperature) on what top-k (0: all) and then top-p keep, renormalised;
    ties with the last logit kept are kept. Temperature 0 takes the largest logit, lowest id first:
    the only possible token, log-prob 0. A row's result does not depend on the other rows.
    """
    scaled_BV = logits_BV / jnp.where(temperature_B > 0, temperature_B, 1.0)[:, None]
    is_cut_B = ((top_k_B > 0) | (top_p_B < 1.0)) & (temperature_B > 0)
    threshold_B = jax.lax.cond(
        jnp.any(is_cut_B),
        lambda: jnp.where(is_cut_B, _thresholds(scaled_BV, top_p_B, top_k_B), NEVER),
        lambda: jnp.full(logits_BV.shape[:1], NEVER),
    )
    kept_BV = jnp.where(scaled_BV >= threshold_B[:, None], scaled_BV, NEVER)
    top_B = jnp.max(kept_BV, axis=1)
    drawn_B, total_B, is_near_B = _pick(jnp.exp(kept_BV - top_B[:, None]), uniform_B)
    chosen_B = jnp.take_along_axis(kept_BV, drawn_B[:, None], axis=1)[:, 0]
    logprob_B = chosen_B - top_B - jnp.log(total_B)
    is_greedy_B = temperature_B == 0
    token_B = jnp.where(is_greedy_B, jnp.argmax(logits_BV, axis=1), drawn_B)
    logprob_B = jnp.where(is_greedy_B, 0.0, logprob_B)
    return token_B.astype(jnp.int32), logprob_B, is_near_B & ~is_greedy_B
