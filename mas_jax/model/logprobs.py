"""Per-token log-prob, entropy and divergence kernels that never hold a [B, T, V] array.

Each is a sum over the vocabulary of a pointwise function of log-probabilities: the functions stand
here, the chunked and sharded summation in `vocab_sums.py`.

Entry t of every [B, T] result belongs to the distribution that predicts `tokens_BT[:, t]`: it reads
`hidden_BTD[:, t - 1]`, and is 0 where the mask is False and at t = 0. Nats, float32. Masks should
also leave out the first token of each packed segment: `predictable` gives all that have a context.
`chunk` is the number of logit rows [V] that a device holds at once, for both models of a pair
together: the peak is about 4 chunk V bytes (V: the device's part of the vocabulary), backwards plus
the unembedding's gradient. Cost is that of the masked-in tokens.

Dimensions: B rows, T positions, D model, V vocabulary, C tokens of one chunk.
Must not know: models, roles, losses.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mas_jax.model.vocab_chunk import Head, Plan
from mas_jax.model.vocab_sums import vocab_loss, vocab_sums

__all__ = [
    "Head",
    "entropy",
    "forward_kl",
    "jsd",
    "loss_sum",
    "predictable",
    "reverse_kl",
    "token_logprobs",
    "token_logprobs_and_entropy",
    "topk_kl",
]

Log = jax.Array | None  # [C, V]
Terms = tuple[jax.Array, ...]


# Pointwise terms: log-probs of student and teacher [C, V], a selection [C, V] of the vocabulary.


def _logprob_terms(plan: Plan, student_CV: Log, teacher_CV: Log, selected_CV: Log) -> Terms:
    return (jnp.where(selected_CV, student_CV, 0.0),)


def _entropy_terms(plan: Plan, student_CV: Log, teacher_CV: Log, selected_CV: Log) -> Terms:
    return (-jnp.exp(student_CV) * student_CV,)


def _logprob_entropy_terms(plan: Plan, student_CV: Log, teacher_CV: Log, selected_CV: Log) -> Terms:
    return (
        *_logprob_terms(plan, student_CV, teacher_CV, selected_CV),
        *_entropy_terms(plan, student_CV, teacher_CV, selected_CV),
    )


def _forward_kl_terms(plan: Plan, student_CV: Log, teacher_CV: Log, selected_CV: Log) -> Terms:
    return (jnp.exp(teacher_CV) * (teacher_CV - student_CV),)


def _reverse_kl_terms(plan: Plan, student_CV: Log, teacher_CV: Log, selected_CV: Log) -> Terms:
    return (jnp.exp(student_CV) * (student_CV - teacher_CV),)


def _jsd_terms(plan: Plan, student_CV: Log, teacher_CV: Log, selected_CV: Log) -> Terms:
    to_teacher, to_student = math.log(plan.beta), math.log1p(-plan.beta)
    mixture_CV = jnp.logaddexp(to_teacher + teacher_CV, to_student + student_CV)
    from_teacher_CV = jnp.exp(teacher_CV) * (teacher_CV - mixture_CV)
    from_student_CV = jnp.exp(student_CV) * (student_CV - mixture_CV)
    return (plan.beta * from_teacher_CV + (1.0 - plan.beta) * from_student_CV,)


def _tail_terms(
    terms: Callable, plan: Plan, student_CV: Log, teacher_CV: Log, selected_CV: Log
) -> Terms:
    """`terms` on the selected tokens, and both models' mass on the others."""
    (divergence_CV,) = terms(plan, student_CV, teacher_CV, selected_CV)
    return (
        jnp.where(selected_CV, divergence_CV, 0.0),
        jnp.where(selected_CV, 0.0, jnp.exp(student_CV)),
        jnp.where(selected_CV, 0.0, jnp.exp(teacher_CV)),
    )


def _forward_tail_terms(plan: Plan, student_CV: Log, teacher_CV: Log, selected_CV: Log) -> Terms:
    return _tail_terms(_forward_kl_terms, plan, student_CV, teacher_CV, selected_CV)


