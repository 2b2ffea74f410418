"""Plays the questions of a plan and records every episode; what is recorded is not played again.

Must not know: teams, models, indices (they are inside the injected `play`), statistics.
"""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from rich.console import Console

from mas_jax.evaluation import records_file
from mas_jax.evaluation.records_file import Plan
from mas_jax.metrics import ProgressReport
from mas_jax.records import Episode, Question

Job = tuple[Question, int]  # a question and the index of its run
Play = Callable[[Sequence[Job]], AsyncIterator[Episode]]

logger = logging.getLogger(__name__)


async def evaluate(
    plan: Plan, path: Path, play: Play, *, console: Console, log_interval_s: float
) -> None:
    """Appends to the records at `path` every episode of the plan that they lack, as it ends.

    play: yields the episodes of its jobs in any order; one that fails in the world is an episode
    with a `failure`, and is recorded as such; a call that goes on plays it again. Episodes that
    `play` leaves out stay missing, are logged, and count as wrong in the statistics.
    Raises: ValueError if the file belongs to another evaluation, or an episode was not asked for.
    """
    played = records_file.resume(path, plan)
    jobs = [
        (question, rollout)
        for question in plan.questions
        for rollout in range(plan.num_runs)
        if (question.uid, rollout) not in played
    ]
    waiting = {(question.uid, rollout): question for question, rollout in jobs}
    if not jobs:
        logger.info("%s: all %d episodes are recorded", path, len(played))
        return
    total, num_right, num_failed = len(played) + len(jobs), 0, 0
    with (
        path.open("ab") as file,
        ProgressReport(
            plan.label, total=total, done=len(played), console=console, interval_s=log_interval_s
        ) as progress,
    ):
        async for episode in play(jobs):
            question = waiting.pop((episode.question, episode.rollout), None)
            if question is None or episode.team != plan.team:
                raise ValueError(
                    f"play gave an episode of {episode.question!r}, run {episode.rollout}, by team "
                    f"{episode.team!r}: not asked for, or given before; {plan.team!r} plays"
                )
            file.write(records_file.record_line(question, episode))
            file.flush()
            num_failed += episode.failure is not None
            num_right += episode.failure is None and episode.correct[:1] == (1.0,)
            num_now = len(jobs) - len(waiting)
            progress.advance(f"avg {num_right / num_now:.3f}, {num_failed} failed")
    if waiting:
        logger.warning("%s: %d of %d episodes are missing", path, len(waiting), total)
