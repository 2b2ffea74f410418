"""The transformer of the Qwen3, Qwen2.5 and Llama-3 families: pure functions of one pytree.

What differs between the families is configuration: QK-norm (Qwen3), QKV bias (Qwen2.5), RoPE
scaling (Llama-3). `param_specs` is the one table of parameters; init, shardings, import, export,
counts and decay masks all derive from it. Layers are stacked on a leading axis and run under
`lax.scan`.

Dimensions: B rows, T positions, D model, F ffw, V vocabulary, N query heads, K key/value heads,
H head dim, L layers. Must not know: roles, episodes, losses.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from mas_jax.model import attention, int8, param_table, sharding
from mas_jax.model.model_config import PRESETS as PRESETS
from mas_jax.model.model_config import Llama3Scaling as Llama3Scaling
from mas_jax.model.model_config import ModelConfig as ModelConfig
from mas_jax.model.param_table import Params as Params
from mas_jax.model.param_table import ParamSpec as ParamSpec
from mas_jax.model.param_table import embedding, matrix, vector

PRODUCT = "product"  # results of a layer's matmuls


def _layer_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    """Specs of one layer, without the stacking axis."""
    hf = "model.layers.{layer}."
    embed, ffw = {"embed": config.model_dim}, {"ffw": config.ffw_dim}
    queries = {"heads": config.num_heads, "head_dim": config.head_dim}
    keys = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    head = {"head_dim": config.head_dim}
    specs = {
        "attn_norm": vector(hf + "input_layernorm.weight", embed, init="ones"),
        "wq": matrix(hf + "self_attn.q_proj.weight", embed, queries),
        "wk": matrix(hf + "self_attn.k_proj.weight", embed, keys),
        "wv": matrix(hf + "self_attn.v_proj.weight", embed, keys),
        "wo": matrix(hf + "self_attn.o_proj.weight", queries, embed),
        "ffw_norm": vector(hf + "post_attention_layernorm.weight", embed, init="ones"),
        "w_gate": matrix(hf + "mlp.gate_proj.weight", embed, ffw),
        "w_up": matrix(hf + "mlp.up_proj.weight", embed, ffw),
        "w_down": matrix(hf + "mlp.down_proj.weight", ffw, embed),
    }
    if config.qk_norm:
        specs["q_norm"] = vector(hf + "self_attn.q_norm.weight", head, init="ones")
        specs["k_norm"] = vector(hf + "self_attn.k_norm.weight", head, init="ones")
    if config.qkv_bias:
        specs["bq"] = vector(hf + "self_attn.q_proj.bias", queries, init="zeros")
        specs["bk"] = vector(hf + "self_attn.k_proj.bias", keys, init="zeros")
        specs["bv"] = vector(hf + "self_attn.v_proj.bias", keys, init="zeros")
    return specs


def param_specs(config: ModelConfig) -> dict:
    """The table of parameters: a nested dict like the pytree of arrays, with `ParamSpec` leaves.

    Raises: ValueError if `num_heads` is not a multiple of `num_kv_heads` or `head_dim` is odd.
    """
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_heads={config.num_heads} is not a multiple of num_kv_heads={config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim} is odd; rotary embeddings pair dimensions")
    vocab, embed = {"vocab": config.vocab_size}, {"embed": config.model_dim}
    specs = {
        "embed": embedding("model.embed_tokens.weight", vocab, config.model_dim),
        "layers": param_table.stack(_layer_specs(config), config.num_layers),
        "final_norm": vector("model.norm.weight", embed, init="ones"),
    }
    if not config.tied:
        specs["unembed"] = embedding("lm_head.weight", vocab, config.model_dim)
    if config.value_head:
        specs["value_head"] = vector(None, embed, init="zeros")
    return specs


def flat_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    """`param_specs` by path, as in `layers/wq`."""
    return param_table.flatten(param_specs(config))


def param_count(config: ModelConfig) -> int:
    """Number of parameters; a tied embedding counts once."""
    return param_table.count(param_specs(config))


def decay_mask(config: ModelConfig) -> dict:
    """Pytree of bools: True where weight decay applies (matrices, not norms or biases)."""
    return jax.tree.map(lambda s: s.decay, param_specs(config))


def param_shardings(config: ModelConfig, mesh: jax.sharding.Mesh) -> dict:
    """Pytree of `NamedSharding`. Raises: ValueError where a size does not divide."""
    return param_table.shardings(param_specs(config), mesh)


def init(config: ModelConfig, key: jax.Array, *, dtype: jnp.dtype) -> Params:
    """Random parameters of the table's shapes; values depend on `key` and a parameter's path alone.

    For a model larger than a device, jit it with `out_shardings=param_shardings(config, mesh)`.
    """
    return param_table.init(param_specs(config), key, dtype=dtype)


def positions_from_segments(segment_ids_BT: jax.Array) -> jax.Array:
    """Position of each token inside its segment, [B, T] int32; runs of equal ids start at 0."""
    index_T = jnp.arange(segment_ids_BT.shape[1], dtype=jnp.int32)
    changed_BT = segment_ids_BT != jnp.roll(segment_ids_BT, 1, axis=1)
    start_BT = jnp.where(changed_BT.at[:, 0].set(True), index_T, 0)
    return index_T - jax.lax.cummax(start_BT, axis=1)


def rms_norm(x: jax.Array, scale: jax.Array, *, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis: x [..., D], scale [D]; float32 inside, as x out."""
    return _rms_norm(x, scale, eps)


