"""The objective of all roles on whole batches: golden behaviours, and a loop over tokens."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_credit import ROW
from tiny_learning import (
    CONFIG,
    FORWARD,
    LENGTH,
    MICRO,
    ROWS,
    as_rows,
    assert_bit_equal,
    changed,
    from_rows,
    gradient_of,
    largest_gap,
    logprobs_of,
    make_batch,
    make_params,
    make_traces,
    norm,
    scores_of,
)

from mas_jax.learning import objective
from mas_jax.learning.objective import head_of
from mas_jax.model import logprobs
from mas_jax.records import ROLES

# the three aggregations, and every stream but the exact ones
PROGRAMME = {
    "leader": replace(ROW, kl_coef=0.3, kl_estimator="k3", entropy_coef=0.2, weight=0.7),
    "searcher": replace(ROW, advantages=("distillation",), beta=0.5, aggregation="sequence"),
    "answerer": replace(
        ROW, drop_zero_variance=True, kl_coef=0.2, kl_estimator="k2", entropy_coef=0.1,
        aggregation="all_tokens", clip_low=0.1, clip_high=0.15,
    ),
}  # fmt: skip
ROLE_NAMES = tuple(PROGRAMME)
each_role = pytest.mark.parametrize("role", ROLE_NAMES)


@functools.cache
def student():
    return make_params(0)


@functools.cache
def teacher(seed: int = 1):
    return make_params(seed)


@functools.cache
def standard():
    """A batch of one micro-batch and its scores by the teacher."""
    traces = make_traces()
    # two of the Answerers' groups had equal rewards
    traces = [
        replace(c, is_dropped=True, advantage=0.0) if index in (2, 8) else c
        for index, c in enumerate(traces)
    ]
    batch, num_micro = make_batch(traces, PROGRAMME)
    assert num_micro == 1
    return batch, num_micro, scored(batch, num_micro)


def scored(batch, num_micro, params=None):
    """Scores by the teacher, or by other parameters, and by a model that no row reads."""
    return scores_of(
        teacher=logprobs_of(teacher() if params is None else params, batch, num_micro),
        initial=logprobs_of(teacher(2), batch, num_micro),
    )


def run(batch, num_micro, scores, **roles):
    return gradient_of(PROGRAMME, student(), batch, num_micro, scores, **roles)


@functools.cache
def standard_result(only=None):
    return run(*standard(), only=only)


# --- golden: the teacher --------------------------------------------------------------------------


def test_a_teacher_equal_to_the_student_gives_the_searcher_no_gradient():
    batch, num_micro, _ = standard()
    same = scored(batch, num_micro, student())
    gradient, metrics = run(batch, num_micro, same, only="searcher")
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient)) < 1e-6
    assert abs(metrics["searcher/teacher_kl"][0]) < 1e-4
    assert norm(standard_result("searcher")[0]) > 1e-2


def test_another_teacher_alone_changes_the_gradient_of_those_who_listen_to_it():
    batch, num_micro, _ = standard()
    other = scored(batch, num_micro, teacher(3))
    for role in ROLE_NAMES:
        here, there = standard_result(role)[0], run(batch, num_micro, other, only=role)[0]
        assert largest_gap(here, there) > 1e-3
    # scores by a model that no row reads are measured and change nothing
    heard = standard()[2].teachers_MBT["teacher"]
    gradient, metrics = run(batch, num_micro, scores_of(teacher=heard, initial=heard))
    assert_bit_equal(gradient, standard_result()[0])
    before = standard_result()[1]
    assert metrics["leader/kl_to_initial"] == metrics["leader/kl_to_teacher"]
    assert before["leader/kl_to_initial"][0] != before["leader/kl_to_teacher"][0]


def test_the_searchers_gradient_is_that_of_its_teachers_log_ratio_and_not_of_its_own():
    """The bug of differentiating log p - log p_T: a gradient in which the teacher has no part."""
    batch, num_micro, scores = standard()
    heard = scores.teachers_MBT
    raised = scores_of(teacher=heard["teacher"] + 2.0, initial=heard["initial"])
    here, there = (run(batch, num_micro, s, only="searcher")[0] for s in (scores, raised))
    # beta 2 sum of -grad log p more, over the sequences: the gradient of SFT on its own tokens
    weights = np.where(batch.owner_MBT == ROLES["searcher"], batch.weights_MBT, 0)

    def _nll(params):
        head = head_of(params, FORWARD, batch.tokens_MBT[0], batch.segment_ids_MBT[0])
        mask_BT = weights[0] != 0
        found_BT = logprobs.token_logprobs(
            head, batch.tokens_MBT[0], mask_BT, temperature=1.0, chunk=64
        )
        return -0.5 * 2.0 * jnp.sum(weights[0] * found_BT) / weights.sum()

    want = jax.jit(jax.grad(_nll))(student())
    more = jax.tree.map(jnp.subtract, there, here)
    assert largest_gap(more, want) < 1e-5 and norm(want) > 1e-2


# --- golden: tokens of nobody ---------------------------------------------------------------------


def test_nothing_that_stands_at_a_token_of_nobody_reaches_loss_or_gradient():
    batch, num_micro, scores = standard()
    unowned = batch.weights_MBT == 0
    for junk in (np.nan, np.inf, -1e30):
        dirty = {
            name: np.where(unowned, np.float32(junk), getattr(batch, name))
            for name in ("advantages_MBT", "rewards_MBT", "sampler_logprobs_MBT")
        }
        heard = {
            name: jnp.where(unowned, junk, theirs) for name, theirs in scores.teachers_MBT.items()
        }
        got = run(changed(batch, **dirty), num_micro, scores_of(**heard))
        assert_bit_equal(got, standard_result())


def test_what_the_world_says_after_the_last_owned_token_leaves_the_loss_bit_equal():
    batch, num_micro, scores = standard()
    ids, weights = batch.segment_ids_MBT, batch.weights_MBT
    behind = np.zeros(ids.shape, bool)
    for m, b in np.ndindex(ids.shape[:2]):
        for segment in range(1, ids[m, b].max() + 1):
            (owned,) = np.nonzero((ids[m, b] == segment) & (weights[m, b] != 0))
            behind[m, b] |= (ids[m, b] == segment) & (np.arange(LENGTH) > owned.max())
    behind |= ids == 0
    assert (behind & (ids > 0)).sum() >= 4
    other = np.where(behind, (batch.tokens_MBT + 7) % CONFIG.vocab_size, batch.tokens_MBT)
    got = run(changed(batch, tokens_MBT=other), num_micro, scores)
    assert_bit_equal(got, standard_result())
    # and what an agent reads before it speaks does matter
    before = (weights == 0) & (ids > 0) & ~behind
    other = np.where(before, (batch.tokens_MBT + 7) % CONFIG.vocab_size, batch.tokens_MBT)
    assert largest_gap(run(changed(batch, tokens_MBT=other), num_micro, scores)[0], got[0]) > 1e-3


@pytest.mark.parametrize("name", ["group", "tree"])
def test_what_the_episodes_were_credited_with_is_the_advantage_of_their_tokens(name):
    names = dict.fromkeys(objective.Tokens._fields)
    credited_BT = jnp.asarray([[0.0, 0.5, -2.0]])
    tokens = objective.Tokens(**names | {"advantages_BT": credited_BT})
    got_BT, _ = objective._advantages(replace(ROW, advantages=(name,)), tokens, jnp.ones((1, 3)))
    np.testing.assert_array_equal(got_BT, credited_BT)


def test_a_token_owned_by_another_role_counts_for_neither():
    batch, num_micro, scores = standard()
    m, b, t = np.argwhere(batch.owner_MBT == ROLES["searcher"])[2]
    weights = batch.weights_MBT.copy()
    weights[m, b, t] = 0  # as pack leaves a teammate's words
    silent = changed(batch, weights_MBT=weights, policy_weights_MBT=weights)
    as_leader = batch.owner_MBT.copy()
    as_leader[m, b, t] = ROLES["leader"]
    got = run(changed(silent, owner_MBT=as_leader), num_micro, scores)
    assert_bit_equal(got, run(silent, num_micro, scores))


# --- golden: how it is cut up ---------------------------------------------------------------------


def cuts():
    """The rows of the standard batch in other orders, micro-batches and paddings."""
    batch, _, _ = standard()
    rows = as_rows(batch)
    order = np.random.default_rng(0).permutation(len(rows.tokens_MBT))
    shuffled = jax.tree.map(lambda x: x[order], rows)
    empty = jax.tree.map(lambda x: np.pad(x, ((3, 0), (0, 0))), rows)  # rows of padding in front
    return {
        "two micro-batches": from_rows(rows, 4),
        "four micro-batches": from_rows(rows, 2),
        "rows in another order": from_rows(shuffled, ROWS),
        "another order in four": from_rows(shuffled, 2),
        "rows of padding": from_rows(empty, 4),
        "an empty micro-batch counted in": (batch, 2),
        "traces in other rows": make_other_rows(),
    }


def make_other_rows():
    """Each trace in a row of its own, twenty-four rows in three micro-batches."""
    rows = as_rows(standard()[0])
    found = []
    for b in range(len(rows.tokens_MBT)):
        for segment in range(1, rows.segment_ids_MBT[b].max() + 1):
            mask = rows.segment_ids_MBT[b] == segment

            def _moved(x, b=b, mask=mask):
                row = np.zeros(LENGTH, x.dtype)
                row[5 : 5 + mask.sum()] = x[b][mask]
                return row

            one = jax.tree.map(_moved, rows)
            found.append(changed(one, segment_ids_MBT=(one.segment_ids_MBT > 0).astype(np.int32)))
    return from_rows(jax.tree.map(lambda *x: np.stack(x), *found), ROWS)


@pytest.mark.parametrize("how", list(cuts()))
def test_loss_gradient_and_metrics_do_not_depend_on_how_the_batch_is_cut_up(how):
    batch, num_micro = cuts()[how]
    gradient, metrics = run(batch, num_micro, scored(batch, num_micro))
    want, want_metrics = standard_result()
    assert largest_gap(gradient, want) < 1e-5 < norm(want)
    for name, metric in want_metrics.items():
        np.testing.assert_allclose(metrics[name], metric, rtol=2e-5, atol=2e-5, err_msg=name)


def test_micro_batches_beyond_those_in_use_are_not_read():
    batch, num_micro, scores = standard()

    def _spoil(x):
        return np.concatenate([x[:num_micro], np.ones_like(x[num_micro:])])

    spoilt = changed(batch, tokens_MBT=_spoil(batch.tokens_MBT))
    assert_bit_equal(run(spoilt, num_micro, scores), standard_result())
    assert batch.tokens_MBT.shape[0] == MICRO > num_micro


# --- golden: roles and their denominators ---------------------------------------------------------


@each_role
def test_a_roles_weight_times_c_is_its_gradient_times_c(role):
    alone, metrics = standard_result(role)
    got, tripled = run(*standard(), only=role, **{role: 3.0})
    scale = norm(alone)
    assert largest_gap(got, jax.tree.map(lambda x: 3 * x, alone)) < 1e-6 * scale
    np.testing.assert_allclose(tripled["loss"][0], 3 * metrics["loss"][0], rtol=1e-6)


def test_the_gradient_of_all_roles_is_the_sum_of_each_ones():
    parts = [standard_result(role)[0] for role in ROLE_NAMES]
    total = jax.tree.map(lambda *x: sum(x), *parts)
    assert largest_gap(total, standard_result()[0]) < 1e-5


def test_another_roles_tokens_change_no_denominator_of_a_role_that_counts_its_own():
    """Twice the Searcher's tokens: a mean over all roles' would halve the Leader's gradient."""
    batch, _, _ = standard()
    traces = [c for c in make_traces(60, seed=5) if c.trace.role == "searcher"]
    more, num_more = make_batch(traces, PROGRAMME)
    assert num_more == 1
    both = jax.tree.map(lambda x, y: np.concatenate([x[:1], y[:1], x[2:]]), batch, more)
    scores = scored(both, 2)
    gradient, metrics = run(both, 2, scores, only="leader")
    assert largest_gap(gradient, standard_result("leader")[0]) < 1e-6
    searchers = [m["searcher/tokens"][0] for m in (metrics, standard_result()[1])]
    assert searchers[0] > 2 * searchers[1]
    # the Answerer asked for a share in the tokens of all
    gap = largest_gap(run(both, 2, scores, only="answerer")[0], standard_result("answerer")[0])
    assert gap > 1e-3


