"""`config.json` of a Hugging Face checkpoint <-> `ModelConfig`, for transformers 4 and 5.

The two generations write the rotary settings differently: 4 has `rope_theta` and `rope_scaling` at
the top level, 5 nests both in `rope_parameters`. Both are read, and both are written.
Must not know: tensors, files other than JSON.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from mas_jax.model.qwen3 import Llama3Scaling, ModelConfig


@dataclass(frozen=True)
class _Family:
    """What a `model_type` fixes; `head_dim`: what transformers assumes if config.json has none."""

    architecture: str
    qk_norm: bool
    qkv_bias: bool
    head_dim: int | None


FAMILIES = {
    "qwen3": _Family("Qwen3ForCausalLM", qk_norm=True, qkv_bias=False, head_dim=128),
    "qwen2": _Family("Qwen2ForCausalLM", qk_norm=False, qkv_bias=True, head_dim=None),
    "llama": _Family("LlamaForCausalLM", qk_norm=False, qkv_bias=False, head_dim=None),
}

# what transformers assumes where config.json does not say
_ABSENT = {
    "model_type": None, "architectures": None, "num_key_value_heads": None, "head_dim": None,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "quantization_config": None,
    "rope_theta": None, "rope_scaling": None, "rope_parameters": None,
    "partial_rotary_factor": None, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28, "layer_types": None,
}  # fmt: skip

_LLAMA3_KEYS = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
)  # fmt: skip

_TOKEN_KINDS = ("bos", "eos", "pad")


def read_json(path: Path) -> dict:
    """The object in a JSON file. Raises: FileNotFoundError; ValueError if it holds no object."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the directory of an HF checkpoint")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: wanted a JSON object, got {type(content).__name__}")
    return content


def load_config(directory: str | Path) -> ModelConfig:
    """Architecture described by `directory`/config.json.

    Raises: FileNotFoundError without the file; ValueError for an architecture or a setting that
    `qwen3.py` does not compute (sliding windows, attention or MLP biases, other rotary scalings).
    """
    path = Path(directory) / "config.json"
    return config_from_hf(read_json(path), where=str(path))


def config_from_hf(settings: dict, *, where: str) -> ModelConfig:
    """Architecture described by the content of a config.json; `where` names it in errors."""
    settings = {**_ABSENT, **settings}
    if settings["model_type"] not in FAMILIES:
        raise ValueError(
            f"{where}: model_type={settings['model_type']!r} is not supported, wanted one of "
            f"{sorted(FAMILIES)}; use a checkpoint of one of these families"
        )
    family = FAMILIES[settings["model_type"]]
    num_layers = _count(settings, "num_hidden_layers", where)
    num_heads = _count(settings, "num_attention_heads", where)
    model_dim = _count(settings, "hidden_size", where)
    _refuse_unsupported(settings, family, num_layers, where)
    if settings["head_dim"] is not None:
        head_dim = _count(settings, "head_dim", where)
    elif family.head_dim is not None:
        head_dim = family.head_dim
    elif model_dim % num_heads == 0:
        head_dim = model_dim // num_heads
    else:
        raise ValueError(
            f"{where}: no head_dim, and hidden_size={model_dim} is not a multiple of "
            f"num_attention_heads={num_heads}; add head_dim"
        )
    no_groups = settings["num_key_value_heads"] is None
    rope_theta, rope_scaling = _rope(settings, where)
    return ModelConfig(
        vocab_size=_count(settings, "vocab_size", where),
        num_layers=num_layers,
        model_dim=model_dim,
        ffw_dim=_count(settings, "intermediate_size", where),
        num_heads=num_heads,
        num_kv_heads=num_heads if no_groups else _count(settings, "num_key_value_heads", where),
        head_dim=head_dim,
        rope_theta=rope_theta,
        max_positions=_count(settings, "max_position_embeddings", where),
        rope_scaling=rope_scaling,
        norm_eps=float(settings["rms_norm_eps"]),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        tied=bool(settings["tie_word_embeddings"]),
    )


