"""Sums over the vocabulary of pointwise functions of log-probs, chunked, sharded, differentiable.

`vocab_sums` never holds a [B, T, V] array: it gathers the next chunk of masked-in tokens, forms
their [C, V] logits, reduces, and drops them; the backward pass forms them again. Its cost is that
of the masked-in tokens alone. With l = z / temperature - logsumexp and g = d(sum) / dl, the
gradient through the softmax is dz = (g - p sum_v g) / temperature. Under a mesh, every device works
on its own tokens and its own rows of the unembedding.

Dimensions: B rows, T positions, D model, V vocabulary (the local rows under a mesh), X = B T
flattened tokens, C tokens of one chunk, K largest logits. Must not know: models, roles, losses.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mas_jax.model import sharding

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


# --- one chunk of tokens


@dataclass(frozen=True)
class _Axes:
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


def _vocab_ids(axes: _Axes, unembed_VD: jax.Array) -> jax.Array:
    """Vocabulary ids of the local rows of the unembedding, [V] int32."""
    rows = unembed_VD.shape[0]
    first = jax.lax.axis_index(axes.vocab) * rows if axes.vocab else 0
    return first + jnp.arange(rows, dtype=jnp.int32)


def _logits(plan: Plan, axes: _Axes, head: Head, place_C: jax.Array) -> jax.Array:
    """Logits over the temperature, [C, V] float32, from the flat hidden states at `place_C`."""
    hidden_XD = head.hidden_BTD.reshape(-1, head.hidden_BTD.shape[-1])
    hidden_CD = hidden_XD.at[place_C].get(mode="fill", fill_value=0)
    logits_CV = jnp.einsum(
        "CD,VD->CV", hidden_CD, head.unembed_VD, preferred_element_type=jnp.float32
    )
    logits_CV = logits_CV / plan.temperature
    return jnp.where(_vocab_ids(axes, head.unembed_VD) < head.vocab_size, logits_CV, NEVER)


def _log_normaliser(axes: _Axes, logits_CV: jax.Array) -> jax.Array:
    """Log of the partition sum over the whole vocabulary, [C] float32."""
    top_C = axes.max_vocab(jnp.max(logits_CV, axis=1))
    return top_C + jnp.log(axes.sum_vocab(jnp.sum(jnp.exp(logits_CV - top_C[:, None]), axis=1)))


def _kth_largest(plan: Plan, axes: _Axes, logits_CV: jax.Array, ids_V: jax.Array) -> jax.Array:
    """Vocabulary id of the k-th largest logit, [C] int32; among equals lower ids come first."""
    top_CK, place_CK = jax.lax.top_k(logits_CV, min(plan.top_k, logits_CV.shape[1]))
    id_CK = ids_V[place_CK]
    if axes.vocab:
        top_CK = jax.lax.all_gather(top_CK, axes.vocab, axis=1, tiled=True)
        id_CK = jax.lax.all_gather(id_CK, axes.vocab, axis=1, tiled=True)
        _, place_CK = jax.lax.top_k(top_CK, plan.top_k)
        id_CK = jnp.take_along_axis(id_CK, place_CK, axis=1)
    return id_CK[:, -1]


def _top_k_mask(axes: _Axes, logits_CV: jax.Array, ids_V: jax.Array, kth_C: jax.Array) -> jax.Array:
    """True for the logits down to the one whose vocabulary id is `kth_C`, [C, V] bool."""
    is_kth_CV = ids_V == kth_C[:, None]
    kth_value_C = axes.max_vocab(jnp.max(jnp.where(is_kth_CV, logits_CV, -jnp.inf), axis=1))
    tied_CV = (logits_CV == kth_value_C[:, None]) & (ids_V <= kth_C[:, None])
    return (logits_CV > kth_value_C[:, None]) | tied_CV


class _Chunk(NamedTuple):
    """A chunk's log-probs of both models [C, V], and what the backward pass needs again [C]."""

    student_CV: jax.Array
    teacher_CV: jax.Array | None
    selected_CV: jax.Array | None
    saved: tuple[jax.Array | None, ...]


