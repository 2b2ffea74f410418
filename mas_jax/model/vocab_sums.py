"""Sums over the vocabulary of pointwise functions of log-probs: chunked, sharded, differentiable.

`vocab_sums` never holds a [B, T, V] array: it gathers the next chunk of masked-in tokens, forms
their [C, V] logits, reduces, and drops them; the backward pass forms them again. Its cost is that
of the masked-in tokens alone. With l = z / temperature - logsumexp and g = d(sum) / dl, the
gradient through the softmax is dz = (g - p sum_v g) / temperature. Under a mesh, every device works
on its own tokens and its own rows of the unembedding.

`vocab_loss` is for a loss that is itself a sum over tokens of a function of those sums: the weight
of each token is then known as soon as its logits are, so the gradient is formed beside the value
and the logits once instead of twice.

Dimensions: B rows, T positions, D model, V vocabulary (the local rows under a mesh), X = B T
flattened tokens, C tokens of one chunk. Must not know: models, roles, losses.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mas_jax.model import sharding
from mas_jax.model.vocab_chunk import (
    Axes,
    Chunk,
    Head,
    Plan,
    chunk_dlogits,
    chunk_sums,
    hidden_at,
    make_chunk,
    over_vocab,
)

Heads = tuple[Head, Head | None]  # student, teacher


def _add_dunembed(dunembed_VD: jax.Array, dlogits_CV: jax.Array, hidden_CD: jax.Array) -> jax.Array:
    """The unembedding's gradient [V, D] so far plus a chunk's, in place, block by block."""

    def _body(start, width, dunembed_VD):
        block_CV = jax.lax.dynamic_slice_in_dim(dlogits_CV, start, width, axis=1)
        new_VD = jnp.einsum("CV,CD->VD", block_CV, hidden_CD, preferred_element_type=jnp.float32)
        old_VD = jax.lax.dynamic_slice_in_dim(dunembed_VD, start, width, axis=0)
        return jax.lax.dynamic_update_slice_in_dim(dunembed_VD, old_VD + new_VD, start, axis=0)

    return over_vocab(dunembed_VD.shape[0], _body, dunembed_VD)


def _chunk_size(plan: Plan, heads: Heads, count: int) -> int:
    """Tokens a chunk: `plan.chunk` rows of logits in all, shared by the two models of a pair."""
    models = 1 if heads[1] is None else 2
    return max(1, min(plan.chunk // models, count))


def _for_each_chunk(mask_X: jax.Array, size: int, axes: Axes, body: Callable, carry: Any) -> Any:
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

    def _turn(i, carry):
        return body(jax.lax.dynamic_slice_in_dim(index_X, i * size, size), carry)

    return jax.lax.fori_loop(0, turns, _turn, carry)


def _take(x_X: jax.Array | None, index_C: jax.Array) -> jax.Array | None:
    """Entries [C] of a flat array; zeros out of range."""
    return None if x_X is None else x_X.at[index_C].get(mode="fill", fill_value=0)


def _before(index_C: jax.Array, count: int) -> jax.Array:
    """Flat place of the hidden state that predicts each token; out of range stays out of range."""
    return jnp.where(index_C < count, index_C - 1, count)


def _forward(
    plan: Plan, axes: Axes, heads: Heads, tokens_BT: jax.Array | None, mask_BT: jax.Array
) -> tuple:
    """Sums [B, T] and residuals [X], computed on one device's shard."""
    mask_X = mask_BT.reshape(-1)
    tokens_X = None if tokens_BT is None else tokens_BT.reshape(-1)
    count = mask_X.shape[0]

    def _evaluate(index_C):
        token_C, place_C = _take(tokens_X, index_C), _before(index_C, count)
        chunk, saved_C = make_chunk(plan, axes, heads, token_C, place_C, None)
        return chunk_sums(plan, axes, chunk), saved_C

    size = _chunk_size(plan, heads, count)
    shapes = jax.eval_shape(_evaluate, jax.ShapeDtypeStruct((size,), jnp.int32))
    zeros = jax.tree.map(lambda s: jnp.zeros((count,), s.dtype), shapes)

    def _body(index_C, carry):
        return jax.tree.map(
            lambda all_X, new_C: all_X.at[index_C].set(new_C, mode="drop"),
            carry,
            _evaluate(index_C),
        )

    sums_X, saved_X = _for_each_chunk(mask_X, size, axes, _body, zeros)
    return tuple(x.reshape(mask_BT.shape) for x in sums_X), saved_X