def test_a_one_token_response_at_the_end_of_a_row_keeps_its_teacher_signal():
    (long,) = [c for c in make_traces(2) if c.trace.role == "searcher"]
    trace = replace(
        long.trace, tokens=(5, 9), owners=(0, 2), logprobs=(0.0, -1.0), question="one token"
    )
    one = replace(long, trace=trace)
    alone, num_micro = make_batch([one], PROGRAMME)

    def _gradient(batch):
        return run(batch, num_micro, scored(batch, num_micro), only="searcher")

    gradient, metrics = _gradient(alone)
    assert norm(gradient) > 1e-2
    assert metrics["searcher/tokens"][0] == 1
    moved = jax.tree.map(lambda x: np.roll(x, -2, axis=-1), alone)  # to the end of the row
    assert moved.weights_MBT[..., -1].sum() == 1
    assert largest_gap(_gradient(moved)[0], gradient) < 1e-6


# --- a loop over tokens ---------------------------------------------------------------------------


def entropies_of(params, batch):
    head = head_of(params, FORWARD, batch.tokens_MBT[0], batch.segment_ids_MBT[0])
    logits_BTV = jnp.einsum("btd,vd->btv", head.hidden_BTD, head.unembed_VD)
    logs_BTV = jnp.roll(jax.nn.log_softmax(logits_BTV), 1, axis=1)
    return -jnp.sum(jnp.exp(logs_BTV) * logs_BTV, axis=-1)


