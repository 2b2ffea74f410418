"""Log-prob, entropy and divergence kernels against dense float64, and what must not change them."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from mas_jax.model import logprobs as lp
from mas_jax.model import sharding
from mas_jax.model.vocab_chunk import VOCAB_BLOCK

B, T, D, V, REAL = 4, 12, 8, 23, 20
KNOBS = dict(temperature=0.7, chunk=6)


def make_head(seed: int, *, dim: int = D, rows: int = V, real: int = REAL, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    hidden_BTD = jnp.asarray(0.4 * rng.normal(size=(B, T, dim)), dtype)
    return lp.Head(hidden_BTD, jnp.asarray(rng.normal(size=(rows, dim)), dtype), real)


def make_tokens(seed: int = 7) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    mask_BT = jnp.asarray(rng.random((B, T)) < 0.6)
    return jnp.asarray(rng.integers(0, REAL, (B, T))), mask_BT


STUDENT, TEACHER = make_head(1), make_head(2, dim=5, rows=V + 4)
TOKENS, MASK = make_tokens()

KERNELS = {
    "logprob": lambda s, t, x, m, k: lp.token_logprobs(s, x, m, **k),
    "entropy": lambda s, t, x, m, k: lp.entropy(s, m, **k),
    "logprob of both": lambda s, t, x, m, k: lp.token_logprobs_and_entropy(s, x, m, **k)[0],
    "entropy of both": lambda s, t, x, m, k: lp.token_logprobs_and_entropy(s, x, m, **k)[1],
    "forward KL": lambda s, t, x, m, k: lp.forward_kl(s, t, m, **k),
    "reverse KL": lambda s, t, x, m, k: lp.reverse_kl(s, t, m, **k),
    "JSD": lambda s, t, x, m, k: lp.jsd(s, t, m, beta=0.3, **k),
} | {
    f"top-3 {direction} KL, {support}'s": (
        lambda s, t, x, m, k, direction=direction, support=support: lp.topk_kl(
            s, t, m, k=3, support=support, direction=direction, **k
        )[0]
    )
    for direction in ("forward", "reverse")
    for support in ("teacher", "student")
}
each_kernel = pytest.mark.parametrize("name", KERNELS)
# one of each way through the code: one model, two models, two passes, a selection by each model
one_of_each = pytest.mark.parametrize(
    "name",
    [
        "logprob",
        "entropy of both",
        "JSD",
        "top-3 forward KL, teacher's",
        "top-3 reverse KL, student's",
    ],
)


def dense_log_probs(head: lp.Head, temperature: float) -> jax.Array:
    """Log-probs [B, T, V] of the distribution that predicts each token, by the definition."""
    logits_BTV = jnp.einsum("BTD,VD->BTV", head.hidden_BTD, head.unembed_VD)
    logits_BTV = logits_BTV[..., : head.vocab_size]
    log_BTV = jax.nn.log_softmax(logits_BTV / temperature)
    return jnp.roll(log_BTV, 1, axis=1)


def dense(name: str, student: lp.Head, teacher: lp.Head, tokens_BT, temperature: float):
    """Each kernel from its definition on whole arrays, [B, T] before masking."""
    s, t = dense_log_probs(student, temperature), dense_log_probs(teacher, temperature)
    if "logprob" in name:
        return jnp.take_along_axis(s, tokens_BT[..., None], axis=-1)[..., 0]
    if "entropy" in name:
        return -jnp.sum(jnp.exp(s) * s, axis=-1)
    if name == "JSD":
        m = jnp.log(0.3 * jnp.exp(t) + 0.7 * jnp.exp(s))
        return jnp.sum(0.3 * jnp.exp(t) * (t - m) + 0.7 * jnp.exp(s) * (s - m), axis=-1)
    if name.startswith("top"):
        place = jnp.argsort(-(t if "teacher" in name else s), axis=-1, stable=True)
        s, t = (jnp.take_along_axis(x, place, axis=-1) for x in (s, t))
        s, t = (
            jnp.concatenate([x[..., :3], jax.nn.logsumexp(x[..., 3:], axis=-1)[..., None]], -1)
            for x in (s, t)
        )
    if "forward" in name:
        return jnp.sum(jnp.exp(t) * (t - s), axis=-1)
    return jnp.sum(jnp.exp(s) * (s - t), axis=-1)


def dense_value_and_grad(name, weights_BT, student=STUDENT, teacher=TEACHER):
    """Masked values [B, T] and gradients of their weighted sum, in float64."""
    with jax.enable_x64(True):
        as64 = [
            dataclasses.replace(
                h,
                hidden_BTD=jnp.asarray(np.asarray(h.hidden_BTD, np.float64)),
                unembed_VD=jnp.asarray(np.asarray(h.unembed_VD, np.float64)),
            )
            for h in (student, teacher)
        ]
        mask_BT = np.asarray(MASK).copy()
        mask_BT[:, 0] = False

        def loss(student, teacher):  # an argument: XLA would fold a constant teacher's sort
            values_BT = dense(name, student, teacher, jnp.asarray(TOKENS), KNOBS["temperature"])
            values_BT = jnp.where(mask_BT, values_BT, 0.0)
            return jnp.sum(values_BT * np.asarray(weights_BT, np.float64)), values_BT

        (_, values_BT), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(*as64)
        return np.asarray(values_BT), [np.asarray(g) for g in jax.tree.leaves(gradient)]


@functools.partial(jax.jit, static_argnames=("name", "temperature", "chunk"))
def _value_and_grad(student, teacher, weights_BT, mask_BT, *, name, temperature, chunk):
    def loss(student):
        knobs = dict(temperature=temperature, chunk=chunk)
        values_BT = KERNELS[name](student, teacher, TOKENS, mask_BT, knobs)
        return jnp.sum(values_BT * weights_BT), values_BT

    return jax.value_and_grad(loss, has_aux=True)(student)


def value_and_grad(name, weights_BT, student=STUDENT, teacher=TEACHER, knobs=KNOBS, mask_BT=MASK):
    """The kernel's values [B, T] and the gradients (hidden, unembedding) of their weighted sum."""
    (_, values_BT), gradient = _value_and_grad(
        student, teacher, weights_BT, mask_BT, name=name, **knobs
    )
    return values_BT, jax.tree.leaves(gradient)