def _backward(plan: Plan, axes: Axes, heads, tokens_BT, mask_BT, saved_X, cotangents_BT):
    """Cotangents of the student's hidden states and unembedding, on one device's shard."""
    student = heads[0]
    mask_X = mask_BT.reshape(-1)
    tokens_X = None if tokens_BT is None else tokens_BT.reshape(-1)
    cotangents_X = tuple(ct.reshape(-1) for ct in cotangents_BT)
    count = mask_X.shape[0]

    def _body(index_C, carry):
        place_C = _before(index_C, count)
        saved_C = jax.tree.map(lambda x: _take(x, index_C), saved_X)
        chunk, _ = make_chunk(plan, axes, heads, _take(tokens_X, index_C), place_C, saved_C)
        cotangents_C = [_take(ct, index_C) for ct in cotangents_X]
        return _add_gradient(plan, axes, student, chunk, cotangents_C, place_C, carry)

    size = _chunk_size(plan, heads, count)
    gradient = _for_each_chunk(mask_X, size, axes, _body, _no_gradient(student))
    return _finish_gradient(axes, student, gradient)


def _loss_of_shard(
    plan: Plan, axes: Axes, token_loss: Callable, with_gradient: bool, heads, tokens_BT, mask_BT,
    data_BT,
):  # fmt: skip
    """Loss, sums [B, T] and, if asked for, its gradient to hidden states and unembedding."""
    student = heads[0]
    mask_X, tokens_X = mask_BT.reshape(-1), tokens_BT.reshape(-1)
    data_X = jax.tree.map(lambda x: x.reshape(-1), data_BT)
    count = mask_X.shape[0]

    def _evaluate(index_C):
        place_C = _before(index_C, count)
        chunk, _ = make_chunk(plan, axes, heads, _take(tokens_X, index_C), place_C, None)
        return chunk, place_C, chunk_sums(plan, axes, chunk)

    def _body(index_C, carry):
        loss, all_sums_X, gradient = carry
        chunk, place_C, sums_C = _evaluate(index_C)
        data_C = jax.tree.map(lambda x: _take(x, index_C), data_X)
        inside_C = index_C < count

        def _total(sums_C):
            return jnp.sum(jnp.where(inside_C, token_loss(sums_C, data_C), 0.0))

        chunk_loss, cotangents_C = jax.value_and_grad(_total)(sums_C)
        if with_gradient:
            gradient = _add_gradient(plan, axes, student, chunk, cotangents_C, place_C, gradient)
        all_sums_X = tuple(
            all_X.at[index_C].set(new_C, mode="drop")
            for all_X, new_C in zip(all_sums_X, sums_C, strict=True)
        )
        return loss + chunk_loss, all_sums_X, gradient

    size = _chunk_size(plan, heads, count)
    shapes = jax.eval_shape(_evaluate, jax.ShapeDtypeStruct((size,), jnp.int32))[-1]
    zeros = tuple(jnp.zeros((count,), s.dtype) for s in shapes)
    start = (jnp.float32(0.0), zeros, _no_gradient(student) if with_gradient else None)
    loss, sums_X, gradient = _for_each_chunk(mask_X, size, axes, _body, start)
    if axes.batch:
        loss = jax.lax.psum(loss, axes.batch)
    sums_BT = tuple(x.reshape(mask_BT.shape) for x in sums_X)
    return loss, sums_BT, _finish_gradient(axes, student, gradient) if with_gradient else None


def _no_gradient(student: Head) -> tuple[jax.Array, jax.Array]:
    """Zero gradients of one shard: hidden [X, D] in its dtype, unembedding [V, D] in float32."""
    model_dim = student.hidden_BTD.shape[-1]
    hidden_XD = student.hidden_BTD.reshape(-1, model_dim)
    return jnp.zeros_like(hidden_XD), jnp.zeros(student.unembed_VD.shape, jnp.float32)


def _add_gradient(
    plan: Plan, axes: Axes, student: Head, chunk: Chunk, cotangents_C, place_C, gradient
):
    """The shard's gradient so far plus that of one chunk, whose logits it uses up."""
    dhidden_XD, dunembed_VD = gradient
    dtype = dhidden_XD.dtype
    dlogits_CV = chunk_dlogits(plan, axes, chunk, cotangents_C).astype(dtype)
    dhidden_CD = jnp.einsum(
        "CV,VD->CD", dlogits_CV, student.unembed_VD, preferred_element_type=jnp.float32
    )
    dhidden_CD = axes.sum_vocab(dhidden_CD).astype(dtype)
    dunembed_VD = _add_dunembed(dunembed_VD, dlogits_CV, hidden_at(student, place_C))
    return dhidden_XD.at[place_C].set(dhidden_CD, mode="drop"), dunembed_VD


