"""The training loop of one stage, straight down: play, credit, pack, score, update, write, save.

A stage is everything that a step depends on. The step is the only counter: questions, sampling
keys, schedules and saved state follow from it, so a run that was killed goes on to the same bits.
Must not know: config files, other stages.
"""

import dataclasses
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from mas_jax import metrics
from mas_jax.agents.rollout import Limits
from mas_jax.agents.setting import Run, Team, World
from mas_jax.agents.tree import Shape
from mas_jax.data.questions import Mixture, of_step
from mas_jax.learning import batch as packing
from mas_jax.learning import cost, experience, hosts, kept_episodes, monitors, update
from mas_jax.learning.alarms import Alarms, AlarmSettings
from mas_jax.learning.checkpoint import Checkpointer
from mas_jax.learning.continuation import check_unchanged
from mas_jax.learning.credit import credit, over_hosts
from mas_jax.learning.objective import Forward
from mas_jax.learning.privileged import Privilege, describe
from mas_jax.learning.programme import Programme
from mas_jax.learning.search_time import SearchTime
from mas_jax.learning.teachers import Teacher
from mas_jax.learning.trainer import Trainer
from mas_jax.learning.turn_credit import Sources
from mas_jax.learning.update import TrainState
from mas_jax.learning.views import View
from mas_jax.model import qwen3
from mas_jax.records import Episode, Trace

logger = logging.getLogger(__name__)

SHOWN = {  # on the console
    "rollout/reward": "reward",
    "rollout/em": "EM",
    "rollout/searches": "searches",
    "rollout/valid_action_frac": "valid",
    "rollout/output_tokens": "length",
    "update/loss": "loss",
    "time/step_s": "s a step",
}


@dataclass(frozen=True)
class TrainSettings:
    """Sizes and intervals of a stage; see `config.train`.

    questions: of a step over all hosts, with group_size episodes each. micro_rows: rows of a
    micro-batch over all hosts, of row_length tokens. chunk: of `logprobs.py`. Intervals are in
    steps, 0 for never: of checkpoints, of validation, of gradient norms by role (a pass for each).
    drift_frac: share of the micro-batches on which KL to the start is measured. view_length: of a
    row of what a privileged branch reads. patience: validations in a row without a better one that
    end the stage; 0 for none.
    """

    questions: int
    group_size: int
    updates_per_batch: int
    micro_rows: int
    row_length: int
    whiten: bool
    checkpoint_interval: int
    keep_checkpoints: int
    validation_interval: int
    role_gradient_interval: int
    drift_frac: float
    log_interval_s: float
    view_length: int = 0
    patience: int = 0


@dataclass(frozen=True)
class Stage:
    """One stage of training. `sample` draws from what `publish` was last given.

    config: as JSON, for the checkpoint. start: makes the parameters on the training mesh from which
    the policy departs; reference: the same, kept to measure how far it has gone. validate: measure
    of the published policy after so many steps, larger is better, alike on all hosts. gold: texts
    of gold passages by id, for rewards of turns. shape: of tree rollouts, None for whole episodes.
    keep_episodes: whether they are written to files (`kept_episodes.py`). privilege: what the rows
    with a view show their teacher. markers: what only a reader of it says (`protocol.MARKERS`), by
    which the stage's policy is watched with or without such rows; None for a stage that is not.
    """

    name: str
    team: Team
    programme: Programme
    steps: int
    seed: int
    questions: Mixture
    world: World
    gold: Mapping[str, str]
    publish: Callable[[qwen3.Params], None]
    sampler_counts: Callable[[], Mapping[str, float]]
    validate: Callable[[int], float]
    start: Callable[[], qwen3.Params]
    reference: qwen3.Params
    forward: Forward
    mesh: Mesh
    teachers: Mapping[str, Teacher]
    optimizer: update.OptimizerSettings
    ema_decay: float
    param_dtype: str
    limits: Limits
    shape: Shape | None
    alarms: AlarmSettings
    settings: TrainSettings
    config: Mapping[str, Any]
    keep_episodes: bool
    privilege: Privilege | None = None
    markers: tuple[str, ...] | None = None


ON_DEVICE = ("score", "role_gradients", "update")  # phases that wait for programs alone


class Phases:
    """Seconds that the phases of one step take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str):
        """Adds the time inside to a phase."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self, step_s: float, num_tokens: int, sampled_s: float | None) -> dict[str, float]:
        """Shares of the step, and tokens trained on a second. sampled_s: in which the engines
        computed, None if nobody counted; with it host_frac is the share in which no program ran."""
        shares = {f"time/{name}_frac": s / step_s for name, s in self.seconds.items()}
        if sampled_s is not None:
            trained_s = sum(self.seconds.get(name, 0.0) for name in ON_DEVICE)
            shares["time/host_frac"] = 1.0 - (sampled_s + trained_s) / step_s
        return shares | {"time/step_s": step_s, "time/tokens_per_s": num_tokens / step_s}


@contextmanager
def _stop_on_sigterm():
    """A list that is no longer empty once SIGTERM came; the old handler comes back after."""
    asked: list[int] = []
    old = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, old)


