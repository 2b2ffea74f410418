"""Several engines of one policy, one a device or mesh, behind one `sample`.

All requests of a question go to the same engine, which shares their prefixes. Which engine that is
changes no token: on one kind of device a request draws the same tokens everywhere. On CPUs an
engine's small matmuls keep one core busy, so that two virtual devices serve two cores.
Must not know: models, roles, prompts.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mas_jax.model import qwen3, sharding
from mas_jax.records import Sample, SampleKey
from mas_jax.sampling import calls
from mas_jax.sampling.engine import Engine


class Replicas:
    """Engines of equal settings. Raises: ValueError for none, or for unequal ones."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        if len({(engine.policy, engine.settings) for engine in engines}) != 1:
            raise ValueError("replicas must be engines of one policy with equal settings, got "
                             f"{[engine.policy for engine in engines]}")  # fmt: skip
        self.engines = tuple(engines)

    async def sample(
        self, prompt: tuple[int, ...], *, key: SampleKey, **knobs: Any
    ) -> list[Sample]:
        """`Engine.sample` of the question's engine."""
        engine = self.engines[zlib.crc32(key.question.encode()) % len(self.engines)]
        return await engine.sample(prompt, key=key, **knobs)

    def set_params(self, params: qwen3.Params) -> None:
        """`Engine.set_params` of all; a collective if the parameters lie on several hosts."""
        meshes = [engine.device.mesh for engine in self.engines]
        if None in meshes:  # one device: each engine takes them as they lie
            parts = [params] * len(self.engines)
        else:
            config = self.engines[0].config
            params = {name: value for name, value in params.items() if name != "value_head"}
            params = self._in_use(params)  # before it moves: half of the bytes, or a quarter
            parts = sharding.on_each(
                params, meshes, lambda mesh: calls.shardings(params, config, mesh)
            )
        for engine, part in zip(self.engines, parts, strict=True):
            engine.set_params(part)

    @functools.cached_property
    def _in_use(self) -> Callable[[qwen3.Params], qwen3.Params]:
        """Compiled: matrices as the engines read them, where they lie."""
        config, settings = self.engines[0].config, self.engines[0].settings
        return jax.jit(lambda params: calls.in_use(params, config, settings))

    @property
    def metrics(self) -> dict[str, float]:
        """Sums over the engines of their metrics, their schedulers' counts and how often weights
        were replaced; device_s: seconds in which an engine computes, calls under way included, in
        the mean over them, since they work at once."""
        counts = [
            dataclasses.asdict(engine.metrics)
            | {
                "prompt_tokens": engine.scheduler.num_prompt_tokens,
                "shared_tokens": engine.scheduler.num_shared_tokens,
                "preemptions": engine.scheduler.num_preemptions,
                "replacements": engine.num_replacements,
            }
            for engine in self.engines
        ]
        sums = {name: sum(count[name] for count in counts) for name in counts[0]}
        device_s = sum(engine.device.busy_s for engine in self.engines) / len(counts)
        return sums | {"device_s": device_s}
