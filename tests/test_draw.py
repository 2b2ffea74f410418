"""Drawing tokens: by hand, against numpy, and row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mas_jax.sampling.draw import draw, uniforms

jitted = jax.jit(draw)


def draw_row(logits, uniform, temperature=1.0, top_p=1.0, top_k=0):
    """Token and log-prob of one row."""
    row = [np.asarray([x], np.float32) for x in (uniform, temperature, top_p)]
    token_B, logprob_B, _ = jitted(
        jnp.asarray([logits], jnp.float32), *row, np.asarray([top_k], np.int32)
    )
    return int(token_B[0]), float(logprob_B[0])


@pytest.mark.parametrize(
    ("uniform", "token", "p"),
    [(0.0, 0, 0.5), (0.49, 0, 0.5), (0.51, 1, 0.25), (0.74, 1, 0.25), (0.76, 2, 0.25)],
)
def test_a_uniform_number_picks_by_the_cumulative_sum(uniform, token, p):
    # p = (1/2, 1/4, 1/4): cut at 0.5 and 0.75
    got = draw_row(np.log([0.5, 0.25, 0.25]), uniform)
    assert got[0] == token
    np.testing.assert_allclose(got[1], np.log(p), atol=1e-6)


def test_temperature_zero_takes_the_first_largest_logit():
    assert draw_row([1.0, 3.0, 3.0], 0.99, temperature=0.0) == (1, 0.0)


def test_top_k_and_top_p_renormalise_what_they_keep():
    logits = np.log([0.1, 0.4, 0.3, 0.2])
    # the two likeliest: 4/7 and 3/7
    assert draw_row(logits, 0.56, top_k=2)[0] == 1
    token, logprob = draw_row(logits, 0.58, top_k=2)
    assert token == 2
    np.testing.assert_allclose(logprob, np.log(3 / 7), atol=1e-6)
    # p = 0.5 keeps 0.4 and the one that passes it; of the two of top-k, 4/7 is enough for 0.5
    assert draw_row(logits, 0.99, top_p=0.5)[0] == 2
    assert draw_row(logits, 0.99, top_p=0.5, top_k=2) == (1, 0.0)
    assert draw_row(logits, 0.0, top_p=1e-6) == (1, 0.0)


def test_impossible_tokens_are_never_drawn():
    logits = np.full(1000, -np.inf)
    logits[[3, 700]] = 0.0
    drawn = {draw_row(logits, u)[0] for u in (0.0, 0.2, 0.4999, 0.5001, 0.9, 1 - 2**-24)}
    assert drawn == {3, 700}


@pytest.mark.parametrize("vocab_size", [2, 17, 1024, 5000])
def test_many_draws_equal_numpy(vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits_BV = rng.normal(size=(300, vocab_size)).astype(np.float32) * 2
    uniform_B = rng.random(300, np.float32)
    one_B = np.ones(300, np.float32)
    token_B, logprob_B, is_near_B = jitted(
        logits_BV, uniform_B, one_B, one_B, np.zeros(300, np.int32)
    )
    p_BV = np.exp(logits_BV.astype(np.float64))
    p_BV /= p_BV.sum(axis=1, keepdims=True)
    ends_BV = np.cumsum(p_BV, axis=1)
    want_B = np.minimum((ends_BV <= uniform_B[:, None]).sum(axis=1), vocab_size - 1)
    gap_B = np.abs(ends_BV - uniform_B[:, None]).min(axis=1)
    assert np.asarray(is_near_B)[gap_B < 0.9e-4].all()
    assert not np.asarray(is_near_B)[(gap_B > 1.1e-4) & (uniform_B > 1.1e-4)].any()
    near_B = gap_B < 1e-6  # rounding may decide
    assert near_B.mean() < 0.05
    np.testing.assert_array_equal(np.asarray(token_B)[~near_B], want_B[~near_B])
    chosen_B = np.log(p_BV[np.arange(300), np.asarray(token_B)])
    np.testing.assert_allclose(logprob_B, chosen_B, atol=2e-5)


def test_a_row_is_the_same_to_the_bit_beside_rows_that_are_cut():
    rng = np.random.default_rng(0)
    logits_BV = rng.normal(size=(8, 100)).astype(np.float32)
    uniform_B, one_B = rng.random(8, np.float32), np.ones(8, np.float32)
    none_B = np.zeros(8, np.int32)
    want = jitted(logits_BV, uniform_B, one_B, one_B, none_B)
    cut_B = none_B.copy()
    cut_B[5] = 3
    got = jitted(logits_BV, uniform_B, one_B, one_B, cut_B)
    others = np.arange(8) != 5
    for w, g in zip(want, got, strict=True):
        np.testing.assert_array_equal(np.asarray(w)[others], np.asarray(g)[others])


def test_uniform_numbers_depend_on_key_and_position_alone():
    keys_B2 = np.asarray([[1, 2], [1, 2], [3, 4]], np.uint32)
    u_B = np.asarray(uniforms(keys_B2, np.asarray([5, 6, 5], np.int32)))
    assert len(set(u_B.tolist())) == 3
    alone_B = np.asarray(uniforms(keys_B2[2:], np.asarray([5], np.int32)))
    assert alone_B[0] == u_B[2]
    many = functools.partial(uniforms, np.tile(keys_B2[:1], (4000, 1)))
    u_B = np.asarray(many(np.arange(4000, dtype=np.int32)))
    assert 0 <= u_B.min() <= u_B.max() < 1
    assert abs(u_B.mean() - 0.5) < 4 * np.sqrt(1 / 12 / 4000)
