"""Streams beside the policy's: what a step down each does; exact divergences and dense ones."""

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
    gradient_of,
    largest_gap,
    logprobs_of,
    make_batch,
    make_params,
    make_traces,
    mesh,
    norm,
    scores_of,
)

from mas_jax.learning import update
from mas_jax.learning.objective import head_of
from mas_jax.records import ROLES


@functools.cache
def student():
    return make_params(0)


@functools.cache
def standard():
    """A batch of one micro-batch and its scores by the teacher."""
    batch, num_micro = make_batch(make_traces(), STREAMS)
    assert num_micro == 1
    return batch, num_micro, scores_of(teacher=logprobs_of(make_params(1), batch, num_micro))


# --- other streams --------------------------------------------------------------------------------

STREAMS = {
    "leader": replace(ROW, advantages=(), entropy_coef=1.0),
    "searcher": replace(ROW, advantages=(), kl_coef=1.0, kl_estimator="k2"),
    "answerer": replace(ROW, advantages=(), policy_loss="sft"),
}


@pytest.mark.parametrize(
    ("role", "metric", "sign"),
    [
        ("leader", "leader/entropy", 1),
        ("searcher", "searcher/penalty_kl", -1),
        ("answerer", "answerer/nll", -1),
    ],
)
def test_a_step_down_a_stream_does_what_it_is_there_for(role, metric, sign):
    """Raises the entropy; pulls to the reference; makes the tokens likelier."""
    batch, num_micro, scores = standard()
    gradient, before = gradient_of(STREAMS, student(), batch, num_micro, scores, only=role)
    size = 0.05 / norm(gradient)
    params = jax.tree.map(lambda p, g: p - size * g, student(), gradient)
    _, after = gradient_of(STREAMS, params, batch, num_micro, scores, only=role)
    change = float(after[metric][0] - before[metric][0]) / float(before[metric][1])
    assert sign * change > 1e-3
    np.testing.assert_array_equal(before[metric][1], before[f"{role}/tokens"][0])
    assert norm(gradient) > 1e-2


EXACT = {
    "leader": replace(ROW, advantages=(), divergence="forward_kl", divergence_coef=1.0),
    "searcher": replace(ROW, advantages=(), divergence="reverse_kl", divergence_coef=0.5),
    "answerer": replace(ROW, advantages=(), divergence="jsd", divergence_coef=1.0, jsd_beta=0.3),
}
BIG = replace(CONFIG, num_layers=1, model_dim=24, ffw_dim=40)


def dense_divergences(params, theirs, batch):
    """Coefficient times the mean divergence over each role's tokens, from whole distributions."""
    logs = []
    for p, forward in ((params, FORWARD), (theirs, FORWARD._replace(config=BIG))):
        head = head_of(p, forward, batch.tokens_MBT[0], batch.segment_ids_MBT[0])
        logits_BTV = jnp.einsum("btd,vd->btv", head.hidden_BTD, head.unembed_VD)
        logs.append(jnp.roll(jax.nn.log_softmax(logits_BTV), 1, axis=1))
    ours, heard = logs

    def kl(p, q):
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1)

    beta = EXACT["answerer"].jsd_beta
    mixed = jnp.logaddexp(ours + jnp.log(1 - beta), heard + jnp.log(beta))
    found = {
        "leader": kl(heard, ours),
        "searcher": 0.5 * kl(ours, heard),
        "answerer": beta * kl(heard, mixed) + (1 - beta) * kl(ours, mixed),
    }
    masks = {role: batch.owner_MBT[0] == number for role, number in ROLES.items()}
    masks = {role: mask & (batch.weights_MBT[0] != 0) for role, mask in masks.items()}
    return {
        role: jnp.sum(jnp.where(masks[role], found[role], 0.0)) / masks[role].sum()
        for role in found
    }


@functools.cache
def dense_results():
    """Values and gradients by role."""
    batch, _, _ = standard()

    def _both(params, theirs):
        values, pull = jax.vjp(lambda p: dense_divergences(p, theirs, batch), params)
        each = {role: {name: jnp.float32(name == role) for name in values} for role in values}
        return values, {role: pull(one)[0] for role, one in each.items()}

    return jax.jit(_both)(student(), make_params(3, BIG))


@functools.cache
def exact_gradients():
    return update.make_gradients(EXACT, FORWARD, mesh(), {"teacher": FORWARD._replace(config=BIG)})


@pytest.mark.parametrize("role", list(EXACT))
def test_an_exact_divergence_to_a_teacher_of_another_size_has_the_dense_ones_gradient(role):
    batch, num_micro, _ = standard()
    weights = {name: jnp.float32(name == role) for name in EXACT}
    gradient, metrics = exact_gradients()(
        student(), batch, scores_of(), {"teacher": make_params(3, BIG)}, num_micro, weights
    )
    values, gradients = dense_results()
    np.testing.assert_allclose(metrics["loss"][0], values[role], rtol=1e-5)
    assert largest_gap(gradient, gradients[role]) < 1e-5 < norm(gradients[role])
    assert "answerer/ratio" not in metrics  # no policy stream