def _count(settings: dict, key: str, where: str) -> int:
    """A size that must be there; JSON has no integers, so 28.0 or "28" would get this far."""
    if key not in settings:
        raise ValueError(f"{where}: {key} is missing; wanted a positive integer")
    value = settings[key]
    if type(value) is not int or value < 1:
        raise ValueError(f"{where}: {key}={value!r}, wanted a positive integer")
    return value


def _refuse_unsupported(settings: dict, family: _Family, num_layers: int, where: str) -> None:
    """Raises ValueError for the first setting that would make our forward pass another function."""
    layer_types = settings["layer_types"]
    if layer_types is not None:
        windowed = any(kind != "full_attention" for kind in layer_types)
    else:
        windowed = (
            settings["use_sliding_window"]
            and settings["sliding_window"] is not None
            and settings["max_window_layers"] < num_layers
        )
    architectures = settings["architectures"]
    # Qwen2 always has biases on q, k and v, whatever attention_bias says
    biased = settings["attention_bias"] and not family.qkv_bias
    rotary_frac = settings["partial_rotary_factor"]
    named = not architectures or family.architecture in architectures
    checks = (
        ("architectures", named, f"[{family.architecture!r}]"),
        ("layer_types" if layer_types else "use_sliding_window", not windowed, "full attention"),
        ("attention_bias", not biased, "false"),
        ("mlp_bias", not settings["mlp_bias"], "false"),
        ("hidden_act", settings["hidden_act"] == "silu", "'silu'"),
        ("partial_rotary_factor", rotary_frac is None or rotary_frac == 1, "1.0"),
        ("quantization_config", settings["quantization_config"] is None, "float weights"),
    )
    for key, supported, wanted in checks:
        if not supported:
            raise ValueError(
                f"{where}: {key}={settings[key]!r} is not supported, wanted {wanted}; use another "
                "checkpoint or teach mas_jax/model/qwen3.py this setting"
            )


def _rope(settings: dict, where: str) -> tuple[float, Llama3Scaling | None]:
    """Base and scaling of the rotary embedding, from wherever either generation keeps them."""
    rope = {}
    for source in (
        settings["rope_parameters"],
        settings["rope_scaling"],
        {"rope_theta": settings["rope_theta"]},
    ):
        for key, value in (source or {}).items():
            name = "rope_type" if key == "type" else key  # "type": before transformers 4.45
            if value is not None and rope.setdefault(name, value) != value:
                raise ValueError(
                    f"{where}: {name} is {rope[name]!r} in one place and {value!r} in another of "
                    "rope_parameters, rope_scaling and rope_theta; make them agree"
                )
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, **rope}
    scaled = rope["rope_type"] == "llama3"
    known = {"rope_type", "rope_theta", "partial_rotary_factor", *(_LLAMA3_KEYS if scaled else ())}
    if rope["rope_type"] not in ("default", "llama3") or rope["partial_rotary_factor"] != 1:
        raise ValueError(
            f"{where}: rotary settings {rope} are not supported, wanted rope_type 'default' or "
            "'llama3' over the whole head; use another checkpoint or extend "
            "qwen3.rotary_frequencies"
        )
    if rope.keys() != known:
        raise ValueError(
            f"{where}: rope_type {rope['rope_type']!r} wants the settings {sorted(known)}, got "
            f"{sorted(rope)}; add what is missing, remove the rest"
        )
    if not scaled:
        return float(rope["rope_theta"]), None
    factor, low, high, original = (rope[key] for key in _LLAMA3_KEYS)
    scaling = Llama3Scaling(float(factor), float(low), float(high), int(original))
    return float(rope["rope_theta"]), scaling


def model_type(config: ModelConfig) -> str:
    """Name that transformers gives the family of `config`. Raises: ValueError if it has none."""
    for name, family in FAMILIES.items():
        if (family.qk_norm, family.qkv_bias) == (config.qk_norm, config.qkv_bias):
            return name
    raise ValueError(
        f"no Hugging Face architecture has both qk_norm={config.qk_norm} and "
        f"qkv_bias={config.qkv_bias}; only Qwen3 (norm), Qwen2 (bias) and Llama (neither) can be "
        "exported"
    )