def _reverse_tail_terms(plan: Plan, student_CV: Log, teacher_CV: Log, selected_CV: Log) -> Terms:
    return _tail_terms(_reverse_kl_terms, plan, student_CV, teacher_CV, selected_CV)


_TAIL_TERMS = {"forward": _forward_tail_terms, "reverse": _reverse_tail_terms}


def predictable(segment_ids_BT: jax.Array) -> jax.Array:
    """True for tokens [..., B, T] with a predecessor in their own segment; id 0 is padding."""
    same_BT = segment_ids_BT == jnp.roll(segment_ids_BT, 1, axis=-1)
    return (same_BT & (segment_ids_BT > 0)).at[..., 0].set(False)


def _marked(
    head: Head, logprobs_BT: jax.Array, tokens_BT: jax.Array, mask_BT: jax.Array
) -> jax.Array:
    """Log-probs with NaN at masked-in tokens that the vocabulary does not have."""
    unknown_BT = (tokens_BT < 0) | (tokens_BT >= head.vocab_size)
    return jnp.where(unknown_BT & mask_BT.at[:, 0].set(False), jnp.nan, logprobs_BT)


@functools.partial(jax.jit, static_argnames=("temperature", "chunk"))
def token_logprobs(
    head: Head, tokens_BT: jax.Array, mask_BT: jax.Array, *, temperature: float, chunk: int
) -> jax.Array:
    """Log-probability of each masked-in token given its prefix, at a temperature, [B, T].

    NaN for an id outside the vocabulary: 0 would say that it was certain.
    """
    plan = Plan(_logprob_terms, temperature, chunk)
    (logprobs_BT,) = vocab_sums(plan, head, mask_BT, tokens_BT=tokens_BT)
    return _marked(head, logprobs_BT, tokens_BT, mask_BT)


@functools.partial(jax.jit, static_argnames=("temperature", "chunk"))
def entropy(head: Head, mask_BT: jax.Array, *, temperature: float, chunk: int) -> jax.Array:
    """Entropy of the distribution that each masked-in token is drawn from, [B, T]."""
    (entropy_BT,) = vocab_sums(Plan(_entropy_terms, temperature, chunk), head, mask_BT)
    return entropy_BT


