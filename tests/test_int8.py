"""int8 weights of a sampler: rounding, the engine that reads them, and the weights that correct."""

import dataclasses

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from engines import (
    CONFIG,
    SETTINGS,
    decode,
    make_engine,
    make_params,
    make_prompts,
    run,
    sample,
)

from mas_jax.config import default_config
from mas_jax.config_rules import check_correction, validate
from mas_jax.learning import losses
from mas_jax.model import int8, qwen3, sharding
from mas_jax.sampling import calls
from mas_jax.sampling.engine import Engine
from mas_jax.sampling.replicas import Replicas

FULL = dataclasses.replace(SETTINGS, buckets=(64,))
INT8 = dataclasses.replace(FULL, weights="int8")
RAGGED = dataclasses.replace(INT8, calls="ragged")
PROMPTS = make_prompts((1, 4, 15, 17, 29))
MATRICES = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")


SPECS = qwen3.param_specs(CONFIG)
quantized = jax.jit(lambda params: int8.quantize_params(params, SPECS))


def is_int8(x) -> bool:
    return isinstance(x, int8.Int8)


@jax.jit
def rounded(params):
    """Full parameters that hold what int8 ones stand for."""
    parts = int8.quantize_params(params, SPECS)
    return jax.tree.map(lambda x: int8.dequantize(x) if is_int8(x) else x, parts, is_leaf=is_int8)


def split_mesh():
    """Inputs or outputs of every matrix over two devices, heads and ffw over two more."""
    return sharding.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])


# (i) by hand


def test_rounding_by_hand():
    # inputs down, outputs across: the first channel's scale is 1.27 / 127 = 0.01, the second's
    # 0.5 / 127, in which 0.254 is 64.516 steps and 0.01 is 2.54; the third is all zeros
    weight = jnp.asarray([[1.27, 0.254, 0.0], [-0.304, -0.5, 0.0], [0.0, 0.01, 0.0]])
    got = int8.quantize(weight, (0,))
    np.testing.assert_array_equal(got.values, [[127, 65, 0], [-30, -127, 0], [0, 3, 0]])
    np.testing.assert_allclose(got.scale, [[0.01, 0.5 / 127, 1 / 127]], rtol=1e-6)
    np.testing.assert_allclose(
        int8.dequantize(got),
        [[1.27, 65 * 0.5 / 127, 0.0], [-0.30, -0.5, 0.0], [0.0, 1.5 / 127, 0.0]], rtol=1e-6,
    )  # fmt: skip


def test_no_entry_is_off_by_more_than_half_a_step_and_embeddings_and_vectors_stay():
    params = make_params()
    parts = quantized(params)
    assert {k for k, x in parts["layers"].items() if is_int8(x)} == set(MATRICES)
    for full, part in zip(jax.tree.leaves(params), jax.tree.leaves(parts, is_leaf=is_int8),
                          strict=True):  # fmt: skip
        assert is_int8(part) or np.array_equal(full, part)
    L, D, N, H = parts["layers"]["wq"].values.shape
    assert parts["layers"]["wq"].scale.shape == (L, 1, N, H)
    assert parts["layers"]["wo"].scale.shape == (L, 1, 1, D)
    for name in MATRICES:
        part, weight = parts["layers"][name], params["layers"][name]
        scale = np.asarray(part.scale)
        error = np.abs(np.asarray(part.values) * scale - np.asarray(weight))
        assert np.all(error <= 0.5001 * scale)
        assert np.max(error / scale) > 0.4  # the bound is near what is seen
        assert part.values.dtype == jnp.int8
    again = int8.quantize_params(parts, SPECS)  # what is so already stays
    assert again["layers"]["wq"] is parts["layers"]["wq"]


def test_a_nan_stays_loud():
    weight = jnp.ones((3, 2)).at[1, 0].set(jnp.nan)
    y = int8.einsum("BD,DF->BF", jnp.ones((1, 3)), int8.quantize(weight, (0,)))
    assert np.isnan(y[0, 0])
    assert y[0, 1] == 3.0


# (ii) independent reference


