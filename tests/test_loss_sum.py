"""The fused loss against the sum of the loss of `token_logprobs`, which two other tests check."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from mas_jax.model import logprobs as lp
from mas_jax.model import sharding

B, T, D, V, REAL = 4, 12, 8, 24, 20
KNOBS = dict(temperature=0.7, chunk=6)
RNG = np.random.default_rng(0)
HEAD = lp.Head(
    jnp.asarray(0.4 * RNG.normal(size=(B, T, D)), jnp.float32),
    jnp.asarray(RNG.normal(size=(V, D)), jnp.float32),
    REAL,
)
TOKENS = jnp.asarray(RNG.integers(0, REAL, (B, T)))
MASK = jnp.asarray(RNG.random((B, T)) < 0.6)
DATA = {
    "old": jnp.asarray(-3.0 + 0.1 * RNG.normal(size=(B, T)), jnp.float32),
    "advantage": jnp.asarray(RNG.normal(size=(B, T)), jnp.float32),
}


def surrogate(logprobs, data):
    """A clipped policy-gradient loss: what the kernel is for."""
    ratio = jnp.exp(logprobs - data["old"])
    clipped = jnp.clip(ratio, 0.8, 1.2)
    return -jnp.minimum(ratio * data["advantage"], clipped * data["advantage"])


def with_bonus(logprobs, entropy, data):
    return surrogate(logprobs, data) - 0.3 * entropy


LOSSES = {"surrogate": (surrogate, False), "with an entropy bonus": (with_bonus, True)}
each_loss = pytest.mark.parametrize("name", LOSSES)


@functools.partial(jax.jit, static_argnames=("name", "chunk"))
def fused(head, mask_BT=MASK, tokens_BT=TOKENS, *, name, chunk=6):
    loss, with_entropy = LOSSES[name]

    def total(head):
        knobs = KNOBS | dict(with_entropy=with_entropy, chunk=chunk)
        return lp.loss_sum(loss, head, tokens_BT, mask_BT, DATA, **knobs)

    return jax.value_and_grad(total, has_aux=True)(head)


@functools.partial(jax.jit, static_argnames="name")
def in_two_passes(head, mask_BT=MASK, *, name):
    loss, with_entropy = LOSSES[name]

    def total(head):
        sums = lp.token_logprobs_and_entropy(head, TOKENS, mask_BT, **KNOBS)
        sums = sums if with_entropy else sums[:1]
        kept_BT = mask_BT.at[:, 0].set(False)
        return jnp.sum(jnp.where(kept_BT, loss(*sums, DATA), 0.0)), sums

    return jax.value_and_grad(total, has_aux=True)(head)


def assert_close(got, want, atol=1e-5):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, atol=atol, rtol=1e-5)


def test_one_token_by_hand():
    # hidden 1, unembedding (ln 3, 0): p = (3/4, 1/4); loss = 2 log p(token 1), weight 2
    head = lp.Head(jnp.ones((1, 2, 1)), jnp.asarray([[np.log(3.0)], [0.0]], jnp.float32), 2)
    tokens_BT, mask_BT = jnp.asarray([[0, 1]]), jnp.asarray([[True, True]])

    def total(head):
        return lp.loss_sum(
            weighted, head, tokens_BT, mask_BT, jnp.full((1, 2), 2.0),
            with_entropy=False, temperature=1.0, chunk=4,
        )  # fmt: skip

    (loss, (logprobs_BT,)), gradient = jax.value_and_grad(total, has_aux=True)(head)
    np.testing.assert_allclose(loss, 2 * np.log(0.25), rtol=1e-6)
    np.testing.assert_allclose(logprobs_BT, [[0.0, np.log(0.25)]], rtol=1e-6)
    # d/dz = 2 (onehot - p) = (-1.5, 1.5); hidden: -1.5 ln 3, unembedding: the same times hidden 1
    np.testing.assert_allclose(gradient.hidden_BTD, [[[-1.5 * np.log(3.0)], [0.0]]], rtol=1e-6)
    np.testing.assert_allclose(gradient.unembed_VD, [[-1.5], [1.5]], rtol=1e-6)


def weighted(logprobs_C, weights_C):
    return logprobs_C * weights_C


@each_loss
@pytest.mark.parametrize("chunk", [1, 6, 1000])
def test_value_metrics_and_gradient_equal_the_loss_of_the_logprobs(name, chunk):
    assert_close(fused(HEAD, name=name, chunk=chunk), in_two_passes(HEAD, name=name))


@each_loss
def test_without_a_gradient_the_value_is_the_same(name):
    loss, with_entropy = LOSSES[name]
    got = lp.loss_sum(loss, HEAD, TOKENS, MASK, DATA, with_entropy=with_entropy, **KNOBS)
    assert_close(got, fused(HEAD, name=name)[0])


@each_loss
@pytest.mark.parametrize("shape", [(2, 2, 2), (4, 1, 2), (1, 1, 8)])
def test_every_mesh_shape_gives_the_value_and_gradient_of_one_device(name, shape):
    want = fused(HEAD, name=name)
    data, fsdp, tensor = shape
    with jax.set_mesh(sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor)):
        got = fused(HEAD, name=name)
    assert_close(got, want)


@each_loss
def test_the_cotangent_of_the_loss_scales_the_gradient(name):
    loss, with_entropy = LOSSES[name]

    def total(head, factor):
        knobs = dict(with_entropy=with_entropy, **KNOBS)
        return factor * lp.loss_sum(loss, head, TOKENS, MASK, DATA, **knobs)[0]

    gradient = jax.jit(jax.grad(total))
    one, three = gradient(HEAD, 1.0), gradient(HEAD, -3.0)
    assert_close(three, jax.tree.map(lambda g: -3.0 * g, one))
    check_grads(lambda h: total(h, 1.0), (HEAD,), order=1, modes=["rev"], atol=1e-2, rtol=1e-2)


@each_loss
def test_nothing_leaks_from_masked_tokens(name):
    want = fused(HEAD, name=name)
    used_BT = jnp.roll(MASK.at[:, 0].set(False), -1, axis=1).at[:, -1].set(False)
    poisoned = jnp.where(used_BT[..., None], HEAD.hidden_BTD, jnp.nan)
    got = fused(lp.Head(poisoned, HEAD.unembed_VD, REAL), name=name)
    assert_close(got, want, atol=0)


@each_loss
def test_an_empty_mask_costs_nothing(name):
    (loss, _), gradient = fused(HEAD, jnp.zeros((B, T), bool), name=name)
    assert loss == 0
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(gradient))


def test_an_id_outside_the_vocabulary_makes_the_loss_nan_where_it_counts():
    b, t = np.argwhere(np.asarray(MASK)[:, 1:])[0] + [0, 1]
    bad = TOKENS.at[b, t].set(REAL)
    assert np.isnan(fused(HEAD, MASK, bad, name="surrogate")[0][0])
    assert np.isfinite(fused(HEAD, MASK.at[b, t].set(False), bad, name="surrogate")[0][0])


def test_value_and_gradient_hold_one_chunk_of_logits_and_one_gradient():
    vocab, width, chunk = 151936, 64, 64

    def total(head, tokens_BT, mask_BT, data_BT):
        return lp.loss_sum(
            surrogate, head, tokens_BT, mask_BT, data_BT,
            with_entropy=False, temperature=1.0, chunk=chunk,
        )[0]  # fmt: skip

    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype)

    head = lp.Head(shape(2, 256, width), shape(vocab, width), vocab)
    rest = shape(2, 256, dtype=jnp.int32), shape(2, 256, dtype=jnp.bool_)
    data = {"old": shape(2, 256), "advantage": shape(2, 256)}
    compiled = jax.jit(jax.value_and_grad(total)).lower(head, *rest, data).compile()
    analysis = compiled.memory_analysis()
    held_bytes = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    assert held_bytes - analysis.alias_size_in_bytes <= 1.2 * 4 * vocab * (chunk + width)
