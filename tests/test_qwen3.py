"""The transformer's own properties; agreement with transformers is in test_hf_parity.py."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mas_jax.model import qwen3

TINY = qwen3.ModelConfig(
    vocab_size=50, num_layers=3, model_dim=24, ffw_dim=40, num_heads=4, num_kv_heads=2,
    head_dim=8, rope_theta=1e4, max_positions=64, qk_norm=True,
)  # fmt: skip

PUBLISHED = {  # parameters, as the model cards and checkpoints state them
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-4b-instruct-2507": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-math-7b": 7_615_616_512,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "smollm2-135m": 134_515_008,
}


# compiled whole: op by op, each test would compile some fifty small programs
init = jax.jit(qwen3.init, static_argnums=0, static_argnames="dtype")
logits = jax.jit(qwen3.logits, static_argnums=1, static_argnames=("dtype", "remat", "backend"))


@pytest.fixture(scope="module")
def params() -> qwen3.Params:
    values = init(TINY, jax.random.key(0), dtype=jnp.float32)
    return jax.tree.map(lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), values)


def random_tokens(shape: tuple[int, int], seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, TINY.vocab_size, shape), jnp.int32)


# (i) by hand


def test_rms_norm_by_hand():
    # mean of squares of (3, 4) is 12.5; 3 / sqrt(12.5) = 0.848528, 4 / sqrt(12.5) = 1.131371
    got = qwen3.rms_norm(jnp.array([3.0, 4.0]), jnp.array([1.0, 2.0]), eps=0.0)
    np.testing.assert_allclose(got, [0.848528, 2.262742], atol=1e-6)


def test_rotary_by_hand():
    # head dim 4, theta 100: angles per position 1 and 1/10
    config = dataclasses.replace(TINY, head_dim=4, rope_theta=100.0)
    cos, sin = qwen3.rotary(config, jnp.array([[0, 2]]))
    np.testing.assert_allclose(cos[0, :, 0], [[1, 1], [math.cos(2.0), math.cos(0.2)]], atol=1e-6)
    np.testing.assert_allclose(sin[0, :, 0], [[0, 0], [math.sin(2.0), math.sin(0.2)]], atol=1e-6)


def test_llama3_scaling_keeps_short_wavelengths_and_stretches_long_ones():
    scaling = qwen3.Llama3Scaling(8.0, 1.0, 4.0, 8192)
    plain = dataclasses.replace(TINY, head_dim=128, rope_theta=5e5)
    scaled = dataclasses.replace(plain, rope_scaling=scaling)
    ratio = np.asarray(qwen3.rotary_frequencies(scaled) / qwen3.rotary_frequencies(plain))
    wavelength = 2 * np.pi / np.asarray(qwen3.rotary_frequencies(plain))
    np.testing.assert_allclose(ratio[wavelength < 8192 / 4], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[wavelength > 8192], 1 / 8, rtol=1e-6)
    assert (np.diff(ratio) <= 1e-7).all()


def test_positions_start_again_in_each_segment():
    got = qwen3.positions_from_segments(jnp.array([[1, 1, 1, 2, 2, 0, 0], [0, 5, 5, 4, 4, 4, 4]]))
    np.testing.assert_array_equal(got, [[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 0, 1, 2, 3]])


# the table of parameters


def test_presets_have_the_published_numbers_of_parameters():
    counts = {name: qwen3.param_count(qwen3.PRESETS[name]) for name in PUBLISHED}
    assert counts == PUBLISHED
    toys = {
        name: qwen3.param_count(qwen3.PRESETS[name]) for name in set(qwen3.PRESETS) - set(PUBLISHED)
    }
    assert set(toys) == {"toy-300k", "toy-1m", "toy-1m-qwen2.5", "toy-30m"}
    assert 0.8e6 < toys["toy-1m"] < 1.2e6
    assert 25e6 < toys["toy-30m"] < 35e6
    assert 0.3 < toys["toy-300k"] / toys["toy-1m"] < 0.36
    assert abs(toys["toy-1m-qwen2.5"] / toys["toy-1m"] - 1) < 0.01


def test_the_2507_model_differs_from_its_base_in_its_positions_only():
    base, instruct = (qwen3.PRESETS[n] for n in ("qwen3-4b", "qwen3-4b-instruct-2507"))
    assert (base.rope_theta, instruct.rope_theta) == (1e6, 5e6)
    assert dataclasses.replace(base, rope_theta=5e6, max_positions=262144) == instruct


@pytest.mark.parametrize(
    "changes",
    [dict(), dict(tied=False), dict(qkv_bias=True, qk_norm=False), dict(value_head=True)],
)
def test_init_has_the_structure_and_spread_of_the_table(changes):
    config = dataclasses.replace(TINY, model_dim=64, **changes)
    specs = qwen3.param_specs(config)
    params = init(config, jax.random.key(1), dtype=jnp.float32)
    assert jax.tree.structure(params) == jax.tree.structure(specs)
    assert sum(x.size for x in jax.tree.leaves(params)) == qwen3.param_count(config)
    for x, s in zip(jax.tree.leaves(params), jax.tree.leaves(specs), strict=True):
        assert x.shape == s.shape and len(s.axes) == x.ndim
        if isinstance(s.init, float):
            np.testing.assert_allclose(np.std(x), s.init, rtol=0.1)
        else:
            np.testing.assert_array_equal(x, {"ones": 1.0, "zeros": 0.0}[s.init])


def test_a_value_head_changes_no_other_parameter():
    plain = init(TINY, jax.random.key(1), dtype=jnp.float32)
    with_head = init(
        dataclasses.replace(TINY, value_head=True), jax.random.key(1), dtype=jnp.float32
    )
    assert with_head.pop("value_head").shape == (TINY.model_dim,)
    jax.tree.map(np.testing.assert_array_equal, plain, with_head)


def test_values_are_read_from_the_hidden_states(params):
    hidden_BTD = qwen3.hidden(params, TINY, random_tokens((2, 5)))
    scale_D = jnp.arange(TINY.model_dim, dtype=jnp.float32)
    values_BT = qwen3.values(params | {"value_head": scale_D}, hidden_BTD)
    np.testing.assert_allclose(values_BT, hidden_BTD @ scale_D, rtol=1e-5, atol=1e-5)


# (iii) what must not change the answer


def test_a_later_token_changes_no_earlier_logit(params):
    tokens_BT = random_tokens((2, 12))
    other_BT = tokens_BT.at[:, 7].set((tokens_BT[:, 7] + 1) % TINY.vocab_size)
    a, b = (logits(params, TINY, t) for t in (tokens_BT, other_BT))
    np.testing.assert_array_equal(a[:, :7], b[:, :7])
    assert np.abs(a[:, 7:] - b[:, 7:]).min(axis=-1).max() > 1e-4


def test_packed_segments_equal_each_alone(params):
    tokens_BT = random_tokens((1, 20))
    segment_ids_BT = jnp.array([[1] * 6 + [2] * 9 + [3] * 2 + [0] * 3])
    packed_BTV = logits(params, TINY, tokens_BT, segment_ids_BT=segment_ids_BT)
    for start, stop in ((0, 6), (6, 15), (15, 17)):
        alone_BTV = logits(params, TINY, tokens_BT[:, start:stop])
        np.testing.assert_allclose(packed_BTV[:, start:stop], alone_BTV, atol=1e-5)


def test_padding_on_either_side_changes_nothing(params):
    tokens_BT = random_tokens((2, 9))
    want_BTV = logits(params, TINY, tokens_BT)
    for left, right in ((0, 5), (4, 0), (3, 3)):
        pad = ((0, 0), (left, right))
        padded_BT = jnp.pad(tokens_BT, pad, constant_values=11)
        segment_ids_BT = jnp.pad(jnp.ones_like(tokens_BT), pad)
        got_BTV = logits(params, TINY, padded_BT, segment_ids_BT=segment_ids_BT)
        np.testing.assert_allclose(got_BTV[:, left : left + 9], want_BTV, atol=1e-5)


def test_rows_in_another_order_give_rows_in_that_order(params):
    tokens_BT, order = random_tokens((4, 8)), jnp.array([2, 0, 3, 1])
    want_BTV = logits(params, TINY, tokens_BT)[order]
    np.testing.assert_allclose(logits(params, TINY, tokens_BT[order]), want_BTV, atol=1e-5)


def test_only_relative_positions_matter(params):
    tokens_BT = random_tokens((2, 8))
    positions_BT = jnp.broadcast_to(jnp.arange(8), (2, 8))
    want_BTV = logits(params, TINY, tokens_BT, positions_BT=positions_BT)
    got_BTV = logits(params, TINY, tokens_BT, positions_BT=positions_BT + 37)
    np.testing.assert_allclose(got_BTV, want_BTV, atol=1e-4)
    stretched_BTV = logits(params, TINY, tokens_BT, positions_BT=2 * positions_BT)
    assert np.abs(stretched_BTV - want_BTV).max() > 1e-3


# (iv) gradients, rematerialisation, precision


def test_kept_matmuls_are_not_made_again(params):
    tokens_BT = random_tokens((2, 8))

    def matmuls(policy: str) -> int:
        def total(p):
            return jnp.sum(qwen3.hidden(p, TINY, tokens_BT, remat=policy, backend="reference"))

        return str(jax.make_jaxpr(jax.grad(total))(params)).count("dot_general[")

    # a layer has 7 products of weights, and attention's 2, which every policy makes again
    assert matmuls("full") - matmuls("dots") >= 6
    assert matmuls("dots") - matmuls("none") == 2


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialisation_changes_no_gradient_and_saves_memory(params, remat):
    tokens_BT = random_tokens((2, 16))

    def gradient(policy):
        def loss(p):
            return jnp.sum(jnp.square(qwen3.hidden(p, TINY, tokens_BT, remat=policy)))

        compiled = jax.jit(jax.grad(loss)).lower(params).compile()
        return compiled(params), compiled.memory_analysis().temp_size_in_bytes

    (want, want_bytes), (got, got_bytes) = gradient("none"), gradient(remat)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-5), got, want)
    assert got_bytes < want_bytes


def test_gradients_of_padding_are_zero_and_all_are_finite(params):
    tokens_BT = random_tokens((1, 10)).at[:, 6:].set(49)  # id 49 stands in the padding alone
    tokens_BT = jnp.where((jnp.arange(10) < 6) & (tokens_BT == 49), 3, tokens_BT)
    segment_ids_BT = jnp.array([[1] * 6 + [0] * 4])

    def loss(p):
        hidden_BTD = qwen3.hidden(p, TINY, tokens_BT, segment_ids_BT=segment_ids_BT)
        return jnp.sum(jnp.where(segment_ids_BT[..., None] > 0, jnp.sin(hidden_BTD), 0.0))

    gradient = jax.jit(jax.grad(loss))(params)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
    assert not np.asarray(gradient["embed"][49]).any()
    assert np.asarray(gradient["embed"][tokens_BT[0, 0]]).any()


def test_bfloat16_activations_give_float32_logits_near_the_float32_ones(params):
    tokens_BT = random_tokens((2, 12))
    half_BTV = logits(params, TINY, tokens_BT, dtype=jnp.bfloat16)
    full_BTV = logits(params, TINY, tokens_BT)
    assert half_BTV.dtype == jnp.float32
    assert qwen3.hidden(params, TINY, tokens_BT, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    np.testing.assert_allclose(half_BTV, full_BTV, atol=0.05 * float(np.abs(full_BTV).max()))


def test_the_gradient_of_a_frequent_token_adds_up_in_float32(params):
    # 2,000 equal addends: a bfloat16 sum would stop growing at 256 of them
    tokens_BT = jnp.full((2000, 1), 7)

    def loss(embed):
        hidden_BTD = qwen3.hidden(
            params | {"embed": embed}, TINY, tokens_BT, dtype=jnp.bfloat16, backend="reference"
        )
        return jnp.sum(hidden_BTD.astype(jnp.float32)[..., 0])

    total_VD = jax.jit(jax.grad(loss))(params["embed"])
    one_VD = jax.jit(jax.grad(lambda e: loss(e) / 2000))(params["embed"])
    scale = float(np.abs(total_VD[7]).max())
    assert scale > 0
    np.testing.assert_allclose(total_VD[7], 2000 * one_VD[7], atol=0.02 * scale)


# bad input


def test_a_projections_gradient_keeps_float32_under_bfloat16_activations(params):
    def loss(params):
        hidden_BTD = qwen3.hidden(
            params, TINY, random_tokens((2, 16)), dtype=jnp.bfloat16, backend="reference"
        )
        return jnp.sum(hidden_BTD.astype(jnp.float32) ** 2)

    gradient = jax.jit(jax.grad(loss))(params)["layers"]
    for name in ("wq", "wv", "wo", "w_up", "w_down"):
        rounded = gradient[name].astype(jnp.bfloat16).astype(jnp.float32)
        assert np.mean(rounded != gradient[name]) > 0.9, name


def test_unknown_settings_are_refused(params):
    with pytest.raises(ValueError, match=r"remat='some' is unknown; choose one of"):
        qwen3.hidden(params, TINY, random_tokens((1, 4)), remat="some")
    with pytest.raises(ValueError, match="num_heads=4 is not a multiple of num_kv_heads=3"):
        qwen3.param_specs(dataclasses.replace(TINY, num_kv_heads=3))
    with pytest.raises(ValueError, match="head_dim=7 is odd"):
        qwen3.param_specs(dataclasses.replace(TINY, head_dim=7))
