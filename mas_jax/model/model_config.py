"""Architectures: what a model's weights depend on, and the published models by name.

Must not know: parameters, arrays, devices.
"""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama-3's RoPE scaling: wavelengths beyond the original context are stretched by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of one model; everything that its weights depend on and nothing else."""

    vocab_size: int
    num_layers: int
    model_dim: int
    ffw_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    max_positions: int
    rope_scaling: Llama3Scaling | None = None
    norm_eps: float = 1e-6
    qk_norm: bool = False
    qkv_bias: bool = False
    tied: bool = True
    value_head: bool = False


def _qwen3(layers: int, dim: int, ffw: int, heads: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=151936, num_layers=layers, model_dim=dim, ffw_dim=ffw, num_heads=heads,
        num_kv_heads=8, head_dim=128, rope_theta=1e6, max_positions=40960, qk_norm=True, tied=tied,
    )  # fmt: skip


def _qwen25(layers: int, dim: int, ffw: int, heads: int, kv_heads: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=151936, num_layers=layers, model_dim=dim, ffw_dim=ffw, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=128, rope_theta=1e6, max_positions=32768, qkv_bias=True,
    )  # fmt: skip


def _llama3(layers: int, dim: int, ffw: int, heads: int, factor: float) -> ModelConfig:
    return ModelConfig(
        vocab_size=128256, num_layers=layers, model_dim=dim, ffw_dim=ffw, num_heads=heads,
        num_kv_heads=8, head_dim=128, rope_theta=5e5, max_positions=131072,
        rope_scaling=Llama3Scaling(factor, 1.0, 4.0, 8192), norm_eps=1e-5,
    )  # fmt: skip


def _toy(layers: int, dim: int, ffw: int, heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=1024, num_layers=layers, model_dim=dim, ffw_dim=ffw, num_heads=heads,
        num_kv_heads=heads // 2, head_dim=head_dim, rope_theta=1e4, max_positions=4096,
        qk_norm=True,
    )  # fmt: skip


PRESETS: dict[str, ModelConfig] = {
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-4b-instruct-2507": dataclasses.replace(
        _qwen3(36, 2560, 9728, 32, tied=True), rope_theta=5e6, max_positions=262144
    ),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, tied=False),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40, tied=False),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64, tied=False),
    "qwen2.5-1.5b": _qwen25(28, 1536, 8960, 12, 2),
    "qwen2.5-3b": _qwen25(36, 2048, 11008, 16, 2),
    "qwen2.5-7b": dataclasses.replace(
        _qwen25(28, 3584, 18944, 28, 4), vocab_size=152064, tied=False
    ),
    "qwen2.5-math-7b": dataclasses.replace(
        _qwen25(28, 3584, 18944, 28, 4),
        vocab_size=152064, tied=False, rope_theta=1e4, max_positions=4096,
    ),
    "llama-3.2-1b": dataclasses.replace(_llama3(16, 2048, 8192, 32, 32.0), head_dim=64),
    "llama-3.2-3b": _llama3(28, 3072, 8192, 24, 32.0),
    "llama-3.1-8b": dataclasses.replace(_llama3(32, 4096, 14336, 32, 8.0), tied=False),
    "smollm2-135m": ModelConfig(
        vocab_size=49152, num_layers=30, model_dim=576, ffw_dim=1536, num_heads=9, num_kv_heads=3,
        head_dim=64, rope_theta=1e5, max_positions=8192, norm_eps=1e-5,
    ),
    "toy-300k": _toy(4, 64, 192, 4, 32),
    "toy-1m": _toy(4, 128, 384, 4, 32),
    "toy-1m-qwen2.5": dataclasses.replace(
        _toy(4, 128, 384, 4, 32), qk_norm=False, qkv_bias=True
    ),
    "toy-30m": _toy(8, 512, 1792, 8, 64),
}  # fmt: skip
