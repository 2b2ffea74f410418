"""The monitors of training on the records of evaluations: every system beside its start, also one
that was imitated and so never played in training.

Must not know: how systems were trained, files.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from mas_jax.data.tokenizer import Tokenizer
from mas_jax.evaluation.report import Grid
from mas_jax.learning import experience, monitors
from mas_jax.learning.alarms import Alarm, Alarms, AlarmSettings
from mas_jax.records import Episode, Question

# of a system, under the names of metrics.jsonl, and what its table calls them
COLUMNS = {
    "rollout/em": "EM", "rollout/searches": "searches", "rollout/output_tokens": "tokens",
    "style/unigram_drift": "unigrams", "style/bigram_drift": "bigrams",
    "leak/marker_frac": "markers", "leak/answer_frac": "answers",
}  # fmt: skip


def measure(
    episodes: Sequence[Episode], start: Sequence[Episode], questions: Mapping[str, Question],
    *, markers: Sequence[str], tokenizer: Tokenizer,
) -> dict[str, float]:  # fmt: skip
    """Metrics `rollout/...`, `style/...` and `leak/...` of a system's episodes.

    start: the untrained policy's, of the same questions. Halves are every other episode in the
    order of questions and runs. What an agent was told is what its own conversation shows.
    """
    shown = [_shown(episode, tokenizer) for episode in episodes]
    texts = {name: text for _, found in shown for name, text in found.items()}
    leaks = monitors.tally_leaks(
        [episode for episode, _ in shown], questions, texts, markers=markers, tokenizer=tokenizer
    )
    drift = monitors.drift(_halves(start), _halves(episodes))
    return experience.divided(experience.tally(episodes) | leaks) | drift


def check(
    values: Mapping[str, float], start: Mapping[str, float], settings: AlarmSettings
) -> list[Alarm]:
    """The alarms that a training run with these metrics would have given whose norm were the
    start's."""
    alarms = Alarms(dataclasses.replace(settings, window=1))
    found = [*alarms.check(0, start), *alarms.check(1, values)]
    return [
        dataclasses.replace(a, message=a.message.replace("run's first 1 steps", "start"))
        for a in found
    ]


def grid(measured: Mapping[str, Mapping[str, float]]) -> Grid:
    """A row a system: `COLUMNS` of what `measure` gave."""
    rows = tuple(
        (name, *(f"{values[metric]:.4f}" for metric in COLUMNS))
        for name, values in measured.items()
    )
    title = "Drift from the start, nats, and leaks, share of the episodes"
    return Grid(title, ("system", *COLUMNS.values()), rows)


def _halves(episodes: Sequence[Episode]) -> np.ndarray:
    ordered = sorted(episodes, key=lambda episode: (episode.question, episode.rollout))
    return np.asarray([monitors.count_tokens(ordered[half::2]) for half in (0, 1)])


def _shown(episode: Episode, tokenizer: Tokenizer) -> tuple[Episode, dict[str, str]]:
    """The episode as if each turn had found one passage, which is all that its agent was shown
    before its next one; and those texts."""
    texts, traces = {}, []
    for number, trace in enumerate(episode.traces):
        ends = [turn.start for turn in trace.turns[1:]] + [len(trace.tokens)]
        turns = []
        for turn, end in zip(trace.turns, ends, strict=True):
            name = f"{episode.question} {episode.rollout} {number} {turn.end}"
            texts[name] = tokenizer.decode(trace.tokens[turn.end : end])
            turns.append(dataclasses.replace(turn, found=(name,)))
        traces.append(dataclasses.replace(trace, turns=tuple(turns)))
    return dataclasses.replace(episode, traces=tuple(traces)), texts