@pytest.mark.parametrize(
    ("spec", "shape", "inputs"),
    [
        ("BTD,DNH->BTNH", (8, 3, 4), (0,)),
        ("BTNH,NHD->BTD", (3, 4, 8), (0, 1)),
        ("BTD,DF->BTF", (8, 5), (0,)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_matmul_is_that_of_the_rounded_matrix(spec, shape, inputs, dtype):
    rng = np.random.default_rng(0)
    weight = int8.quantize(jnp.asarray(rng.normal(size=shape), jnp.float32), inputs)
    x = jnp.asarray(rng.normal(size=(2, 6, *(shape[i] for i in inputs))), dtype)
    got = jax.jit(int8.einsum, static_argnums=0)(spec, x, weight)
    assert got.dtype == x.dtype
    matrix = np.asarray(weight.values, np.float64) * np.asarray(weight.scale, np.float64)
    want = np.einsum(spec, np.asarray(x, np.float64), matrix)
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-8, atol=2e-6 * 8)
    if dtype == "float32":
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("settings", [INT8, RAGGED], ids=["dense", "ragged"])
def test_the_engine_gives_what_a_full_engine_with_rounded_weights_gives(settings):
    engine = make_engine(settings)
    plain = make_engine(dataclasses.replace(settings, weights="full"))
    plain.set_params(rounded(make_params()))
    for temperature in (0.0, 1.0):
        got, want = (
            run(*(sample(e, p, str(i), temperature=temperature) for i, p in enumerate(PROMPTS)))
            for e in (engine, plain)
        )
        for [one], [other] in zip(got, want, strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    # and the weights are really others: some log-prob moves by more than rounding
    plain.set_params(make_params())
    full = run(*(sample(plain, p, str(i)) for i, p in enumerate(PROMPTS)))
    gaps = [abs(a - b) for [x], [y] in zip(got, full, strict=True)
            for a, b in zip(x.logprobs[:1], y.logprobs[:1], strict=True)]  # fmt: skip
    assert max(gaps) > 1e-3


@pytest.mark.parametrize(
    "settings",
    [pytest.param(INT8, id="dense"), pytest.param(RAGGED, id="ragged", marks=pytest.mark.slow)],
)
def test_a_mesh_gives_what_one_device_gives_and_holds_its_parts(settings):
    many = make_engine(settings, mesh=split_mesh())
    got, want = (
        run(*(sample(e, p, str(i)) for i, p in enumerate(PROMPTS)))
        for e in (many, make_engine(settings))
    )
    for [one], [other] in zip(got, want, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    wo = many.device._params["layers"][0]["wo"]  # heads over tensor, outputs over fsdp
    N, H, D = wo.values.shape
    assert wo.values.sharding.shard_shape(wo.values.shape) == (N // 2, H, D // 2)
    assert wo.scale.sharding.shard_shape(wo.scale.shape) == (1, 1, D // 2)


# weights that come and go


def test_new_weights_are_rounded_anew_and_nothing_full_is_kept():
    replicas = Replicas([make_engine(INT8, mesh=split_mesh())])
    replicas.set_params(make_params(1))
    draws = {
        name: [
            r[0].tokens for r in run(*(sample(e, p, str(i)) for i, p in enumerate(PROMPTS)))
        ]
        for name, e in {
            "replicas": replicas, "anew": make_engine(INT8, seed=1), "old": make_engine(INT8)
        }.items()
    }  # fmt: skip
    assert draws["replicas"] == draws["anew"]
    assert draws["replicas"] != draws["old"]
    [engine] = replicas.engines
    for layer in engine.device._params["layers"]:
        for name, x in layer.items():
            assert is_int8(x) == name.startswith("w")


WIDE = dataclasses.replace(CONFIG, num_layers=3, model_dim=128, ffw_dim=1024)


def test_no_call_makes_the_matrices_full_all_at_once():
    """Temporaries beyond the full engine's: a matrix or two, not the layers'."""
    full_layers = 4 * (qwen3.param_count(WIDE) - WIDE.vocab_size * WIDE.model_dim)
    largest = 4 * WIDE.model_dim * 2 * WIDE.ffw_dim  # gate and up, fused
    assert full_layers > 4 * largest
    full = jax.eval_shape(lambda: qwen3.init(WIDE, jax.random.key(0), dtype=jnp.float32))
    temporaries = {}
    for weights in ("full", "int8"):
        settings = dataclasses.replace(FULL, weights=weights)
        params = jax.eval_shape(calls.by_layer(WIDE, settings, None), full)
        pool = calls.pool_shapes(WIDE, settings, None, is_ragged=False)
        rows, drawing = calls.rows(settings, 64, [], []), calls.drawing([], settings.decode_rows)
        args = {
            "decode": (rows, drawing, np.zeros(WIDE.vocab_size, bool), np.int32(1)),
            "prefill": (calls.blocks(settings, 64, []), calls.drawing([], settings.prefill_blocks)),
        }
        for kind, rest in args.items():
            program = calls.lower_call(kind, WIDE, None, (params, pool, *rest)).compile()
            temporaries[kind, weights] = program.memory_analysis().temp_size_in_bytes
        if weights == "int8":
            # 1 byte where there were 4, and a scale a channel
            assert int8.num_bytes(params["layers"]) < 0.27 * full_layers
    for kind in ("decode", "prefill"):
        assert temporaries[kind, "int8"] - temporaries[kind, "full"] < 2.5 * largest


# the gap is weighed back


@jax.jit
def next_logprobs(params, tokens_BT):
    """Of every token after each prompt, [B, V]."""
    return jax.nn.log_softmax(qwen3.logits(params, CONFIG, tokens_BT)[:, -1])


@jax.jit
def expected_gradient(params, tokens_BT, sampler_BV, factors_BV, worth_V):
    """Gradient by the parameters of the expected PPO loss of the next token after each prompt:
    every token, as often as the sampler draws it, its worth times the importance weight."""

    def _loss(params):
        now_BV = next_logprobs(params, tokens_BT)
        loss, _ = losses.ppo(
            now_BV, jax.lax.stop_gradient(now_BV), factors_BV * worth_V, jnp.exp(sampler_BV),
            clip_low=0.2, clip_high=0.2, dual_clip=0.0,
        )  # fmt: skip
        return loss

    return jax.flatten_util.ravel_pytree(jax.grad(_loss)(params))[0]


def test_the_expected_gradient_under_int8_samples_is_the_on_policy_one():
    params, tokens_BT = make_params(), jnp.asarray(make_prompts((6, 6, 6), seed=4))
    worth_V = jnp.asarray(np.random.default_rng(0).normal(size=CONFIG.vocab_size), jnp.float32)
    old_BV, sampler_BV = (next_logprobs(p, tokens_BT) for p in (params, rounded(params)))
    ones_BV = jnp.ones_like(old_BV)
    segments_BV = jnp.arange(1, CONFIG.vocab_size + 1)[None].repeat(3, 0)  # traces of one token
    want = expected_gradient(params, tokens_BT, old_BV, ones_BV, worth_V)
    errors = {}
    for form in ("none", "token", "sequence"):
        factors_BV, metrics = losses.importance_weights(
            old_BV, sampler_BV, ones_BV, segments_BV, form=form, cap=2.0
        )
        got = expected_gradient(params, tokens_BT, sampler_BV, factors_BV, worth_V)
        errors[form] = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert metrics["importance_cap_frac"][0] == 0
        assert metrics["sampler_trainer_kl"][0] > 0
    assert errors["none"] > 1e-3
    assert errors["token"] < 1e-5
    assert errors["sequence"] < 1e-5


# settings


def test_other_weights_than_full_and_int8_are_refused_by_the_engine_and_the_config():
    with pytest.raises(ValueError, match="weights='int4' is unknown; choose 'full' or 'int8'"):
        Engine(
            CONFIG, make_params(), dataclasses.replace(SETTINGS, weights="int4"),
            policy="student", decode=decode,
        )  # fmt: skip
    config = default_config()
    assert config.engine.weights == "full"
    config.engine.weights = "int4"
    with pytest.raises(ValueError, match=r"engine\.weights: 'int4' is unknown; did you mean"):
        validate(config)


def test_learning_from_int8_samples_without_weighing_them_is_refused():
    config = default_config()
    check_correction(config)
    config.engine.weights = "int8"
    validate(config)  # to evaluate with it is fine
    with pytest.raises(ValueError, match=r"teacher\.programme\.\w+\.correction='none'"):
        check_correction(config)
    for stage in config.stages.values():
        for row in stage.programme.values():
            row.correction = "token"
    check_correction(config)