@functools.partial(jax.jit, static_argnames=("temperature", "chunk"))
def token_logprobs_and_entropy(
    head: Head, tokens_BT: jax.Array, mask_BT: jax.Array, *, temperature: float, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """`token_logprobs` and `entropy`, each [B, T], from one pass over the logits."""
    plan = Plan(_logprob_entropy_terms, temperature, chunk)
    logprobs_BT, entropy_BT = vocab_sums(plan, head, mask_BT, tokens_BT=tokens_BT)
    return _marked(head, logprobs_BT, tokens_BT, mask_BT), entropy_BT


def _of_logprobs(loss: Callable, sums: Terms, data) -> jax.Array:
    return loss(*sums, data)


@functools.partial(jax.jit, static_argnames=("loss", "with_entropy", "temperature", "chunk"))
def loss_sum(
    loss: Callable[..., jax.Array],
    head: Head,
    tokens_BT: jax.Array,
    mask_BT: jax.Array,
    data_BT: Any,
    *,
    with_entropy: bool,
    temperature: float,
    chunk: int,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Sum over masked-in tokens of a loss of each one's log-prob, with a gradient at no recompute.

    loss(logprobs_C, data_C), or loss(logprobs_C, entropy_C, data_C) with_entropy, -> [C] float32;
    data_BT is a tree of [B, T] constants (advantages, old log-probs). Returns the scalar, NaN if a
    masked-in token is outside the vocabulary, and the log-probs (and entropies) [B, T] as constants
    for metrics. Equal to summing the loss of `token_logprobs`, whose backward pass would form the
    logits again.
    """
    terms = _logprob_entropy_terms if with_entropy else _logprob_terms
    token_loss = functools.partial(_of_logprobs, loss)
    total, (logprobs_BT, *entropy_BT) = vocab_loss(
        Plan(terms, temperature, chunk), token_loss, head, tokens_BT, mask_BT, data_BT
    )
    logprobs_BT = _marked(head, logprobs_BT, tokens_BT, mask_BT)
    total = total + jnp.where(jnp.any(jnp.isnan(logprobs_BT)), jnp.nan, 0.0)
    return total, (logprobs_BT, *entropy_BT)


@functools.partial(jax.jit, static_argnames=("temperature", "chunk"))
def forward_kl(
    student: Head, teacher: Head, mask_BT: jax.Array, *, temperature: float, chunk: int
) -> jax.Array:
    """KL(teacher || student) over the whole vocabulary, [B, T]; gradient to the student only."""
    plan = Plan(_forward_kl_terms, temperature, chunk)
    return vocab_sums(plan, student, mask_BT, teacher=teacher)[0]


@functools.partial(jax.jit, static_argnames=("temperature", "chunk"))
def reverse_kl(
    student: Head, teacher: Head, mask_BT: jax.Array, *, temperature: float, chunk: int
) -> jax.Array:
    """KL(student || teacher) over the whole vocabulary, [B, T]; gradient to the student only."""
    plan = Plan(_reverse_kl_terms, temperature, chunk)
    return vocab_sums(plan, student, mask_BT, teacher=teacher)[0]


@functools.partial(jax.jit, static_argnames=("beta", "temperature", "chunk"))
def jsd(
    student: Head, teacher: Head, mask_BT: jax.Array, *, beta: float, temperature: float, chunk: int
) -> jax.Array:
    """Generalised Jensen-Shannon divergence, [B, T]; gradient to the student only.

    beta KL(teacher || M) + (1 - beta) KL(student || M), M = beta teacher + (1 - beta) student.
    Over beta it tends to the forward KL as beta -> 0; over 1 - beta to the reverse as beta -> 1.
    Raises: ValueError unless 0 < beta < 1. Source: GKD (arXiv 2306.13649), definition of JSD(beta).
    """
    if not 0.0 < beta < 1.0:
        raise ValueError(
            f"beta={beta} is not inside (0, 1); at the ends use forward_kl, reverse_kl"
        )
    plan = Plan(_jsd_terms, temperature, chunk, beta=beta)
    return vocab_sums(plan, student, mask_BT, teacher=teacher)[0]


@functools.partial(jax.jit, static_argnames=("k", "support", "direction", "temperature", "chunk"))
def topk_kl(
    student: Head,
    teacher: Head,
    mask_BT: jax.Array,
    *,
    k: int,
    support: str,
    direction: str,
    temperature: float,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """KL on the k likeliest tokens plus one bucket for all others, and the teacher's mass on the k.

    Both [B, T]. support: whose k, "teacher" or "student"; direction: "forward" is
    KL(teacher || student), "reverse" the other. Nothing is renormalised: mass that drifts outside
    the support costs what it weighs. By the data-processing inequality at most the full KL.
    Raises: ValueError for another support or direction, or k outside 1..vocab_size - 1.
    """
    if support not in ("teacher", "student") or direction not in _TAIL_TERMS:
        raise ValueError(
            f"support={support!r}, direction={direction!r}; want 'teacher' or 'student', and "
            f"one of {sorted(_TAIL_TERMS)}"
        )
    if not 0 < k < student.vocab_size:
        raise ValueError(f"k={k} is not in 1..{student.vocab_size - 1}; use forward_kl, reverse_kl")
    plan = Plan(_TAIL_TERMS[direction], temperature, chunk, top_k=k, support=support)
    on_support_BT, student_tail_BT, teacher_tail_BT = vocab_sums(
        plan, student, mask_BT, teacher=teacher
    )
    floor = jnp.finfo(jnp.float32).tiny
    student_log_BT = jnp.log(jnp.maximum(student_tail_BT, floor))
    teacher_log_BT = jnp.log(jnp.maximum(teacher_tail_BT, floor))
    if direction == "forward":
        tail_BT = teacher_tail_BT * (teacher_log_BT - student_log_BT)
    else:
        tail_BT = student_tail_BT * (student_log_BT - teacher_log_BT)
    kept_BT = mask_BT.at[:, 0].set(False)
    kl_BT = jnp.where(kept_BT, on_support_BT + tail_BT, 0.0)
    return kl_BT, jnp.where(kept_BT, 1.0 - teacher_tail_BT, 0.0)
