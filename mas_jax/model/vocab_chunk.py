"""One chunk of tokens against the whole vocabulary: logits, normalisers, sums, gradients.

[C, V] is held once a model, as the matmul leaves it; every pass over it works block by block, so
that nothing else of that size is ever made. Under a mesh V is this device's part of the vocabulary
and sums run over its shards.

Dimensions: B rows, T positions, D model, V vocabulary (or a block of it), X = B T flattened tokens,
C tokens of the chunk, K largest logits. Must not know: models, roles, losses.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

VOCAB_BLOCK = 4096  # rows of the vocabulary that one pass over the logits works on at a time
NEVER = -1e30  # a logit that cannot be drawn; finite, so that 0 * log 0 is 0 and not NaN


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["hidden_BTD", "unembed_VD"],
    meta_fields=["vocab_size"],
)
@dataclass(frozen=True)
class Head:
    """What turns hidden states into a distribution: hidden [B, T, D], unembedding [V, D].

    vocab_size: rows at and beyond it are padding and get probability 0.
    """

    hidden_BTD: jax.Array
    unembed_VD: jax.Array
    vocab_size: int


@dataclass(frozen=True)
class Plan:
    """What one kernel computes; static. `terms(student, teacher, selected)` -> pointwise terms."""

    terms: Callable[..., tuple[jax.Array, ...]]
    temperature: float
    chunk: int
    top_k: int | None = None
    support: str = "teacher"
    beta: float | None = None


@dataclass(frozen=True)
class Axes:
    """Mesh axes that the kernel's collectives run over; empty without a mesh."""

    vocab: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()

    def sum_vocab(self, x: jax.Array) -> jax.Array:
        """Sum of `x` (any shape) over the shards of the vocabulary."""
        return jax.lax.psum(x, self.vocab) if self.vocab else x

    def max_vocab(self, x: jax.Array) -> jax.Array:
        """Maximum of `x` (any shape) over the shards of the vocabulary."""
        return jax.lax.pmax(x, self.vocab) if self.vocab else x


def over_vocab(rows: int, body: Callable, carry: Any) -> Any:
    """Folds `body(start, width, carry)` over blocks of the local vocabulary.

    Whatever a pass computes lives for one block only: [C, V] is held once, as logits.
    """
    width = min(VOCAB_BLOCK, rows)
    carry = jax.lax.fori_loop(
        0, rows // width, lambda i, carry: body(i * width, width, carry), carry
    )
    return body(rows - rows % width, rows % width, carry) if rows % width else carry


