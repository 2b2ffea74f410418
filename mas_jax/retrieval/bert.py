"""The BERT encoder as pure functions of one pytree: E5, MiniLM and what else has its architecture.

Post-norm layers with biases, learned positions, attention in both directions. `param_specs` is the
one table of parameters. Layers run under `lax.scan`.
Source: Devlin et al. (arXiv 1810.04805); parity with transformers' BertModel is tested.

Dimensions: B rows, T positions, D model, F ffw, N heads, H head dim. Must not know: texts, indexes.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from mas_jax.model import hf_tensors, param_table, sharding
from mas_jax.model.param_table import Params, embedding, matrix, vector

# beside the encoder a checkpoint holds a head for another task and constant buffers
UNUSED_TENSORS = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids")


@dataclass(frozen=True)
class BertConfig:
    """Sizes of one encoder, named as in `model_config.ModelConfig`."""

    vocab_size: int
    num_layers: int
    model_dim: int
    ffw_dim: int
    num_heads: int
    max_positions: int
    num_types: int
    norm_eps: float


def load_config(directory: Path) -> BertConfig:
    """The sizes in a checkpoint's config.json.

    Raises: FileNotFoundError if there is none; ValueError, with the key, for an architecture that
    this is not.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give a Hugging Face directory of a BERT")
    raw = json.loads(path.read_text())
    wanted = {
        "model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute",
        "is_decoder": False,
    }  # fmt: skip
    for key, value in wanted.items():
        if raw.get(key, value) != value or (key == "model_type" and key not in raw):
            raise ValueError(f"{path}: {key}={raw.get(key)!r}, but bert.py computes {value!r} only")
    keys = {
        "vocab_size": "vocab_size", "num_layers": "num_hidden_layers", "model_dim": "hidden_size",
        "ffw_dim": "intermediate_size", "num_heads": "num_attention_heads",
        "max_positions": "max_position_embeddings", "num_types": "type_vocab_size",
        "norm_eps": "layer_norm_eps",
    }  # fmt: skip
    if missing := sorted(set(keys.values()) - raw.keys()):
        raise ValueError(f"{path}: {', '.join(missing)} missing; download it again")
    config = BertConfig(**{ours: raw[theirs] for ours, theirs in keys.items()})
    if config.model_dim % config.num_heads:
        raise ValueError(
            f"{path}: hidden_size={config.model_dim} is not a multiple of "
            f"num_attention_heads={config.num_heads}"
        )
    return config


def _norm_specs(prefix: str, embed: dict[str, int], name: str) -> dict[str, param_table.ParamSpec]:
    return {
        f"{name}_scale": vector(f"{prefix}.weight", embed, init="ones"),
        f"{name}_bias": vector(f"{prefix}.bias", embed, init="zeros"),
    }


