"""Small engines and a full-forward reference for the engine's tests."""

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from mas_jax.model import qwen3
from mas_jax.records import SampleKey, Stop
from mas_jax.sampling.engine import Engine
from mas_jax.sampling.engine_settings import EngineSettings

CONFIG = dataclasses.replace(
    qwen3.PRESETS["toy-1m"], vocab_size=96, num_layers=2, model_dim=32, ffw_dim=48, head_dim=16
)
SETTINGS = EngineSettings(
    context=64, buckets=(32, 64), num_pages=600, page_size=4, prefill_blocks=16, decode_rows=8,
    decode_steps=4,
)  # fmt: skip


@functools.cache
def make_params(seed: int = 0) -> qwen3.Params:
    """Random weights, spread out so that greedy continuations differ between prompts."""
    params = qwen3.init(CONFIG, jax.random.key(seed), dtype=jnp.float32)
    return params | {"embed": params["embed"] * 20}


def decode(tokens: list[int]) -> str:
    """Token i is the character after the i-th printable one."""
    return "".join(chr(32 + token) for token in tokens)


PROGRAMS = {}  # compiled once for each settings and mesh; a program holds no state


def make_engine(settings: EngineSettings = SETTINGS, seed: int = 0, mesh=None) -> Engine:
    """An engine of policy "student", with the programs that were compiled for an equal one."""
    params = make_params(seed)
    if mesh is not None:
        params = jax.device_put(params, qwen3.param_shardings(CONFIG, mesh))
    engine = Engine(CONFIG, params, settings, policy="student", decode=decode, mesh=mesh)
    engine.device._programs = PROGRAMS.setdefault((settings, mesh), {})
    return engine


def key(question: str = "q", rollout: int = 0, turn: int = 0) -> SampleKey:
    return SampleKey(0, "eval", 0, question, rollout, "searcher", turn)


REQUEST = dict(
    policy="student", n=1, max_tokens=12, temperature=1.0, top_p=1.0, top_k=0, stop=Stop()
)


async def sample(engine: Engine, prompt, question: str = "q", **changes):
    """One request with the defaults above."""
    knobs = REQUEST | {"key": key(question)} | changes
    return await engine.sample(tuple(prompt), **knobs)


def run(*coroutines):
    """Results of coroutines that run together."""

    async def _together():
        return await asyncio.gather(*coroutines)

    return asyncio.run(_together())


def make_prompts(lengths, seed: int = 1) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, CONFIG.vocab_size, n).tolist()) for n in lengths]


@functools.partial(jax.jit, static_argnames="length")
def _logits(params, tokens_BT, length):
    return qwen3.logits(params, CONFIG, tokens_BT)


def full_forward(tokens, seed: int = 0) -> np.ndarray:
    """Log-probs [T, V] over each next token, from one full forward pass, padded to one shape."""
    padded = np.zeros((1, SETTINGS.context), np.int32)
    padded[0, : len(tokens)] = tokens
    logits_BTV = _logits(make_params(seed), padded, SETTINGS.context)
    return np.asarray(jax.nn.log_softmax(logits_BTV[0]))[: len(tokens)]
