"""Credited traces -> packed `TokenBatch`: what one update reads, the same shapes on every host.

A trace is a run of one segment id in one row, never cut. Entry t of an array describes token t.
Dimensions: M micro-batches, B rows of one, T positions, S of a row of views; X traces, N tokens of
them end to end.
Must not know: rewards and how they became advantages, models, teachers.
"""

import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mas_jax.learning import hosts
from mas_jax.learning.credit import Credited
from mas_jax.learning.programme import Programme
from mas_jax.learning.views import View
from mas_jax.model import sharding
from mas_jax.records import ROLES, UNTOLD, Trace

_FIELDS = (
    "tokens_MBT",
    "segment_ids_MBT",
    "owner_MBT",
    "weights_MBT",
    "policy_weights_MBT",
    "advantages_MBT",
    "rewards_MBT",
    "sampler_logprobs_MBT",
)
_VIEW_FIELDS = ("tokens_MBS", "segment_ids_MBS", "place_MBT", "weights_MBT")
MAX_NAMED = 5  # traces that were too long, in one log line


@functools.partial(jax.tree_util.register_dataclass, data_fields=_VIEW_FIELDS, meta_fields=[])
@dataclass(frozen=True)
class ViewBatch:
    """What a teacher is shown of the traces of a batch (`views.py`), each in the row of its trace.

    tokens, segment_ids: of the views, [M, B, S] i32, segments numbered as their traces. place: of
    each of the batch's tokens in its row of views, [M, B, T] i32. weights: how often the trace of a
    sampled token counts, [M, B, T] f32; 0 where there is no view.
    """

    tokens_MBS: np.ndarray | jax.Array
    segment_ids_MBS: np.ndarray | jax.Array
    place_MBT: np.ndarray | jax.Array
    weights_MBT: np.ndarray | jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=[*_FIELDS, "view"], meta_fields=[])
@dataclass(frozen=True)
class TokenBatch:
    """Packed traces, [M, B, T]; i32 the first three, f32 the others, 0 wherever nothing is said.

    segment_ids: 1.. within a row, 0 for padding. owner: id in `records.ROLES` of who sampled the
    token, 0 for nobody. weights: of the token in its role's streams, the weight of equal traces
    (their number, if not aligned), or that over |y| where the role aggregates by sequence; 0 where
    nothing is learned. policy_weights:
    the same, but 0 for what drop_zero_variance leaves out of the policy loss. advantages:
    group-relative, on every token of the trace that its role sampled, with its turn's added.
    rewards: the trace's, on the last of them; a turn's, on the last of the turn. sampler_logprobs:
    nats. view: None where no row of the programme has one.
    """

    tokens_MBT: np.ndarray | jax.Array
    segment_ids_MBT: np.ndarray | jax.Array
    owner_MBT: np.ndarray | jax.Array
    weights_MBT: np.ndarray | jax.Array
    policy_weights_MBT: np.ndarray | jax.Array
    advantages_MBT: np.ndarray | jax.Array
    rewards_MBT: np.ndarray | jax.Array
    sampler_logprobs_MBT: np.ndarray | jax.Array
    view: ViewBatch | None = None


@dataclass(frozen=True)
class PackStats:
    """What became of one host's traces.

    padding_frac: of the positions of the micro-batches that hold rows. num_tokens, num_traces: as
    packed. merged_traces: that are in the batch as the weight of an equal one. too_long: traces
    that no row holds. skipped_traces: of roles that learn nothing. role_tokens: num_tokens by the
    role of their trace. viewed_traces: of num_traces, that have a view; too_long_views: views that
    no row holds, whose traces are packed without.
    """

    padding_frac: float
    num_tokens: int
    num_traces: int
    merged_traces: int
    too_long: int
    skipped_traces: int
    role_tokens: Mapping[str, int]
    viewed_traces: int
    too_long_views: int