def param_specs(config: BertConfig) -> dict:
    """The table of parameters: a nested dict like the pytree of arrays, with `ParamSpec` leaves."""
    hf = "encoder.layer.{layer}."
    embed, ffw = {"embed": config.model_dim}, {"ffw": config.ffw_dim}
    heads = {"heads": config.num_heads, "head_dim": config.model_dim // config.num_heads}
    layer = {}
    for name, part in (("q", "query"), ("k", "key"), ("v", "value")):
        layer[f"w{name}"] = matrix(f"{hf}attention.self.{part}.weight", embed, heads)
        layer[f"b{name}"] = vector(f"{hf}attention.self.{part}.bias", heads, init="zeros")
    layer |= {
        "wo": matrix(f"{hf}attention.output.dense.weight", heads, embed),
        "bo": vector(f"{hf}attention.output.dense.bias", embed, init="zeros"),
        "w_up": matrix(f"{hf}intermediate.dense.weight", embed, ffw),
        "b_up": vector(f"{hf}intermediate.dense.bias", ffw, init="zeros"),
        "w_down": matrix(f"{hf}output.dense.weight", ffw, embed),
        "b_down": vector(f"{hf}output.dense.bias", embed, init="zeros"),
    }
    layer |= _norm_specs(f"{hf}attention.output.LayerNorm", embed, "attn_norm")
    layer |= _norm_specs(f"{hf}output.LayerNorm", embed, "ffw_norm")
    tables = {
        "embed": ("word", {"vocab": config.vocab_size}),
        "embed_position": ("position", {"positions": config.max_positions}),
        "embed_type": ("token_type", {"positions": config.num_types}),
    }
    return {
        name: embedding(f"embeddings.{part}_embeddings.weight", rows, config.model_dim)
        for name, (part, rows) in tables.items()
    } | {
        **_norm_specs("embeddings.LayerNorm", embed, "embed_norm"),
        "layers": param_table.stack(layer, config.num_layers),
    }


def load(
    directory: Path, *, dtype: jnp.dtype, mesh: jax.sharding.Mesh | None
) -> tuple[BertConfig, Params]:
    """An encoder from a Hugging Face directory, laid out on the mesh (None: the default device).

    Raises: FileNotFoundError for a missing file; ValueError for another architecture, a damaged
    file, or tensors other than the ones that config.json implies.
    """
    config = load_config(directory)
    table = param_specs(config)
    specs = param_table.flatten(table)
    stored = hf_tensors.find(directory)
    shapes = hf_tensors.wanted(specs, config.num_layers)
    hf_tensors.check(shapes, stored, directory, ignored=UNUSED_TENSORS)
    shardings = None if mesh is None else param_table.shardings(table, mesh)
    return config, hf_tensors.read(
        specs, config.num_layers, stored, dtype=dtype, shardings=shardings
    )


def _layer_norm(x: jax.Array, scale_D: jax.Array, bias_D: jax.Array, eps: float) -> jax.Array:
    """Layer norm over the last axis of [..., D], float32 inside, as x out."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    return (centred * inverse * scale_D + bias_D).astype(x.dtype)


def _attend(
    q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array, is_token_BT: jax.Array
) -> jax.Array:
    """Attention of every position to every token, [B, T, N, H]; softmax in float32."""
    scale = q_BTNH.shape[-1] ** -0.5
    score_BNTS = scale * jnp.einsum(
        "BTNH,BSNH->BNTS", q_BTNH, k_BTNH, preferred_element_type=jnp.float32
    )
    score_BNTS = jnp.where(is_token_BT[:, None, None], score_BNTS, jnp.finfo(jnp.float32).min)
    weight_BNTS = jnp.exp(score_BNTS - jnp.max(score_BNTS, axis=-1, keepdims=True))
    # heads before positions, divided last: XLA's CPU backend is three times as slow at the einsum
    # that puts positions first, and the division passes over [T, H], not [T, S]
    out_BNTH = jnp.einsum("BNTS,BSNH->BNTH", weight_BNTS.astype(v_BTNH.dtype), v_BTNH)
    out_BNTH = out_BNTH / jnp.sum(weight_BNTS, axis=-1, keepdims=True)
    return out_BNTH.astype(v_BTNH.dtype).transpose(0, 2, 1, 3)


def _layer(config: BertConfig, layer: Params, x_BTD: jax.Array, is_token_BT: jax.Array):
    def _linear(spec: str, x: jax.Array, name: str) -> jax.Array:
        """x times a weight plus its bias; all three shapes are spelled in the einsum's `spec`."""
        return jnp.einsum(spec, x, layer[f"w{name}"]) + layer[f"b{name}"]

    q, k, v = (_linear("BTD,DNH->BTNH", x_BTD, name) for name in ("q", "k", "v"))
    out_BTD = _linear("BTNH,NHD->BTD", _attend(q, k, v, is_token_BT), "o")
    x_BTD = _layer_norm(
        x_BTD + out_BTD, layer["attn_norm_scale"], layer["attn_norm_bias"], config.norm_eps
    )
    inner_BTF = jax.nn.gelu(_linear("BTD,DF->BTF", x_BTD, "_up"), approximate=False)
    out_BTD = _linear("BTF,FD->BTD", inner_BTF, "_down")
    return _layer_norm(
        x_BTD + out_BTD, layer["ffw_norm_scale"], layer["ffw_norm_bias"], config.norm_eps
    )


def hidden(
    params: Params, config: BertConfig, tokens_BT: jax.Array, is_token_BT: jax.Array
) -> jax.Array:
    """Last hidden states, [B, T, D]; what stands where `is_token_BT` is False means nothing.

    tokens_BT [B, T] int32, all of the first type, at positions from 0.
    Raises: ValueError at trace time if T exceeds the encoder's positions.
    """
    T = tokens_BT.shape[1]
    if config.max_positions < T:
        raise ValueError(f"{T} tokens in a row, but the encoder has {config.max_positions}")
    rows = ("batch", "length", "hidden")
    x_BTD = params["embed"][tokens_BT] + params["embed_position"][:T] + params["embed_type"][0]
    norm = params["embed_norm_scale"], params["embed_norm_bias"]
    x_BTD = sharding.constrain(_layer_norm(x_BTD, *norm, config.norm_eps), rows)

    def _body(x_BTD: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        return sharding.constrain(_layer(config, layer, x_BTD, is_token_BT), rows), None

    return jax.lax.scan(_body, x_BTD, params["layers"])[0]


def mean_pooled(hidden_BTD: jax.Array, is_token_BT: jax.Array) -> jax.Array:
    """Mean of each row's hidden states over its tokens, of norm 1, [B, D] float32; 0 if none."""
    kept_BTD = jnp.where(is_token_BT[..., None], hidden_BTD.astype(jnp.float32), 0.0)
    mean_BD = jnp.sum(kept_BTD, axis=1) / jnp.maximum(jnp.sum(is_token_BT, axis=1), 1)[:, None]
    return mean_BD / jnp.maximum(jnp.linalg.norm(mean_BD, axis=1, keepdims=True), 1e-12)
