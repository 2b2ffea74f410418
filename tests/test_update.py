"""Updates: rates, decay, skipped steps, averages, merged traces, several updates of one batch."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_credit import ROW
from tiny_learning import (
    CONFIG,
    FORWARD,
    assert_bit_equal,
    changed,
    largest_gap,
    logprobs_of,
    make_batch,
    make_params,
    make_traces,
    mesh,
    norm,
)

from mas_jax.learning import update
from mas_jax.learning.teachers import Teacher
from mas_jax.learning.trainer import Trainer
from mas_jax.model import qwen3

SETTINGS = update.OptimizerSettings(
    learning_rate=1e-2, warmup_steps=0, schedule="constant", b1=0.9, b2=0.95, eps=1e-8,
    weight_decay=0.0, max_grad_norm=1.0, moment_dtype="float32",
)  # fmt: skip
PROGRAMME = {
    "leader": replace(ROW, policy_loss="gspo", kl_coef=0.1, kl_estimator="k2"),
    "searcher": replace(ROW, advantages=("distillation",), beta=0.5, aggregation="sequence"),
    "answerer": replace(ROW, policy_loss="cispo", entropy_coef=0.1, drop_zero_variance=True),
}


# --- rates and decay ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "warmup", "want"),
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1]),
        ("constant", 3, [0.25, 0.5, 0.75, 1, 1, 1]),
        ("linear", 0, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("linear", 2, [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25]),
        ("cosine", 2, [1 / 3, 2 / 3, *((1 + math.cos(math.pi * k / 4)) / 2 for k in range(4))]),
        ("linear", 9, [k / 10 for k in range(1, 7)]),  # warm-up beyond the run
    ],
)
def test_learning_rates_of_six_updates_by_hand(schedule, warmup, want):
    settings = replace(SETTINGS, learning_rate=2e-3, schedule=schedule, warmup_steps=warmup)
    rate = update.make_schedule(settings, 6)
    np.testing.assert_allclose([rate(step) for step in range(6)], 2e-3 * np.asarray(want), 1e-6)


def test_an_unknown_schedule_is_an_error():
    with pytest.raises(ValueError, match="schedule='steps'; choose from"):
        update.make_schedule(replace(SETTINGS, schedule="steps"), 6)


def test_decay_shrinks_matrices_and_leaves_norms_biases_and_the_critic():
    config = replace(CONFIG, qkv_bias=True, value_head=True)
    params = jax.tree.map(jnp.ones_like, qwen3.init(config, jax.random.key(0), dtype=jnp.float32))
    optimizer = update.make_optimizer(replace(SETTINGS, weight_decay=0.5), config, 1)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params)
    flat = {"/".join(p.key for p in path): x for path, x in jax.tree.leaves_with_path(updates)}
    decayed = {path for path, x in flat.items() if np.any(x)}
    matrices = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")
    assert decayed == {"embed", *(f"layers/{name}" for name in matrices)}
    for path in decayed:  # decoupled: the rate times the decay times the weight
        np.testing.assert_allclose(flat[path], -1e-2 * 0.5, rtol=1e-6)


def test_the_gradients_global_norm_is_clipped_before_adam():
    optimizer = update.make_optimizer(replace(SETTINGS, max_grad_norm=2.0, b1=0.0), CONFIG, 1)
    params = qwen3.init(CONFIG, jax.random.key(0), dtype=jnp.float32)
    gradient = jax.tree.map(lambda p: 10 * jnp.ones_like(p), params)
    _, state = jax.jit(optimizer.update)(gradient, optimizer.init(params), params)
    (moments,) = [s.mu for s in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(s)]
    np.testing.assert_allclose(norm(moments), 2.0, rtol=1e-5)


def is_adam(state) -> bool:
    return isinstance(state, optax.ScaleByAdamState)


# --- applying a gradient --------------------------------------------------------------------------


@functools.cache
def applied():
    """The optimizer, shardings and compiled application of a gradient, with an average."""
    optimizer = update.make_optimizer(SETTINGS, CONFIG, 10)
    _, at = update.state_shardings(optimizer, CONFIG, mesh(), dtype="float32", with_average=True)
    apply = update.make_apply(optimizer, at, ema_decay=0.75)
    return optimizer, at, apply


def fresh_state():
    optimizer, at, _ = applied()
    return jax.device_put(update.init_state(make_params(0), optimizer, with_average=True), at)


def constant_gradient(value: float):
    return jax.tree.map(lambda p: jnp.full_like(p, value), make_params(0))


def host(tree):
    return jax.tree.map(np.array, tree)


def test_an_update_moves_weights_moments_average_and_step():
    _, _, apply = applied()
    before = host(fresh_state())
    state, metrics = apply(fresh_state(), constant_gradient(0.1), jnp.bool_(True))
    after = host(state)
    # Adam's first step is the rate against the gradient's sign; the average follows by a quarter
    jax.tree.map(
        lambda new, old: np.testing.assert_allclose(new, old - 1e-2, atol=1e-5),
        after.params, before.params,
    )  # fmt: skip
    jax.tree.map(
        lambda new, old: np.testing.assert_allclose(new, old - 0.25 * 1e-2, atol=1e-5),
        after.average, before.average,
    )  # fmt: skip
    assert (after.step, metrics["skipped"]) == (1, 0)
    size = qwen3.param_count(CONFIG)
    np.testing.assert_allclose(metrics["gradient_norm"], 0.1 * size**0.5, rtol=1e-5)
    np.testing.assert_allclose(metrics["update_norm"], 1e-2 * size**0.5, rtol=1e-4)
    np.testing.assert_allclose(metrics["param_norm"], norm(after.params), rtol=1e-5)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_a_gradient_of_zero_or_not_finite_changes_nothing_but_the_step(value):
    _, _, apply = applied()
    state, _ = apply(fresh_state(), constant_gradient(0.1), jnp.bool_(True))  # moments are there
    before = host(state)
    gradient = constant_gradient(0.0)
    gradient["final_norm"] = gradient["final_norm"].at[0].set(value)
    after, metrics = apply(state, gradient, jnp.bool_(True))
    after = host(after)
    assert (after.step, metrics["skipped"], metrics["update_norm"]) == (2, 1, 0)
    assert_bit_equal(
        (after.params, after.opt_state, after.average),
        (before.params, before.opt_state, before.average),
    )


def test_the_step_counts_once_however_many_updates_it_has():
    _, _, apply = applied()
    state, _ = apply(fresh_state(), constant_gradient(0.1), jnp.bool_(False))
    assert state.step == 0
    state, _ = apply(state, constant_gradient(0.1), jnp.bool_(True))
    assert state.step == 1
    counts = {int(s.count) for s in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(s)}
    assert counts == {2}


# --- a trainer's updates --------------------------------------------------------------------------


@functools.cache
def trainer():
    """Two updates a batch, with ratios in the policy losses."""
    optimizer = update.make_optimizer(SETTINGS, CONFIG, 10)
    teacher = Teacher("teacher", make_params(1), CONFIG)
    return Trainer(
        PROGRAMME, FORWARD, mesh(), optimizer, {"teacher": teacher},
        updates_per_batch=2, whiten=False, ema_decay=0.9,
    )  # fmt: skip


@functools.cache
def gradients():
    """What the trainer applies, to be applied by hand."""
    return update.make_gradients(PROGRAMME, FORWARD, mesh(), {})


def updated(batch, num_micro, scores=None):
    """The state after one step from the start, and its metrics."""
    state = trainer().init(make_params(0))
    scores = scores or trainer().scores(state, batch, num_micro)
    return trainer().update(state, batch, scores, num_micro)


@functools.cache
def standard():
    return make_batch(make_traces(), PROGRAMME)


def test_the_start_survives_the_updates_of_a_state_made_from_it():
    params = make_params(0)
    kept = host(params)
    updated(*standard())
    state = trainer().init(params)
    state, _ = trainer().update(
        state, standard()[0], trainer().scores(state, *standard()), standard()[1]
    )
    assert_bit_equal(host(params), kept)
    assert largest_gap(state.params, params) > 1e-3


def test_two_updates_of_a_batch_keep_the_first_ones_log_probs():
    """By hand: the second gradient is that at the moved parameters, with the ratio to the old."""
    batch, num_micro = standard()
    start = trainer().init(make_params(0))
    scores = trainer().scores(start, batch, num_micro)
    np.testing.assert_array_equal(
        scores.old_logprobs_MBT, logprobs_of(make_params(0), batch, num_micro)
    )
    optimizer = update.make_optimizer(SETTINGS, CONFIG, 10)
    params, opt_state, ratios = make_params(0), optimizer.init(make_params(0)), []
    ones = dict.fromkeys(PROGRAMME, jnp.float32(1.0))
    for _ in range(2):
        gradient, found = gradients()(params, batch, scores, {}, num_micro, ones)
        ratios.append(update.divided(found)["answerer/ratio"])
        moves, opt_state = jax.jit(optimizer.update)(gradient, opt_state, params)
        params = optax.apply_updates(params, moves)
    assert ratios[0] == pytest.approx(1.0, abs=1e-5)
    assert abs(ratios[1] - 1.0) > 1e-2
    state, metrics = updated(batch, num_micro)
    assert largest_gap(state.params, params) < 1e-5
    assert metrics["update/answerer/ratio"] == pytest.approx(np.mean(ratios), abs=1e-5)
    assert (int(state.step), metrics["update/skipped"]) == (1, 0)


def test_sequence_and_clipped_weight_losses_agree_with_loops_at_a_moved_policy():
    batch, num_micro = standard()
    state, _ = updated(batch, num_micro)
    old = np.asarray(logprobs_of(make_params(0), batch, num_micro))[0]
    now = np.asarray(logprobs_of(state.params, batch, num_micro))[0]
    traces = {}
    for b, t in np.argwhere(batch.weights_MBT[0] != 0):
        key = int(batch.owner_MBT[0, b, t]), int(b), int(batch.segment_ids_MBT[0, b, t])
        traces.setdefault(key, []).append((b, t))
    clipped = {1: [], 3: []}  # the Leader's GSPO and the Answerer's CISPO
    for (role, _, _), trace in traces.items():
        gaps = [now[at] - old[at] for at in trace]
        ratios = {1: [np.exp(np.mean(gaps))] * len(trace), 3: np.exp(gaps)}.get(role, [])
        for at, ratio in zip(trace, ratios, strict=False):
            bounded = min(max(ratio, 0.8), 1.2)
            worth = batch.advantages_MBT[0][at]
            bites = bounded != ratio if role == 3 else bounded * worth < ratio * worth
            clipped[role].append((ratio, bites))
    scores = trainer().scores(trainer().init(make_params(0)), batch, num_micro)
    _, metrics = trainer().update(trainer().init(state.params), batch, scores, num_micro)
    ones = dict.fromkeys(PROGRAMME, jnp.float32(1.0))
    found = update.divided(gradients()(state.params, batch, scores, {}, num_micro, ones)[1])
    for role, name in ((1, "leader"), (3, "answerer")):
        ratio, bites = np.mean(clipped[role], axis=0)
        assert found[f"{name}/ratio"] == pytest.approx(ratio, rel=1e-4)
        assert found[f"{name}/clip_frac"] == pytest.approx(bites, abs=1e-6)
    assert 0 < found["answerer/clip_frac"] < 1 and metrics["update/loss"] != 0


def test_a_batch_without_tokens_is_skipped_and_the_step_advances():
    batch, num_micro = make_batch([], PROGRAMME)
    assert num_micro == 0
    state, metrics = updated(batch, num_micro)
    assert_bit_equal(host(state.params), host(make_params(0)))
    assert (int(state.step), metrics["update/skipped"]) == (1, 1)
    assert (metrics["update/loss"], metrics["update/searcher/distillation_tokens"]) == (0, 0)
    assert all(math.isfinite(value) for value in metrics.values())


def test_all_groups_filtered_is_a_skipped_update_where_no_other_stream_learns():
    only = [c for c in make_traces() if c.trace.role == "answerer"]
    batch, num_micro = make_batch([replace(c, is_dropped=True) for c in only], PROGRAMME)
    plain = changed(batch, weights_MBT=batch.policy_weights_MBT)  # no entropy bonus either
    state, metrics = updated(plain, num_micro)
    assert_bit_equal(host(state.params), host(make_params(0)))
    assert (int(state.step), metrics["update/skipped"]) == (1, 1)
    # with it, the same batch still has an entropy to raise
    state, metrics = updated(batch, num_micro)
    assert metrics["update/skipped"] == 0 and metrics["update/answerer/policy_tokens"] == 0


def test_a_nan_of_the_teacher_at_an_owned_token_skips_the_update():
    batch, num_micro = standard()
    start = trainer().init(make_params(0))
    scores = trainer().scores(start, batch, num_micro)
    at = tuple(np.argwhere((batch.owner_MBT == 2) & (batch.weights_MBT != 0))[0])
    spoilt = scores.teachers_MBT["teacher"].at[at].set(jnp.nan)
    before = host((start.params, start.opt_state))
    state, metrics = trainer().update(
        start, batch, scores._replace(teachers_MBT={"teacher": spoilt}), num_micro
    )
    assert_bit_equal(host((state.params, state.opt_state)), before)
    assert (int(state.step), metrics["update/skipped"]) == (1, 1)
    assert math.isnan(metrics["update/loss"])


def test_role_norms_are_those_of_each_roles_own_gradient_and_shares_sum_to_one():
    batch, num_micro = standard()
    state = trainer().init(make_params(0))
    scores = trainer().scores(state, batch, num_micro)
    found = trainer().role_norms(state, batch, scores, num_micro)
    norms = [found[f"update/{role}/gradient_norm"] for role in PROGRAMME]
    shares = [found[f"update/{role}/gradient_share"] for role in PROGRAMME]
    assert min(norms) > 1e-3
    np.testing.assert_allclose(shares, np.asarray(norms) / sum(norms), rtol=1e-6)
    searcher = [c for c in make_traces() if c.trace.role == "searcher"]
    alone, num_alone = make_batch(searcher, PROGRAMME)
    scores = trainer().scores(state, alone, num_alone)
    found = trainer().role_norms(state, alone, scores, num_alone)
    assert found["update/searcher/gradient_norm"] == pytest.approx(norms[1], rel=1e-4)
    assert found["update/leader/gradient_norm"] == 0


# --- equal traces ---------------------------------------------------------------------------------


def doubled():
    """Traces of which some stand there twice or three times: merged, and each on its own."""
    traces = make_traces()
    again = [replace(c, trace=replace(c.trace, rollout=99)) for c in traces[::2]]
    thrice = [replace(c, trace=replace(c.trace, rollout=100)) for c in traces[::4]]
    merged, num_merged = make_batch([*traces, *again, *thrice], PROGRAMME)
    assert num_merged == 1
    parts = [make_batch(part, PROGRAMME)[0] for part in (traces, again, thrice)]
    whole = jax.tree.map(lambda *x: np.concatenate([p[:1] for p in x] + [0 * x[0][:1]]), *parts)
    assert whole.weights_MBT.max() == 1 and merged.weights_MBT.max() == 3
    return (merged, 1), (whole, 3)


def test_merging_equal_traces_changes_neither_loss_nor_gradient_nor_metrics():
    (merged, num_merged), (whole, num_whole) = doubled()
    results = []
    for batch, num_micro in ((merged, num_merged), (whole, num_whole)):
        start = trainer().init(make_params(0))
        scores = trainer().scores(start, batch, num_micro)
        norms = trainer().role_norms(start, batch, scores, num_micro)
        drift = trainer().drift(make_params(1), batch, num_micro, frac=1.0)
        state, metrics = trainer().update(start, batch, scores, num_micro)
        results.append((host(state.params), metrics | norms | drift))
    (params, metrics), (want_params, want) = results
    assert largest_gap(params, want_params) < 1e-5
    assert metrics.keys() == want.keys() and "update/searcher/kl_to_start" in want
    for name, value in want.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("whiten", [False, True])
def test_merging_equal_traces_changes_no_critics_advantage(whiten):
    (merged, _), (whole, _) = doubled()
    critic = {"leader": ROW, "searcher": replace(ROW, advantages=("gae",), gae_decay=0.9)}
    run = update.make_gae(critic, mesh(), whiten=whiten)
    found = []
    for batch in (merged, whole):
        values = jnp.asarray(np.sin(batch.tokens_MBT), jnp.float32)  # of what the token is
        worth, returns = (np.asarray(x) for x in run(batch, values))
        own = (batch.owner_MBT == 2) & (batch.weights_MBT != 0)
        assert not worth[~own].any() and not returns[~own].any()
        keys = zip(batch.tokens_MBT[own], batch.sampler_logprobs_MBT[own], strict=True)
        found.append(dict(zip(keys, zip(worth[own], returns[own], strict=True), strict=True)))
        weights = batch.weights_MBT[own]
        mean = np.sum(weights * worth[own]) / weights.sum()
        deviation = np.sqrt(np.sum(weights * (worth[own] - mean) ** 2) / weights.sum())
        if whiten:
            np.testing.assert_allclose((mean, deviation), (0, 1), atol=1e-5)
    assert found[0].keys() == found[1].keys()
    for key, pair in found[0].items():
        np.testing.assert_allclose(pair, found[1][key], atol=1e-5)


# --- drift ----------------------------------------------------------------------------------------


def test_drift_by_hand_is_the_samplers_log_probs_less_the_starts_over_some_micro_batches():
    traces = make_traces(72)
    batch, num_micro = make_batch(traces, PROGRAMME)
    assert num_micro >= 3
    start = np.asarray(logprobs_of(make_params(1), batch, num_micro))
    for frac, some in ((1.0, num_micro), (0.3, 1), (0.0, 0)):
        found = trainer().drift(make_params(1), batch, num_micro, frac=frac)
        assert (found == {}) == (some == 0)
        for role, number in (("leader", 1), ("searcher", 2), ("answerer", 3)):
            weights = np.where(batch.owner_MBT == number, batch.weights_MBT, 0)[:some]
            gaps = (batch.sampler_logprobs_MBT - start)[:some]
            want = np.sum(weights * gaps) / weights.sum() if some else None
            if some:
                assert found[f"update/{role}/kl_to_start"] == pytest.approx(want, rel=1e-4)