def _finish_gradient(axes: Axes, student: Head, gradient) -> tuple[jax.Array, jax.Array]:
    """Gradients [B, T, D] and [V, D] from one shard's, the latter summed over the batch axes."""
    dhidden_XD, dunembed_VD = gradient
    for axis in axes.batch:
        if axis in axes.embed:
            dunembed_VD = jax.lax.psum_scatter(dunembed_VD, axis, scatter_dimension=1, tiled=True)
        else:
            dunembed_VD = jax.lax.psum(dunembed_VD, axis)
    if axes.batch:
        # XLA for TPUs (libtpu 0.0.52) fails on an untied head otherwise, where it tries to move the
        # sum over devices out of the loop that adds up micro-batches
        dunembed_VD = jax.lax.optimization_barrier(dunembed_VD)
    dhidden_BTD = dhidden_XD.reshape(student.hidden_BTD.shape)
    return dhidden_BTD, dunembed_VD.astype(student.unembed_VD.dtype)


_TOKENS = ("batch", "length")


def _mesh_axes() -> Axes:
    """Axes of the mesh set by `jax.set_mesh`."""
    if jax.sharding.get_abstract_mesh().empty:
        return Axes()
    return Axes(*(sharding.mesh_axes(name) for name in ("vocab", "batch", "embed")))


def _head_spec(head: Head | None) -> Head | None:
    if head is None:
        return None
    hidden, unembed = sharding.spec((*_TOKENS, "hidden")), sharding.spec(("vocab", "hidden"))
    return dataclasses.replace(head, hidden_BTD=hidden, unembed_VD=unembed)


def _on_mesh(function: Callable, axes: Axes, in_specs: Any, out_specs: Any) -> Callable:
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _vocab_loss(plan: Plan, token_loss: Callable, heads, tokens_BT, mask_BT, data_BT):
    return _run_vocab_loss(plan, token_loss, False, heads, tokens_BT, mask_BT, data_BT)[:2]


def _run_vocab_loss(plan, token_loss, with_gradient, heads, tokens_BT, mask_BT, data_BT):
    axes = _mesh_axes()
    tokens = sharding.spec(_TOKENS)
    in_specs = (tuple(map(_head_spec, heads)), tokens, tokens, tokens)
    gradient = (sharding.spec((*_TOKENS, "hidden")), sharding.spec(("vocab", "embed")))
    out_specs = (sharding.spec(()), tokens, gradient if with_gradient else None)
    run = functools.partial(_loss_of_shard, plan, axes, token_loss, with_gradient)
    return _on_mesh(run, axes, in_specs, out_specs)(heads, tokens_BT, mask_BT, data_BT)


def _vocab_loss_fwd(plan: Plan, token_loss: Callable, heads, tokens_BT, mask_BT, data_BT):
    *primal, gradient = _run_vocab_loss(plan, token_loss, True, heads, tokens_BT, mask_BT, data_BT)
    return tuple(primal), (heads[0].vocab_size, gradient)


def _vocab_loss_bwd(plan: Plan, token_loss: Callable, residuals, cotangents):
    vocab_size, gradient = residuals
    scaled = [(cotangents[0] * d.astype(jnp.float32)).astype(d.dtype) for d in gradient]
    return (Head(*scaled, vocab_size), None), None, None, None


_vocab_loss.defvjp(_vocab_loss_fwd, _vocab_loss_bwd)


def vocab_loss(
    plan: Plan,
    token_loss: Callable[[tuple[jax.Array, ...], Any], jax.Array],
    student: Head,
    tokens_BT: jax.Array,
    mask_BT: jax.Array,
    data_BT: Any,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Sum over masked-in tokens of a loss of their sums over the vocabulary, and those sums.

    token_loss(sums, data) -> [C] float32: the loss of each of C tokens from the [C] sums that
    `vocab_sums` would give and their entries [C] of data_BT, a tree of [B, T] arrays; give a
    module-level function, since one made per call compiles per call. Returns the loss, float32, and
    the sums [B, T] each. Differentiable in the student through the loss alone: the sums and the
    data are constants. Taking the gradient costs no second pass over the logits.
    Raises: as `vocab_sums`.
    """
    _check(plan, student, mask_BT, None)
    kept_BT = mask_BT.at[:, 0].set(False)
    data_BT = jax.lax.stop_gradient(data_BT)
    loss, sums_BT = _vocab_loss(plan, token_loss, (student, None), tokens_BT, kept_BT, data_BT)
    return loss, jax.lax.stop_gradient(sums_BT)


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