WEIGHTS = jnp.asarray(np.random.default_rng(3).normal(size=(B, T)), jnp.float32)


# (i) by hand


def test_two_tokens_by_hand():
    # hidden 1 at t = 0, unembedding (ln 3, 0): p = (3/4, 1/4); token 0 then token 1
    head = lp.Head(jnp.ones((1, 3, 1)), jnp.array([[math.log(3.0)], [0.0]]), 2)
    tokens_BT = jnp.array([[1, 0, 1]])
    knobs = dict(temperature=1.0, chunk=8)
    logprobs_BT, entropy_BT = lp.token_logprobs_and_entropy(
        head, tokens_BT, jnp.ones((1, 3), bool), **knobs
    )
    np.testing.assert_allclose(logprobs_BT, [[0.0, math.log(0.75), math.log(0.25)]], atol=1e-6)
    # -(3/4 ln 3/4 + 1/4 ln 1/4) = 0.56233514
    np.testing.assert_allclose(entropy_BT, [[0.0, 0.56233514, 0.56233514]], atol=1e-6)
    uniform = dataclasses.replace(head, unembed_VD=jnp.zeros((2, 1)))
    # KL(uniform || p) = 1/2 ln(2/3) + 1/2 ln 2 = 0.14384104; KL(p || uniform) = ln 2 - 0.56233514
    forward_BT = lp.forward_kl(head, uniform, jnp.ones((1, 3), bool), **knobs)
    reverse_BT = lp.reverse_kl(head, uniform, jnp.ones((1, 3), bool), **knobs)
    np.testing.assert_allclose(forward_BT, [[0.0, 0.14384104, 0.14384104]], atol=1e-6)
    np.testing.assert_allclose(reverse_BT, [[0.0, 0.13081204, 0.13081204]], atol=1e-6)


