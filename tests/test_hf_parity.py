"""Our forward pass against `transformers`, float32: each module to 1e-5, logits to 1e-4."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hf_models import FAMILIES, random_model
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mas_jax.model import attention, hf, hf_config, qwen3

MODULE_TOLERANCE = 1e-5
LOGITS_TOLERANCE = 1e-4
LONG = 30_000  # here one unit in the last place of a frequency would show
B, T = 2, 16


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same model twice: in torch, and loaded here from what transformers saved."""

    torch_model: torch.nn.Module
    config: qwen3.ModelConfig
    params: dict


def make_pair(directory, family: str) -> Pair:
    model = random_model(family)
    model.save_pretrained(directory)
    return Pair(model, *hf.load(directory, dtype=jnp.float32))


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request, tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp(request.param), request.param)


def assert_close(ours, theirs: torch.Tensor, tolerance: float) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs.detach().numpy(), rtol=0, atol=tolerance)


def test_the_families_cover_one_to_eight_queries_per_key():
    settings = [settings for _, settings in FAMILIES.values()]
    ratios = {s["num_attention_heads"] // s["num_key_value_heads"] for s in settings}
    assert ratios == set(range(1, 9))


# --- modules --------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="config")
def our_modules(params: dict, config: qwen3.ModelConfig, x_BTD, start) -> dict:
    """Output of each module of layer 1, on the input `x_BTD` at positions from `start` on."""
    layer = jax.tree.map(lambda x: x[1], params["layers"])
    cos_sin = qwen3.rotary(config, jnp.broadcast_to(start + jnp.arange(T), (B, T)))
    qkv = qwen3.project_qkv(layer, config, x_BTD, cos_sin)
    attended_BTNH = attention.reference(*qkv, jnp.ones((B, T), jnp.int32))
    finish = functools.partial(qwen3.finish_layer, config=config, x_BTD=x_BTD)
    return {
        "norm": qwen3.rms_norm(x_BTD, layer["attn_norm"], eps=config.norm_eps),
        "rotary": cos_sin,
        # a layer whose feed-forward block gives 0, and one that attends to nothing
        "attention": finish(layer | {"w_down": 0 * layer["w_down"]}, attended_BTNH=attended_BTNH),
        "feed_forward": finish(layer, attended_BTNH=0 * attended_BTNH),
        "layer": finish(layer, attended_BTNH=attended_BTNH),
    }


@pytest.fixture(scope="module", params=[0, LONG], ids=["start", "long"])
def modules(request, pair):
    """Our modules' outputs; layer 1 of transformers; the inputs that its modules take."""
    start = request.param
    shape = (B, T, pair.config.model_dim)
    x_BTD = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    ours = our_modules(pair.params, pair.config, x_BTD, start)
    rotary = pair.torch_model.model.rotary_emb(torch.zeros(1), start + torch.arange(T)[None])
    mask = torch.full((T, T), torch.finfo(torch.float32).min).triu(1)[None, None]
    inputs = {"position_embeddings": rotary, "attention_mask": mask}
    return ours, pair.torch_model.model.layers[1], torch.tensor(x_BTD), inputs


def test_norm_equals_that_of_transformers(modules):
    ours, theirs, x, _ = modules
    assert_close(ours["norm"], theirs.input_layernorm(x), MODULE_TOLERANCE)


def test_rotary_angles_equal_those_of_transformers(modules, pair):
    ours, _, _, inputs = modules
    half = pair.config.head_dim // 2  # transformers repeats the angles for the second half
    for our_part, their_part in zip(ours["rotary"], inputs["position_embeddings"], strict=True):
        our_row = np.asarray(our_part)[:1, :, 0]
        assert_close(our_row, their_part[..., :half], MODULE_TOLERANCE)
        assert_close(our_row, their_part[..., half:], MODULE_TOLERANCE)


def test_attention_block_equals_that_of_transformers(modules):
    ours, theirs, x, inputs = modules
    attended, _ = theirs.self_attn(hidden_states=theirs.input_layernorm(x), **inputs)
    assert_close(ours["attention"], x + attended, MODULE_TOLERANCE)


def test_feed_forward_block_equals_that_of_transformers(modules):
    ours, theirs, x, _ = modules
    expected = x + theirs.mlp(theirs.post_attention_layernorm(x))
    assert_close(ours["feed_forward"], expected, MODULE_TOLERANCE)


def test_whole_layer_equals_that_of_transformers(modules):
    ours, theirs, x, inputs = modules
    assert_close(ours["layer"], theirs(x, **inputs), MODULE_TOLERANCE)


def released_rotary(name: str) -> tuple[qwen3.ModelConfig, LlamaRotaryEmbedding]:
    """A preset and transformers' rotary embedding of its size (the same class in every family)."""
    config = qwen3.PRESETS[name]
    as_llama = dataclasses.replace(
        config, qk_norm=False, qkv_bias=False, model_dim=config.num_heads * config.head_dim
    )
    settings = hf_config.config_to_hf(as_llama, dtype="float32", token_ids={})
    return config, LlamaRotaryEmbedding(LlamaConfig(**settings))


RELEASED = ("qwen3-8b", "qwen2.5-7b", "qwen2.5-math-7b", "llama-3.2-1b", "llama-3.1-8b", "smollm2-135m")  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("name", RELEASED)
def test_rotary_angles_of_released_models_hold_at_long_positions(name):
    config, rotary = released_rotary(name)
    positions_BT = np.arange(0, 40_000, 13)[None]
    ours = qwen3.rotary(config, jnp.asarray(positions_BT))
    theirs = rotary(torch.zeros(1), torch.tensor(positions_BT))
    for our_part, their_part in zip(ours, theirs, strict=True):
        expected = their_part[..., : config.head_dim // 2]
        assert_close(np.asarray(our_part)[:, :, 0], expected, MODULE_TOLERANCE)


@pytest.mark.parametrize("name", list(qwen3.PRESETS))
def test_rotary_frequencies_differ_in_one_unit_of_the_last_place_at_most_once(name):
    # torch's vectorised pow rounds one of 64 values otherwise than torch's scalar pow does: pair 19
    # for theta 5e6, where position 30,000 of Qwen3-4B-2507 then differs by 3e-5
    config, rotary = released_rotary(name)
    ours, theirs = qwen3.rotary_frequencies(config), rotary.inv_freq.numpy()
    np.testing.assert_array_max_ulp(ours, theirs, maxulp=1)
    assert np.count_nonzero(ours != theirs) <= 1


# --- the whole model ------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="config")
def our_logits(params: dict, config: qwen3.ModelConfig, tokens_BT, positions_BT, segment_ids_BT):
    return qwen3.logits(
        params, config, tokens_BT, positions_BT=positions_BT, segment_ids_BT=segment_ids_BT
    )


def torch_logits(pair: Pair, tokens_BT: np.ndarray, **inputs: np.ndarray) -> torch.Tensor:
    tensors = {name: torch.tensor(value) for name, value in inputs.items()}
    with torch.no_grad():
        return pair.torch_model(input_ids=torch.tensor(tokens_BT), **tensors).logits


@pytest.fixture(scope="module")
def tokens_BT():
    return np.random.default_rng(1).integers(0, 97, (B, T))


ONE_SEGMENT_BT = np.ones((B, T), np.int32)


def row_positions(start: int) -> np.ndarray:
    return np.broadcast_to(start + np.arange(T), (B, T))


@pytest.mark.parametrize("start", [0, LONG])
def test_logits_equal_those_of_transformers(pair, tokens_BT, start):
    positions_BT = row_positions(start)
    ours = our_logits(pair.params, pair.config, tokens_BT, positions_BT, ONE_SEGMENT_BT)
    theirs = torch_logits(pair, tokens_BT, position_ids=positions_BT)
    assert_close(ours, theirs, LOGITS_TOLERANCE)


def test_logits_of_padded_rows_equal_those_of_transformers(pair, tokens_BT):
    real_BT = np.arange(T) < np.array([[T], [9]])
    mask_BT = real_BT.astype(np.int32)
    ours = our_logits(pair.params, pair.config, tokens_BT, row_positions(0), mask_BT)
    theirs = torch_logits(pair, tokens_BT, attention_mask=mask_BT)
    assert_close(np.asarray(ours)[real_BT], theirs[torch.tensor(real_BT)], LOGITS_TOLERANCE)
    assert np.all(np.isfinite(ours))


def test_each_packed_sequence_equals_itself_alone_in_transformers(pair, tokens_BT):
    segment_ids_BT = np.array([[1] * 5 + [2] * 7 + [3] * 4, [7] * 3 + [4] * 9 + [0] * 4], np.int32)
    positions_BT = np.stack([np.r_[0:5, 0:7, 0:4], np.r_[0:3, 0:9, 0:4]])
    ours = our_logits(pair.params, pair.config, tokens_BT, positions_BT, segment_ids_BT)
    for row, segment in ((0, 1), (0, 2), (0, 3), (1, 7), (1, 4)):
        inside_T = segment_ids_BT[row] == segment
        theirs = torch_logits(pair, tokens_BT[row][inside_T][None])
        assert_close(np.asarray(ours)[row, inside_T], theirs[0], LOGITS_TOLERANCE)


@functools.partial(jax.jit, static_argnames="config")
def our_gradients(params: dict, config: qwen3.ModelConfig, tokens_BT) -> dict:
    """Gradient of the sum of log p(token | tokens before it)."""

    def logprob_sum(some: dict) -> jax.Array:
        all_params = params | {"embed": some["embed"]}
        all_params["layers"] = params["layers"] | {"wq": some["wq"]}
        logprobs_BTV = jax.nn.log_softmax(qwen3.logits(all_params, config, tokens_BT)[:, :-1])
        return jnp.take_along_axis(logprobs_BTV, tokens_BT[:, 1:, None], axis=-1).sum()

    return jax.grad(logprob_sum)({"embed": params["embed"], "wq": params["layers"]["wq"]})


@pytest.mark.parametrize("family", ["qwen3", "qwen2-untied", "llama3"])
def test_gradients_equal_those_of_transformers(tmp_path, tokens_BT, family):
    pair = make_pair(tmp_path, family)
    ours = our_gradients(pair.params, pair.config, tokens_BT)
    tokens = torch.tensor(tokens_BT)
    logprobs = torch.log_softmax(pair.torch_model(input_ids=tokens).logits[:, :-1], dim=-1)
    logprobs.gather(2, tokens[:, 1:, None]).sum().backward()
    model = pair.torch_model.model
    embed, wq = model.embed_tokens.weight.grad, model.layers[1].self_attn.q_proj.weight.grad.T
    assert_close(ours["embed"], embed, 1e-4 * float(embed.abs().max()))
    our_wq = np.asarray(ours["wq"])[1].reshape(wq.shape)
    assert_close(our_wq, wq, 1e-4 * float(wq.abs().max()))