def test_every_aggregation_stream_and_filter_agrees_with_a_loop_over_tokens():
    batch, num_micro, scores = standard()
    now = np.asarray(logprobs_of(student(), batch, num_micro))[0]
    heard = np.asarray(scores.teachers_MBT["teacher"])[0]
    entropy = np.asarray(jax.jit(entropies_of)(student(), batch))
    traces = {}  # (row, segment) -> positions of its owned tokens
    for b, t in np.argwhere(batch.weights_MBT[0] != 0):
        traces.setdefault((b, batch.segment_ids_MBT[0, b, t]), []).append((b, t))
    roles = {
        role: [v for v in traces.values() if batch.owner_MBT[0][v[0]] == number]
        for role, number in ROLES.items()
    }
    dropped = {at for at in np.ndindex(now.shape) if batch.policy_weights_MBT[0][at] == 0}
    # "all_tokens": each as its own role weighs it, the Searcher's 1 a sequence
    every = {at: batch.weights_MBT[0][at] for at in np.ndindex(now.shape)}
    kept = sum(weight for at, weight in every.items() if at not in dropped)
    every = sum(every.values())
    assert 0 < kept < every

    def k3(at):
        return np.exp(heard[at] - now[at]) - 1 - (heard[at] - now[at])

    advantages = batch.advantages_MBT[0]
    leaders = [at for trace in roles["leader"] for at in trace]
    leader = 0.7 * sum(-advantages[at] + 0.3 * k3(at) - 0.2 * entropy[at] for at in leaders)
    searcher = sum(
        sum(-0.5 * (heard[at] - now[at]) for at in trace) / len(trace)
        for trace in roles["searcher"]
    )
    answerers = [at for trace in roles["answerer"] for at in trace]
    answerer = sum(-advantages[at] for at in answerers if at not in dropped) / kept
    answerer += (
        sum(0.2 * 0.5 * (heard[at] - now[at]) ** 2 - 0.1 * entropy[at] for at in answerers) / every
    )
    want = {
        "leader": leader / len(leaders),
        "searcher": searcher / len(roles["searcher"]),
        "answerer": answerer,
    }
    for role, value in want.items():
        np.testing.assert_allclose(standard_result(role)[1]["loss"][0], value, rtol=1e-4)
    np.testing.assert_allclose(standard_result()[1]["loss"][0], sum(want.values()), rtol=1e-4)


def test_the_zero_variance_filter_leaves_the_roles_other_streams_and_other_roles_alone():
    batch, num_micro, scores = standard()
    kept = changed(batch, policy_weights_MBT=batch.weights_MBT)
    _, metrics = run(kept, num_micro, scores)
    filtered = standard_result()[1]
    assert metrics["answerer/policy_tokens"] > filtered["answerer/policy_tokens"]
    for name in ("answerer/tokens", "searcher/tokens", "searcher/policy_tokens"):
        assert metrics[name][0] == filtered[name][0]
    for name in ("answerer/entropy", "answerer/penalty_kl", "searcher/teacher_kl"):
        np.testing.assert_array_equal(metrics[name], filtered[name])
    for role in ("searcher", "leader"):
        assert_bit_equal(run(kept, num_micro, scores, only=role)[0], standard_result(role)[0])
