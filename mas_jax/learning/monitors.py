"""What a run with a privileged branch is watched for: whether its policy tells what it never read,
and how far its way of writing has moved from that of the run's start.

Pure functions of episodes and counts; limits and warnings are `alarms.py`'s.
Must not know: how the policy learns, files.
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np

from mas_jax.agents.protocol import leaks
from mas_jax.data.tokenizer import Tokenizer
from mas_jax.learning.experience import Tally
from mas_jax.records import Episode, Question, Trace

BUCKETS = 4096  # of tokens and of pairs each; what shares one is not told apart
_KINDS = ("unigram", "bigram")
_MIX = 1_000_003  # spreads pairs over the buckets
_TAG = re.compile(r"<[^<>]*>")  # would be one word with what it holds


# --- leaks ----------------------------------------------------------------------------------------


def tally_leaks(
    episodes: Sequence[Episode], questions: Mapping[str, Question], texts: Mapping[str, str],
    *, markers: Sequence[str], tokenizer: Tokenizer,
) -> Tally:  # fmt: skip
    """Shares of episodes that say what only a reader of the privileged text can say: `leak/...`.

    marker_frac: one of `markers` (as they are, whatever the case), which neither the question nor a
    passage found before holds. answer_frac: a golden answer that the question does not name, before
    a passage that holds one was found; a policy that knows it by heart counts too, so that only its
    growth is a sign. texts: of passages by id.
    """
    found = [
        _leaks(episode.traces, questions[episode.question], texts, markers, tokenizer)
        for episode in episodes
    ]
    return {
        "leak/marker_frac": (sum(marker for marker, _ in found), len(found)),
        "leak/answer_frac": (sum(answer for _, answer in found), len(found)),
    }


def _leaks(
    traces: Sequence[Trace], question: Question, texts: Mapping[str, str], markers: Sequence[str],
    tokenizer: Tokenizer,
) -> tuple[bool, bool]:  # fmt: skip
    """Whether an agent's traces say a marker, and an answer, that nothing had told it."""
    told, answer_told = _plain(question.text), False
    says_marker = says_answer = False
    for trace in traces:
        for turn in trace.turns:
            text = _TAG.sub(" ", tokenizer.decode(trace.tokens[turn.start : turn.end]))
            said = _plain(text)
            says_marker |= any(_plain(m) in said and _plain(m) not in told for m in markers)
            says_answer |= not answer_told and bool(leaks(text, question))
            for name in turn.found:
                told += f" {_plain(texts[name])}"
                answer_told |= bool(leaks(texts[name], question))
    return says_marker, says_answer


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


# --- style ----------------------------------------------------------------------------------------


def count_tokens(episodes: Sequence[Episode]) -> list[list[int]]:
    """How often each bucket of sampled tokens, and of pairs that follow each other in one turn,
    occurs: two lists of BUCKETS counts. A vocabulary of no more than that has a bucket a token."""
    counts = np.zeros((len(_KINDS), BUCKETS), np.int64)
    for trace in (trace for episode in episodes for trace in episode.traces):
        for turn in trace.turns:
            ids = np.asarray(trace.tokens[turn.start : turn.end], np.int64)
            np.add.at(counts[0], ids % BUCKETS, 1)
            np.add.at(counts[1], (ids[:-1] * _MIX + ids[1:]) % BUCKETS, 1)
    return counts.tolist()


def divergence(one: np.ndarray, other: np.ndarray) -> float:
    """Jensen-Shannon divergence of two lists of counts as distributions, nats in [0, ln 2]; 0 where
    one of them counts nothing.

    Source: Lin 1991; H((p + q) / 2) - (H(p) + H(q)) / 2.
    """
    if not one.sum() or not other.sum():
        return 0.0
    p, q = one / one.sum(), other / other.sum()
    return _entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2


def _entropy(p: np.ndarray) -> float:
    return -float(np.sum(p * np.log(np.where(p > 0, p, 1.0))))


def drift(start: np.ndarray, recent: np.ndarray) -> dict[str, float]:
    """`style/unigram_drift` and `style/bigram_drift`, of counts of `count_tokens` in two halves:
    the mean divergence of a half of `recent` from a half of the start, less that of the start's
    halves: what samples of such a size differ by where nothing drifts. Nats; may be a little
    below 0.

    Shapes: start, recent [2, 2, BUCKETS], halves first.
    """
    return {
        f"style/{kind}_drift": float(
            np.mean([divergence(a[n], b[n]) for a in start for b in recent])
        )
        - divergence(*start[:, n])
        for n, kind in enumerate(_KINDS)
    }


class Style:
    """The token statistics of a run's first `window` steps and of its last ones.

    `state` goes into a checkpoint, and a run that goes on from it measures as an uninterrupted one.
    """

    def __init__(self, window: int) -> None:
        self._window, self._num_steps = window, 0
        # the start in two halves, its even and its odd steps
        self._start = np.zeros((2, len(_KINDS), BUCKETS), np.int64)
        self._recent: deque[np.ndarray] = deque(maxlen=window)

    def add(self, counts: Sequence[Sequence[int]] | np.ndarray) -> dict[str, float]:
        """Counts one more step; `drift` once the last `window` steps are none of the first, halves
        being even and odd steps; none in a window of one step, which has no halves."""
        step_counts = np.asarray(counts, np.int64)
        if self._num_steps < self._window:
            self._start[self._num_steps % 2] += step_counts
        else:
            self._recent.append(step_counts)
        self._num_steps += 1
        if len(self._recent) < max(self._window, 2):
            return {}
        steps = list(self._recent)
        return drift(self._start, np.stack([sum(steps[::2]), sum(steps[1::2])]))

    @property
    def state(self) -> dict:
        """All of it as JSON."""
        return {
            "window": self._window, "num_steps": self._num_steps, "start": _sparse(self._start),
            "recent": [_sparse(counts) for counts in self._recent],
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: Mapping) -> Self:
        """As `state` says."""
        style = cls(state["window"])
        style._num_steps = state["num_steps"]
        style._start = _dense(state["start"], style._start.shape)
        style._recent.extend(_dense(c, style._start.shape[1:]) for c in state["recent"])
        return style


def _sparse(counts: np.ndarray) -> list[list[int]]:
    """Places and values of what is not 0."""
    (places,) = np.nonzero(counts.ravel())
    return [places.tolist(), counts.ravel()[places].tolist()]


def _dense(sparse: Sequence[Sequence[int]], shape: Sequence[int]) -> np.ndarray:
    counts = np.zeros(np.prod(shape), np.int64)
    counts[np.asarray(sparse[0], np.int64)] = sparse[1]
    return counts.reshape(shape)
