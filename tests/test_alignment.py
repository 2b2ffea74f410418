"""M-GRPO's alignment by weights against what it replaces: random doubling and dropping."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from mas_jax.learning.advantages import SCALES, group_relative
from mas_jax.learning.alignment import aligned_weights, target_count

EPS = 1e-6
ROLLOUTS = [0, 1, 1, 2, 2, 2]  # d_k = 1, 2, 3
REWARDS = np.array([1.0, 0.0, 0.5, 0.25, 0.75, 0.1])


@pytest.mark.parametrize(
    ("counts", "want"),
    [
        ([], 1),
        ([0, 0], 1),
        ([3], 3),
        ([2, 8, 5], 8),
        ([1] * 99 + [8], 1),  # 99 of 100 are at most 1
        ([1] * 98 + [8], 8),  # 98 of 99 are less than 0.99
        ([1] * 98 + [5, 8], 5),
        ([4] * 198 + [8, 9], 4),
        ([4] * 697 + [6] * 2 + [7], 4),
        ([0] * 50 + [2] * 50, 2),
    ],
)
def test_the_target_is_the_smallest_number_that_99_percent_do_not_exceed(counts, want):
    assert target_count(counts) == want
    if counts:
        share = [Fraction(sum(c <= d for c in counts), len(counts)) for d in range(1, 10)]
        assert want == next(d for d in range(1, 10) if share[d - 1] >= Fraction(99, 100))


def test_weights_by_hand():
    assert aligned_weights(ROLLOUTS, 2).tolist() == [2, 1, 1, 2 / 3, 2 / 3, 2 / 3]
    assert aligned_weights([], 2).shape == (0,)


def draws(members, target):
    """Every equally likely outcome of aligning one rollout: its members and those doubled, or
    those kept."""
    if len(members) > target:
        return [Counter(kept) for kept in itertools.combinations(members, target)]
    extra = itertools.product(members, repeat=target - len(members))
    return [Counter([*members, *more]) for more in extra]


def outcomes(target):
    """(probability, multiplicity of each agent) of every aligned batch."""
    members = [[x for x, k in enumerate(ROLLOUTS) if k == rollout] for rollout in (0, 1, 2)]
    options = [draws(some, target) for some in members]
    share = Fraction(1, math.prod(map(len, options)))
    for chosen in itertools.product(*options):
        total = sum(chosen, Counter())
        yield share, [total[x] for x in range(len(ROLLOUTS))]


@pytest.mark.parametrize("target", [1, 2, 3, 4])
def test_weights_are_the_expectation_of_doubling_and_dropping_by_enumeration(target):
    weights = [Fraction(target, ROLLOUTS.count(k)) for k in ROLLOUTS]
    assert [float(w) for w in weights] == aligned_weights(ROLLOUTS, target).tolist()
    rewards = [Fraction(r) for r in REWARDS.tolist()]
    losses = [Fraction(x * x - 7, 3) for x in range(6)]  # of each agent's tokens, anything
    size = 3 * target  # of every aligned batch
    expected = [Fraction(0)] * 6
    mean = square = loss = Fraction(0)
    for share, times in outcomes(target):
        assert sum(times) == size
        expected = [e + share * t for e, t in zip(expected, times, strict=True)]
        mean += share * sum(t * r for t, r in zip(times, rewards, strict=True)) / size
        square += share * sum(t * r * r for t, r in zip(times, rewards, strict=True)) / size
        loss += share * sum(t * x for t, x in zip(times, losses, strict=True)) / size
    assert expected == weights
    # so are the batch's mean, its mean square, and its loss, exactly
    total = sum(weights)
    assert total == size
    assert mean == sum(w * r for w, r in zip(weights, rewards, strict=True)) / total
    assert square == sum(w * r * r for w, r in zip(weights, rewards, strict=True)) / total
    assert loss == sum(w * x for w, x in zip(weights, losses, strict=True)) / total
    # and these are what the advantages are made of
    got, *_ = group_relative(
        REWARDS,
        [0] * 6,
        scale="population_std",
        eps=EPS,
        weights_X=aligned_weights(ROLLOUTS, target),
    )
    std = math.sqrt(square - mean * mean)
    np.testing.assert_allclose(got, (REWARDS - float(mean)) / (std + EPS), rtol=1e-9)


@pytest.mark.parametrize("scale", SCALES)
def test_where_doubling_needs_no_chance_both_are_equal(scale):
    rollouts = [0, 1, 1, 2, 2, 2]
    weights = aligned_weights(rollouts, 6)  # 6, 3, 2: each stands there so many times
    doubled = np.repeat(np.arange(6), weights.astype(int))
    assert len(doubled) == 18
    want, *_ = group_relative(REWARDS[doubled], [0] * 18, scale=scale, eps=EPS)
    got, *_ = group_relative(REWARDS, [0] * 6, scale=scale, eps=EPS, weights_X=weights)
    np.testing.assert_allclose(got[doubled], want, rtol=1e-12)


def align(rng, counts, target):
    """Indices of the agents of a randomly doubled and dropped batch, as M-GRPO makes it."""
    chosen, first = [], 0
    for count in counts:
        members = np.arange(first, first + count)
        if count > target:
            chosen += rng.choice(members, target, replace=False).tolist()
        else:
            chosen += [*members, *rng.choice(members, target - count)]
        first += count
    return np.asarray(chosen)


@pytest.mark.parametrize(("num_rollouts", "bound"), [(8, 0.05), (64, 0.008)])
def test_the_update_is_that_of_random_doubling_on_average(num_rollouts, bound):
    """The mean over many doubled batches of the update direction, sum of A g over agents with
    features g. What the weights leave out is that a batch's own mean and deviation move with its
    draw, of order 1 / K: the bound falls with K."""
    rng = np.random.default_rng(5)
    counts = rng.integers(1, 7, size=num_rollouts)
    rollouts = np.repeat(np.arange(num_rollouts), counts)
    rewards = rng.random(len(rollouts)).round(1)
    features_XF = rng.normal(size=(len(rollouts), 3)) + rewards[:, None]
    target = 4
    knobs = dict(scale="population_std", eps=EPS)
    weights = aligned_weights(rollouts, target)
    advantages, *_ = group_relative(rewards, [0] * len(rewards), weights_X=weights, **knobs)
    ours = (weights * advantages) @ features_XF / weights.sum()
    found = []
    for _ in range(3000):
        at = align(rng, counts, target)
        advantages, *_ = group_relative(rewards[at], [0] * len(at), **knobs)
        found.append(advantages @ features_XF[at] / len(at))
    error = np.std(found, axis=0) / math.sqrt(len(found))
    assert (error < bound / 5).all()
    assert (np.abs(np.mean(found, axis=0) - ours) < bound + 4 * error).all()
    # not the same thing as every agent alike
    plain, *_ = group_relative(rewards, [0] * len(rewards), **knobs)
    assert np.abs(plain @ features_XF / len(plain) - ours).max() > 1.5 * bound