@functools.partial(jax.checkpoint, static_argnums=2, prevent_cse=False)
def _rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`rms_norm` of shapes [..., D] and [D], made again in the backward pass."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * inverse * scale.astype(jnp.float32)).astype(x.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False)
def _swiglu(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    """silu(gate) * up, [B, T, F]; the backward pass keeps the two inputs and nothing between."""
    return jax.nn.silu(gate_BTF) * up_BTF


def _project(spec: str, x: jax.Array, weight: jax.Array | int8.Int8) -> jax.Array:
    """A projection of x, any shapes, in x's dtype, by a matrix or by what a sampler holds of it."""
    if isinstance(weight, int8.Int8):
        return int8.einsum(spec, x, weight)
    return _matmul(spec, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """`jnp.einsum(spec, x, weight)` in x's dtype, any shapes, with x on the left in the weight's
    gradient, which is float32 until it takes the weight's own dtype.

    Autodiff puts the cotangent on the left of the weight's gradient; XLA on CPUs then writes the
    (wider) cotangent out transposed, a third of a small model's backward pass.
    """
    return jnp.einsum(spec, x, weight.astype(x.dtype))


def _matmul_fwd(spec, x, weight):
    return _matmul(spec, x, weight), (x, weight)


def _matmul_bwd(spec, residuals, dout):
    x, weight = residuals
    operands, out_axes = spec.split("->")
    x_axes, weight_axes = operands.split(",")
    dx = jnp.einsum(f"{out_axes},{weight_axes}->{x_axes}", dout, weight.astype(x.dtype))
    dweight = jnp.einsum(
        f"{x_axes},{out_axes}->{weight_axes}", x, dout, preferred_element_type=jnp.float32
    )
    return dx, dweight.astype(weight.dtype)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _product(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """`_project` of any shapes, named so that `REMAT_POLICIES` can keep it: they see no matmul
    inside a function with a gradient of its own."""
    return checkpoint_name(_project(spec, x, weight), PRODUCT)


def rotary_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle in radians per position of each rotary pair, [H/2] float32.

    A constant of the config, made in numpy: XLA's `pow` is off by one unit in the last place here
    and there, which at position 30,000 turns the angle by 2e-3.
    Source: RoFormer (arXiv 2104.09864); Llama-3 scaling as in transformers `modeling_rope_utils`.
    """
    pair = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequency = 1.0 / (config.rope_theta ** pair.astype(np.float64)).astype(np.float32)
    s = config.rope_scaling
    if s is None:
        return frequency
    turns = s.original_max_positions / (2 * np.pi / frequency)
    # 1 where a pair turns often inside the original context (kept), 0 where rarely (stretched)
    keep = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * frequency + (1.0 - keep) * frequency / s.factor


def rotary(config: ModelConfig, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the rotary angles, each [B, T, 1, H/2] float32."""
    angle = positions_BT.astype(jnp.float32)[..., None, None] * rotary_frequencies(config)
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x_BTNH: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Float32 inside. Halves are taken and joined in x's dtype: XLA for TPUs fuses neither with the
    arithmetic, so between them all of it would be written out in float32."""
    cos, sin = cos_sin
    first, second = (half.astype(jnp.float32) for half in jnp.split(x_BTNH, 2, axis=-1))
    rotated = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate([half.astype(x_BTNH.dtype) for half in rotated], axis=-1)


def fuse_layer(layer: Params) -> Params:
    """One layer's parameters with what reads the same input side by side: `wqkv` [D, N+2K, H] (and
    `bqkv`), `w_gate_up` [D, 2F]. For few rows on one device, where matmuls are bound by their
    number; `project_qkv` and `finish_layer` take either form.
    """
    parts = {"wqkv": ("wq", "wk", "wv"), "w_gate_up": ("w_gate", "w_up")}
    if "bq" in layer:
        parts["bqkv"] = ("bq", "bk", "bv")

    def _join(*arrays: jax.Array, name: str) -> jax.Array:
        """Joined along the outputs: axis 1 of matrices [D, ...], axis 0 of biases [N, H]."""
        return jnp.concatenate(arrays, axis=0 if name == "bqkv" else 1)

    fused = {
        name: jax.tree.map(functools.partial(_join, name=name), *[layer[part] for part in of])
        for name, of in parts.items()
    }
    taken = {part for of in parts.values() for part in of}
    return {name: x for name, x in layer.items() if name not in taken} | fused


def project_qkv(
    layer: Params, config: ModelConfig, x_BTD: jax.Array, cos_sin: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """First half of a layer: normalised, projected and rotated q [B,T,N,H], k and v [B,T,K,H].

    `layer` holds one layer's parameters; attention over them is the caller's (dense, or paged).
    """
    dtype = x_BTD.dtype
    normed_BTD = rms_norm(x_BTD, layer["attn_norm"], eps=config.norm_eps)

    def _linear(weight: str, bias: str) -> jax.Array:
        y = _product("BTD,DNH->BTNH", normed_BTD, layer[weight])
        return y + layer[bias].astype(dtype) if config.qkv_bias else y

    if "wqkv" in layer:
        ends = config.num_heads, config.num_heads + config.num_kv_heads
        q_BTNH, k_BTKH, v_BTKH = jnp.split(_linear("wqkv", "bqkv"), ends, axis=2)
    else:
        q_BTNH, k_BTKH, v_BTKH = _linear("wq", "bq"), _linear("wk", "bk"), _linear("wv", "bv")
    if config.qk_norm:
        q_BTNH = rms_norm(q_BTNH, layer["q_norm"], eps=config.norm_eps)
        k_BTKH = rms_norm(k_BTKH, layer["k_norm"], eps=config.norm_eps)
    return _rotate(q_BTNH, cos_sin), _rotate(k_BTKH, cos_sin), v_BTKH


def finish_layer(
    layer: Params, config: ModelConfig, x_BTD: jax.Array, attended_BTNH: jax.Array
) -> jax.Array:
    """Second half of a layer: output projection and gated feed-forward, residuals; [B, T, D]."""
    x_BTD = x_BTD + _product("BTNH,NHD->BTD", attended_BTNH, layer["wo"])
    normed_BTD = rms_norm(x_BTD, layer["ffw_norm"], eps=config.norm_eps)
    if "w_gate_up" in layer:
        both_BTF = _product("BTD,DF->BTF", normed_BTD, layer["w_gate_up"])
        gate_BTF, up_BTF = jnp.split(both_BTF, 2, axis=2)
    else:
        gate_BTF = _product("BTD,DF->BTF", normed_BTD, layer["w_gate"])
        up_BTF = _product("BTD,DF->BTF", normed_BTD, layer["w_up"])
    inner_BTF = _swiglu(gate_BTF, up_BTF)
    return x_BTD + _product("BTF,FD->BTD", inner_BTF, layer["w_down"])


# norms and the gate are recomputed under every policy: reading them back would cost more
REMAT_POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def hidden(
    params: Params,
    config: ModelConfig,
    tokens_BT: jax.Array,
    *,
    positions_BT: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
    dtype: jnp.dtype = jnp.float32,
    remat: str = "none",
    backend: str = "auto",
) -> jax.Array:
    """Hidden states after the final norm, [B, T, D] in `dtype`; entry t predicts token t + 1.

    Attention is causal in the row and never crosses a segment; id 0 marks padding by convention.
    segment_ids_BT [B, T] int: default one segment a row; an id may not come back after another.
    positions_BT [B, T] int: default the place inside the segment. remat: what the backward pass
    recomputes, a key of `REMAT_POLICIES`.
    backend: an attention backend of `attention.BACKENDS`, or "auto" by platform.
    Raises: ValueError for an unknown `remat` or an impossible `backend`.
    """
    if remat not in REMAT_POLICIES:
        raise ValueError(f"remat={remat!r} is unknown; choose one of {sorted(REMAT_POLICIES)}")
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones(tokens_BT.shape, jnp.int32)
    if positions_BT is None:
        positions_BT = positions_from_segments(segment_ids_BT)
    cos_sin = rotary(config, positions_BT)
    activation = ("batch", "length", "hidden")

    def _body(x_BTD: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        q_BTNH, k_BTKH, v_BTKH = project_qkv(layer, config, x_BTD, cos_sin)
        attended_BTNH = attention.attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, backend=backend)
        x_BTD = finish_layer(layer, config, x_BTD, attended_BTNH)
        return sharding.constrain(x_BTD, activation), None

    policy = REMAT_POLICIES[remat]
    body = _body if policy is None else jax.checkpoint(_body, policy=policy, prevent_cse=False)
    x_BTD = params["embed"][tokens_BT].astype(dtype)  # the gradient adds up in the table's type
    x_BTD, _ = jax.lax.scan(body, sharding.constrain(x_BTD, activation), params["layers"])
    return rms_norm(x_BTD, params["final_norm"], eps=config.norm_eps)


def unembedding(params: Params, config: ModelConfig) -> jax.Array:
    """Output head [V, D]; the embedding itself where the two are tied."""
    return params["embed"] if config.tied else params["unembed"]


def logits(
    params: Params,
    config: ModelConfig,
    tokens_BT: jax.Array,
    *,
    positions_BT: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
    dtype: jnp.dtype = jnp.float32,
    remat: str = "none",
    backend: str = "auto",
) -> jax.Array:
    """Next-token logits [B, T, V], float32 accumulation and result; arguments as in `hidden`.

    For small work and tests: `logprobs.py` never holds this array.
    """
    hidden_BTD = hidden(
        params, config, tokens_BT,
        positions_BT=positions_BT, segment_ids_BT=segment_ids_BT,
        dtype=dtype, remat=remat, backend=backend,
    )  # fmt: skip
    unembed_VD = unembedding(params, config).astype(dtype)
    return jnp.einsum("BTD,VD->BTV", hidden_BTD, unembed_VD, preferred_element_type=jnp.float32)


def values(params: Params, hidden_BTD: jax.Array) -> jax.Array:
    """Critic's value of each position, [B, T] float32; needs a config with `value_head=True`."""
    weight_D = params["value_head"].astype(jnp.float32)
    return jnp.einsum("BTD,D->BT", hidden_BTD.astype(jnp.float32), weight_D)
