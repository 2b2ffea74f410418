"""Several policies behind one `sample`: the trained one's engines, frozen ones, and endpoints.

A frozen policy's greedy continuation depends on its prompt alone, so each is computed once: drafts
and equal hints of a group, and with a directory those of runs before. Endpoints take and give text
through `complete`. Must not know: roles, prompts, models.
"""

import asyncio
import dataclasses
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mas_jax.records import Reply, Sample, SampleKey, StopReason
from mas_jax.sampling import api_cache
from mas_jax.sampling.api_budget import Counts
from mas_jax.sampling.api_request import Message

MOST_KNOWN = 4096  # continuations in memory: of 2,048 tokens each, half a gigabyte


class Sampler(Protocol):
    """What draws from one policy, such as `Replicas`."""

    async def sample(
        self, prompt: tuple[int, ...], *, key: SampleKey, **knobs: Any
    ) -> list[Sample]:
        """Continuations of a prompt's ids; they follow from prompt, key and knobs alone."""

    def set_params(self, params: Any) -> None:
        """Samples from these parameters from now on."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """What has been counted so far, by name."""


class Remembering:
    """A frozen policy whose greedy continuations are computed once.

    identity: JSON values of everything that decides them beside the request (weights, precision).
    directory: where they are kept for later runs; None for this process alone, of which the
    MOST_KNOWN that were asked for last are known.
    """

    def __init__(
        self, sampler: Sampler, identity: Mapping[str, object], directory: Path | None
    ) -> None:
        self._sampler, self._identity, self._directory = sampler, dict(identity), directory
        self._known: dict[str, Sample] = {}
        self._asking: dict[str, asyncio.Lock] = {}
        self.num_recalled = 0

    async def sample(
        self, prompt: tuple[int, ...], *, key: SampleKey, n: int, temperature: float, **knobs: Any
    ) -> list[Sample]:
        """As the policy's own; at temperature 0 from memory where it was asked before."""
        if temperature != 0:
            return await self._sampler.sample(
                prompt, key=key, n=n, temperature=temperature, **knobs
            )
        # top_p and top_k leave a greedy choice as it is
        fields = self._identity | {
            "prompt": list(prompt),
            "max_tokens": knobs["max_tokens"],
            "stop": [list(knobs["stop"].token_ids), list(knobs["stop"].strings)],
        }
        name = api_cache.hash_fields(fields)
        # equal requests in flight wait for the first; if it fails the next one asks
        lock = self._asking.setdefault(name, asyncio.Lock())
        try:
            async with lock:
                found = self._recall(name, fields)
                is_new = found is None
                if is_new:
                    (found,) = await self._sampler.sample(
                        prompt, key=key, n=1, temperature=temperature, **knobs
                    )
                    self._keep(name, fields, found)
                self.num_recalled += n - is_new
        finally:
            if self._asking.get(name) is lock:  # locks belong to an event loop, answers do not
                del self._asking[name]
        return [found] * n

    def _recall(self, name: str, fields: Mapping[str, object]) -> Sample | None:
        found = self._known.pop(name, None)
        if found is None and self._directory is not None:
            stored = api_cache.read(self._directory, fields)
            if stored is not None:
                stop = StopReason(stored["stop_reason"])
                found = Sample(tuple(stored["tokens"]), tuple(stored["logprobs"]), stop)
        if found is not None:
            self._know(name, found)
        return found

    def _know(self, name: str, found: Sample) -> None:
        """Puts a continuation behind all others, the first of which is forgotten if need be."""
        self._known[name] = found
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def _keep(self, name: str, fields: Mapping[str, object], found: Sample) -> None:
        self._know(name, found)
        if self._directory is not None:
            api_cache.write(self._directory, fields, dataclasses.asdict(found))

    @property
    def metrics(self) -> dict[str, float]:
        """The policy's, and how many continuations were not computed again."""
        return {**self._sampler.metrics, "recalled": float(self.num_recalled)}


def endpoint_complete(
    complete: Callable[..., Awaitable], *, model: str
) -> Callable[..., Awaitable]:
    """`World.complete` through `complete` of `sampling/api.py`.

    Every draw has a number that follows from its key, so that the cache answers a resumed run; at
    temperature 0 equal conversations are one request.
    """

    async def _reply(
        messages: Sequence[Message], *, key: SampleKey, policy: str, max_tokens: int,
        temperature: float,
    ) -> Reply:  # fmt: skip
        draw = hashlib.blake2b(repr(dataclasses.astuple(key)).encode(), digest_size=6).digest()
        said = await complete(
            messages, model=model, temperature=temperature, max_tokens=max_tokens,
            sample=None if temperature == 0 else int.from_bytes(draw),
        )  # fmt: skip
        is_cut = said.finish_reason == "length"
        return Reply(
            text="" if said.refusal is not None else said.text,
            input_tokens=said.input_tokens,
            output_tokens=said.output_tokens,
            stop_reason=StopReason.LENGTH if is_cut else StopReason.TOKEN,
            is_refused=said.refusal is not None,
        )

    return _reply


def endpoint_metrics(counts: Mapping[str, Counts]) -> dict[str, float]:
    """Sums over an endpoint's models of what was asked and what it cost. No "cost" where a model
    has no price: it is not known, and not 0; nor before anything was asked."""
    fields = [dataclasses.asdict(found) for found in counts.values()]
    names = [field.name for field in dataclasses.fields(Counts)]
    known = [name for name in names if fields and None not in {found[name] for found in fields}]
    return {name: float(sum(found[name] for found in fields)) for name in known}


class Policies:
    """The trained policy's engines and a frozen Actor beside them.

    frozen: by name. complete: of an endpoint, with its metrics; None without one.
    Raises: ValueError for a frozen policy of the trained one's name.
    """

    def __init__(
        self,
        trained: Sampler,
        name: str,
        frozen: Mapping[str, Remembering],
        complete: Callable[..., Awaitable] | None = None,
        endpoint: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        if name in frozen:
            raise ValueError(
                f"two policies are named {name!r}; set model.policy to another than {list(frozen)}"
            )
        self.trained, self.complete = trained, complete
        self._by_name: Mapping[str, Sampler | Remembering] = {name: trained, **frozen}
        self._frozen, self._endpoint = frozen, endpoint

    async def sample(
        self, prompt: tuple[int, ...], *, key: SampleKey, policy: str, **knobs: Any
    ) -> list[Sample]:
        """A continuation by the named policy. Raises: ValueError for a name that there is not."""
        if policy not in self._by_name:
            raise ValueError(f"no policy {policy!r}; there are {list(self._by_name)}")
        sampler = self._by_name[policy]
        return await sampler.sample(prompt, key=key, policy=policy, **knobs)

    def set_params(self, params: Any) -> None:
        """New weights for the trained policy; the frozen ones keep theirs."""
        self.trained.set_params(params)

    @property
    def metrics(self) -> dict[str, float]:
        """The trained policy's, and the others' under their names; device_s, prefill_s and decode_s
        are of all, which share the devices."""
        found = dict(self.trained.metrics)
        for name, sampler in self._frozen.items():
            for metric, value in sampler.metrics.items():
                found[f"{name}_{metric}"] = value
                if metric in ("device_s", "prefill_s", "decode_s"):
                    found[metric] += value
        return found | {f"endpoint_{name}": x for name, x in self._endpoint().items()}