def _chunk(plan, axes, heads, token_C, place_C, saved) -> _Chunk:
    """Log-probs of one chunk; `saved` = (normalisers, k-th id) of the forward pass, or None."""
    student, teacher = heads
    ids_V = _vocab_ids(axes, student.unembed_VD)
    student_CV = _logits(plan, axes, student, place_C)
    teacher_CV = None if teacher is None else _logits(plan, axes, teacher, place_C)
    if saved is None:
        kth_C = None
        if plan.top_k is not None:
            ranked_CV = teacher_CV if plan.support == "teacher" else student_CV
            kth_C = _kth_largest(plan, axes, ranked_CV, ids_V)
        saved = (
            _log_normaliser(axes, student_CV),
            None if teacher is None else _log_normaliser(axes, teacher_CV),
            kth_C,
        )
    student_norm_C, teacher_norm_C, kth_C = saved
    selected_CV = None
    if plan.top_k is not None:
        ranked_CV = teacher_CV if plan.support == "teacher" else student_CV
        selected_CV = _top_k_mask(axes, ranked_CV, ids_V, kth_C)
    elif token_C is not None:
        selected_CV = ids_V == token_C[:, None]
    student_CV = student_CV - student_norm_C[:, None]
    if teacher is not None:
        teacher_CV = teacher_CV - teacher_norm_C[:, None]
    return _Chunk(student_CV, teacher_CV, selected_CV, saved)


def _chunk_sums(plan: Plan, axes: _Axes, chunk: _Chunk) -> tuple[jax.Array, ...]:
    """Sum of each pointwise term over the vocabulary, [C] each."""
    terms = plan.terms(plan, chunk.student_CV, chunk.teacher_CV, chunk.selected_CV)
    return tuple(axes.sum_vocab(jnp.sum(term_CV, axis=1)) for term_CV in terms)


def _chunk_dlogits(plan: Plan, axes: _Axes, chunk: _Chunk, cotangents_C) -> jax.Array:
    """Cotangent of the student's logits before the temperature, [C, V] float32."""

    def weighted(student_CV: jax.Array) -> jax.Array:
        terms = plan.terms(plan, student_CV, chunk.teacher_CV, chunk.selected_CV)
        return sum(ct_C[:, None] * term for ct_C, term in zip(cotangents_C, terms, strict=True))

    student_CV = chunk.student_CV
    _, g_CV = jax.jvp(weighted, (student_CV,), (jnp.ones_like(student_CV),))
    g_sum_C = axes.sum_vocab(jnp.sum(g_CV, axis=1))
    return (g_CV - jnp.exp(student_CV) * g_sum_C[:, None]) / plan.temperature


# --- all chunks