def pack(
    credited: Sequence[Credited],
    programme: Programme,
    *,
    micro_rows: int,
    length: int,
    agree: Callable[[int], int],
    view_of: Callable[[Trace], View | None] | None = None,
    view_length: int = 0,
) -> tuple[TokenBatch, int, PackStats]:
    """This host's batch as numpy arrays, how many micro-batches hold rows, and the statistics.

    Rows are filled first-fit, longest trace first, and stand in no order, so that any micro-batch
    is a fair sample. micro_rows: this host's rows of a micro-batch.
    agree: this host's number of rows -> the largest of any host's, which all then have, filled up
    with rows of padding; M is the next power of two of the micro-batches in use, at least 1.
    A trace longer than `length` is left out, counted and logged, never cut.
    view_of: what a teacher is shown of a trace, None for nothing, in rows of view_length; a longer
    one is left out like that, and its trace learns without it.
    Raises: ValueError for traces of two policies, or of an endpoint, in roles that learn.
    """
    learning = [c for c in credited if programme[c.trace.role].learns]
    _check_one_policy([c.trace for c in learning])
    fitting = [c for c in learning if len(c.trace.tokens) <= length]
    too_long = [c.trace for c in learning if len(c.trace.tokens) > length]
    _log_too_long(too_long, length)
    packed, times_X = merged(fitting, programme, by_question=view_of is not None)
    views, too_long_views = _views(packed, view_of, view_length)
    sizes_X = np.asarray([len(c.trace.tokens) for c in packed], np.int64)
    view_sizes_X = np.asarray([len(v.tokens) if v else 0 for v in views], np.int64)
    room = np.asarray([length, max(view_length, 1)])
    row_X, start_XK, segment_X, num_rows = first_fit(np.stack([sizes_X, view_sizes_X], 1), room)
    row_X = np.random.default_rng(0).permutation(num_rows)[row_X]
    num_micro = -(-agree(num_rows) // micro_rows)
    shape = (1 << max(num_micro - 1, 0).bit_length(), micro_rows, length)
    values = _token_values(packed, programme, segment_X, sizes_X, times_X)
    position_N = _places(sizes_X, row_X * length + start_XK[:, 0])
    fields = {name: _scattered(values[name], position_N, shape) for name in _FIELDS}
    if view_of is not None:
        at_X = start_XK[:, 1]
        seen = (_places(view_sizes_X, row_X * view_length + at_X), (*shape[:2], view_length))
        lies = dict.fromkeys(_VIEW_FIELDS[:2], seen) | dict.fromkeys(
            _VIEW_FIELDS[2:], (position_N, shape)
        )
        found = _view_values(views, segment_X, at_X, sizes_X, times_X, values["weights_MBT"])
        fields["view"] = ViewBatch(**{n: _scattered(found[n], *lies[n]) for n in _VIEW_FIELDS})
    num_tokens, room = int(sizes_X.sum()), num_micro * micro_rows * length
    stats = PackStats(
        padding_frac=1.0 - num_tokens / room if room else 0.0,
        num_tokens=num_tokens,
        num_traces=len(packed),
        merged_traces=len(fitting) - len(packed),
        too_long=len(too_long),
        skipped_traces=len(credited) - len(learning),
        role_tokens=_by_role(packed),
        viewed_traces=sum(view is not None for view in views),
        too_long_views=too_long_views,
    )
    return TokenBatch(**fields), num_micro, stats


def _check_one_policy(traces: Sequence[Trace]) -> None:
    """Raises: ValueError unless all tokens are ids of one policy, whose weights are trained."""
    policies = sorted({trace.policy for trace in traces})
    if len(policies) > 1 or any(UNTOLD in trace.tokens for trace in traces):
        roles = sorted({trace.role for trace in traces})
        raise ValueError(
            f"roles {roles} learn and were played by policies {policies}, one of them perhaps an "
            "endpoint; one policy is trained: set trained=False for what another plays"
        )


def _places(sizes_X: np.ndarray, starts_X: np.ndarray) -> np.ndarray:
    """Flat position of each of the pieces' values, end to end, where each piece begins at one."""
    first_X = np.cumsum(sizes_X) - sizes_X  # of each piece among all values
    return np.repeat(starts_X - first_X, sizes_X) + np.arange(sizes_X.sum())


def _scattered(value_N: np.ndarray, position_N: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """An array of a shape with the values at their flat positions, else 0."""
    flat = np.zeros(np.prod(shape), value_N.dtype)
    flat[position_N] = value_N
    return flat.reshape(shape)


def _views(
    packed: Sequence[Credited], view_of: Callable[[Trace], View | None] | None, length: int
) -> tuple[list[View | None], int]:
    """The view of each trace, and how many of them no row of a length holds, which are None."""
    views = [None if view_of is None else view_of(c.trace) for c in packed]
    fitting = [view if view and len(view.tokens) <= length else None for view in views]
    return fitting, sum(v is not None for v in views) - sum(v is not None for v in fitting)


def _view_values(
    views: Sequence[View | None],
    segment_X: np.ndarray,
    start_X: np.ndarray,
    sizes_X: np.ndarray,
    times_X: np.ndarray,
    weights_N: np.ndarray,
) -> dict[str, np.ndarray]:
    """Fields of a `ViewBatch`: the first two of all tokens of the views, end to end, the others of
    all tokens of the traces. start_X: of each view in its row."""
    tokens = itertools.chain.from_iterable(view.tokens for view in views if view)
    lengths_X = np.asarray([len(view.tokens) if view else 0 for view in views], np.int64)
    trace_N = np.repeat(np.arange(len(views)), sizes_X)
    position_N = np.arange(len(trace_N)) - np.repeat(np.cumsum(sizes_X) - sizes_X, sizes_X)
    at_X = np.asarray([view.at if view else 0 for view in views], np.int64)
    size_X = np.asarray([view.size if view else 0 for view in views], np.int64)
    has_X = np.asarray([view is not None for view in views], bool)
    moved_N = np.where(position_N >= at_X[trace_N], size_X[trace_N], 0)
    place_N = np.where(has_X[trace_N], start_X[trace_N] + position_N + moved_N, 0)
    return {
        "tokens_MBS": np.fromiter(tokens, np.int32, lengths_X.sum()),
        "segment_ids_MBS": np.repeat(segment_X, lengths_X).astype(np.int32),
        "place_MBT": place_N.astype(np.int32),
        "weights_MBT": _single(has_X[trace_N] & (weights_N != 0), times_X[trace_N]),
    }


def _by_role(packed: Sequence[Credited]) -> dict[str, int]:
    """Tokens of the traces of each role."""
    counts: Counter[str] = Counter()
    for c in packed:
        counts[c.trace.role] += len(c.trace.tokens)
    return dict(counts)


def merged(
    credited: Sequence[Credited], programme: Programme, *, by_question: bool = False
) -> tuple[list[Credited], np.ndarray]:
    """The traces that differ in anything the update reads, in order, and each one's weight: how
    often it is there, where each counts once.

    Equal ones have equal losses and gradients, so a weight stands for them exactly. Candidates of
    one context often say the same: half of the toy workload's tokens. Rewards are read by a
    critic's rows alone. by_question: whether traces of two questions differ in what is read.
    """
    times: dict[tuple, float] = {}
    first: dict[tuple, Credited] = {}
    for c in credited:
        trace, row = c.trace, programme[c.trace.role]
        reward = c.reward if "gae" in row.advantages else 0.0
        earned = c.turn_rewards if "gae" in row.advantages else ()
        key = (trace.role, trace.tokens, trace.owners, trace.logprobs, c.advantage, reward,
               c.is_dropped)  # fmt: skip
        if by_question:
            key += (trace.question,)
        if any((*c.turn_advantages, *earned)):
            places = tuple((turn.start, turn.end) for turn in trace.turns)
            key += (c.turn_advantages, earned, places)
        times[key] = times.get(key, 0.0) + c.weight
        first.setdefault(key, c)
    return list(first.values()), np.fromiter(times.values(), np.float64, len(times))


def first_fit(
    sizes_XK: np.ndarray, room_K: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Row [X], first positions [X, K] and segment id (from 1) [X] of each trace, all i64, and the
    number of rows. A trace takes so much of each of K lines of its row, which have so much room.

    Longest first, equal ones in order, each into the first row with room for it.
    """
    num_traces, num_lines = sizes_XK.shape
    row_X, segment_X = np.zeros(num_traces, np.int64), np.zeros(num_traces, np.int64)
    start_XK = np.zeros((num_traces, num_lines), np.int64)
    free_BK = np.tile(room_K, (num_traces, 1))  # one row each is enough
    segments_B = np.zeros(num_traces, np.int64)
    share_X = np.max(sizes_XK / room_K, axis=1)
    for x in np.argsort(-share_X, kind="stable"):
        row = np.argmax(np.all(free_BK >= sizes_XK[x], axis=1))
        segments_B[row] += 1
        row_X[x], start_XK[x], segment_X[x] = row, room_K - free_BK[row], segments_B[row]
        free_BK[row] -= sizes_XK[x]
    return row_X, start_XK, segment_X, int(np.count_nonzero(segments_B))


def _token_values(
    packed: Sequence[Credited],
    programme: Programme,
    segment_X: np.ndarray,
    sizes_X: np.ndarray,
    times_X: np.ndarray,
) -> dict[str, np.ndarray]:
    """Every field of the batch for the traces' tokens, [N] each, traces end to end."""
    num_tokens = int(sizes_X.sum())
    trace_N = np.repeat(np.arange(len(packed)), sizes_X)

    def _tokenwise(field: Callable[[Trace], Iterable], dtype: type) -> np.ndarray:
        values = itertools.chain.from_iterable(field(c.trace) for c in packed)
        return np.fromiter(values, dtype, num_tokens)

    def _tracewise(field: Callable[[Credited], float], dtype: type) -> np.ndarray:
        return np.fromiter(map(field, packed), dtype, len(packed))

    owner_N = _tokenwise(lambda trace: trace.owners, np.int32)
    role_X = _tracewise(lambda c: ROLES[c.trace.role], np.int32)
    is_first_N = np.diff(trace_N, prepend=-1) > 0  # nothing predicts the first token of a segment
    owned_N = (owner_N == role_X[trace_N]) & ~is_first_N
    count_X = np.maximum(np.bincount(trace_N[owned_N], minlength=len(packed)), 1)
    by_sequence_X = _tracewise(lambda c: programme[c.trace.role].aggregation == "sequence", bool)
    weight_X = np.where(by_sequence_X, times_X / count_X, times_X)
    weights_N = np.where(owned_N, weight_X[trace_N], 0.0).astype(np.float32)
    kept_X = _tracewise(lambda c: not c.is_dropped, bool)
    advantage_X = _tracewise(lambda c: c.advantage, np.float64)
    reward_X = _tracewise(lambda c: c.reward, np.float64)
    turn_advantage_N, turn_reward_N = _turn_values(packed, sizes_X)
    last_N = np.zeros(num_tokens, bool)  # the last owned token of its trace
    owned_at = np.flatnonzero(owned_N)
    last_N[owned_at[np.diff(trace_N[owned_at], append=len(packed)) > 0]] = True
    return {
        "tokens_MBT": _tokenwise(lambda trace: trace.tokens, np.int32),
        "segment_ids_MBT": segment_X[trace_N].astype(np.int32),
        "owner_MBT": owner_N,
        "weights_MBT": weights_N,
        "policy_weights_MBT": np.where(kept_X[trace_N], weights_N, np.float32(0.0)),
        "advantages_MBT": _single(owned_N, advantage_X[trace_N] + turn_advantage_N),
        "rewards_MBT": _single(owned_N, np.where(last_N, reward_X[trace_N], 0.0) + turn_reward_N),
        "sampler_logprobs_MBT": _tokenwise(lambda trace: trace.logprobs, np.float32),
    }


def _single(mask_N: np.ndarray, value_N: np.ndarray) -> np.ndarray:
    """The values in float32, 0 outside the mask."""
    return np.where(mask_N, value_N, 0.0).astype(np.float32)


def _turn_values(packed: Sequence[Credited], sizes_X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Turns' advantages on all their tokens, and turns' rewards on their last, [N] each.

    A turn in which nothing was sampled has no token to earn a reward with.
    """
    advantage_N, reward_N = np.zeros(sizes_X.sum()), np.zeros(sizes_X.sum())
    for first, c in zip(np.cumsum(sizes_X) - sizes_X, packed, strict=True):
        if c.turn_advantages:
            for turn, value in zip(c.trace.turns, c.turn_advantages, strict=True):
                advantage_N[first + turn.start : first + turn.end] = value
        if c.turn_rewards:
            for turn, value in zip(c.trace.turns, c.turn_rewards, strict=True):
                if turn.end > turn.start:
                    reward_N[first + turn.end - 1] = value
    return advantage_N, reward_N


def _log_too_long(traces: Sequence[Trace], length: int) -> None:
    if not traces:
        return
    named = ", ".join(
        f"{trace.role} {trace.path} of {trace.question!r} rollout {trace.rollout} "
        f"({len(trace.tokens)})"
        for trace in traces[:MAX_NAMED]
    )
    logging.warning(
        "%d traces are longer than a row of %d tokens and left out of the update: %s%s",
        len(traces), length, named, ", ..." if len(traces) > MAX_NAMED else "",
    )  # fmt: skip


# --- many hosts -----------------------------------------------------------------------------------


def agree_max(value: int) -> int:
    """The largest of all processes' values; each process must call it."""
    return max(hosts.gather(int(value)))


def over_hosts(by_host: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The numbers of `PackStats` for all hosts' traces: sums, and of padding the mean, since every
    host has as many positions."""
    totals = {name: sum(stats[name] for stats in by_host) for name in by_host[0]}
    return totals | {"padding_frac": totals["padding_frac"] / len(by_host)}


def globalise(batch: TokenBatch, mesh: Mesh) -> TokenBatch:
    """Global arrays [M, B, T] of all processes' local ones, rows split over the batch axes.

    Every process gives as many rows, in order of the mesh: `agree` in `pack` saw to it.
    Raises: ValueError if the rows of a micro-batch do not divide over the batch axes.
    """
    num_micro, rows, length = batch.tokens_MBT.shape
    rows *= jax.process_count()
    at = sharding.named(mesh, (rows, length), ("batch", "length"), name="rows of a micro-batch")
    at = NamedSharding(mesh, PartitionSpec(None, *at.spec))
    return jax.tree.map(
        lambda local: jax.make_array_from_process_local_data(
            at, local, (num_micro, rows, local.shape[-1])
        ),
        batch,
    )
