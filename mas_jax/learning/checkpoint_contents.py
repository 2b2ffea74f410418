"""What one checkpoint directory holds, and the proof that it still holds what was saved.

Orbax does not notice damage: most flipped bits of an array file are restored as other numbers.
Every checkpoint therefore has an *index* beside its arrays: for each leaf its shape, its dtype and
a digest of its contents, with the caller's metadata, and a blake2b seal over all of it. Reading
recomputes the digests from the restored arrays.

On disk a state is a flat table of leaves named by their path in the tree, so NamedTuples, empty
tuples and None need no support from the file format.
Must not know: which checkpoints there are, when one is saved, what the metadata mean.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

DIGEST_SEEDS = (0x9E3779B9, 0x7F4A7C15)


class DamagedCheckpoint(ValueError):
    """A checkpoint that cannot be read, or that holds other contents than were saved."""


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 that spreads every input bit over all output bits (any shape).

    Source: the 32-bit finaliser of MurmurHash3 (Appleby, public domain).
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _words(x: jax.Array) -> jax.Array:
    """The bits of `x` as uint32 words: the same shape, 8-byte types with a trailing axis of two."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


@jax.jit
def content_digest(x: jax.Array) -> jax.Array:
    """Digest [2] uint32 of the contents of one array of any shape, the same for every sharding.

    Each lane is the sum mod 2^32, over all words, of mix(word ^ mix(position + seed)). Integer sums
    are exact in any order, so the result does not depend on how the array is split over devices or
    processes, and no process needs another one's shards: the compiler adds the all-reduce. For a
    given position the summand is a bijection of the word, hence a change within one word (a
    flipped bit) always changes both lanes; damage to many words goes unseen with probability
    2^-64. It runs where the array lives, at about the speed of reading it, and so also covers the
    copy to the host, compression and the disk. It guards against accidents, not an adversary.
    Positions count mod 2^32: exchanging two words 2^32 positions apart would not be seen.
    """
    words = _words(x)
    position = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(words.ndim)):
        counter = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        position = position + counter * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    lanes = [_mix(words ^ _mix(position + jnp.uint32(seed))) for seed in DIGEST_SEEDS]
    # one reduction of both lanes fuses with all of the above: 2.7 GB/s and no temporary on two CPU
    # cores, where two `jnp.sum`s write both lanes out first and reach 0.2 GB/s
    return jnp.stack(jax.lax.reduce(lanes, [jnp.uint32(0)] * 2, _add_each, range(words.ndim)))


def _add_each(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
    """Lane by lane a + b mod 2^32; uint32 of any shape, alike in all."""
    return [x + y for x, y in zip(a, b, strict=True)]


def _digests(leaves: Mapping[str, jax.Array]) -> dict[str, str]:
    """Digest of every leaf as 16 hexadecimal digits; all are dispatched before any is awaited.

    leaves: of any shape. Of several processes in one program: some that each reduce over all of
    them, one behind the other, were seen to block for good on CPUs.
    """
    if jax.process_count() > 1:
        lanes = jax.device_get(_all_lanes(dict(leaves)))
    else:
        lanes = jax.device_get({name: content_digest(x) for name, x in leaves.items()})
    return {name: "".join(f"{int(lane):08x}" for lane in lanes[name]) for name in leaves}


@jax.jit
def _all_lanes(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """`content_digest` of every leaf, of any shape, in one program."""
    return {name: content_digest(x) for name, x in leaves.items()}


def _seal(body: Mapping[str, Any]) -> str:
    """blake2b of a JSON document, independent of how its text is laid out."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves of a tree by their dotted path, `opt_state.0.mu.embed`.

    Raises: ValueError if two leaves would have one name.
    """
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in named:
            raise ValueError(f"state: two leaves are both named {name!r}; rename a key with a dot")
        named[name] = leaf
    return named


def contents(
    step: int, state: Any, meta: Mapping[str, Any], *, value: float | None
) -> ocp.args.Composite:
    """What Orbax is to save for `state`, a pytree of jax.Arrays: its named leaves and their index.

    Raises: ValueError for a leaf that is not an array of numbers.
    """
    leaves = _named_leaves(state)
    for name, x in leaves.items():
        if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"state leaf {name}: wanted a jax.Array of numbers, got {type(x).__name__}; "
                "make it one, and of a typed PRNG key store jax.random.key_data(key)"
            )
    digests = _digests(leaves)
    table = {
        name: dict(shape=x.shape, dtype=str(x.dtype), digest=digests[name])
        for name, x in leaves.items()
    }
    body = json.loads(json.dumps(dict(step=step, value=value, meta=dict(meta), leaves=table)))
    return ocp.args.Composite(
        state=ocp.args.PyTreeSave(leaves), index=ocp.args.JsonSave(body | dict(seal=_seal(body)))
    )


def read_index(path: epath.Path) -> dict[str, Any]:
    """The index of the checkpoint at `path`: `step`, `value`, `meta`, `leaves`.

    Raises: DamagedCheckpoint if it is missing, unreadable or not what was sealed.
    """
    try:
        document = ocp.JsonCheckpointHandler().restore(path / "index")
        seal = document.pop("seal")
        sealed = _seal(document)
    # what a damaged text can raise: decoding, parsing, a document of another type
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"index: {_one_line(error)}") from error
    if seal != sealed:
        raise DamagedCheckpoint("index: its contents do not match its seal")
    return document