def test_the_last_of_a_row_and_a_one_token_response_have_a_logprob():
    mask_BT = jnp.zeros((B, T), bool).at[0, T - 1].set(True).at[1, 1].set(True)
    logprobs_BT = lp.token_logprobs(STUDENT, TOKENS, mask_BT, **KNOBS)
    assert (np.asarray(logprobs_BT) < 0).sum() == 2
    assert logprobs_BT[0, T - 1] < 0 and logprobs_BT[1, 1] < 0


# (ii) independent reference


@each_kernel
def test_values_and_gradients_equal_the_dense_computation(name):
    want_BT, want_gradient = dense_value_and_grad(name, WEIGHTS)
    got_BT, got_gradient = value_and_grad(name, WEIGHTS)
    np.testing.assert_allclose(got_BT, want_BT, atol=1e-5, rtol=1e-5)
    for got, want in zip(got_gradient, want_gradient, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4)


@one_of_each
def test_bfloat16_inputs_are_accumulated_in_float32(name):
    halves = [make_head(seed, real=REAL, dtype=jnp.bfloat16) for seed in (1, 2)]
    singles = [
        dataclasses.replace(
            h,
            hidden_BTD=h.hidden_BTD.astype(jnp.float32),
            unembed_VD=h.unembed_VD.astype(jnp.float32),
        )
        for h in halves
    ]
    want_BT = KERNELS[name](*singles, TOKENS, MASK, KNOBS)
    got_BT = KERNELS[name](*halves, TOKENS, MASK, KNOBS)
    assert got_BT.dtype == jnp.float32
    np.testing.assert_allclose(got_BT, want_BT, atol=1e-5, rtol=1e-5)
    _, gradient = value_and_grad(name, WEIGHTS, *halves)
    assert all(g.dtype == jnp.bfloat16 for g in gradient)
    _, single_gradient = value_and_grad(name, WEIGHTS, *singles)
    for got, want in zip(gradient, single_gradient, strict=True):
        scale = np.abs(np.asarray(want)).max()
        np.testing.assert_allclose(got.astype(jnp.float32), want, atol=2**-7 * scale)


# (iii) what must not change the answer


