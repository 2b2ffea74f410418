"""The certificate of a teacher: better than where it started, in its own team, on validation
questions.

Must not know: how it was trained, where certificates are kept.
"""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path

from ml_collections import ConfigDict
from rich.console import Console

from mas_jax.evaluation import bootstrap
from mas_jax.evaluation.statistics import accuracy_by_dataset, macro_average
from mas_jax.learning import evaluate, samplers
from mas_jax.learning.programme import TEACHER
from mas_jax.learning.scenes import Scene
from mas_jax.sampling.policies import Policies
from mas_jax.sampling.replicas import Replicas

logger = logging.getLogger(__name__)


class NotCertified(Exception):
    """The trained teacher is not better than the untrained team."""


def measure(
    config: ConfigDict, scene: Scene, engines: Replicas | Policies, places: Mapping[str, Path]
) -> dict:
    """The certificate as JSON values: accuracy of each, and the difference with its 95% interval.

    places: directories of the policies, "start" and "teacher", in this order. The engines hold the
    last one afterwards.
    """
    means, accuracy = {}, {}
    for label, place in places.items():
        engines.set_params(samplers.load_params(config, place))
        plan, scores = evaluate.play_now(
            config, scene, engines, config.stages[TEACHER].team,
            num_questions=config.certify.num_questions, num_runs=config.certify.num_runs, step=0,
        )  # fmt: skip
        means[label] = bootstrap.question_means(plan, scores)
        by_dataset = accuracy_by_dataset(plan, scores, k=config.certify.num_runs)
        accuracy[label] = macro_average(by_dataset, "avg")
    interval = bootstrap.paired(means[TEACHER], means["start"])
    return {"accuracy": accuracy, **dataclasses.asdict(interval)}


def check(found: Mapping, console: Console, *, ignore: bool) -> None:
    """Says what a certificate holds.

    Raises: NotCertified unless the whole 95% interval of the difference is above 0, or `ignore` is
    set, which only warns.
    """
    trained, untrained = (100 * found["accuracy"][label] for label in (TEACHER, "start"))
    text = (
        f"teacher {trained:.1f} against {untrained:.1f} untrained on validation questions: "
        f"{100 * found['difference']:+.1f} "
        f"[{100 * found['low']:.1f}, {100 * found['high']:.1f}]"
    )
    if found["low"] > 0:
        console.print(f"certified: {text}")
    elif ignore:
        logger.warning("NOT CERTIFIED, and certify.ignore is set: %s", text)
    else:
        raise NotCertified(
            f"{text}; a student would learn from a teacher that is not better than it: train "
            "longer, look at the teacher's metrics, or set certify.ignore=True"
        )