def read_state(
    path: epath.Path, abstract_state: Any, *, complete: bool
) -> tuple[Any, dict[str, Any]]:
    """The verified state of the checkpoint at `path`, on the shardings asked for, and its index.

    `complete`: the checkpoint may hold no leaf that `abstract_state` lacks. In a run of several
    processes damage that one of them meets is raised on all.
    Raises: DamagedCheckpoint; ValueError if a whole checkpoint does not fit `abstract_state`.
    """
    index, failure = {}, None
    try:
        index = read_index(path)
    except DamagedCheckpoint as error:
        failure = error
    _agree(failure)
    wanted = _named_leaves(abstract_state)
    _check_fit(index["leaves"], wanted, path=path, complete=complete)
    leaves = _read_leaves(path, wanted)
    digests = _digests(leaves)
    changed = [name for name in wanted if digests[name] != index["leaves"][name]["digest"]]
    if changed:
        shown = ", ".join(changed[:3]) + (", ..." if len(changed) > 3 else "")
        raise DamagedCheckpoint(
            f"{len(changed)} of {len(wanted)} leaves do not match their digest: {shown}"
        )
    in_order = [leaves[name] for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), in_order), index


def _agree(failure: DamagedCheckpoint | None) -> None:
    """Raise on every process if one of them met damage; a collective, as restoring is one."""
    met = failure is not None
    if jax.process_count() > 1:
        met = bool(np.any(multihost_utils.process_allgather(np.asarray(met))))
    if met:
        raise failure or DamagedCheckpoint("another process could not read it")


def _check_fit(
    saved: Mapping[str, Mapping[str, Any]],
    wanted: Mapping[str, Any],
    *,
    path: epath.Path,
    complete: bool,
) -> None:
    """Raises: ValueError that names every leaf that is absent, of another shape or dtype, or
    that its sharding cannot split; and, if `complete`, every saved leaf that is not wanted."""
    wrong = []
    for name, x in wanted.items():
        want = f"{x.dtype}{list(x.shape)}"
        have = "nothing" if name not in saved else "{dtype}{shape}".format(**saved[name])
        if have != want:
            wrong.append(f"{name}: saved {have}, wanted {want}")
        elif x.sharding is None:
            wrong.append(f"{name}: no sharding given")
        else:
            try:
                x.sharding.shard_shape(tuple(x.shape))
            except ValueError as error:
                wrong.append(f"{name}: {error}")
    if complete:
        wrong += [f"{name}: saved, not wanted" for name in saved if name not in wanted]
    if wrong:
        raise ValueError(f"checkpoint {path} does not fit abstract_state: " + "; ".join(wrong))


def _read_leaves(path: epath.Path, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The leaves `wanted`, unverified. Raises: DamagedCheckpoint on whatever the formats raise."""
    arguments = {
        name: ocp.ArrayRestoreArgs(
            sharding=x.sharding, global_shape=tuple(x.shape), dtype=x.dtype, strict=True
        )
        for name, x in wanted.items()
    }
    request = ocp.args.PyTreeRestore(dict(wanted), arguments, partial_restore=True)
    leaves, failure = {}, None
    try:
        # the handler itself: Orbax's Checkpointer ends with a barrier, which a process that met
        # damage would not reach
        with closing(ocp.PyTreeCheckpointHandler()) as handler:
            leaves = handler.restore(path / "state", args=request)
        # a leaf that its damaged table of contents lacks comes back as it was asked for
        if lost := [n for n in wanted if not isinstance(leaves[n], jax.Array)]:
            raise DamagedCheckpoint(f"no contents for {', '.join(lost)}")
    # damage surfaces as errors of Orbax, tensorstore, json, zstd and the file system alike, and
    # all of them mean the same here: this checkpoint cannot be read
    except Exception as error:
        failure = DamagedCheckpoint(f"state: {_one_line(error)}")
        failure.__cause__ = error
    _agree(failure)
    return leaves


def _one_line(error: BaseException) -> str:
    """An error in one line of at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