def config_to_hf(config: ModelConfig, *, dtype: str, token_ids: dict) -> dict:
    """Settings of the config.json that describes `config`, for transformers 4 and 5 alike.

    dtype: name of the weights' type, as in "bfloat16". token_ids: see `find_token_ids`.
    """
    name = model_type(config)
    rope = {"rope_type": "default"}
    if config.rope_scaling is not None:
        s = config.rope_scaling
        values = (s.factor, s.low_freq_factor, s.high_freq_factor, s.original_max_positions)
        rope = {"rope_type": "llama3", **dict(zip(_LLAMA3_KEYS, values, strict=True))}
    if name == "llama":
        # without these transformers would give it the ids of Llama-2: bos 1 and eos 2
        extra = {"mlp_bias": False, "bos_token_id": None, "eos_token_id": None}
    else:
        windows = {"sliding_window": None, "max_window_layers": config.num_layers}
        extra = {"use_sliding_window": False, **windows}
    if not config.qkv_bias:
        extra["attention_bias"] = False
    return {
        "architectures": [FAMILIES[name].architecture],
        "model_type": name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "intermediate_size": config.ffw_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied,
        "attention_dropout": 0.0,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
        **extra,
        **token_ids,
    }


def find_token_ids(tokenizer_dir: Path, *, vocab_size: int) -> dict[str, int | list[int]]:
    """`bos_token_id`, `eos_token_id`, `pad_token_id` of a tokenizer's directory, where it has them.

    The directory's config.json wins (it may list several stop tokens); else the token named in
    tokenizer_config.json is looked up in the vocabulary.
    Raises: ValueError if a named token is not in the vocabulary, or an id not below `vocab_size`.
    """
    names = {
        **dict.fromkeys(f"{kind}_token" for kind in _TOKEN_KINDS),
        **_read_optional(tokenizer_dir / "special_tokens_map.json"),
        **_read_optional(tokenizer_dir / "tokenizer_config.json"),
    }
    known = {
        **dict.fromkeys(f"{kind}_token_id" for kind in _TOKEN_KINDS),
        **_read_optional(tokenizer_dir / "config.json"),
    }
    vocabulary = None
    found = {}
    for kind in _TOKEN_KINDS:
        ids, token = known[f"{kind}_token_id"], names[f"{kind}_token"]
        if ids is None and token is not None:
            vocabulary = _vocabulary(tokenizer_dir) if vocabulary is None else vocabulary
            text = token["content"] if isinstance(token, dict) else token
            if text not in vocabulary:
                raise ValueError(
                    f"{tokenizer_dir}: {kind}_token {text!r} is in none of the vocabulary files; "
                    f"add {kind}_token_id to a config.json there"
                )
            ids = vocabulary[text]
        if ids is None:
            continue
        largest = max(ids) if isinstance(ids, list) else ids
        if largest >= vocab_size:
            raise ValueError(
                f"{tokenizer_dir}: {kind}_token_id={ids} does not fit vocab_size={vocab_size}; "
                "this tokenizer belongs to another model"
            )
        found[f"{kind}_token_id"] = ids
    return found


def _read_optional(path: Path) -> dict:
    return read_json(path) if path.is_file() else {}


def _vocabulary(tokenizer_dir: Path) -> dict[str, int]:
    """Id of each token text, special tokens included, from every file that may hold some."""
    vocabulary = {
        **_read_optional(tokenizer_dir / "vocab.json"),
        **_read_optional(tokenizer_dir / "added_tokens.json"),
    }
    settings = _read_optional(tokenizer_dir / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        for token_id, entry in settings["added_tokens_decoder"].items():
            vocabulary[entry["content"]] = int(token_id)
    tokenizer = _read_optional(tokenizer_dir / "tokenizer.json")
    if "added_tokens" in tokenizer:
        for entry in tokenizer["added_tokens"]:
            vocabulary[entry["content"]] = entry["id"]
    return vocabulary