class Interrupted(Exception):
    """SIGTERM came; the state is saved and the same command goes on."""


def train(stage: Stage, workdir: Path, console: Console) -> qwen3.Params:
    """Parameters after the stage's steps; goes on from the newest whole checkpoint in workdir.

    With patience the best validated ones, and no step after that many validations without a better.
    Saves every `checkpoint_interval` steps, at the last step, and where validation is best so far.
    Raises: Interrupted after SIGTERM, with everything saved; ValueError if the workdir's checkpoint
    is of another config or a teacher is missing.
    """
    s, host = stage.settings, jax.process_index()
    optimizer = update.make_optimizer(
        stage.optimizer, stage.forward.config, stage.steps * s.updates_per_batch
    )
    trainer = Trainer(
        stage.programme, stage.forward, stage.mesh, optimizer, stage.teachers,
        updates_per_batch=s.updates_per_batch, whiten=s.whiten, ema_decay=stage.ema_decay,
        param_dtype=stage.param_dtype,
    )  # fmt: skip
    with Checkpointer(workdir / "checkpoints", keep=s.keep_checkpoints) as checkpoints:
        restored = checkpoints.restore(trainer.abstract_state)
        if restored is None:
            state, best, best_step = trainer.init(stage.start()), None, None
        else:
            check_unchanged(restored.meta["config"], stage.config)
            state, best = restored.state, restored.meta["best"]
            # a run begun before stages could end early has no such entry, and no patience
            best_step = restored.meta.get("best_step")
            logger.info("%s: going on from step %d", stage.name, restored.step)
        done = start_step = 0 if restored is None else restored.step
        style = monitors.Style(stage.alarms.window)
        if restored is not None and "style" in restored.meta:  # a run of before had none
            style = monitors.Style.from_state(restored.meta["style"])
        with (
            _stop_on_sigterm() as asked,
            metrics.Writer(
                workdir, active=host == 0, console=console, total_steps=stage.steps,
                start_step=start_step, log_interval_s=s.log_interval_s,
            ) as writer,
        ):  # fmt: skip
            alarms = Alarms.from_history(stage.alarms, _history(workdir))
            for step in range(start_step, stage.steps):
                if _is_over(s, done, best_step):
                    logger.info("%s: no better validation since step %d", stage.name, best_step)
                    break
                state, values = _step(stage, trainer, state, step, workdir, style)
                done = step + 1
                is_last, is_best, value = done == stage.steps, False, None
                if _due(s.validation_interval, step) or (s.validation_interval and is_last):
                    stage.publish(state.params)
                    value = stage.validate(done)
                    values["validation/avg"] = value
                    is_best = best is None or value > best
                    best, best_step = (value, done) if is_best else (best, best_step)
                for alarm in alarms.check(step, values):
                    logger.warning("ALARM %s at step %d: %s", alarm.name, step, alarm.message)
                    values[f"alarm/{alarm.name}"] = 1.0
                writer.write(step, values, metrics.short_note(values, SHOWN))
                stop = packing.agree_max(len(asked)) > 0
                if stop or is_last or is_best or _due(s.checkpoint_interval, step):
                    meta = {
                        "config": stage.config, "best": best, "best_step": best_step,
                        "seed": stage.seed,
                        "questions_seen": done * s.questions,
                    }  # fmt: skip
                    if stage.markers is not None:
                        meta["style"] = style.state
                    checkpoints.save(done, state, meta, value=value)
                if stop:
                    break
            checkpoints.wait()
            if packing.agree_max(len(asked)) > 0:
                raise Interrupted(f"{stage.name}: saved at step {done} of {stage.steps}")
            if not s.patience:
                return state.params
            abstract = {"params": trainer.abstract_state.params}
            return checkpoints.restore_step("best", abstract).state["params"]


def _is_over(settings: TrainSettings, done: int, best_step: int | None) -> bool:
    """Whether so many validations as patience has brought none better than that of best_step."""
    if not settings.patience or best_step is None:
        return False
    return done - best_step >= settings.patience * settings.validation_interval


def _due(interval: int, step: int) -> bool:
    """Whether something that happens every `interval` steps happens after this one; 0: never."""
    return interval > 0 and (step + 1) % interval == 0


def _history(workdir: Path) -> list[dict]:
    path = workdir / metrics.FILE
    return metrics.read(path) if path.exists() else []


def _views(
    privilege: Privilege | None, episodes: Sequence[Episode], *, is_first: bool
) -> tuple[Callable[[Trace], View | None] | None, Mapping[str, int]]:
    """As `Privilege.of`, nothing without one. is_first: logs the first example, since somebody must
    have seen what a teacher reads."""
    if privilege is None:
        return None, {}
    view_of, shown = privilege.of(episodes)
    if is_first:
        traces = (trace for episode in episodes for trace in episode.traces)
        found = next(((t, view) for t in traces if (view := view_of(t)) is not None), None)
        if found is None:
            logger.warning("no trace of the first step has a view: nothing is distilled")
        else:
            logger.info(describe(privilege.chat, *found))
    return view_of, shown


