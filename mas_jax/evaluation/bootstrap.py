"""Paired bootstrap: an interval for the difference of two systems on the same questions.

Dimensions: Q questions, I resampled differences. Must not know: what a system is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mas_jax.evaluation.records_file import Plan
from mas_jax.evaluation.statistics import EpisodeScore

NUM_DRAWS = 10_000
BLOCK = 500  # draws at once: bounds the memory of the drawn indices


@dataclass(frozen=True)
class Interval:
    """A difference of macro averages and its percentile interval at `level`; fractions."""

    difference: float
    low: float
    high: float
    level: float


def question_means(plan: Plan, scores: Sequence[EpisodeScore]) -> dict[str, np.ndarray]:
    """avg@k of each question by dataset, [Q] in the plan's order; what is missing is wrong."""
    num_right: dict[str, int] = {}
    for score in scores:
        num_right[score.question] = num_right.get(score.question, 0) + score.correct
    means: dict[str, list[float]] = {}
    for question in plan.questions:
        share = num_right.get(question.uid, 0) / plan.num_runs
        means.setdefault(question.dataset, []).append(share)
    return {dataset: np.asarray(values) for dataset, values in means.items()}


def paired(
    first: Mapping[str, np.ndarray],
    second: Mapping[str, np.ndarray],
    *,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Macro average of `first` less that of `second`, and its interval.

    Questions are drawn with replacement inside each dataset, the same ones for both systems, so a
    question that is hard for both widens nothing. Datasets weigh equally.
    Raises: ValueError if the systems differ in datasets or numbers of questions.
    Source: METHODS 6: stratified question bootstrap, 10,000 draws, percentiles, seed 0.
    """
    sizes = [{name: len(values) for name, values in system.items()} for system in (first, second)]
    if sizes[0] != sizes[1] or not sizes[0]:
        raise ValueError(f"paired systems must have the same questions, not {sizes[0]}, {sizes[1]}")
    rng = np.random.default_rng(seed)
    differences_I = np.zeros(NUM_DRAWS)
    for name in sorted(first):
        gap_Q = first[name] - second[name]
        for start in range(0, NUM_DRAWS, BLOCK):
            index = rng.integers(0, len(gap_Q), (BLOCK, len(gap_Q)))
            differences_I[start : start + BLOCK] += gap_Q[index].mean(axis=1)
    differences_I /= len(first)
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(differences_I, [tail, 100 - tail])
    difference = np.mean([np.mean(first[name] - second[name]) for name in first])
    return Interval(float(difference), float(low), float(high), level)
