"""When a difference counts: over question sets, over training seeds, within a margin, of one run.

Differences are fractions, first system less second. Dimensions: Q questions, M sets, Z training
seeds. Must not know: what a system is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from mas_jax.evaluation import bootstrap
from mas_jax.evaluation.bootstrap import Interval

Values = Mapping[str, np.ndarray]  # dataset -> a number of each of its questions, [Q]


# --- several sets ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SetDifference:
    """The difference on one set: its interval, its p, and that p after Holm over all sets."""

    interval: Interval
    p_value: float
    adjusted: float


def holm(p_values_M: Sequence[float]) -> np.ndarray:
    """p values after Holm's correction for their number, [M] in the order given.

    Rejecting where a corrected value is below alpha keeps the chance of any false rejection below
    alpha, however the tests depend on each other.
    Raises: ValueError unless all are in [0, 1]. Source: Holm 1979.
    """
    p_M = np.asarray(p_values_M, np.float64)
    if p_M.ndim != 1 or not np.all((p_M >= 0) & (p_M <= 1)):
        raise ValueError(f"p_values={p_values_M}; want a list of numbers in [0, 1]")
    order_M = np.argsort(p_M, kind="stable")
    scaled_M = p_M[order_M] * np.arange(p_M.size, 0, -1)
    adjusted_M = np.empty_like(p_M)
    adjusted_M[order_M] = np.minimum(np.maximum.accumulate(scaled_M), 1.0)
    return adjusted_M


def over_sets(
    first: Values, second: Values, *, level: float = 0.95, seed: int = 0
) -> dict[str, SetDifference]:
    """The difference on each set by itself, its p values corrected for their number.

    Intervals are of one set each, at `level`, without a correction.
    Raises: ValueError if the systems differ in sets or numbers of questions.
    """
    bootstrap.check_paired(first, second)
    alone = {name: ({name: first[name]}, {name: second[name]}) for name in first}
    p_values = [bootstrap.p_value(bootstrap.resample(*pair, seed=seed)) for pair in alone.values()]
    return {
        name: SetDifference(bootstrap.paired(*pair, level=level, seed=seed), p, float(adjusted))
        for (name, pair), p, adjusted in zip(alone.items(), p_values, holm(p_values), strict=True)
    }


def over_all(first: Values, second: Values, *, level: float = 0.95, seed: int = 0) -> SetDifference:
    """The difference of macro averages over all sets: one test, so its p stays as it is.

    Raises: ValueError if the systems differ in sets or numbers of questions.
    """
    p = bootstrap.p_value(bootstrap.resample(first, second, seed=seed))
    return SetDifference(bootstrap.paired(first, second, level=level, seed=seed), p, p)


# --- several training seeds -----------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """That one system differs from another: the question bootstrap inside each training seed, and
    the t-interval over the seeds' differences."""

    seeds: tuple[Interval, ...]
    over_seeds: Interval


def t_interval(differences_Z: Sequence[float], *, level: float = 0.95) -> Interval:
    """Mean of the paired differences of several training seeds, and its t-interval.

    A pair is two runs with the same seed: same questions, start and data order. Of no width where
    all are equal. Raises: ValueError for fewer than two, of which no spread is known.
    """
    mean, error, freedom = _mean_and_error(differences_Z)
    half = error * float(special.stdtrit(freedom, (1 + level) / 2))
    return Interval(mean, mean - half, mean + half, level)


def compare_seeds(
    pairs_Z: Sequence[tuple[Values, Values]], *, level: float = 0.95, seed: int = 0
) -> Claim:
    """The claim that the first system differs from the second, a pair of question values a seed.

    seed: of the bootstrap. Raises: ValueError for fewer than two training seeds (then `mcnemar`, or
    `bootstrap.paired` without a claim about training), or for other sets, or numbers of questions
    in them, in a system or a later seed. Values have no ids: that they are of the same questions is
    up to the caller, as in `bootstrap.check_paired`.
    """
    for first, second in pairs_Z:
        bootstrap.check_paired(pairs_Z[0][0], first)
        bootstrap.check_paired(first, second)
    seeds = tuple(bootstrap.paired(*pair, level=level, seed=seed) for pair in pairs_Z)
    over_seeds = t_interval([interval.difference for interval in seeds], level=level)
    return Claim(seeds, over_seeds)


def supported(claim: Claim) -> bool:
    """Whether the interval over seeds and the one inside every seed lie on one side of zero.

    An interval that touches zero does not exclude it.
    """
    intervals = (*claim.seeds, claim.over_seeds)
    return all(i.low > 0 for i in intervals) or all(i.high < 0 for i in intervals)


