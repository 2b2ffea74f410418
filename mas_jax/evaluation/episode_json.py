"""Episodes as JSON values and back, exactly.

A trace's owners are written as runs, and its log-probs only where somebody sampled: two thirds of
a trace is nobody's, and its log-probs are 0.0 by contract. Must not know: files.
"""

from itertools import groupby

from mas_jax.records import (
    NOBODY,
    Episode,
    Failure,
    FailureKind,
    Judgement,
    StopReason,
    Trace,
    Turn,
)


def to_json(episode: Episode) -> dict:
    """The episode as dicts, lists and numbers; `from_json` gives back an equal one.

    Raises: ValueError if a trace breaks its contract (lengths, log-probs of nobody's tokens).
    """
    failure, fields = episode.failure, dict(vars(episode))
    if episode.reward_error is None:  # of nearly all
        del fields["reward_error"]
    return {
        **fields,
        "traces": [_trace_to_json(trace) for trace in episode.traces],
        "judgements": [vars(judgement) for judgement in episode.judgements],
        "failure": failure and {"kind": failure.kind.value, "message": failure.message},
    }


def from_json(value: dict) -> Episode:
    """The episode that `to_json` wrote, also after json.dumps and json.loads."""
    failure = value["failure"]
    return Episode(
        **{
            **value,
            "traces": tuple(_trace_from_json(trace) for trace in value["traces"]),
            "predictions": tuple(value["predictions"]),
            "correct": tuple(value["correct"]),
            "retrieved": tuple(map(tuple, value.get("retrieved", ()))),
            "judgements": tuple(Judgement(**found) for found in value.get("judgements", ())),
            "failure": failure and Failure(FailureKind(failure["kind"]), failure["message"]),
        }
    )


def _trace_to_json(trace: Trace) -> dict:
    if not len(trace.tokens) == len(trace.owners) == len(trace.logprobs):
        raise ValueError(
            f"trace {trace.path} of {trace.question}: {len(trace.tokens)} tokens, "
            f"{len(trace.owners)} owners, {len(trace.logprobs)} logprobs; want equal numbers"
        )
    pairs = list(zip(trace.owners, trace.logprobs, strict=True))
    if any(logprob != 0.0 for owner, logprob in pairs if owner == NOBODY):
        raise ValueError(
            f"trace {trace.path} of {trace.question}: a token that nobody sampled has a logprob"
        )
    return {
        **vars(trace),
        "owners": [[owner, len(list(run))] for owner, run in groupby(trace.owners)],
        "logprobs": [logprob for owner, logprob in pairs if owner != NOBODY],
        "turns": [_turn_to_json(turn) for turn in trace.turns],
    }


def _turn_to_json(turn: Turn) -> dict:
    """The turn's fields; those of a search, a history, a topology or an endpoint only where it has
    them."""
    fields = {**vars(turn), "stop_reason": turn.stop_reason.value}
    empty = [name for name in ("query", "found", "text") if not fields[name]]
    empty += [name for name in ("dropped", "wave") if fields[name] is None]
    return {name: value for name, value in fields.items() if name not in empty}


def _turn_from_json(value: dict) -> Turn:
    found = tuple(value.get("found", ()))
    return Turn(**{**value, "stop_reason": StopReason(value["stop_reason"]), "found": found})


def _trace_from_json(value: dict) -> Trace:
    owners = tuple(owner for owner, length in value["owners"] for _ in range(length))
    sampled = iter(value["logprobs"])
    return Trace(
        **{
            **value,
            "tokens": tuple(value["tokens"]),
            "owners": owners,
            "logprobs": tuple(0.0 if owner == NOBODY else next(sampled) for owner in owners),
            "turns": tuple(map(_turn_from_json, value["turns"])),
        }
    )