@one_of_each
@pytest.mark.parametrize("chunk", [1, 1000])
def test_chunk_size_changes_nothing(name, chunk):
    want_BT, want_gradient = value_and_grad(name, WEIGHTS)
    got_BT, got_gradient = value_and_grad(name, WEIGHTS, knobs=KNOBS | dict(chunk=chunk))
    np.testing.assert_allclose(got_BT, want_BT, atol=1e-5)
    for got, want in zip(got_gradient, want_gradient, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


@one_of_each
def test_a_vocabulary_of_several_blocks_equals_dense(name):
    rows = 2 * VOCAB_BLOCK + 100  # two whole blocks and a tail; the padding begins in the tail
    student, teacher = (make_head(seed, dim=4, rows=rows, real=rows - 30) for seed in (1, 2))
    want_BT, want_gradient = dense_value_and_grad(name, WEIGHTS, student, teacher)
    got_BT, got_gradient = value_and_grad(name, WEIGHTS, student, teacher)
    np.testing.assert_allclose(got_BT, want_BT, atol=1e-5, rtol=1e-5)
    for got, want in zip(got_gradient, want_gradient, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4)


@one_of_each
@pytest.mark.parametrize("shape", [(2, 2, 2), (4, 1, 2), (1, 1, 8)])
def test_every_mesh_shape_gives_the_values_and_gradients_of_one_device(name, shape):
    heads = [make_head(1, rows=24), make_head(2, rows=24)]
    want_BT, want_gradient = value_and_grad(name, WEIGHTS, *heads)
    data, fsdp, tensor = shape
    with jax.set_mesh(sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor)):
        got_BT, got_gradient = value_and_grad(name, WEIGHTS, *heads)
    np.testing.assert_allclose(got_BT, want_BT, atol=1e-5, rtol=1e-5)
    for got, want in zip(got_gradient, want_gradient, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


@one_of_each
def test_a_mesh_whose_shards_hold_unequal_counts_of_tokens_finishes(name):
    heads = [make_head(1, rows=24), make_head(2, rows=24)]
    mask_BT = jnp.zeros((B, T), bool).at[1].set(True)  # one row has all of the work
    want_BT, _ = value_and_grad(name, WEIGHTS, *heads, mask_BT=mask_BT)
    with jax.set_mesh(sharding.make_mesh(data=4, tensor=2)):
        got_BT, _ = value_and_grad(name, WEIGHTS, *heads, mask_BT=mask_BT)
    np.testing.assert_allclose(got_BT, want_BT, atol=1e-5)


def test_temperature_divides_the_logits():
    scaled = dataclasses.replace(STUDENT, hidden_BTD=STUDENT.hidden_BTD / 0.7)
    want_BT = lp.token_logprobs(scaled, TOKENS, MASK, temperature=1.0, chunk=6)
    got_BT = lp.token_logprobs(STUDENT, TOKENS, MASK, temperature=0.7, chunk=6)
    np.testing.assert_allclose(got_BT, want_BT, atol=1e-5)


def test_rows_beyond_the_vocabulary_have_no_probability():
    louder = STUDENT.unembed_VD.at[REAL:].set(1e3)
    changed = dataclasses.replace(STUDENT, unembed_VD=louder)
    for name in KERNELS:
        a_BT, _ = value_and_grad(name, WEIGHTS)
        b_BT, b_gradient = value_and_grad(name, WEIGHTS, student=changed)
        np.testing.assert_array_equal(a_BT, b_BT)
        assert not np.asarray(b_gradient[1])[REAL:].any()


@pytest.mark.parametrize("unknown", [-1, REAL, V, 10**6])
def test_an_id_outside_the_vocabulary_is_nan_where_it_counts_and_nowhere_else(unknown):
    mask_BT = jnp.ones((B, T), bool).at[1, 5].set(False)
    tokens_BT = TOKENS.at[0, 5].set(unknown).at[1, 5].set(unknown)
    logprobs_BT = np.asarray(lp.token_logprobs(STUDENT, tokens_BT, mask_BT, **KNOBS))
    assert np.isnan(logprobs_BT[0, 5]) and logprobs_BT[1, 5] == 0.0
    assert np.isnan(logprobs_BT).sum() == 1


# (iv) gradients


@one_of_each
def test_gradients_pass_numerical_checks(name):
    # differences in float32 carry 1e-2; the exact gradients are compared with float64's above
    def loss(hidden_BTD, unembed_VD):
        student = dataclasses.replace(STUDENT, hidden_BTD=hidden_BTD, unembed_VD=unembed_VD)
        return jnp.sum(KERNELS[name](student, TEACHER, TOKENS, MASK, KNOBS) * WEIGHTS)

    args = (STUDENT.hidden_BTD, STUDENT.unembed_VD)
    check_grads(loss, args, order=1, modes=["rev"], eps=1e-2, atol=5e-2, rtol=5e-2)


@each_kernel
def test_three_times_the_loss_is_three_times_the_gradient(name):
    _, one = value_and_grad(name, WEIGHTS)
    _, three = value_and_grad(name, 3.0 * WEIGHTS)
    for a, b in zip(one, three, strict=True):
        assert np.asarray(a).any()
        np.testing.assert_allclose(3.0 * a, b, rtol=1e-5, atol=1e-5)


@each_kernel
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nothing_leaks_from_masked_tokens(name, poison):
    want_BT, want_gradient = value_and_grad(name, WEIGHTS)
    mask_BT = MASK.at[:, 0].set(False)
    used_BT = jnp.roll(mask_BT, -1, axis=1).at[:, -1].set(False)  # states that predict a kept token
    hidden_BTD = jnp.where(used_BT[..., None], STUDENT.hidden_BTD, poison)
    got_BT, got_gradient = value_and_grad(
        name, WEIGHTS, student=dataclasses.replace(STUDENT, hidden_BTD=hidden_BTD)
    )
    np.testing.assert_array_equal(got_BT, want_BT)
    assert not np.asarray(got_BT)[~np.asarray(mask_BT)].any()
    for got, want in zip(got_gradient, want_gradient, strict=True):
        np.testing.assert_array_equal(got, want)
    assert not np.asarray(got_gradient[0])[~np.asarray(used_BT)].any()


@each_kernel
def test_an_empty_mask_gives_zeros(name):
    got_BT, gradient = value_and_grad(name, WEIGHTS, mask_BT=jnp.zeros((B, T), bool))
    assert not np.asarray(got_BT).any()
    assert not any(np.asarray(g).any() for g in gradient)


@each_kernel
def test_no_gradient_reaches_the_teacher(name):
    gradient = jax.grad(
        lambda t: jnp.sum(KERNELS[name](STUDENT, t, TOKENS, MASK, KNOBS) * WEIGHTS)
    )(TEACHER)
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(gradient))


