"""The sides of the loop benchmark, a process each: the same questions, agents, tokens and weights.

"ours" plays the episodes on its engines, credits and packs them, scores the teacher and updates.
The torch loop is two processes, since TRL's packages are others than ours: "play" plays the same
episodes with the same agents over transformers.generate, "trl" scores the teacher and updates.
A worker answers every command with seconds by part; the command names a variant, see `loop.py`.
"""

import asyncio
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mas_jax.benchmarks import loop_workload, update_workers
from mas_jax.benchmarks.loop_workload import Request, Script, Sequences, Waves
from mas_jax.benchmarks.processes import answer, peak_bytes
from mas_jax.sampling.pages import PagePool

KL_COEF = 1e-3  # of Stage II's Leader and Answerer; TRL has one for all tokens
BETA = 0.1  # of the Searcher's distillation


class Clock:
    """Seconds by part of one run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """The time since the last lap was this part's."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def _serve(run: Callable[[str], dict]) -> None:
    """Answers each line with what `run` of it returns, and "exit" with the peak memory."""
    answer(ready=True)
    for line in sys.stdin:
        if line.strip() == "exit":
            answer(peak_bytes=peak_bytes())
            return
        answer(**run(line.strip()))


# --- ours -----------------------------------------------------------------------------------------


class _Unshared(PagePool):
    """A pool whose pages no two prompts share: prefix sharing switched off."""

    def find(self, digest: bytes) -> int | None:
        """No page, whatever was published."""
        return None

    def publish(self, page: int, digest: bytes) -> None:
        """Tells nobody."""


def _engines(config, params, settings, *, is_shared: bool):
    from mas_jax.benchmarks.rollout_workers import engines_on_each_device

    engines = engines_on_each_device(config, params, settings)
    if not is_shared:
        for engine in engines.engines:
            engine.scheduler.pool = _Unshared(settings.num_pages)
    return engines


def _generator(engines) -> Callable:
    """Generates on our engines, each candidate as long as the script has it."""
    from mas_jax.records import Stop

    async def _generate(request: Request) -> None:
        prompt, key, samples = request
        await asyncio.gather(
            *(
                engines.sample(
                    prompt, key=dataclasses.replace(key, path=f"{key.path}.{number}"), policy="p",
                    n=1, max_tokens=len(s.tokens), temperature=1.0, top_p=1.0, top_k=0, stop=Stop(),
                )
                for number, s in enumerate(samples)
            )
        )  # fmt: skip

    return _generate


def _trainer(config, params, teacher, settings: dict):
    """Stage II's trainer of the toy's config on one device."""
    import jax

    from mas_jax.config import default_config
    from mas_jax.learning import update
    from mas_jax.learning.objective import Forward
    from mas_jax.learning.programme import make_programme
    from mas_jax.learning.teachers import Teacher
    from mas_jax.learning.trainer import Trainer
    from mas_jax.model import sharding

    defaults = default_config()
    programme = make_programme(defaults.stages.student.programme.to_dict())
    return Trainer(
        programme,
        Forward(
            config, temperature=1.0, chunk=settings["chunk"], dtype="float32", remat="none",
            backend="auto",
        ),
        sharding.make_mesh(devices=jax.devices()[:1]),
        update.make_optimizer(
            update.OptimizerSettings(**defaults.train.optimizer), config, num_updates=40
        ),
        {"teacher": Teacher("teacher", teacher, config)},
        updates_per_batch=1, whiten=False, ema_decay=0.0,
    )  # fmt: skip


