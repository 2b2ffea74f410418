"""Teachers: of another size, the live policy, an average; what they must share with the student."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from scripted_team import CharTokenizer
from test_credit import ROW
from tiny_learning import (
    CONFIG,
    FORWARD,
    largest_gap,
    logprobs_of,
    make_batch,
    make_params,
    make_traces,
    mesh,
)

from mas_jax.agents import chat
from mas_jax.learning import update
from mas_jax.learning.teachers import Teacher, check_voices, voice
from mas_jax.learning.trainer import Trainer

BIG = replace(CONFIG, num_layers=3, model_dim=24, ffw_dim=40)
PROGRAMME = {
    "leader": replace(
        ROW, advantages=(), divergence="reverse_kl", divergence_coef=1.0, teacher="ema"
    ),
    "searcher": replace(ROW, advantages=("distillation",), beta=1.0, teacher="ema"),
    "answerer": replace(
        ROW, advantages=("group", "distillation"), beta=0.5, kl_coef=0.3, kl_estimator="k2",
        kl_reference="live",
    ),
}  # fmt: skip
SETTINGS = update.OptimizerSettings(
    learning_rate=1e-2, warmup_steps=0, schedule="constant", b1=0.9, b2=0.95, eps=1e-8,
    weight_decay=0.0, max_grad_norm=1.0, moment_dtype="float32",
)  # fmt: skip


def make_trainer(programme, teachers, forward=FORWARD):
    optimizer = update.make_optimizer(SETTINGS, forward.config, 10)
    return Trainer(
        programme, forward, mesh(), optimizer, teachers,
        updates_per_batch=1, whiten=False, ema_decay=0.75,
    )  # fmt: skip


@functools.cache
def big_teacher():
    return Teacher("teacher", make_params(5, BIG), BIG)


@functools.cache
def trainer():
    return make_trainer(PROGRAMME, {"teacher": big_teacher()})


@functools.cache
def batch_and_count():
    return make_batch(make_traces(), PROGRAMME)


@functools.cache
def one_step():
    """Start's scores, the state after a step as numpy arrays and its metrics, and its scores."""
    batch, num_micro = batch_and_count()
    start = trainer().init(make_params(0))
    first = trainer().scores(start, batch, num_micro)
    norms = trainer().role_norms(start, batch, first, num_micro)
    state, metrics = trainer().update(start, batch, first, num_micro)
    return first, norms, state, metrics, trainer().scores(state, batch, num_micro)


def test_a_teacher_of_another_size_scores_the_students_own_tokens():
    batch, num_micro = batch_and_count()
    first, _, _, metrics, _ = one_step()
    forward = FORWARD._replace(config=BIG)
    want = logprobs_of(big_teacher().params, batch, num_micro, forward)
    np.testing.assert_array_equal(first.teachers_MBT["teacher"], want)
    own = (batch.owner_MBT == 3) & (batch.weights_MBT != 0)
    gaps = np.asarray(logprobs_of(make_params(0), batch, num_micro) - want)[own]
    assert metrics["update/answerer/teacher_kl"] == pytest.approx(gaps.mean(), rel=1e-4)
    assert abs(gaps.mean()) > 0.01


def test_only_teachers_that_a_row_reads_are_scored_and_none_on_anothers_tokens():
    batch, _ = batch_and_count()
    first, *_ = one_step()
    assert first.teachers_MBT.keys() == {"teacher", "ema"}  # the live one is the pass itself
    for theirs_MBT in first.teachers_MBT.values():
        assert not np.asarray(theirs_MBT)[batch.weights_MBT == 0].any()
        assert np.asarray(theirs_MBT)[batch.weights_MBT != 0].all()


def test_an_average_equal_to_the_student_teaches_nothing_and_one_that_lags_does():
    batch, num_micro = batch_and_count()
    _, norms, state, metrics, second = one_step()
    assert norms["update/searcher/gradient_norm"] < 1e-6
    assert norms["update/leader/gradient_norm"] < 1e-5
    assert norms["update/answerer/gradient_norm"] > 1e-2
    assert metrics["update/leader/divergence"] == pytest.approx(0.0, abs=1e-6)
    later = trainer().role_norms(state, batch, second, num_micro)
    assert min(later[f"update/{role}/gradient_norm"] for role in PROGRAMME) > 1e-3
    assert metrics["update/searcher/distillation_tokens"] > 0


def test_the_average_follows_by_its_decay_and_is_what_scores():
    batch, num_micro = batch_and_count()
    _, _, state, _, second = one_step()
    want = jax.tree.map(lambda a, p: 0.75 * a + 0.25 * p, make_params(0), state.params)
    assert largest_gap(state.average, want) < 1e-6 < largest_gap(state.average, state.params)
    np.testing.assert_allclose(
        second.teachers_MBT["ema"], logprobs_of(state.average, batch, num_micro), atol=1e-6
    )


def test_the_live_policy_is_at_no_distance_from_itself():
    metrics = one_step()[3]
    assert metrics["update/answerer/penalty_kl"] == 0
    assert metrics["update/answerer/kl_to_live"] == 0
    assert metrics["update/answerer/kl_to_teacher"] != 0


def test_without_an_average_in_the_programme_none_is_kept():
    plain = make_trainer({"searcher": ROW}, {})
    assert not plain.has_average and plain.init(make_params(0)).average is None
    assert trainer().has_average


# --- what is missing ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        replace(ROW, advantages=("distillation",), teacher="initial"),
        replace(ROW, kl_coef=0.1, kl_reference="initial"),
        replace(ROW, divergence="jsd", divergence_coef=1.0, teacher="initial"),
    ],
)
def test_a_teacher_that_the_run_does_not_have_is_named(row):
    with pytest.raises(
        ValueError, match=r"reads teacher 'initial', and this run has \['teacher'\]"
    ):
        make_trainer({"searcher": row}, {"teacher": big_teacher()})
    # not by a role that learns nothing
    make_trainer({"searcher": replace(row, trained=False)}, {})


def test_a_critic_without_a_value_head_is_an_error():
    with pytest.raises(ValueError, match=r"set train\.value_head=True"):
        make_trainer({"searcher": replace(ROW, advantages=("gae",))}, {})


# --- voices ---------------------------------------------------------------------------------------


def test_a_teacher_must_share_tokenizer_size_template_stops_and_temperature():
    tokenizer = CharTokenizer()
    student = voice(chat.make_chat(tokenizer, chat.INSTRUCT), vocab_size=40, temperature=1.0)
    check_voices(student, student, where="here")
    other_template = voice(chat.make_chat(tokenizer, chat.TOY), vocab_size=40, temperature=1.0)
    for theirs, what in (
        (replace(student, vocabulary="words"), "tokenizer"),
        (replace(student, vocab_size=41), "number of tokens"),
        (other_template, "chat template"),
        (replace(student, stop_ids=(1, 2)), "stop tokens"),
        (replace(student, temperature=0.7), "temperature"),
    ):
        with pytest.raises(ValueError, match=f"teacher runs/x: its {what} is not the student's"):
            check_voices(student, theirs, where="runs/x")