def test_a_teacher_equal_to_the_student_gives_zero_divergence_and_zero_gradient():
    for name in KERNELS:
        if "KL" not in name and name != "JSD":
            continue
        got_BT, gradient = value_and_grad(name, WEIGHTS, teacher=STUDENT)
        np.testing.assert_allclose(got_BT, 0.0, atol=1e-5)
        for g in gradient:
            np.testing.assert_allclose(g, 0.0, atol=1e-5)


# divergences against each other


def test_jsd_tends_to_the_kl_of_each_end():
    forward_BT = lp.forward_kl(STUDENT, TEACHER, MASK, **KNOBS)
    reverse_BT = lp.reverse_kl(STUDENT, TEACHER, MASK, **KNOBS)
    beta = 1e-3
    low_BT = lp.jsd(STUDENT, TEACHER, MASK, beta=beta, **KNOBS) / beta
    high_BT = lp.jsd(STUDENT, TEACHER, MASK, beta=1 - beta, **KNOBS) / beta
    for limit_BT, kl_BT, other_BT in (
        (low_BT, forward_BT, reverse_BT),
        (high_BT, reverse_BT, forward_BT),
    ):
        assert np.abs(limit_BT - kl_BT).mean() < 0.2 * np.abs(limit_BT - other_BT).mean()