def _step(
    stage: Stage, trainer: Trainer, state: TrainState, step: int, workdir: Path,
    style: monitors.Style,
) -> tuple[TrainState, dict[str, float]]:  # fmt: skip
    """The state after one step, and its metrics; `style` is told of it."""
    s, programme = stage.settings, stage.programme
    start_s, phases = time.perf_counter(), Phases()
    sampled_s = stage.sampler_counts().get("device_s")
    with phases("publish"):
        stage.publish(state.params)
    with phases("rollout"):
        asked = of_step(
            stage.questions, seed=stage.seed, step=step, count=s.questions,
            host=jax.process_index(), num_hosts=jax.process_count(),
        )  # fmt: skip
        run = Run(seed=stage.seed, purpose="train", step=step)
        searches = SearchTime(stage.world.search, lambda: stage.sampler_counts().get("device_s"))
        search, texts = experience.remembering(searches.search)
        world = dataclasses.replace(stage.world, search=search)
        episodes = experience.collect(
            asked, s.group_size, stage.team, world=world, run=run, limits=stage.limits,
            shape=stage.shape,
        )  # fmt: skip
    with phases("pack"):
        by_uid = {question.uid: question for question in asked}
        if stage.keep_episodes:
            host = dict(host=jax.process_index(), num_hosts=jax.process_count())
            kept_episodes.write(workdir, step, episodes, by_uid, **host)
        sources = Sources(by_uid, {**stage.gold, **texts})
        credited, found = credit(episodes, programme, sources, agree=packing.agree_max)
        view_of, shown = _views(stage.privilege, episodes, is_first=step == 0)
        batch, num_micro, stats = packing.pack(
            credited, programme, micro_rows=s.micro_rows // jax.process_count(),
            length=s.row_length, agree=packing.agree_max, view_of=view_of,
            view_length=s.view_length,
        )  # fmt: skip
        counts = dataclasses.asdict(stats)
        role_tokens = counts.pop("role_tokens")
        batch = packing.globalise(batch, stage.mesh)
        counted = dict(stage.sampler_counts())
        own = [experience.tally(episodes), found, counts, counted, shown]
        values = _over_hosts(hosts.gather(own))
        if stage.markers is not None:
            values |= _watched(stage, episodes, sources, style)
    with phases("score"):
        scores = trainer.scores(state, batch, num_micro)
        values |= trainer.drift(stage.reference, batch, num_micro, frac=s.drift_frac)
    if s.role_gradient_interval and step % s.role_gradient_interval == 0:
        with phases("role_gradients"):
            values |= trainer.role_norms(state, batch, scores, num_micro)
    with phases("update"):
        state, found = trainer.update(state, batch, scores, num_micro)
        values |= found
    if not np.isfinite(values["update/loss"]):
        logger.warning("step %d: update/loss is %g", step, values["update/loss"])
    if values["update/skipped"]:
        logger.warning(
            "step %d: no update, the gradient's norm is %g", step, values["update/gradient_norm"]
        )
    if sampled_s is not None:
        sampled_s = counted["device_s"] - sampled_s
    seconds = phases.seconds
    values |= cost.of_step(
        episodes, {role: s.updates_per_batch * n for role, n in role_tokens.items()},
        play_s=seconds["rollout"], train_s=seconds["score"] + seconds["update"],
    )  # fmt: skip
    step_s, num_tokens = time.perf_counter() - start_s, int(values["batch/num_tokens"])
    values |= phases.metrics(step_s, num_tokens, sampled_s) | searches.metrics(step_s)
    return state, values


def _watched(
    stage: Stage, episodes: Sequence[Episode], sources: Sources, style: monitors.Style
) -> dict[str, float]:
    """What a policy with a privileged branch, or one that is compared with it, is watched for, over
    all hosts' episodes."""
    leaks = monitors.tally_leaks(
        episodes, sources.questions, sources.texts, markers=stage.markers,
        tokenizer=stage.team.chat.tokenizer,
    )  # fmt: skip
    tallies, counts = zip(*hosts.gather([leaks, monitors.count_tokens(episodes)]), strict=True)
    return experience.divided(*tallies) | style.add(np.sum(counts, axis=0))


def _over_hosts(gathered: list[list[dict]]) -> dict[str, float]:
    """Metrics of all hosts' episodes, credits, packing, sampling and views, from each host's."""
    tallies, credits, packed, sampled, shown = zip(*gathered, strict=True)
    counts = packing.over_hosts(packed)
    # engines count since they were made; hosts compute at once
    totals = {name: sum(each[name] for each in sampled) for name in sampled[0]}
    if "device_s" in totals:
        totals["device_s"] /= len(sampled)
    return {
        **experience.divided(*tallies),
        **over_hosts(credits),
        **{f"batch/{name}": float(x) for name, x in counts.items()},
        **{f"engine/{name}": float(x) for name, x in totals.items()},
        **{name: float(sum(each[name] for each in shown)) for name in shown[0]},
    }
