"""Advantages: how much better a token was than expected, by reward, by teacher, by critic.

A role's advantages are summed by the caller; all are constants to the gradient. Group-relative ones
are made on the host in float64, over the whole global batch and before it is cut into
micro-batches; the others on the device, per token.
A trace is a run of one segment id in one row; its owned tokens (the mask) may stand in several
spans, and what is between them, tool results and other agents' words, is skipped as if absent.
Dimensions: B rows, T positions, X samples or turns with a reward, P groups. Must not know: models,
roles.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import jax
import jax.numpy as jnp
import numpy as np

from mas_jax.learning.losses import Metrics, masked, token_max, token_mean

SCALES = ("std", "population_std", "none", "leave_one_out")
FORMS = ("sum", "nested")  # of tree-relative advantages


@dataclass(frozen=True)
class Census:
    """What the groups looked like; sizes count the rewards that are there.

    empty: groups with no reward at all; singletons: with one; zero_variance: with two or more whose
    deviation is below eps. None of these three teaches. missing: samples without a reward.
    """

    num_groups: int
    size_min: int
    size_max: int
    size_mean: float
    empty: int
    singletons: int
    zero_variance: int
    missing: int


def group_relative(
    rewards_X: Sequence[float | None] | np.ndarray,
    groups_X: Sequence[Hashable],
    *,
    scale: str,
    eps: float,
    weights_X: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, Census]:
    """Rewards less their group's mean, divided by the scale; and who is in a group without spread.

    rewards_X: None or NaN is missing (a failure of the world): left out of mean and deviation, and
    0 itself. groups_X: one key for each, such as (dataset, question uid, role).
    scale: "std" (of the sample, n - 1) or "population_std" (n), each plus eps; "none"; or
    "leave_one_out", the reward less the mean of the others', undivided.
    weights_X: how often each counts in mean, deviation and n, as if it stood there so many times;
    None for once. The census counts every reward once.
    Returns advantages_X float64, is_constant_X bool (the group is empty, a singleton, or deviates
    by less than eps: advantage 0, for a caller to drop), and the census.
    Raises: ValueError for lengths that differ, an infinite reward, a weight that is not above 0,
    another scale, or eps <= 0.
    Source: GRPO (arXiv 2402.03300); no scale: Dr. GRPO (arXiv 2503.20783); leave-one-out: RLOO
    (arXiv 2402.14740). A singleton gets 0 here, where others give it its raw reward or NaN.
    """
    rewards_X = np.asarray(rewards_X, np.float64)
    if rewards_X.shape != (len(groups_X),) or np.isinf(rewards_X).any():
        raise ValueError(f"{rewards_X.shape} rewards, {len(groups_X)} groups; want finite or NaN")
    if scale not in SCALES or eps <= 0:
        raise ValueError(f"scale={scale!r}, eps={eps}; want one of {SCALES}, and eps > 0")
    weights_X = np.ones_like(rewards_X) if weights_X is None else np.asarray(weights_X, np.float64)
    if weights_X.shape != rewards_X.shape or not (np.isfinite(weights_X) & (weights_X > 0)).all():
        raise ValueError(f"weights of shape {weights_X.shape}; want {len(groups_X)} above 0")
    numbers: dict[Hashable, int] = {}
    group_X = np.array([numbers.setdefault(key, len(numbers)) for key in groups_X], np.int64)
    present_X = ~np.isnan(rewards_X)

    def _add_up(x_X: np.ndarray) -> np.ndarray:
        return np.bincount(group_X, np.where(present_X, x_X, 0.0), minlength=len(numbers))

    counts_P, sizes_P = _add_up(np.ones_like(rewards_X)), _add_up(weights_X)
    means_P = _add_up(weights_X * rewards_X) / np.where(sizes_P > 0, sizes_P, 1.0)
    centred_X = np.where(present_X, rewards_X - means_P[group_X], 0.0)
    degrees_P = sizes_P if scale == "population_std" else sizes_P - 1
    degrees_P = np.where(degrees_P > 0, degrees_P, 1.0)
    std_P = np.sqrt(_add_up(weights_X * centred_X**2) / degrees_P)
    is_constant_P = (std_P < eps) | (counts_P < 2)
    if scale == "none":
        divisor_P = np.ones_like(std_P)
    elif scale == "leave_one_out":  # r - (n mean - r) / (n - 1) = (r - mean) n / (n - 1)
        divisor_P = np.where(sizes_P > 1, sizes_P - 1, 1.0) / np.where(sizes_P > 0, sizes_P, 1.0)
    else:
        divisor_P = std_P + eps
    is_constant_X = is_constant_P[group_X]
    divisor_X = np.where(is_constant_X, 1.0, divisor_P[group_X])
    advantages_X = np.where(is_constant_X, 0.0, centred_X / divisor_X)
    return advantages_X, is_constant_X, _census(counts_P, is_constant_P, present_X)


def error_weights(
    rewards_X: np.ndarray, errors_X: np.ndarray, groups_X: Sequence[Hashable]
) -> np.ndarray:
    """Inverse-variance weights of rewards that are measured with errors, of mean 1 in each group,
    [X] float64, for `group_relative` and the loss.

    w_i ~ 1 / (e_i^2 + t^2): e_i is the standard error of reward i, and t^2 the variance of the true
    rewards in its group, estimated as the rewards' variance (n - 1) less the mean of e^2, at least
    0. So a group whose rewards differ by more than their errors weighs nearly alike, in the limit
    of exact rewards as GRPO does, and where all of the spread may be error the better known count
    for more. An error is smallest near 0 and 1, so a weight is not independent of its reward.
    Shapes: rewards_X, errors_X [X]. Raises: ValueError for lengths that differ or an error that is
    not above 0.
    Source: the random-effects weights of DerSimonian and Laird 1986, with the unweighted moment
    estimate of t^2 of Hedges 1983; that they weigh hints is ours.
    """
    rewards_X, errors_X = np.asarray(rewards_X, np.float64), np.asarray(errors_X, np.float64)
    if not rewards_X.shape == errors_X.shape == (len(groups_X),) or not (errors_X > 0).all():
        raise ValueError(
            f"{rewards_X.shape} rewards, errors {errors_X}, {len(groups_X)} groups; want as many "
            "of each, and errors above 0"
        )
    numbers: dict[Hashable, int] = {}
    group_X = np.array([numbers.setdefault(key, len(numbers)) for key in groups_X], np.int64)

    def _mean_P(x_X: np.ndarray) -> np.ndarray:
        return np.bincount(group_X, x_X) / np.bincount(group_X)

    counts_P = np.bincount(group_X)
    squares_P = _mean_P((rewards_X - _mean_P(rewards_X)[group_X]) ** 2)
    variances_P = squares_P * counts_P / np.maximum(counts_P - 1, 1)
    true_P = np.maximum(variances_P - _mean_P(errors_X**2), 0.0)
    precisions_X = 1 / (errors_X**2 + true_P[group_X])
    return precisions_X / _mean_P(precisions_X)[group_X]


def tree_relative(
    rewards_X: Sequence[float | None] | np.ndarray,
    questions_X: Sequence[Hashable],
    trees_X: Sequence[Hashable],
    *,
    form: str,
    scale: str,
    eps: float,
) -> tuple[np.ndarray, np.ndarray, Census]:
    """Leaves' rewards relative to all leaves of the question and to those of their own tree.

    trees_X: keys that differ between the trees of one question. form: "sum", A = A_intra + A_inter,
    each as in `group_relative`; or "nested", which scales over the question's leaves and then what
    came out within each tree. Scaling is affine, so that is A_intra alone but for eps.
    Returns as `group_relative`, with is_constant_X and census of the questions' groups for "sum",
    where a tree without spread may still differ from the others, and of the trees for "nested".
    Raises: as `group_relative`; ValueError for lengths that differ or another form.
    Source: Tree-GRPO (arXiv 2509.21240): the sum is its equation and the `tree` of its published
    scripts, nested its repository's `tree_2norm` (AMAP-ML/Tree-GRPO, core_algos.py and
    ray_trainer_ts.py), where a singleton keeps its value; it gets 0 here.
    """
    if form not in FORMS:
        raise ValueError(f"form={form!r}; want one of {FORMS}")
    keys_X = list(zip(questions_X, trees_X, strict=True))
    inter_X, is_constant_X, census = group_relative(rewards_X, questions_X, scale=scale, eps=eps)
    if form == "sum":
        intra_X, _, _ = group_relative(rewards_X, keys_X, scale=scale, eps=eps)
        return intra_X + inter_X, is_constant_X, census
    is_missing_X = np.isnan(np.asarray(rewards_X, np.float64))
    return group_relative(np.where(is_missing_X, np.nan, inter_X), keys_X, scale=scale, eps=eps)


def _census(sizes_P: np.ndarray, is_constant_P: np.ndarray, present_X: np.ndarray) -> Census:
    return Census(
        num_groups=len(sizes_P),
        size_min=int(sizes_P.min()) if len(sizes_P) else 0,
        size_max=int(sizes_P.max(initial=0)),
        size_mean=float(sizes_P.sum() / max(len(sizes_P), 1)),
        empty=int((sizes_P == 0).sum()),
        singletons=int((sizes_P == 1).sum()),
        zero_variance=int((is_constant_P & (sizes_P >= 2)).sum()),
        missing=int((~present_X).sum()),
    )


def returns_to_go(rewards: Sequence[float] | np.ndarray, *, discount: float) -> np.ndarray:
    """Discounted sum of each turn's reward and the later ones', R_t = r_t + discount R_(t+1).

    Source: GiGPO (arXiv 2505.10978) eq. 5, with discount 0.95.
    """
    returns = np.array(rewards, np.float64)
    for turn in range(len(returns) - 2, -1, -1):
        returns[turn] += discount * returns[turn + 1]
    return returns


def alike(
    states_X: Sequence[str], keys_X: Sequence[Hashable], *, similarity: float
) -> list[tuple[Hashable, int]]:
    """Group of each text among those of one key: (key, number of the group).

    In order, each text joins the first group to whose first text its ratio (difflib) is at least
    `similarity`, or begins one.
    Source: GiGPO's anchor groups (arXiv 2505.10978 eq. 6), for search as verl-agent compares them:
    similarity 0.9, of characters.
    """
    firsts: dict[Hashable, list[SequenceMatcher]] = {}
    groups = []
    for state, key in zip(states_X, keys_X, strict=True):
        known = firsts.setdefault(key, [])
        number = next((i for i, m in enumerate(known) if _is_alike(m, state, similarity)), None)
        if number is None:
            number = len(known)
            known.append(SequenceMatcher(None, "", state))
        groups.append((key, number))
    return groups


def _is_alike(matcher: SequenceMatcher, state: str, similarity: float) -> bool:
    if state == matcher.b:
        return True
    matcher.set_seq1(state)
    # two bounds from above, which cost less
    bounds = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)
    return all(ratio() >= similarity for ratio in bounds)


def distillation(
    teacher_logprobs_BT: jax.Array,
    old_logprobs_BT: jax.Array,
    weights_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    beta: float,
    log_ratio_clip: float,
    future_discount: float,
) -> tuple[jax.Array, Metrics]:
    """Per-token distillation advantage, beta clip(log p_teacher - log p_old), [B, T].

    The mean is minus beta times the reverse KL, and stays: nothing is centred or scaled.
    log_ratio_clip: bound on the log-ratio, both ways, 0 for none. future_discount: weight g of
    later tokens' clipped log-ratios, g^k for the k-th later owned token of the trace; 0 for none.
    At ratio 1 a policy-gradient loss with it has beta times the gradient of KL(policy || teacher)
    in expectation, for g = 0 token by token at the contexts seen, for g = 1 of whole traces.
    Shapes: log-probs [B, T] f32, nats, at one temperature; a weight of 0 masks
    out. NaN on a masked-in token is someone's error and stays NaN; elsewhere it is not read.
    Metrics: see `losses.py`; teacher_kl is k1 of KL(old || teacher), unclipped.
    Source: MultiAgent-OPD, the Searcher's advantage; future sum: MiniLLM (arXiv 2306.08543).
    """
    mask_BT = weights_BT != 0
    teacher_BT, old_BT = masked(mask_BT, teacher_logprobs_BT, old_logprobs_BT)
    raw_BT = jax.lax.stop_gradient(teacher_BT - old_BT)
    is_clipped_BT = (jnp.abs(raw_BT) > log_ratio_clip) & (log_ratio_clip > 0)
    log_ratio_BT = jnp.clip(raw_BT, -log_ratio_clip, log_ratio_clip) if log_ratio_clip else raw_BT
    metrics = {
        "teacher_kl": token_mean(-raw_BT, weights_BT),
        "teacher_clip_frac": token_mean(is_clipped_BT, weights_BT),
        "teacher_log_ratio_abs_max": token_max(jnp.abs(raw_BT), mask_BT),
    }
    if future_discount:  # a critic that expects nothing
        log_ratio_BT, _ = gae(
            log_ratio_BT,
            jnp.zeros_like(log_ratio_BT),
            mask_BT,
            segment_ids_BT,
            discount=future_discount,
            decay=1.0,
        )
    return beta * log_ratio_BT, metrics


def gae(
    rewards_BT: jax.Array,
    values_BT: jax.Array,
    mask_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    discount: float,
    decay: float,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantages and their returns (advantage + value), both [B, T], 0 where masked.

    Over the owned tokens of each trace in their order: A_t = r_t + discount V_next - V_t
    + discount decay A_next, with V_next = A_next = 0 after the trace's last. values_BT[b, t]: of
    the state before token t. Rewards of tokens outside the mask do not count.
    Source: arXiv 1506.02438 eqs. 11-16.
    """
    rewards_BT, values_BT = jax.lax.stop_gradient(masked(mask_BT, rewards_BT, values_BT))

    def _step(later, token):
        segment_B, next_value_B, next_advantage_B = later
        reward_B, value_B, owned_B, own_segment_B = token
        # selected, not multiplied by 0: a NaN of the trace behind must not cross
        next_value_B, next_advantage_B = masked(
            own_segment_B == segment_B, next_value_B, next_advantage_B
        )
        advantage_B = (
            reward_B + discount * next_value_B - value_B + discount * decay * next_advantage_B
        )
        carried = (
            own_segment_B,
            jnp.where(owned_B, value_B, next_value_B),
            jnp.where(owned_B, advantage_B, next_advantage_B),
        )
        return carried, jnp.where(owned_B, advantage_B, 0.0)

    tokens = [x_BT.T for x_BT in (rewards_BT, values_BT, mask_BT, segment_ids_BT)]
    nothing_B = jnp.zeros_like(rewards_BT[:, 0])
    start = (segment_ids_BT[:, -1], nothing_B, nothing_B)
    _, advantages_TB = jax.lax.scan(_step, start, tokens, reverse=True)
    return advantages_TB.T, advantages_TB.T + values_BT


def whiten(x_BT: jax.Array, weights_BT: jax.Array, *, eps: float) -> jax.Array:
    """x less its weighted mean, divided by its deviation (population's) plus eps; 0 where masked.

    For any shape: give it the whole batch, not one micro-batch of it. A weight of 0 masks out; a
    bool mask weighs 1.
    """
    mask_BT, weights_BT = weights_BT != 0, weights_BT.astype(jnp.float32)
    (x_BT,) = masked(mask_BT, x_BT)
    total = jnp.sum(weights_BT)
    total = jnp.where(total > 0, total, 1.0)
    (centred_BT,) = masked(mask_BT, x_BT - jnp.sum(weights_BT * x_BT) / total)
    variance = jnp.sum(weights_BT * jnp.square(centred_BT)) / total
    return centred_BT / (jnp.sqrt(variance) + eps)
