"""Attention backends against hand-worked numbers, numpy loops and each other.

Dimensions: B rows, T positions, N query heads, K key/value heads, H head dim.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from mas_jax.model import attention, sharding

# what runs on a CPU: the kernels interpreted, the cuDNN wrappers around jax's plain implementation
FORMS = {
    "reference": attention.reference,
    "blocked": attention.blocked_rows,
    "splash": attention.splash_interpret,
    "cudnn_mask": functools.partial(attention._cudnn_mask_rows, implementation="xla"),
    "cudnn_lengths": functools.partial(attention._cudnn_lengths_rows, implementation="xla"),
}
PACKING_FORMS = ("reference", "blocked", "splash", "cudnn_mask")
B, T, N, K, H = 2, 160, 4, 2, 32  # T is no multiple of the kernels' blocks of 128


@functools.partial(jax.jit, static_argnames="form")
def start(q, k, v, ids, cotangent, *, form):
    out, pull = jax.vjp(lambda q, k, v: FORMS[form](q, k, v, ids), q, k, v)
    return out, *pull(cotangent)


def run(q, k, v, ids, cotangent, *, form):
    """Output, and the gradients of sum(output * cotangent) by q, k and v, as numpy arrays.

    Finished when it returns: JAX may read a caller's numpy array in place, and only when it gets to
    it, so that a test which changes its inputs next would change this result too.
    """
    return [np.asarray(x) for x in start(q, k, v, ids, cotangent, form=form)]


def draw(seed, *, rows=B, length=T):
    """Random q [B,T,N,H], k and v [B,T,K,H], cotangent [B,T,N,H], float32."""
    rng = np.random.default_rng(seed)
    shapes = [(rows, length, heads, H) for heads in (N, K, K, N)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def ids_of(*rows, length=T):
    """Segment ids [B, T] of rows given as segment lengths, 0 after the last segment."""
    ids_BT = np.zeros((len(rows), length), np.int32)
    for row, lengths in enumerate(rows):
        ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        ids_BT[row, : len(ids)] = ids
    return ids_BT


PACKED = ids_of((60, 85), (33, 1, 100))
SINGLE = ids_of((145,), (7,))


def attend_by_loop(q, k, v, ids):
    """Attention one query at a time in float64, 0 at padding."""
    out = np.zeros(q.shape, np.float64)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    for b, t, n in np.ndindex(q.shape[:3]):
        if ids[b, t] == 0:
            continue
        seen = [s for s in range(t + 1) if ids[b, s] == ids[b, t]]
        scores = np.array([q[b, t, n] @ k[b, s, n // (N // K)] for s in seen]) / np.sqrt(H)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights / weights.sum() @ v[b, seen, n // (N // K)]
    return out


def mesh_for(platform, kind, *, tensor=1):
    """A mesh of chips that this machine has not got, to trace and lower programs for."""
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    shape, types = (1, 1, tensor), (AxisType.Auto,) * 3
    mesh = AbstractMesh(shape, sharding.MESH_AXES, axis_types=types, abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


# ---------------------------------------------------------------- hand-computed


@pytest.mark.parametrize("form", PACKING_FORMS)
def test_two_segments_by_hand(form):
    # H = 4, so scores are q.k / 2; with q = (2,0,0,0) they are the first of k: 0, log 2 | log 5
    # head 0 (q = 2): t=0 sees v = 3; t=1 weighs 3 and 6 by 1/3, 2/3 -> 1 + 4 = 5; t=2 is alone: 9
    # head 1 (q = 0): t=1 weighs 3 and 6 alike -> 4.5
    one_hot = np.eye(4, dtype=np.float32)[0]
    q = np.array([[[2, 0]] * 3], np.float32)[..., None] * one_hot
    k = np.array([[[0], [np.log(2)], [np.log(5)]]], np.float32)[..., None] * one_hot
    v = np.array([[[3], [6], [9]]], np.float32)[..., None] * one_hot
    out = jax.jit(FORMS[form])(q, k, v, np.array([[1, 1, 2]]))
    np.testing.assert_allclose(out[0, :, :, 0], [[3, 3], [5, 4.5], [9, 9]], atol=1e-6)
    np.testing.assert_array_equal(out[0, :, :, 1:], 0)


# ---------------------------------------------------------------- independent reference


@pytest.mark.parametrize("form", PACKING_FORMS)
def test_packed_rows_equal_a_float64_loop(form):
    q, k, v, cotangent = draw(0)
    out = run(q, k, v, PACKED, cotangent, form=form)[0]
    expected = attend_by_loop(q, k, v, PACKED)
    np.testing.assert_allclose(np.where(PACKED[..., None, None], out, 0), expected, atol=1e-5)


def test_rows_of_one_sequence_equal_a_float64_loop():
    q, k, v, cotangent = draw(1)
    out = run(q, k, v, SINGLE, cotangent, form="cudnn_lengths")[0]
    np.testing.assert_allclose(out, attend_by_loop(q, k, v, SINGLE), atol=1e-5)


def test_splash_in_several_blocks_equals_the_reference():
    # 600 positions are two blocks of 512: whole, diagonal, empty and padded ones
    q, k, v, cotangent = draw(2, rows=1, length=600)
    ids = ids_of((500, 90), length=600)
    ours = run(q, k, v, ids, cotangent, form="splash")
    for ours_x, expected_x in zip(
        ours, run(q, k, v, ids, cotangent, form="reference"), strict=True
    ):
        np.testing.assert_allclose(ours_x, expected_x, atol=1e-5)


@pytest.mark.parametrize("length", [128, 129, 700, 2200])
def test_blocked_equals_the_reference_across_block_edges(length):
    # one block, a block and one token, several blocks, and more tokens than the blocks' least size
    q, k, v, cotangent = draw(4, rows=1, length=length)
    ids = ids_of((length // 3, length // 2), length=length)
    ours = run(q, k, v, ids, cotangent, form="blocked")
    expected = run(q, k, v, ids, cotangent, form="reference")
    for ours_x, expected_x in zip(ours, expected, strict=True):
        np.testing.assert_allclose(ours_x, expected_x, atol=1e-5)


@pytest.mark.parametrize("form", PACKING_FORMS)
def test_bfloat16_is_rounded_only(form):
    q, k, v, _ = (x.astype(jnp.bfloat16) for x in draw(3))
    out = jax.jit(FORMS[form])(q, k, v, PACKED)
    assert out.dtype == jnp.bfloat16
    expected = attend_by_loop(*(x.astype(np.float32) for x in (q, k, v)), PACKED)
    # the output is at most 4 and its rounding 2^-9 of that; weights or scaled q are rounded as well
    out = np.where(PACKED[..., None, None], out.astype(np.float32), 0)
    np.testing.assert_allclose(out, expected, atol=3 * 4 * 2**-9)


# ---------------------------------------------------------------- metamorphic


@pytest.mark.parametrize("form", PACKING_FORMS)
def test_packing_two_sequences_equals_each_alone(form):
    q, k, v, cotangent = draw(4)
    packed = run(q, k, v, ids_of((60, 85), (60, 85)), cotangent, form=form)
    alone = [np.zeros_like(x) for x in (q, k, v, cotangent)]
    for x, x_alone in zip((q, k, v, cotangent), alone, strict=True):
        x_alone[0, :60], x_alone[1, :85] = x[0, :60], x[0, 60:145]
    alone = run(*alone[:3], ids_of((60,), (85,)), alone[3], form=form)
    for x, x_alone in zip(packed, alone, strict=True):
        np.testing.assert_allclose(x[0, :60], x_alone[0, :60], atol=1e-5)
        np.testing.assert_allclose(x[0, 60:145], x_alone[1, :85], atol=1e-5)


@pytest.mark.parametrize("form", PACKING_FORMS)
def test_other_segments_future_and_padding_change_no_bit(form):
    q, k, v, cotangent = draw(5)
    before = run(q, k, v, PACKED, cotangent, form=form)[0]
    for x in (q, k, v):
        x[0, :60] *= 3  # the other segment
        x[0, 120:145] += 1  # the future of tokens 60 to 119
        x[0, 145:] = 50  # padding
    after = run(q, k, v, PACKED, cotangent, form=form)[0]
    np.testing.assert_array_equal(before[0, 60:120], after[0, 60:120])
    assert np.abs(before[0, :60] - after[0, :60]).max() > 0.1


def test_lengths_form_ignores_what_padding_holds():
    q, k, v, cotangent = draw(6)
    before = run(q, k, v, SINGLE, cotangent, form="cudnn_lengths")
    for x in (q, k, v):
        x[SINGLE == 0] = np.nan
    after = run(q, k, v, SINGLE, cotangent, form="cudnn_lengths")
    for x_before, x_after in zip(before, after, strict=True):
        np.testing.assert_array_equal(x_before, x_after)


def test_lengths_form_marks_rows_that_it_cannot_represent():
    q, k, v, cotangent = draw(7)
    hole = ids_of((145,), (145,))
    hole[0, 10] = 0  # padding before the end
    for ids in (hole, ids_of((60, 85), (145,))):
        out = run(q, k, v, ids, cotangent, form="cudnn_lengths")[0]
        assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


@pytest.mark.parametrize("form", PACKING_FORMS)
def test_permuting_heads_permutes_outputs(form):
    q, k, v, cotangent = draw(8)
    out = run(q, k, v, PACKED, cotangent, form=form)[0]
    swapped_q = q[:, :, [2, 3, 0, 1]]  # the two groups of query heads with their key/value heads
    swapped = run(swapped_q, k[:, :, ::-1], v[:, :, ::-1], PACKED, cotangent, form=form)[0]
    np.testing.assert_allclose(swapped, out[:, :, [2, 3, 0, 1]], atol=1e-6)


@pytest.mark.parametrize("form", ["blocked", "splash", "cudnn_mask", "cudnn_lengths"])
def test_eight_devices_equal_one(form):
    q, k, v, cotangent = draw(9, rows=4, length=128)
    packed = form != "cudnn_lengths"
    ids = ids_of((60, 50), (128,), (1,), (30, 30, 30), length=128)
    ids = ids if packed else np.minimum(ids, 1)
    rows = {**FORMS, "splash": attention.SPLASH_INTERPRET_ROWS}[form]

    def split(q, k, v, ids, cotangent):
        out, pull = jax.vjp(lambda *x: attention._split_rows(rows, (*x, ids)), q, k, v)
        return out, *pull(cotangent)

    inside = ids[..., None, None] > 0
    cotangent = np.where(inside, cotangent, 0)
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        out, *gradients = jax.jit(split)(q, k, v, ids, cotangent)
    wanted = jax.NamedSharding(mesh, sharding.spec(attention.Q_AXES))
    assert out.sharding.is_equivalent_to(wanted, out.ndim)
    expected, *expected_gradients = run(q, k, v, ids, cotangent, form="reference")
    np.testing.assert_allclose(np.where(inside, out, 0), np.where(inside, expected, 0), atol=1e-5)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, wanted, atol=1e-5)


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("form", ["blocked", "splash", "cudnn_mask", "cudnn_lengths"])
def test_gradients_equal_the_reference(form):
    q, k, v, cotangent = draw(10)
    ids = SINGLE if form == "cudnn_lengths" else PACKED
    cotangent = np.where(ids[..., None, None], cotangent, 0)
    gradients = run(q, k, v, ids, cotangent, form=form)[1:]
    expected = run(q, k, v, ids, cotangent, form="reference")[1:]
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert np.abs(wanted).max() > 0.5
        np.testing.assert_allclose(gradient, wanted, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_padding_gives_finite_outputs_and_gradients(form):
    q, k, v, cotangent = draw(11)
    for x in run(q, k, v, ids_of((145,), ()), cotangent, form=form):  # row 1 is padding alone
        assert np.isfinite(x).all()


@pytest.mark.parametrize("form", PACKING_FORMS)
def test_gradient_by_other_segments_is_zero(form):
    q, k, v, cotangent = draw(12)
    cotangent[:, :60], cotangent[:, 145:] = 0, 0
    for gradient in run(q, k, v, ids_of((60, 85), (60, 85)), cotangent, form=form)[1:]:
        np.testing.assert_array_equal(gradient[:, :60], 0)
        np.testing.assert_array_equal(gradient[:, 145:], 0)
        assert np.abs(gradient[:, 60:145]).max() > 0.1


# ---------------------------------------------------------------- the choice of a backend


def placeholders(dtype, *, head_dim=64, length=300):
    """Shapes of q, k, v and segment ids, to trace with."""
    shapes = [(2, length, 4, head_dim), (2, length, 2, head_dim), (2, length, 2, head_dim)]
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return [*arrays, jax.ShapeDtypeStruct((2, length), jnp.int32)]


def trace(*args, backend):
    return jax.eval_shape(functools.partial(attention.attend, backend=backend), *args)


def test_auto_follows_the_platform_that_is_compiled_for():
    half, full = placeholders(jnp.bfloat16)[0], placeholders(jnp.float32)[0]
    assert attention.choose("auto", half) == "blocked"
    with mesh_for("tpu", "TPU v5 lite"):
        assert attention.choose("auto", full) == "splash"
    with mesh_for("gpu", "NVIDIA H200"):
        assert attention.choose("auto", half) == "cudnn_mask"
        assert attention.choose("auto", full) == "blocked"


def test_attend_runs_the_named_backend():
    q, k, v, cotangent = draw(13)
    out = jax.jit(attention.attend, static_argnames="backend")(q, k, v, PACKED, backend="auto")
    expected = run(q, k, v, PACKED, cotangent, form="blocked")[0]
    np.testing.assert_allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("flash", "'flash' is unknown; choose 'auto' or one of"),
        ("splash", "'splash' runs on tpu, but this program is for cpu; choose"),
        ("cudnn_mask", "'cudnn_mask' runs on gpu, but this program is for cpu; choose"),
    ],
)
def test_impossible_backend_on_cpu_is_an_error(backend, message):
    with pytest.raises(ValueError, match=message):
        trace(*placeholders(jnp.bfloat16), backend=backend)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "message"),
    [
        (jnp.float32, 64, "takes bfloat16 or float16, got q of float32; compute in bfloat16"),
        (jnp.bfloat16, 60, "multiple of 8 and at most 256, got 60; choose 'reference'"),
        (jnp.bfloat16, 264, "multiple of 8 and at most 256, got 264; choose 'reference'"),
    ],
)
def test_what_cudnn_lacks_is_an_error(dtype, head_dim, message):
    with mesh_for("gpu", "NVIDIA H200"), pytest.raises(ValueError, match=message):
        trace(*placeholders(dtype, head_dim=head_dim), backend="cudnn_lengths")


def test_shapes_that_do_not_fit_are_errors():
    q, k, v, ids = placeholders(jnp.float32)
    with pytest.raises(ValueError, match=r"wanted q \[B, T, N, H\]"):
        trace(k, q, q, ids, backend="reference")
    with pytest.raises(ValueError, match=r"segment_ids \(300, 2\), wanted"):
        trace(q, k, v, jax.ShapeDtypeStruct((300, 2), jnp.int32), backend="reference")
    with mesh_for("tpu", "TPU v5 lite", tensor=4):
        message = "kv_heads=2 of an input .* is not divisible by 4, the size of mesh axes .'tensor'"
        with pytest.raises(ValueError, match=message):
            trace(q, k, v, ids, backend="splash")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_splash_and_its_gradient_lower_for_tpu(head_dim):
    def loss(q, k, v, ids):
        out = attention.attend(q, k, v, ids, backend="auto")
        return jnp.sum(out.astype(jnp.float32))

    args = placeholders(jnp.bfloat16, head_dim=head_dim)
    with mesh_for("tpu", "TPU v5 lite", tensor=2):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*args)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 3  # forward, gradient by q, gradient by k and v
