"""Paged attention against hand-worked numbers, jax's own reference and dense attention.

Dimensions: T tokens, B rows, N query heads, K key/value heads, H head dim, M pages, Z positions of
a page, U pages of a row.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from mas_jax.model import attention, paged_attention, sharding

attend = jax.jit(paged_attention.attend_paged, static_argnames="backend")


def draw(seed, q_lens, kv_lens, *, T, B, N, K, H, Z, U):
    """Random arguments of `attend_paged`; what lies beyond the rows in use is nonsense."""
    rng = np.random.default_rng(seed)
    used = len(q_lens)
    q = rng.normal(size=(T, N, H)).astype(np.float32)
    pages = rng.normal(size=(B * U + 2, Z, 2 * K, H)).astype(np.float32)
    table = rng.permutation(B * U + 2)[: B * U].reshape(B, U).astype(np.int32)
    lens, starts = np.full(B, 999, np.int32), np.full(B + 1, 7, np.int32)
    lens[:used], starts[: used + 1] = kv_lens, np.cumsum([0, *q_lens])
    return [q, pages, lens, table, starts, np.array([used], np.int32)]


def pool_of(k_SKH, v_SKH, *, Z):
    """Pages [M, Z, 2K, H] that hold one sequence in order, NaN in the slots after its end."""
    S, K, H = k_SKH.shape
    slots = np.full((-(-S // Z) * Z, K, 2, H), np.nan, np.float32)
    slots[:S, :, 0], slots[:S, :, 1] = k_SKH, v_SKH
    return slots.reshape(-1, Z, 2 * K, H)


# ---------------------------------------------------------------- hand-computed


def test_one_token_over_two_pages_by_hand():
    # pages of 2 positions; the row's keys are 0, log 2, log 5 in pages 1 and 0, its values 3, 6, 8
    # one new token, the third, q = 1 and H = 1: weights 1/8, 2/8, 5/8 -> (3 + 12 + 40) / 8 = 6.875
    pages = np.full((2, 2, 2, 1), np.nan, np.float32)
    pages[1, :, :, 0] = [[0, 3], [np.log(2), 6]]
    pages[0, 0, :, 0] = [np.log(5), 8]
    i32 = functools.partial(np.array, dtype=np.int32)
    q = np.ones((2, 1, 1), np.float32)
    out = attend(q, pages, i32([3]), i32([[1, 0]]), i32([0, 1]), i32([1]), backend="auto")
    np.testing.assert_allclose(out[:, 0, 0], [6.875, 0], atol=1e-6)  # the second token is no row's


# ---------------------------------------------------------------- independent reference


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "sizes"),
    [
        # decode; prefill from the start and resumed; mixed; one key/value head
        ([1, 1, 1], [1, 16, 29], {"T": 4, "B": 5, "N": 4, "K": 2, "H": 32, "Z": 16, "U": 2}),
        ([9, 20], [9, 27], {"T": 29, "B": 2, "N": 2, "K": 2, "H": 64, "Z": 4, "U": 7}),
        ([1, 6, 1, 1], [5, 6, 24, 8], {"T": 12, "B": 5, "N": 6, "K": 2, "H": 128, "Z": 8, "U": 3}),
        ([3, 1], [10, 3], {"T": 6, "B": 3, "N": 8, "K": 1, "H": 32, "Z": 4, "U": 3}),
    ],
)
def test_ragged_rows_equal_the_reference_shipped_with_the_kernel(q_lens, kv_lens, sizes):
    q, pages, *tables = draw(0, q_lens, kv_lens, **sizes)
    out = attend(q, pages, *tables, backend="auto")

    @jax.jit  # one compilation; its loop over rows needs the tables as numpy
    def shipped(q, pages):
        return ref_ragged_paged_attention(q, pages, *tables, sm_scale=sizes["H"] ** -0.5)

    expected = shipped(q, pages)
    np.testing.assert_allclose(out[: sum(q_lens)], expected, atol=1e-5)
    np.testing.assert_array_equal(out[sum(q_lens) :], 0)


@pytest.mark.parametrize("q_lens", [(21,), (1,) * 21, (8, 8, 5)])
def test_prefill_chunks_and_decode_equal_dense_attention(q_lens):
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(21, heads, 32)).astype(np.float32) for heads in (4, 2, 2))
    expected = attention.reference(q[None], k[None], v[None], np.ones((1, 21), np.int32))[0]
    pages, table, end = pool_of(k, v, Z=4), np.arange(6, dtype=np.int32)[None], 0
    for q_len in q_lens:
        start, end = end, end + q_len
        budget = np.pad(q[start:end], [(0, 21 - q_len), (0, 0), (0, 0)])
        lens, starts = np.array([end], np.int32), np.array([0, q_len], np.int32)
        out = attend(budget, pages, lens, table, starts, np.ones(1, np.int32), backend="reference")
        np.testing.assert_allclose(out[:q_len], expected[start:end], atol=1e-5)


# ---------------------------------------------------------------- metamorphic

SIZES = {"T": 16, "B": 4, "N": 4, "K": 2, "H": 32, "Z": 4, "U": 6}


def test_the_rest_of_the_batch_changes_no_bit_of_a_row():
    short = draw(2, [5, 3], [9, 4], **SIZES)
    longer = draw(3, [1, 5, 7], [23, 9, 24], **SIZES)
    longer[0][1:6], longer[3][1] = short[0][:5], short[3][0]  # the same row, second in its batch
    longer[1] = np.where(np.isin(np.arange(26), short[3][0])[:, None, None, None], short[1], 9)
    np.testing.assert_array_equal(
        attend(*short, backend="reference")[:5], attend(*longer, backend="reference")[1:6]
    )


def test_where_pages_lie_and_what_unused_slots_hold_changes_nothing():
    q, pages, lens, table, starts, one = draw(4, [4], [10], **SIZES)
    before = attend(q, pages, lens, table, starts, one, backend="reference")
    moved, moved_table = np.full_like(pages, np.nan), np.full_like(table, -1)
    moved_table[0, :3] = [6, 2, 0]
    moved[moved_table[0, :2]] = pages[table[0, :2]]
    moved[0, :2] = pages[table[0, 2], :2]  # 10 positions are two pages of 4 and two slots
    after = attend(q, moved, lens, moved_table, starts, one, backend="reference")
    np.testing.assert_array_equal(before, after)


def test_a_pool_padded_to_the_kernel_head_dim_gives_the_same():
    args = draw(5, [4, 1], [10, 7], **SIZES)
    before = attend(*args, backend="reference")
    args[1] = np.pad(args[1], [(0, 0)] * 3 + [(0, 96)])
    np.testing.assert_array_equal(before, attend(*args, backend="reference"))


def test_eight_devices_equal_one():
    args = draw(6, [4, 1], [10, 7], **SIZES)
    expected = attend(*args, backend="auto")
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    for i, axes in enumerate((paged_attention.Q_AXES, paged_attention.PAGE_AXES)):
        args[i] = jax.device_put(args[i], jax.NamedSharding(mesh, sharding.spec(axes)))
    with jax.set_mesh(mesh):
        out = attend(*args, backend="auto")
    wanted = jax.NamedSharding(mesh, sharding.spec(paged_attention.Q_AXES))
    assert out.sharding.is_equivalent_to(wanted, out.ndim)
    np.testing.assert_allclose(out, expected, atol=1e-5)


# ---------------------------------------------------------------- the choice of a backend


def placeholders(dtype, *, K, H, P=None):
    """Shapes of the arguments of `attend_paged`, to trace with: 16 tokens, 5 rows of 8 pages."""
    arrays = [((16, 2 * K, H), dtype), ((40, 16, 2 * K, H if P is None else P), dtype)]
    tables = [(shape, jnp.int32) for shape in ((5,), (5, 8), (6,), (1,))]
    return [jax.ShapeDtypeStruct(shape, kind) for shape, kind in arrays + tables]


def trace(*args, backend):
    return jax.jit(functools.partial(paged_attention.attend_paged, backend=backend)).trace(*args)


def tpu_mesh(*, tensor):
    """A mesh of chips that this machine has not got, to trace and lower programs for."""
    device = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    shape, types = (1, 1, tensor), (AxisType.Auto,) * 3
    mesh = AbstractMesh(shape, sharding.MESH_AXES, axis_types=types, abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


@pytest.mark.parametrize(("H", "P"), [(64, 64), (64, 128), (128, 128)])
def test_the_kernel_lowers_for_tpu(H, P):
    args = placeholders(jnp.bfloat16, K=4, H=H, P=P)
    with tpu_mesh(tensor=2):
        assert paged_attention.choose("auto") == "ragged_paged"
        text = trace(*args, backend="auto").lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1


def test_impossible_choices_are_errors():
    args = placeholders(jnp.bfloat16, K=3, H=64)
    with pytest.raises(ValueError, match="'ragged_paged' runs on tpu, but this program is for cpu"):
        trace(*args, backend="ragged_paged")
    with pytest.raises(ValueError, match="'splash' is unknown; choose 'auto' or one of"):
        trace(*args, backend="splash")
    with tpu_mesh(tensor=1), pytest.raises(ValueError, match="no tiling for 3 key/value heads"):
        trace(*args, backend="auto")
    with (
        tpu_mesh(tensor=4),
        pytest.raises(ValueError, match="not divisible by 4, the size of mesh"),
    ):
        trace(*args, backend="auto")


def test_shapes_that_do_not_fit_are_errors():
    q, pages, lens, table, starts, one = placeholders(jnp.float32, K=2, H=64)
    with pytest.raises(ValueError, match=r"wanted q \[T, N, H\] and kv_pages .* P at least H"):
        trace(
            *placeholders(jnp.float32, K=2, H=64, P=32)[:2],
            lens,
            table,
            starts,
            one,
            backend="auto",
        )
    with pytest.raises(ValueError, match=r"wanted \[\(5,\), \(5, 8\), \(6,\), \(1,\)\], all int32"):
        trace(q, pages, lens, table, lens, one, backend="auto")
