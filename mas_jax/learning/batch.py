"""Credited traces -> packed `TokenBatch`: what one update reads, the same shapes on every host.

A trace is a run of one segment id in one row, never cut. Entry t of an array describes token t.
Dimensions: M micro-batches, B rows of one, T positions; X traces, N tokens of them end to end.
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
from mas_jax.model import sharding
from mas_jax.records import ROLES, Trace

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
MAX_NAMED = 5  # traces that were too long, in one log line


@functools.partial(jax.tree_util.register_dataclass, data_fields=_FIELDS, meta_fields=[])
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
    nats.
    """

    tokens_MBT: np.ndarray | jax.Array
    segment_ids_MBT: np.ndarray | jax.Array
    owner_MBT: np.ndarray | jax.Array
    weights_MBT: np.ndarray | jax.Array
    policy_weights_MBT: np.ndarray | jax.Array
    advantages_MBT: np.ndarray | jax.Array
    rewards_MBT: np.ndarray | jax.Array
    sampler_logprobs_MBT: np.ndarray | jax.Array


@dataclass(frozen=True)
class PackStats:
    """What became of one host's traces.

    padding_frac: of the positions of the micro-batches that hold rows. num_tokens, num_traces: as
    packed. merged_traces: that are in the batch as the weight of an equal one. too_long: traces
    that no row holds. skipped_traces: of roles that learn nothing. role_tokens: num_tokens by the
    role of their trace.
    """

    padding_frac: float
    num_tokens: int
    num_traces: int
    merged_traces: int
    too_long: int
    skipped_traces: int
    role_tokens: Mapping[str, int]


def pack(
    credited: Sequence[Credited],
    programme: Programme,
    *,
    micro_rows: int,
    length: int,
    agree: Callable[[int], int],
) -> tuple[TokenBatch, int, PackStats]:
    """This host's batch as numpy arrays, how many micro-batches hold rows, and the statistics.

    Rows are filled first-fit, longest trace first, and stand in no order, so that any micro-batch
    is a fair sample. micro_rows: this host's rows of a micro-batch.
    agree: this host's number of rows -> the largest of any host's, which all then have, filled up
    with rows of padding; M is the next power of two of the micro-batches in use, at least 1.
    A trace longer than `length` is left out, counted and logged, never cut.
    """
    learning = [c for c in credited if programme[c.trace.role].learns]
    fitting = [c for c in learning if len(c.trace.tokens) <= length]
    too_long = [c.trace for c in learning if len(c.trace.tokens) > length]
    _log_too_long(too_long, length)
    packed, times_X = merged(fitting, programme)
    sizes_X = np.asarray([len(c.trace.tokens) for c in packed], np.int64)
    row_X, start_X, segment_X, num_rows = first_fit(sizes_X, length)
    row_X = np.random.default_rng(0).permutation(num_rows)[row_X]
    num_micro = -(-agree(num_rows) // micro_rows)
    shape = (1 << max(num_micro - 1, 0).bit_length(), micro_rows, length)
    values = _token_values(packed, programme, segment_X, sizes_X, times_X)
    first_X = np.cumsum(sizes_X) - sizes_X  # of each trace among all tokens
    position_N = np.repeat(row_X * length + start_X - first_X, sizes_X) + np.arange(sizes_X.sum())

    def _scatter(value_N: np.ndarray) -> np.ndarray:
        flat = np.zeros(np.prod(shape), value_N.dtype)
        flat[position_N] = value_N
        return flat.reshape(shape)

    num_tokens, room = int(sizes_X.sum()), num_micro * micro_rows * length
    stats = PackStats(
        padding_frac=1.0 - num_tokens / room if room else 0.0,
        num_tokens=num_tokens,
        num_traces=len(packed),
        merged_traces=len(fitting) - len(packed),
        too_long=len(too_long),
        skipped_traces=len(credited) - len(learning),
        role_tokens=_by_role(packed),
    )
    return TokenBatch(**{name: _scatter(values[name]) for name in _FIELDS}), num_micro, stats


def _by_role(packed: Sequence[Credited]) -> dict[str, int]:
    """Tokens of the traces of each role."""
    counts: Counter[str] = Counter()
    for c in packed:
        counts[c.trace.role] += len(c.trace.tokens)
    return dict(counts)


def merged(credited: Sequence[Credited], programme: Programme) -> tuple[list[Credited], np.ndarray]:
    """The traces that differ in anything the update reads, in order, and each one's weight: how
    often it is there, where each counts once.

    Equal ones have equal losses and gradients, so a weight stands for them exactly. Candidates of
    one context often say the same: half of the toy workload's tokens. Rewards are read by a
    critic's rows alone.
    """
    times: dict[tuple, float] = {}
    first: dict[tuple, Credited] = {}
    for c in credited:
        trace, row = c.trace, programme[c.trace.role]
        reward = c.reward if "gae" in row.advantages else 0.0
        earned = c.turn_rewards if "gae" in row.advantages else ()
        key = (trace.role, trace.tokens, trace.owners, trace.logprobs, c.advantage, reward,
               c.is_dropped)  # fmt: skip
        if any((*c.turn_advantages, *earned)):
            places = tuple((turn.start, turn.end) for turn in trace.turns)
            key += (c.turn_advantages, earned, places)
        times[key] = times.get(key, 0.0) + c.weight
        first.setdefault(key, c)
    return list(first.values()), np.fromiter(times.values(), np.float64, len(times))


def first_fit(sizes_X: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Row, first position and segment id (from 1) of each trace, [X] i64, and the number of rows.

    Longest first, equal ones in order, each into the first row with room for it.
    """
    row_X, start_X, segment_X = (np.zeros(len(sizes_X), np.int64) for _ in range(3))
    free_B = np.full(len(sizes_X), length, np.int64)  # one row each is enough
    segments_B = np.zeros(len(sizes_X), np.int64)
    for x in np.argsort(-sizes_X, kind="stable"):
        row = np.argmax(free_B >= sizes_X[x])
        segments_B[row] += 1
        row_X[x], start_X[x], segment_X[x] = row, length - free_B[row], segments_B[row]
        free_B[row] -= sizes_X[x]
    return row_X, start_X, segment_X, int(np.count_nonzero(segments_B))


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
        lambda local: jax.make_array_from_process_local_data(at, local, (num_micro, rows, length)),
        batch,
    )
