"""Paired bootstrap: an interval for the difference of two systems on the same questions.

Dimensions: Q questions, I resampled differences. Must not know: what a system is.
"""

from collections.abc import Callable, Mapping, Sequence
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


def question_values(
    plan: Plan, scores: Sequence[EpisodeScore], estimate: Callable[[int, int], float]
) -> dict[str, np.ndarray]:
    """A number of each question by dataset, [Q] in the plan's order; what is missing is wrong.

    estimate(num_runs, num_correct) -> the number; such as `statistics.pass_at_k` with a k.
    """
    num_right: dict[str, int] = {}
    for score in scores:
        num_right[score.question] = num_right.get(score.question, 0) + score.correct
    values: dict[str, list[float]] = {}
    for question in plan.questions:
        value = estimate(plan.num_runs, num_right.get(question.uid, 0))
        values.setdefault(question.dataset, []).append(value)
    return {dataset: np.asarray(numbers) for dataset, numbers in values.items()}


def question_means(plan: Plan, scores: Sequence[EpisodeScore]) -> dict[str, np.ndarray]:
    """avg@k of each question by dataset, [Q] in the plan's order; what is missing is wrong."""
    return question_values(plan, scores, lambda num_runs, num_right: num_right / num_runs)


def paired(
    first: Mapping[str, np.ndarray],
    second: Mapping[str, np.ndarray],
    *,
    level: float = 0.95,
    seed: int = 0,
    num_draws: int = NUM_DRAWS,
) -> Interval:
    """Macro average of `first` less that of `second`, and its interval.

    Questions are drawn with replacement inside each dataset, the same ones for both systems, so a
    question that is hard for both widens nothing. Datasets weigh equally.
    Raises: ValueError if the systems differ in datasets or numbers of questions.
    Source: METHODS 6: stratified question bootstrap, 10,000 draws, percentiles, seed 0.
    """
    differences_I = resample(first, second, seed=seed, num_draws=num_draws)
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(differences_I, [tail, 100 - tail])
    difference = np.mean([np.mean(first[name] - second[name]) for name in first])
    return Interval(float(difference), float(low), float(high), level)


def interval(values: Mapping[str, np.ndarray]) -> Interval:
    """The macro average of one system, as `difference`, and its interval. Raises: as `paired`."""
    return paired(values, {name: np.zeros_like(found) for name, found in values.items()})


def resample(
    first: Mapping[str, np.ndarray],
    second: Mapping[str, np.ndarray],
    *,
    seed: int = 0,
    num_draws: int = NUM_DRAWS,
) -> np.ndarray:
    """Differences of macro averages in `num_draws` redrawn sets of questions, [I]; see `paired`."""
    check_paired(first, second)
    rng = np.random.default_rng(seed)
    differences_I = np.zeros(num_draws)
    for name in sorted(first):
        gap_Q = first[name] - second[name]
        for start in range(0, num_draws, BLOCK):
            size = min(BLOCK, num_draws - start)
            index = rng.integers(0, len(gap_Q), (size, len(gap_Q)))
            differences_I[start : start + size] += gap_Q[index].mean(axis=1)
    return differences_I / len(first)


def check_paired(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> None:
    """Raises: ValueError if two systems differ in datasets or numbers of questions, or have none.

    That they are the same questions in the same order is up to the caller.
    """
    sizes = [{name: len(values) for name, values in system.items()} for system in (first, second)]
    if sizes[0] != sizes[1] or not sizes[0] or 0 in sizes[0].values():
        raise ValueError(
            f"paired systems must have the same questions, at least one a dataset, not {sizes[0]} "
            f"and {sizes[1]}"
        )


def p_value(differences_I: np.ndarray) -> float:
    """Two-sided p of no difference, from the draws of `resample`; in (0, 1].

    Twice the share of draws on the far side of zero, ties counted there, with one draw added to
    both counts so that it is never 0. It falls below 1 - level where the interval of that level
    begins to exclude zero, up to the added draw.
    Source: the percentile interval, inverted.
    """
    num_far = min(np.sum(differences_I <= 0), np.sum(differences_I >= 0))
    return min(1.0, 2 * float(num_far + 1) / (differences_I.size + 1))
