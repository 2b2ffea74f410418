"""Each algorithm, through credit, packing and the trainer, solves a bandit whose optimum is known.

The model has two tokens. The prompt is the first of them, the answer either.
"""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_credit import ROW, answers
from tiny_learning import FORWARD, mesh

from mas_jax.learning import update
from mas_jax.learning.batch import pack
from mas_jax.learning.credit import credit
from mas_jax.learning.objective import head_of, values_of
from mas_jax.learning.teachers import Teacher
from mas_jax.learning.trainer import Trainer
from mas_jax.model import qwen3
from mas_jax.records import ROLES

CONFIG = qwen3.ModelConfig(
    vocab_size=2, num_layers=1, model_dim=8, ffw_dim=16, num_heads=1, num_kv_heads=1, head_dim=8,
    rope_theta=1e4, max_positions=8, tied=False, value_head=True,
)  # fmt: skip
BANDIT = FORWARD._replace(config=CONFIG)
RIGHT = 1  # the token that is rewarded
SEGMENTS_BT = jnp.ones((1, 2), jnp.int32)


@functools.partial(jax.jit)
def outlook(params):
    """Probabilities of the two answers [V], and the critic's value of the prompt."""
    head = head_of(params, BANDIT, jnp.asarray([[0, 0]]), SEGMENTS_BT)
    return (
        jax.nn.softmax(head.unembed_VD @ head.hidden_BTD[0, 0]),
        values_of(params, head)[0, 1],
    )


def start_params():
    return qwen3.init(CONFIG, jax.random.key(0), dtype=jnp.float32)


def teacher_of(share: float) -> Teacher:
    """A teacher that says token 1 with this probability."""
    params = qwen3.init(CONFIG, jax.random.key(1), dtype=jnp.float32)
    hidden_D = head_of(params, BANDIT, jnp.asarray([[0, 0]]), SEGMENTS_BT).hidden_BTD[0, 0]
    pull_D = math.log(share / (1 - share)) * hidden_D / jnp.sum(hidden_D**2)
    params["unembed"] = jnp.stack([jnp.zeros_like(pull_D), pull_D])
    return Teacher("teacher", params, CONFIG)


def play(row, *, steps=100, samples=32, learning_rate=0.03, teachers=None, whiten=False):
    """Parameters after as many updates, of `samples` answers each, and the metrics of all steps."""
    settings = update.OptimizerSettings(
        learning_rate=learning_rate, warmup_steps=0, schedule="linear", b1=0.9, b2=0.95, eps=1e-8,
        weight_decay=0.0, max_grad_norm=1.0, moment_dtype="float32",
    )  # fmt: skip
    programme = {"answerer": row}
    trainer = Trainer(
        programme, BANDIT, mesh(), update.make_optimizer(settings, CONFIG, steps), teachers or {},
        updates_per_batch=1, whiten=whiten, ema_decay=0.9,
    )  # fmt: skip
    state, rng, history = trainer.init(start_params()), np.random.default_rng(0), []
    for _ in range(steps):
        probs_V = np.asarray(outlook(state.params)[0], np.float64)
        said = rng.choice(2, samples, p=probs_V / probs_V.sum())
        played = answers(tuple(float(token == RIGHT) for token in said))
        traces = tuple(
            replace(
                trace,
                tokens=(0, int(token)),
                owners=(0, ROLES["answerer"]),
                logprobs=(0.0, float(np.log(probs_V[token]))),
                turns=(replace(trace.turns[0], start=1, end=2),),
            )
            for trace, token in zip(played.traces, said, strict=True)
        )
        credited, _ = credit([replace(played, traces=traces)], programme)
        batch, num_micro, stats = pack(
            credited, programme, micro_rows=1, length=4, agree=lambda rows: rows
        )
        assert (num_micro, stats.num_traces + stats.merged_traces) == (1, samples)
        scores = trainer.scores(state, batch, num_micro)
        state, metrics = trainer.update(state, batch, scores, num_micro)
        history.append(metrics)
    return state.params, history


def test_outcome_grpo_finds_the_rewarded_answer():
    assert outlook(start_params())[0][RIGHT] < 0.7
    params, history = play(ROW)
    assert outlook(params)[0][RIGHT] > 0.95
    # where all answers are right there is nothing to learn, and the update is skipped
    assert {metrics["update/skipped"] for metrics in history} == {0.0, 1.0}


@pytest.mark.parametrize("share", [pytest.param(0.8, marks=pytest.mark.slow), 0.2])
def test_distillation_ends_at_the_teachers_probabilities_and_not_at_its_favourite(share):
    teacher = teacher_of(share)
    np.testing.assert_allclose(outlook(teacher.params)[0][1], share, rtol=1e-4)
    assert abs(outlook(start_params())[0][1] - share) > 0.15
    row = replace(ROW, advantages=("distillation",), beta=1.0)
    params, history = play(row, samples=64, teachers={"teacher": teacher})
    np.testing.assert_allclose(outlook(params)[0][1], share, atol=0.05)
    gaps = [metrics["update/answerer/teacher_kl"] for metrics in history]
    assert abs(np.mean(gaps[-20:])) < 0.02 < np.mean(gaps[:3])


def test_ppo_with_a_critic_finds_the_rewarded_answer_and_what_it_is_worth():
    row = replace(ROW, advantages=("gae",), value_coef=0.5)
    params, history = play(row, whiten=True)
    probs_V, value = outlook(params)
    assert probs_V[RIGHT] > 0.95
    np.testing.assert_allclose(value, probs_V[RIGHT], atol=0.1)  # the mean reward
    errors = [metrics["update/answerer/value_squared_error"] for metrics in history]
    assert np.mean(errors[-10:]) < 0.1 < errors[0]


@pytest.mark.slow
def test_a_critic_of_a_policy_that_may_not_move_is_worth_its_mean_reward():
    row = replace(ROW, advantages=("gae",), value_coef=1.0, correction="token", correction_cap=1e-9)
    params, _ = play(row, samples=64)
    probs_V, value = outlook(params)
    assert 0.2 < probs_V[RIGHT] < 0.8
    np.testing.assert_allclose(value, probs_V[RIGHT], atol=0.1)
