"""Behaviour terms of the roles' rewards: what an agent did, whatever came of it; and how well a
mean of outcomes is known.

Pure functions; a term is in [-1, 1], or NaN where it is missing. Must not
know: which role programme uses a term, and with what weight.
"""

import math
from collections.abc import Sequence

from mas_jax.records import Episode, Trace

INVALID_TERM = -1.0


def invalid_action(trace: Trace) -> float:
    """-1.0 if any turn of the trace was an invalid action, else 0.0."""
    return INVALID_TERM if _num_actions(trace, "invalid") else 0.0


def search_activity(trace: Trace) -> float:
    """b of one Searcher: 1.0 for two or more searches, 0.5 for one and then a report, else 0.0.

    -1.0 with any invalid action. A search counts when it was asked for, also if the retriever
    failed: the policy did its part. Raises: ValueError on another role's trace.
    Source: MultiAgent-OPD, the Searcher's reward 0.9 R_EM + 0.1 b; the seed's "two or more
    searches" asks for no report.
    """
    if trace.role != "searcher":
        raise ValueError(f"search_activity of a {trace.role} ({trace.path}); pass a searcher's")
    if _num_actions(trace, "invalid"):
        return INVALID_TERM
    num_searches = _num_actions(trace, "search")
    if num_searches >= 2:
        return 1.0
    return 0.5 if num_searches == 1 and trace.turns[-1].action == "report" else 0.0


def assignment(episode: Episode, *, cap: int) -> float:
    """Executed searches of the whole workflow up to `cap`, divided by it; in [0, 1].

    -1.0 if a Leader of the episode acted invalidly; other roles' invalid actions do not count.
    Source: MultiAgent-OPD, R_assign = min(C_tool, 6) / 6 with C_tool read as executed searches.
    """
    if cap < 1:
        raise ValueError(f"cap={cap}; the number of searches that earns 1.0 must be at least 1")
    leaders = [trace for trace in episode.traces if trace.role == "leader"]
    if any(_num_actions(trace, "invalid") for trace in leaders):
        return INVALID_TERM
    return min(episode.num_searches, cap) / cap


def search_cost(num_searches: int, *, cap: int) -> float:
    """Minus the searches up to `cap`, divided by it; in [-1, 0].

    The counterpart of `assignment`, for worlds in which a search is not free. Source: ours, an axis
    of the study.
    """
    if cap < 1:
        raise ValueError(f"cap={cap}; the number of searches that costs 1.0 must be at least 1")
    return -min(num_searches, cap) / cap


def num_searches(trace: Trace) -> int:
    """Searches that an agent asked for."""
    return _num_actions(trace, "search")


def judged(
    trace: Trace, correct: float, score: float | None, *, weights: tuple[float, float, float]
) -> float:
    """Reward b1 + b2 correct + b3 score of a subtask's execution; 0.0 with any invalid action.

    weights: b1 of the format, which is kept or the reward is 0.0; b2, b3. NaN, which is missing,
    where the judge gave no score to a valid one.
    Source: M-GRPO (arXiv 2511.13288), the sub-agents' reward; b = (0.1, 0.4, 0.5) there.
    """
    if _num_actions(trace, "invalid"):
        return 0.0
    valid, right, expert = weights
    return math.nan if score is None else valid + right * correct + expert * score


def combine(correct: float, term: float, *, weight: float) -> float:
    """Reward (1 - weight) * correct + weight * term; the paper's weight is 0.1."""
    if not 0.0 <= weight <= 1.0:
        raise ValueError(f"weight={weight} of the behaviour term is outside [0, 1]")
    return (1.0 - weight) * correct + weight * term


def sampling_error(correct: Sequence[float]) -> float:
    """Standard error of the mean of K outcomes, each 1.0 or 0.0: sqrt(p (1 - p) / K).

    p = (right + 1) / (K + 2), so that K equal outcomes are not taken for certainty. Raises:
    ValueError for none.
    Source: the binomial's, with Laplace's rule of succession.
    """
    if not correct:
        raise ValueError("no outcome; the error of a mean is of at least one")
    p = (sum(correct) + 1) / (len(correct) + 2)
    return math.sqrt(p * (1 - p) / len(correct))


def _num_actions(trace: Trace, action: str) -> int:
    return sum(turn.action == action for turn in trace.turns)