def _packed(credited: list, programme, variant: str, *, micro_rows: int, length: int):
    """The batch, its micro-batches in use and how many places these have.

    variant: "unmerged" keeps equal traces apart; "unpacked" does too, and gives each a row of its
    own, as long as the longest needs.
    """
    from mas_jax.learning import batch as packing

    shared = dict(agree=lambda count: count)
    if variant in ("unmerged", "unpacked"):  # equal but for a rounding of their advantages
        credited = [
            dataclasses.replace(c, advantage=c.advantage + 1e-12 * (n + 1))
            for n, c in enumerate(credited)
        ]
    if variant != "unpacked":
        batch, num_micro, _ = packing.pack(
            credited, programme, micro_rows=micro_rows, length=length, **shared
        )
        return batch, num_micro, num_micro * micro_rows * length
    length = -(-max(len(c.trace.tokens) for c in credited) // 32) * 32
    rows = [packing.pack([c], programme, micro_rows=1, length=length, **shared) for c in credited]
    num_micro = -(-len(rows) // micro_rows)
    room = (1 << max(num_micro - 1, 0).bit_length(), micro_rows, length)
    fields = {}
    for field in vars(rows[0][0]):
        flat = np.concatenate([np.ravel(getattr(row, field)) for row, _, _ in rows])
        fields[field] = np.pad(flat, (0, np.prod(room) - flat.size)).reshape(room)
    return type(rows[0][0])(**fields), num_micro, num_micro * micro_rows * length


def _sampler(engines, script: Script, variant: str) -> tuple[Callable, Waves | None]:
    """The scripted `sample` of a variant over our engines, and its waves, if it goes in waves."""
    generate = _generator(engines)
    if variant == "host":
        return loop_workload.scripted(script, loop_workload.nothing), None
    if variant != "waves":
        return loop_workload.scripted(script, generate), None

    async def _together(requests: list[Request]) -> None:
        await asyncio.gather(*map(generate, requests))

    waves = Waves(_together)
    return loop_workload.scripted(script, waves.generate), waves


def _learn(trainer, held: list, episodes, variant: str, clock: Clock, settings: dict) -> dict:
    """Credit, packing, the teacher's scores and the update of held[0], and what they were of."""
    import jax

    from mas_jax.learning import batch as packing
    from mas_jax.learning.credit import credit

    credited, _ = credit(episodes, trainer.programme)
    batch, num_micro, places = _packed(
        credited, trainer.programme, variant, micro_rows=settings["micro_rows"],
        length=settings["row_length"],
    )  # fmt: skip
    weights_MBT = batch.weights_MBT
    batch = packing.globalise(batch, trainer.mesh)
    clock.lap("pack")
    scores = jax.block_until_ready(trainer.scores(held[0], batch, num_micro))
    clock.lap("score")
    held[0], metrics = trainer.update(held[0], batch, scores, num_micro)
    jax.block_until_ready(held[0].params)
    clock.lap("update")
    teacher_MBT = np.float64(np.asarray(scores.teachers_MBT["teacher"]))
    return dict(
        train_places=places, tokens=float(weights_MBT.sum()), loss=metrics["update/loss"],
        teacher_sum=float((weights_MBT * teacher_MBT).sum()),
    )  # fmt: skip


def ours(directory: Path, script: Script, *, settings: dict, questions: int, group: int) -> None:
    """mas_jax: an engine a core for the episodes, then one update; everything is timed but what
    keeps runs apart (a new index, whose answers are not known yet).

    Commands: "all"; "unshared" (no prefix is), "waves" (static batching), "unmerged" and "unpacked"
    (see `_packed`) switch one thing off; "host" plays without a model.
    """
    import jax
    import jax.numpy as jnp

    from mas_jax.benchmarks import loop_stage
    from mas_jax.model import hf
    from mas_jax.sampling.engine_settings import EngineSettings

    jax.config.update("jax_num_cpu_devices", 2)
    config, params = hf.load(directory / "model", dtype=jnp.float32)
    _, teacher = hf.load(directory / "teacher", dtype=jnp.float32)
    shapes = settings["engine"] | {"buckets": tuple(settings["engine"]["buckets"])}

    @functools.cache  # those that share nothing are made when they are asked for
    def _made(is_shared: bool):
        return _engines(config, params, EngineSettings(**shapes), is_shared=is_shared)

    trainer = _trainer(config, params, teacher, settings)
    stage, held = loop_stage.make(questions, group), [trainer.init(params)]

    def _run(variant: str) -> dict:
        engines, fresh = _made(variant != "unshared"), stage.fresh()
        before, (sample, waves) = engines.metrics, _sampler(engines, script, variant)
        clock = Clock()
        engines.set_params(held[0].params)
        clock.lap("publish")
        episodes = fresh.play(sample, waves)
        clock.lap("play")
        counts = {name: value - before[name] for name, value in engines.metrics.items()}
        found = dict(seconds=clock.seconds, counts=counts, engines=len(engines.engines))
        if variant == "host":
            return found
        return found | _learn(trainer, held, episodes, variant, clock, settings)

    _serve(_run)


# --- the torch loop -------------------------------------------------------------------------------


def play(directory: Path, script: Script, *, batch_size: int, questions: int, group: int) -> None:
    """transformers.generate under the same agents: waves, in batches of about equal prompts.

    A batch goes on until its longest continuation is done, as generate does.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from mas_jax.benchmarks import loop_stage
    from mas_jax.benchmarks.rollout_workers import generate_batch

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(
        directory / "model", dtype=torch.float32, attn_implementation="sdpa"
    )
    stage, counts = loop_stage.make(questions, group), {}

    async def _wave(requests: list[Request]) -> None:
        start = time.perf_counter()
        rows = [(prompt, len(s.tokens)) for prompt, _, samples in requests for s in samples]
        rows.sort(key=lambda row: len(row[0]))
        with torch.inference_mode():
            for first in range(0, len(rows), batch_size):
                batch = rows[first : first + batch_size]
                generate_batch(model, batch)
                counts["prefill_places"] += len(batch) * max(len(p) for p, _ in batch)
                counts["decode_places"] += len(batch) * max(n for _, n in batch)
        counts["waves"] += 1
        counts["generate_s"] += time.perf_counter() - start

    def _run(variant: str) -> dict:
        counts.update(waves=0, prefill_places=0, decode_places=0, generate_s=0.0)
        stage_now, waves, clock = stage.fresh(), Waves(_wave), Clock()
        stage_now.play(loop_workload.scripted(script, waves.generate), waves)
        clock.lap("play")
        return dict(seconds=clock.seconds, counts=counts)

    _serve(_run)


def trl(directory: Path, *, rows: int) -> None:
    """TRL: the teacher's log-probs by its own function, then a training step on each micro-batch.

    Commands: "cut" (all sequences padded to the longest of the batch, as TRL does) and "trimmed"
    (sorted, each micro-batch as wide as it needs).
    """
    import torch
    import transformers

    found = loop_workload.read_sequences(directory)
    trainer, model, optimizer = update_workers.trl_trainer(directory / "model", found.batch, rows)
    trainer.beta = KL_COEF  # after it was made, or it would load a reference of its own
    teacher = transformers.AutoModelForCausalLM.from_pretrained(
        directory / "teacher", dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    num_items = int(found.sampled_NC.sum())

    def _micro(part: Sequences) -> dict:
        return update_workers.trl_inputs(part.batch, num_items) | {
            "old_per_token_logps": None,  # on policy: the step's own
            "sampler_logps": torch.from_numpy(part.batch.old_logprobs_NC),
            "tool_mask": torch.from_numpy(part.sampled_NC).long(),
            "is_distilled": torch.from_numpy(part.is_distilled_N)[:, None],
        }

    def _logps(scorer, micro: dict) -> torch.Tensor:
        ids = torch.cat([micro["prompt_ids"], micro["completion_ids"]], dim=1)
        mask = torch.cat([micro["prompt_mask"], micro["completion_mask"]], dim=1)
        with torch.no_grad():
            return trainer._get_per_token_logps_and_entropies(
                scorer, ids, mask, micro["completion_ids"].shape[1]
            )[0]

    def _run(variant: str) -> dict:
        clock, make = Clock(), {"cut": loop_workload.cut, "trimmed": loop_workload.trimmed}[variant]
        parts = make(found, rows)
        micros = [_micro(part) for part in parts]
        clock.lap("pack")
        total = 0.0
        for micro in micros:
            micro["ref_per_token_logps"] = _logps(teacher, micro)
            total += float((micro["ref_per_token_logps"].double() * micro["tool_mask"]).sum())
            # beta (log teacher - log student) in place of the outcome, where distilled; the
            # student's are those that sampling gave
            log_ratio = micro["ref_per_token_logps"] - micro["sampler_logps"]
            outcome = micro["advantages"][:, None].expand_as(log_ratio)
            micro["advantages"] = torch.where(micro["is_distilled"], BETA * log_ratio, outcome)
        clock.lap("score")
        result = update_workers.trl_step(trainer, model, optimizer, micros)
        clock.lap("update")
        return dict(
            seconds=clock.seconds, train_places=loop_workload.positions(parts), tokens=num_items,
            teacher_sum=total, loss=result["loss"],
        )  # fmt: skip

    _serve(_run)


def main() -> None:
    """Entry point of a worker process: the side, and a JSON object of its arguments."""
    side, arguments = sys.argv[1], json.loads(sys.argv[2])
    directory = Path(arguments.pop("directory"))
    if side == "trl":
        trl(directory, **arguments)
        return
    script = loop_workload.read(directory / "script.json")
    {"ours": ours, "play": play}[side](directory, script, **arguments)


if __name__ == "__main__":
    main()