class _Logits(NamedTuple):
    """One model's logits of a chunk as they come out of the matmul, and how to read them."""

    raw_CV: jax.Array
    first_id: jax.Array | int
    vocab_size: int
    temperature: float

    def block(self, start: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
        """Logits over the temperature of a block of the vocabulary, [C, V], and its ids [V]."""
        ids_V = self.first_id + start + jnp.arange(width, dtype=jnp.int32)
        raw_CV = jax.lax.dynamic_slice_in_dim(self.raw_CV, start, width, axis=1)
        return jnp.where(ids_V < self.vocab_size, raw_CV / self.temperature, NEVER), ids_V


def hidden_at(head: Head, place_C: jax.Array) -> jax.Array:
    """Hidden states [C, D] at flat places; zeros out of range."""
    hidden_XD = head.hidden_BTD.reshape(-1, head.hidden_BTD.shape[-1])
    return hidden_XD.at[place_C].get(mode="fill", fill_value=0)


def _logits(plan: Plan, axes: Axes, head: Head, place_C: jax.Array) -> _Logits:
    """Logits of the tokens that the flat hidden states at `place_C` predict."""
    hidden_CD = hidden_at(head, place_C)
    raw_CV = jnp.einsum("CD,VD->CV", hidden_CD, head.unembed_VD, preferred_element_type=jnp.float32)
    rows = head.unembed_VD.shape[0]
    first_id = jax.lax.axis_index(axes.vocab) * rows if axes.vocab else 0
    return _Logits(raw_CV, first_id, head.vocab_size, plan.temperature)


def _log_normaliser(axes: Axes, logits: _Logits) -> jax.Array:
    """Log of the partition sum over the whole vocabulary, [C] float32."""

    def _body(start, width, carry):
        top_C, sum_C = carry
        block_CV, _ = logits.block(start, width)
        new_top_C = jnp.maximum(top_C, jnp.max(block_CV, axis=1))
        block_sum_C = jnp.sum(jnp.exp(block_CV - new_top_C[:, None]), axis=1)
        return new_top_C, sum_C * jnp.exp(top_C - new_top_C) + block_sum_C

    count, rows = logits.raw_CV.shape
    carry = (jnp.full((count,), NEVER, jnp.float32), jnp.zeros((count,), jnp.float32))
    top_C, sum_C = over_vocab(rows, _body, carry)
    all_top_C = axes.max_vocab(top_C)
    return all_top_C + jnp.log(axes.sum_vocab(sum_C * jnp.exp(top_C - all_top_C)))


def _kth_largest(plan: Plan, axes: Axes, logits: _Logits) -> jax.Array:
    """Vocabulary id of the k-th largest logit, [C] int32; among equals lower ids come first."""

    def _largest(value_CK, id_CK):
        value_CK, place_CK = jax.lax.top_k(value_CK, plan.top_k)
        return value_CK, jnp.take_along_axis(id_CK, place_CK, axis=1)

    def _body(start, width, carry):
        block_CV, ids_V = logits.block(start, width)
        value_CK, place_CK = jax.lax.top_k(block_CV, min(plan.top_k, width))
        value_CK = jnp.concatenate([carry[0], value_CK], axis=1)
        return _largest(value_CK, jnp.concatenate([carry[1], ids_V[place_CK]], axis=1))

    count, rows = logits.raw_CV.shape
    shape = (count, plan.top_k)
    carry = (jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, -1, jnp.int32))
    best = over_vocab(rows, _body, carry)
    if axes.vocab:
        best = _largest(*(jax.lax.all_gather(x, axes.vocab, axis=1, tiled=True) for x in best))
    return best[1][:, -1]


def _value_at(axes: Axes, logits: _Logits, id_C: jax.Array) -> jax.Array:
    """Logit over the temperature of one vocabulary id a token, [C] float32."""
    place_C1 = (id_C - logits.first_id)[:, None]
    last = logits.raw_CV.shape[1] - 1
    value_C1 = jnp.take_along_axis(logits.raw_CV, jnp.clip(place_C1, 0, last), axis=1)
    here_C1 = (place_C1 >= 0) & (place_C1 <= last)
    return axes.max_vocab(jnp.where(here_C1, value_C1 / logits.temperature, -jnp.inf)[:, 0])


class Chunk(NamedTuple):
    """The logits of a chunk's tokens and, [C] each, what normalises and selects among them."""

    student: _Logits
    teacher: _Logits | None
    student_norm_C: jax.Array
    teacher_norm_C: jax.Array | None
    selected_id_C: jax.Array | None
    kth_value_C: jax.Array | None

    def block(self, plan: Plan, start: jax.Array, width: int) -> tuple[jax.Array, Callable]:
        """The student's log-probs of a block [C, V], and the function from them to the terms."""
        student_CV, ids_V = self.student.block(start, width)
        teacher_CV, selected_CV, ranked_CV = None, None, student_CV
        if self.teacher is not None:
            teacher_logits_CV, _ = self.teacher.block(start, width)
            teacher_CV = teacher_logits_CV - self.teacher_norm_C[:, None]
            ranked_CV = teacher_logits_CV if plan.support == "teacher" else student_CV
        if self.selected_id_C is not None:
            selected_CV = ids_V == self.selected_id_C[:, None]
        if self.kth_value_C is not None:
            kth_C1 = self.kth_value_C[:, None]
            before_CV = ids_V <= self.selected_id_C[:, None]
            selected_CV = (ranked_CV > kth_C1) | ((ranked_CV == kth_C1) & before_CV)

        def _terms(log_CV: jax.Array) -> tuple[jax.Array, ...]:
            return plan.terms(plan, log_CV, teacher_CV, selected_CV)

        return student_CV - self.student_norm_C[:, None], _terms