def _chunk_size(plan: Plan, heads, count: int) -> int:
    """Tokens a chunk: `plan.chunk` rows of logits in all, shared by the two models of a pair."""
    models = 1 if heads[1] is None else 2
    return max(1, min(plan.chunk // models, count))


def _for_each_chunk(mask_X: jax.Array, size: int, axes: _Axes, body, carry):
    """Folds `body(index_C, carry)` over the flat places where the mask is True, `size` at a time.

    The last chunk is filled up with X, which is out of range. Under a mesh every device makes the
    same number of turns, so that collectives meet.
    """
    count = mask_X.shape[0]
    rows = -(-count // size) * size
    index_X = jnp.nonzero(mask_X, size=rows, fill_value=count)[0].astype(jnp.int32)
    turns = -(-jnp.sum(mask_X, dtype=jnp.int32) // size)
    if axes.batch:
        turns = jax.lax.pmax(turns, axes.batch)

    def turn(i, carry):
        return body(jax.lax.dynamic_slice_in_dim(index_X, i * size, size), carry)

    return jax.lax.fori_loop(0, turns, turn, carry)


def _take(x_X, index_C):
    return None if x_X is None else x_X.at[index_C].get(mode="fill", fill_value=0)


def _before(index_C: jax.Array, count: int) -> jax.Array:
    """Flat place of the hidden state that predicts each token; out of range stays out of range."""
    return jnp.where(index_C < count, index_C - 1, count)


def _forward(plan: Plan, axes: _Axes, heads, tokens_BT, mask_BT):
    """Sums [B, T] and residuals [X], computed on one device's shard."""
    mask_X = mask_BT.reshape(-1)
    tokens_X = None if tokens_BT is None else tokens_BT.reshape(-1)
    count = mask_X.shape[0]

    def evaluate(index_C):
        chunk = _chunk(plan, axes, heads, _take(tokens_X, index_C), _before(index_C, count), None)
        return _chunk_sums(plan, axes, chunk), chunk.saved

    size = _chunk_size(plan, heads, count)
    shapes = jax.eval_shape(evaluate, jax.ShapeDtypeStruct((size,), jnp.int32))
    zeros = jax.tree.map(lambda s: jnp.zeros((count,), s.dtype), shapes)

    def body(index_C, carry):
        return jax.tree.map(
            lambda all_X, new_C: all_X.at[index_C].set(new_C, mode="drop"), carry, evaluate(index_C)
        )

    sums_X, saved_X = _for_each_chunk(mask_X, size, axes, body, zeros)
    return tuple(x.reshape(mask_BT.shape) for x in sums_X), saved_X


def _backward(plan: Plan, axes: _Axes, heads, tokens_BT, mask_BT, saved_X, cotangents_BT):
    """Cotangents of the student's hidden states and unembedding, on one device's shard."""
    student = heads[0]
    mask_X = mask_BT.reshape(-1)
    tokens_X = None if tokens_BT is None else tokens_BT.reshape(-1)
    cotangents_X = tuple(ct.reshape(-1) for ct in cotangents_BT)
    count, model_dim = mask_X.shape[0], student.hidden_BTD.shape[-1]
    hidden_XD = student.hidden_BTD.reshape(-1, model_dim)

    def body(index_C, carry):
        dhidden_XD, dunembed_VD = carry
        place_C = _before(index_C, count)
        saved_C = jax.tree.map(lambda x: _take(x, index_C), saved_X)
        chunk = _chunk(plan, axes, heads, _take(tokens_X, index_C), place_C, saved_C)
        cotangents_C = [_take(ct, index_C) for ct in cotangents_X]
        dlogits_CV = _chunk_dlogits(plan, axes, chunk, cotangents_C).astype(hidden_XD.dtype)
        dhidden_CD = jnp.einsum(
            "CV,VD->CD", dlogits_CV, student.unembed_VD, preferred_element_type=jnp.float32
        )
        dhidden_CD = axes.sum_vocab(dhidden_CD).astype(hidden_XD.dtype)
        dunembed_VD += jnp.einsum(
            "CV,CD->VD",
            dlogits_CV,
            hidden_XD.at[place_C].get(mode="fill", fill_value=0),
            preferred_element_type=jnp.float32,
        )
        return dhidden_XD.at[place_C].set(dhidden_CD, mode="drop"), dunembed_VD

    carry = (jnp.zeros_like(hidden_XD), jnp.zeros(student.unembed_VD.shape, jnp.float32))
    size = _chunk_size(plan, heads, count)
    dhidden_XD, dunembed_VD = _for_each_chunk(mask_X, size, axes, body, carry)
    for axis in axes.batch:
        if axis in axes.embed:
            dunembed_VD = jax.lax.psum_scatter(dunembed_VD, axis, scatter_dimension=1, tiled=True)
        else:
            dunembed_VD = jax.lax.psum(dunembed_VD, axis)
    dhidden_BTD = dhidden_XD.reshape(student.hidden_BTD.shape)
    return dhidden_BTD, dunembed_VD.astype(student.unembed_VD.dtype)


# --- the differentiable whole, over the mesh

_TOKENS = ("batch", "length")


def _mesh_axes() -> _Axes:
    """Axes of the mesh set by `jax.set_mesh`."""
    if jax.sharding.get_abstract_mesh().empty:
        return _Axes()
    return _Axes(*(sharding.mesh_axes(name) for name in ("vocab", "batch", "embed")))


def _head_spec(head: Head | None) -> Head | None:
    if head is None:
        return None
    hidden, unembed = sharding.spec((*_TOKENS, "hidden")), sharding.spec(("vocab", "hidden"))
    return dataclasses.replace(head, hidden_BTD=hidden, unembed_VD=unembed)


def _on_mesh(function, axes: _Axes, in_specs, out_specs):
    """`function` on every device's shard of its arguments."""
    if not axes.batch:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _vocab_sums(plan: Plan, heads, tokens_BT, mask_BT):
    return _vocab_sums_fwd(plan, heads, tokens_BT, mask_BT)[0]


def _vocab_sums_fwd(plan: Plan, heads, tokens_BT, mask_BT):
    axes = _mesh_axes()
    tokens, flat = sharding.spec(_TOKENS), sharding.spec(("batch",))
    in_specs = (tuple(map(_head_spec, heads)), tokens, tokens)
    forward = _on_mesh(functools.partial(_forward, plan, axes), axes, in_specs, (tokens, flat))
    sums_BT, saved_X = forward(heads, tokens_BT, mask_BT)
    return sums_BT, (heads, tokens_BT, mask_BT, saved_X)


def _vocab_sums_bwd(plan: Plan, residuals, cotangents_BT):
    heads, tokens_BT, mask_BT, saved_X = residuals
    axes = _mesh_axes()
    tokens, flat = sharding.spec(_TOKENS), sharding.spec(("batch",))
    in_specs = (tuple(map(_head_spec, heads)), tokens, tokens, flat, tokens)
    out_specs = (sharding.spec((*_TOKENS, "hidden")), sharding.spec(("vocab", "embed")))
    backward = _on_mesh(functools.partial(_backward, plan, axes), axes, in_specs, out_specs)
    dhidden_BTD, dunembed_VD = backward(heads, tokens_BT, mask_BT, saved_X, cotangents_BT)
    student = dataclasses.replace(heads[0], hidden_BTD=dhidden_BTD, unembed_VD=dunembed_VD)
    return (student, None), None, None


_vocab_sums.defvjp(_vocab_sums_fwd, _vocab_sums_bwd)


def vocab_sums(
    plan: Plan,
    student: Head,
    mask_BT: jax.Array,
    *,
    teacher: Head | None = None,
    tokens_BT: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Sum over the vocabulary of each of `plan.terms`, [B, T] float32 each, 0 where masked.

    student, teacher: hidden [B, T, D] (their own D) and unembedding [V, D]. tokens_BT, mask_BT
    [B, T]. Differentiable in the student; the teacher is a constant.
    Raises: ValueError at trace time for unequal shapes or vocabularies, and for a temperature or
    chunk that is not positive.
    """
    _check(plan, student, mask_BT, teacher)
    if teacher is not None:
        rows = min(student.unembed_VD.shape[0], teacher.unembed_VD.shape[0])
        student = dataclasses.replace(student, unembed_VD=student.unembed_VD[:rows])
        teacher = dataclasses.replace(teacher, unembed_VD=teacher.unembed_VD[:rows])
        teacher = jax.lax.stop_gradient(teacher)
    return _vocab_sums(plan, (student, teacher), tokens_BT, mask_BT.at[:, 0].set(False))


def _check(plan: Plan, student: Head, mask_BT: jax.Array, teacher: Head | None) -> None:
    for name, head in (("student", student), ("teacher", teacher)):
        if head is None:
            continue
        rows, model_dim = head.unembed_VD.shape
        if head.hidden_BTD.shape != (*mask_BT.shape, model_dim):
            raise ValueError(
                f"{name}: hidden {head.hidden_BTD.shape} does not fit mask {mask_BT.shape} and "
                f"unembedding {head.unembed_VD.shape}; want [B, T, D], [B, T] and [V, D]"
            )
        if not 0 < head.vocab_size <= rows:
            raise ValueError(
                f"{name}: vocab_size={head.vocab_size} is not in 1..{rows}, the unembedding's rows"
            )
    if teacher is not None and teacher.vocab_size != student.vocab_size:
        raise ValueError(
            f"student vocab_size={student.vocab_size} and teacher vocab_size={teacher.vocab_size} "
            "differ; give both the number of tokens of the tokenizer that they share"
        )
    if plan.temperature <= 0 or plan.chunk <= 0:
        raise ValueError(
            f"temperature={plan.temperature} and chunk={plan.chunk} must both be positive"
        )
