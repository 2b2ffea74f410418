"""Random tiny models of `transformers`, one of each kind that `hf.py` reads, and their files."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.torch
import torch
import transformers

from mas_jax.model import qwen3

# torch's threads spin: beside other work on two cores, two take up to ten times as long as one
torch.set_num_threads(1)

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def _sizes(hidden: int, heads: int, kv_heads: int, theta: float, *, tied: bool) -> dict:
    return {
        "vocab_size": 97, "hidden_size": hidden, "intermediate_size": 72, "num_hidden_layers": 3,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": tied,
        "max_position_embeddings": 65536,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }  # fmt: skip


# name -> config class and settings; the comments give the query heads per key/value head
FAMILIES = {
    # 5, heads wider than the model
    "qwen3": (transformers.Qwen3Config, _sizes(40, 10, 2, 1e6, tied=True) | {"head_dim": 16}),
    # 8
    "qwen3-untied": (transformers.Qwen3Config, _sizes(32, 8, 1, 5e6, tied=False) | {"head_dim": 8}),
    # 6
    "qwen2": (transformers.Qwen2Config, _sizes(48, 6, 1, 1e6, tied=True)),
    # 7
    "qwen2-untied": (transformers.Qwen2Config, _sizes(56, 7, 1, 1e4, tied=False)),
    # 1
    "llama": (transformers.LlamaConfig, _sizes(48, 4, 4, 1e4, tied=False)),
    # 4, heads wider than the model
    "llama3": (
        transformers.LlamaConfig,
        _sizes(48, 4, 1, 5e5, tied=True)
        | {"head_dim": 32, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA3_ROPE},
    ),
    # 2
    "llama3-untied": (
        transformers.LlamaConfig,
        _sizes(64, 4, 2, 5e5, tied=False)
        | {"rms_norm_eps": 1e-5, "rope_parameters": LLAMA3_ROPE | {"factor": 8.0}},
    ),
    # 3, an odd number of heads
    "smollm2": (
        transformers.LlamaConfig,
        _sizes(72, 9, 3, 1e5, tied=True) | {"rms_norm_eps": 1e-5},
    ),
}


def random_model(family: str, *, seed: int = 0, **changes: object) -> torch.nn.Module:
    """Model of `FAMILIES[family]` with `changes`, float32, every parameter random, biases too."""
    config_class, settings = FAMILIES[family]
    settings = {**settings, **changes}
    settings["rope_parameters"] = dict(settings["rope_parameters"])  # transformers edits it
    model = transformers.AutoModelForCausalLM.from_config(
        config_class(**settings), attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif "embed_tokens" in name or name.endswith(".bias"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
    return model.eval()


def save_families(root: Path) -> dict[str, Path]:
    """Writes each family's random model in float32; returns their directories."""
    directories = {name: root / name for name in FAMILIES}
    for name, directory in directories.items():
        random_model(name).save_pretrained(directory)
    return directories


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, read by the safetensors library."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= safetensors.torch.load_file(path)
    return tensors


def assert_same_bits(ours: dict, theirs: dict) -> None:
    """Two checkpoints, as `read_tensors` gives them, hold the same tensors."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape, name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


def edit_json(path: Path, **changes: object) -> None:
    """Sets keys of a JSON file; the value `...` removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def constant_params(config: qwen3.ModelConfig, dtype: jnp.dtype) -> dict:
    """Parameters that are all 1."""
    return jax.tree.map(lambda s: jnp.ones(s.shape, dtype), qwen3.param_specs(config))


def assert_same_params(ours: dict, theirs: dict) -> None:
    """Two parameter pytrees hold the same values, and have the same structure."""
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