def test_jsd_at_one_half_is_symmetric_and_bounded_by_log_two():
    twin = make_head(9)
    a_BT = lp.jsd(STUDENT, twin, MASK, beta=0.5, **KNOBS)
    b_BT = lp.jsd(twin, STUDENT, MASK, beta=0.5, **KNOBS)
    np.testing.assert_allclose(a_BT, b_BT, atol=1e-5)
    assert (np.asarray(a_BT) <= math.log(2.0) + 1e-6).all()


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("support", ["teacher", "student"])
def test_topk_kl_grows_with_k_up_to_the_full_kl(direction, support):
    full = {"forward": lp.forward_kl, "reverse": lp.reverse_kl}[direction]
    full_BT = full(STUDENT, TEACHER, MASK, **KNOBS)
    previous_BT = jnp.zeros_like(full_BT)
    for k in (1, 4, 10, REAL - 1):  # a finer partition never has less divergence
        kl_BT, _ = lp.topk_kl(
            STUDENT, TEACHER, MASK, k=k, support=support, direction=direction, **KNOBS
        )
        assert (np.asarray(kl_BT) >= np.asarray(previous_BT) - 1e-5).all()
        previous_BT = kl_BT
    np.testing.assert_allclose(previous_BT, full_BT, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tensor", [1, 4])
def test_equal_logits_are_ranked_by_id(tensor):
    # a constant teacher is uniform: exactly k tokens, the lowest ids, carry k / V of its mass
    flat = dataclasses.replace(make_head(2, rows=24), unembed_VD=jnp.ones((24, D)))
    mesh = sharding.make_mesh(data=4 // tensor, tensor=tensor, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        _, mass_BT = lp.topk_kl(
            make_head(1, rows=24), flat, MASK, k=6, support="teacher", direction="forward", **KNOBS
        )
    want_BT = np.where(np.asarray(MASK.at[:, 0].set(False)), 6 / REAL, 0.0)
    np.testing.assert_allclose(mass_BT, want_BT, atol=1e-6)


def test_predictable_tokens_have_a_predecessor_in_their_segment():
    segment_ids_BT = jnp.array([[1, 1, 2, 2, 2, 0, 0], [3, 1, 1, 0, 4, 4, 4]])
    want_BT = [[0, 1, 0, 1, 1, 0, 0], [0, 0, 1, 0, 0, 1, 1]]
    np.testing.assert_array_equal(lp.predictable(segment_ids_BT), np.array(want_BT, bool))


# memory

VOCAB, CHUNK = 151936, 64


@functools.cache
def compiled_bytes(name: str, positions: int, width: int, *, backward: bool) -> int:
    """Bytes that the compiled kernel holds beside its arguments, results included; never run."""

    def head() -> lp.Head:
        hidden_BTD = jax.ShapeDtypeStruct((2, positions, width), jnp.float32)
        return lp.Head(hidden_BTD, jax.ShapeDtypeStruct((VOCAB, width), jnp.float32), 151669)

    tokens_BT = jax.ShapeDtypeStruct((2, positions), jnp.int32)
    mask_BT = jax.ShapeDtypeStruct((2, positions), jnp.bool_)

    def kernel(student, teacher, tokens_BT, mask_BT):
        knobs = dict(temperature=1.0, chunk=CHUNK)
        return KERNELS[name](student, teacher, tokens_BT, mask_BT, knobs)

    function = jax.grad(lambda *args: jnp.sum(kernel(*args))) if backward else kernel
    compiled = jax.jit(function).lower(head(), head(), tokens_BT, mask_BT).compile()
    analysis = compiled.memory_analysis()
    held_bytes = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    return held_bytes - analysis.alias_size_in_bytes


@each_kernel
def test_peak_memory_is_one_chunk_of_logits(name):
    chunk_bytes = CHUNK * VOCAB * 4
    assert compiled_bytes(name, 256, 16, backward=False) <= 1.2 * chunk_bytes
    # narrow: a second [C, V] would show; the tests below see a second [V, D]
    gradient_bytes = VOCAB * 16 * 4
    assert compiled_bytes(name, 256, 16, backward=True) <= 1.2 * (chunk_bytes + gradient_bytes)


@one_of_each
def test_the_backward_pass_holds_one_gradient_of_the_unembedding(name):
    chunk_bytes, gradient_bytes = CHUNK * VOCAB * 4, VOCAB * 256 * 4
    assert compiled_bytes(name, 64, 256, backward=True) <= 1.2 * (chunk_bytes + gradient_bytes)


@one_of_each
def test_peak_memory_does_not_grow_with_the_length(name):
    more_tokens = 2 * (1024 - 256)
    forward, backward = (
        compiled_bytes(name, 1024, 16, backward=b) - compiled_bytes(name, 256, 16, backward=b)
        for b in (False, True)
    )
    assert forward <= 64 * more_tokens  # a few numbers a token, against 608 kB of logits
    assert backward <= (64 + 8 * 16) * more_tokens  # and the hidden states' cotangents


# bad input


def test_bad_shapes_and_numbers_are_refused():
    with pytest.raises(ValueError, match=r"hidden \(4, 12, 8\) does not fit mask \(4, 11\)"):
        lp.token_logprobs(STUDENT, TOKENS, MASK[:, 1:], **KNOBS)
    with pytest.raises(ValueError, match=r"vocab_size=24 is not in 1\.\.23"):
        lp.entropy(dataclasses.replace(STUDENT, vocab_size=24), MASK, **KNOBS)
    with pytest.raises(ValueError, match="vocab_size=20 and teacher vocab_size=19"):
        lp.forward_kl(STUDENT, dataclasses.replace(TEACHER, vocab_size=19), MASK, **KNOBS)
    with pytest.raises(ValueError, match=r"temperature=0\.0"):
        lp.entropy(STUDENT, MASK, temperature=0.0, chunk=4)
    with pytest.raises(ValueError, match=r"beta=1\.0"):
        lp.jsd(STUDENT, TEACHER, MASK, beta=1.0, **KNOBS)
    with pytest.raises(ValueError, match=r"k=20 is not in 1\.\.19"):
        lp.topk_kl(STUDENT, TEACHER, MASK, k=20, support="teacher", direction="forward", **KNOBS)
    with pytest.raises(ValueError, match="direction='sideways'"):
        lp.topk_kl(STUDENT, TEACHER, MASK, k=2, support="teacher", direction="sideways", **KNOBS)