# --- no difference --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Equivalence:
    """Whether a difference was shown to lie within (-margin, margin), at error rate alpha.

    interval: at level 1 - 2 alpha, the one that must lie inside. p_value: the larger of the two
    one-sided ones.
    """

    interval: Interval
    margin: float
    alpha: float
    p_value: float
    equivalent: bool


def equivalence_over_questions(
    first: Values, second: Values, *, margin: float, alpha: float = 0.05, seed: int = 0
) -> Equivalence:
    """Two one-sided bootstrap tests that the macro averages differ by less than `margin`.

    Says nothing about other training seeds, and is trustworthy from some dozens of questions a set
    on: few questions may agree by chance, and their draws then agree too.
    Raises: ValueError for a margin that is not positive, or if the systems differ in questions.
    Source: Schuirmann 1987, with percentile intervals.
    """
    _check_margin(margin, alpha)
    differences_I = bootstrap.resample(first, second, seed=seed)
    interval = bootstrap.paired(first, second, level=1 - 2 * alpha, seed=seed)
    num_beyond = max(np.sum(differences_I <= -margin), np.sum(differences_I >= margin))
    p_value = min(1.0, float(num_beyond + 1) / (differences_I.size + 1))
    return _equivalence(interval, margin, alpha, p_value)


def equivalence_over_seeds(
    differences_Z: Sequence[float], *, margin: float, alpha: float = 0.05
) -> Equivalence:
    """Two one-sided t-tests that the mean paired difference of training seeds is within `margin`.

    Raises: ValueError for a margin that is not positive or fewer than two differences.
    Source: Schuirmann 1987.
    """
    _check_margin(margin, alpha)
    mean, error, freedom = _mean_and_error(differences_Z)
    interval = t_interval(differences_Z, level=1 - 2 * alpha)
    distance = margin - abs(mean)  # to the nearer end, whose test has the larger p
    if error > 0:
        p_value = float(special.stdtr(freedom, -distance / error))
    else:
        p_value = 0.0 if distance > 0 else 1.0
    return _equivalence(interval, margin, alpha, p_value)


def _equivalence(interval: Interval, margin: float, alpha: float, p_value: float) -> Equivalence:
    inside = -margin < interval.low and interval.high < margin
    return Equivalence(interval, margin, alpha, p_value, inside)


# --- single runs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class McNemar:
    """Questions that only one of two single runs answered, and the exact two-sided p."""

    first_only: int
    second_only: int
    p_value: float


def mcnemar(first_Q: np.ndarray, second_Q: np.ndarray) -> McNemar:
    """Exact McNemar test of two single runs on the same questions: are they right equally often?

    first_Q, second_Q: 1 or True where right, [Q]. Under equality each question that only one run
    answered is a fair coin: p = 2 P(Binomial(n, 1/2) <= the smaller count), at most 1. It pools
    questions: for several sets test each and correct with `holm`.
    Raises: ValueError unless both are single runs on equally many questions.
    Source: McNemar 1947, in the exact binomial form.
    """
    first_Q, second_Q = np.asarray(first_Q), np.asarray(second_Q)
    if first_Q.shape != second_Q.shape or first_Q.ndim != 1:
        raise ValueError(f"shapes {first_Q.shape} and {second_Q.shape}; want the same questions")
    for values_Q in (first_Q, second_Q):
        if not np.all((values_Q == 0) | (values_Q == 1)):
            raise ValueError(
                "a value is neither 0 nor 1: McNemar's test is of one run a question; "
                "use bootstrap.paired for means of several runs"
            )
    first_only = int(np.sum((first_Q == 1) & (second_Q == 0)))
    second_only = int(np.sum((first_Q == 0) & (second_Q == 1)))
    total = first_only + second_only
    tail, ways = 0, 1  # whole numbers of any size: exact for any number of questions
    for count in range(min(first_only, second_only) + 1):
        tail += ways
        ways = ways * (total - count) // (count + 1)
    p_value = min(1.0, 2 * tail / 2**total)
    return McNemar(first_only, second_only, p_value)


def _mean_and_error(differences_Z: Sequence[float]) -> tuple[float, float, int]:
    """Mean, its standard error, and the degrees of freedom."""
    values_Z = np.asarray(differences_Z, np.float64)
    if values_Z.ndim != 1 or values_Z.size < 2:
        raise ValueError(
            f"differences={differences_Z}; want at least 2 training seeds. For single runs use "
            "mcnemar"
        )
    error = values_Z.std(ddof=1) / np.sqrt(values_Z.size)
    return float(values_Z.mean()), float(error), values_Z.size - 1


def _check_margin(margin: float, alpha: float) -> None:
    if not (margin > 0 and 0 < alpha < 0.5):
        raise ValueError(
            f"margin={margin}, alpha={alpha}; want a margin above 0, as a fraction, and alpha in "
            "(0, 0.5)"
        )