def make_chunk(
    plan: Plan,
    axes: Axes,
    heads: tuple[Head, Head | None],
    token_C: jax.Array | None,
    place_C: jax.Array,
    saved: tuple | None,
) -> tuple[Chunk, tuple]:
    """A chunk and what its backward pass needs saved: (normalisers, k-th id); None makes them."""
    student = _logits(plan, axes, heads[0], place_C)
    teacher = None if heads[1] is None else _logits(plan, axes, heads[1], place_C)
    ranked = teacher if plan.support == "teacher" else student
    if saved is None:
        saved = (
            _log_normaliser(axes, student),
            None if teacher is None else _log_normaliser(axes, teacher),
            None if plan.top_k is None else _kth_largest(plan, axes, ranked),
        )
    student_norm_C, teacher_norm_C, kth_C = saved
    chunk = Chunk(student, teacher, student_norm_C, teacher_norm_C, token_C, None)
    if plan.top_k is not None:
        kth_value_C = _value_at(axes, ranked, kth_C)
        chunk = chunk._replace(selected_id_C=kth_C, kth_value_C=kth_value_C)
    return chunk, saved


def chunk_sums(plan: Plan, axes: Axes, chunk: Chunk) -> tuple[jax.Array, ...]:
    """Sum of each pointwise term over the vocabulary, [C] each."""

    def _block_sums(start, width):
        student_CV, terms = chunk.block(plan, start, width)
        return tuple(jnp.sum(term_CV, axis=1) for term_CV in terms(student_CV))

    def _body(start, width, sums):
        return jax.tree.map(jnp.add, sums, _block_sums(start, width))

    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda: _block_sums(0, 1)))
    sums = over_vocab(chunk.student.raw_CV.shape[1], _body, zeros)
    return jax.tree.map(axes.sum_vocab, sums)


def chunk_dlogits(plan: Plan, axes: Axes, chunk: Chunk, cotangents_C: list[jax.Array]) -> jax.Array:
    """Cotangent of the student's raw logits, [C, V] float32, written over the logits themselves."""

    def _block_gradient(start, width, raw_CV):
        of_raw = chunk._replace(student=chunk.student._replace(raw_CV=raw_CV))
        student_CV, terms = of_raw.block(plan, start, width)

        def _weighted(log_CV):
            pairs = zip(cotangents_C, terms(log_CV), strict=True)
            return sum(cotangent_C[:, None] * term_CV for cotangent_C, term_CV in pairs)

        return student_CV, jax.jvp(_weighted, (student_CV,), (jnp.ones_like(student_CV),))[1]

    def _add(start, width, g_sum_C):
        return g_sum_C + jnp.sum(_block_gradient(start, width, chunk.student.raw_CV)[1], axis=1)

    count, rows = chunk.student.raw_CV.shape
    g_sum_C = axes.sum_vocab(over_vocab(rows, _add, jnp.zeros((count,), jnp.float32)))

    def _write(start, width, raw_CV):
        student_CV, g_CV = _block_gradient(start, width, raw_CV)
        dlogits_CV = (g_CV - jnp.exp(student_CV) * g_sum_C[:, None]) / plan.temperature
        return jax.lax.dynamic_update_slice_in_dim(raw_CV, dlogits_CV, start, axis=1)

    return over_vocab(rows, _write, chunk.student.raw_CV)
