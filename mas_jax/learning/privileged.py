"""MAPD's privileged branch: which text each question's teacher reads, and the view that shows it.

A question whose protocol did not pass its gates shows a correct rollout of its own group instead;
without one it has no view, and nothing of it is distilled. Each of these is counted.
Must not know: losses, devices, how protocols were made.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mas_jax.agents.chat import Chat
from mas_jax.agents.protocol import FIELDS, Protocol, render, select
from mas_jax.agents.protocol_files import read_protocols
from mas_jax.learning.views import View, insert
from mas_jax.records import Episode, Question, Trace

CONTROLS = ("none", "empty", "shuffled", "wrong")
FALLBACKS = ("rollout", "none")


def texts(
    protocols: Mapping[str, Protocol], *, fields: Sequence[str], form: str, control: str, seed: int
) -> dict[str, str]:
    """The text of each question with a protocol, or of a control: "empty", its own words in a
    random order ("shuffled"), or another question's ("wrong").

    A protocol that has none of the fields has no text. Raises: ValueError for another control or
    field.
    """
    if control not in CONTROLS:
        raise ValueError(f"privileged.control={control!r}: choose from {CONTROLS}")
    chosen = {uid: select(found, fields) for uid, found in protocols.items()}
    own = {uid: text for uid, found in chosen.items() if found and (text := render(found, form))}
    if control == "empty":
        return dict.fromkeys(own, "")
    if control == "shuffled":
        return {uid: _shuffled(text, random.Random(f"{seed}/{uid}")) for uid, text in own.items()}
    if control == "wrong":
        uids = sorted(own)
        random.Random(seed).shuffle(uids)
        return {uid: own[other] for uid, other in zip(uids, uids[1:] + uids[:1], strict=True)}
    return own


def read_texts(section: Mapping, questions: Sequence[Question], *, seed: int) -> dict[str, str]:
    """`texts` of these questions, as the config's section `privileged` says: of its file of
    launch/build_protocols.py, no fields standing for all. Other questions of the file, such as
    those of another split, are not shown as a control either. Raises: ValueError as `texts`, or if
    the file is of none of the questions."""
    path = section["protocols"]
    every = read_protocols(Path(path))
    found = {q.uid: every[q.uid] for q in questions if q.uid in every}
    if questions and not found:
        raise ValueError(
            f"privileged.protocols={path!r} holds protocols of {len(every)} questions and none of "
            f"these, such as {questions[0].uid!r}; build it with the --split and config of them"
        )
    fields, form, control = (section[name] for name in ("fields", "form", "control"))
    return texts(found, fields=fields or FIELDS, form=form, control=control, seed=seed)


def digest(shown: Mapping[str, str]) -> str:
    """Of all texts."""
    found = hashlib.blake2b(digest_size=8)
    for uid, text in sorted(shown.items()):
        found.update(f"{uid}\n{text}\n".encode())
    return found.hexdigest()


def fallback_of(fallback: str, *, control: str) -> str:
    """What is shown without a text: nothing under a control, which would else be no control."""
    return fallback if control == "none" else "none"


def _shuffled(text: str, rng: random.Random) -> str:
    words = text.split()
    rng.shuffle(words)
    return "".join(f" {word}" for word in words)


@dataclass(frozen=True)
class Privilege:
    """What the privileged branch is shown.

    texts: by question. fallback: "rollout" for the first correct rollout of the group where there
    is no text (the rollout itself has no view: it would read what it is about to say), "none" for
    nothing. num_examples: exchanges before the opening question.
    """

    texts: Mapping[str, str]
    chat: Chat
    fallback: str = "rollout"
    num_examples: int = 0

    def digest(self) -> str:
        """Of all texts: what a run that goes on must find again."""
        return digest(self.texts)

    def of(
        self, episodes: Sequence[Episode]
    ) -> tuple[Callable[[Trace], View | None], dict[str, int]]:
        """The view of each trace of a step's episodes, and how many of their questions show what:
        `privileged/...`."""
        shown: dict[str, str] = {}
        copied: dict[str, int] = {}  # question -> the rollout that is shown
        counts = dict.fromkeys(("protocols", "rollouts", "nothing"), 0)
        by_question: dict[str, list[Episode]] = {}
        for episode in episodes:
            by_question.setdefault(episode.question, []).append(episode)
        for uid, group in by_question.items():
            right = None if uid in self.texts else self._right(group)
            if uid in self.texts:
                shown[uid] = self.texts[uid]
            elif right is not None:
                shown[uid], copied[uid] = self._said(right), right.rollout
            kind = "protocols" if uid in self.texts else "rollouts" if uid in shown else "nothing"
            counts[kind] += 1
        ids = {uid: tuple(self.chat.tokenizer.encode(text)) for uid, text in shown.items() if text}

        def _view_of(trace: Trace) -> View | None:
            if trace.question not in shown or copied.get(trace.question) == trace.rollout:
                return None
            text = ids.get(trace.question, ())
            return insert(trace, text, self.chat, num_examples=self.num_examples)

        return _view_of, {f"privileged/{name}": count for name, count in counts.items()}

    def _right(self, group: Sequence[Episode]) -> Episode | None:
        """The first correct rollout of a group; None without one, or if none is to be shown."""
        if self.fallback == "none":
            return None
        ordered = sorted(group, key=lambda episode: episode.rollout)
        return next((e for e in ordered if e.failure is None and max(e.correct) == 1.0), None)

    def _said(self, right: Episode) -> str:
        """What a rollout sampled, turn by turn."""
        tokenizer = self.chat.tokenizer
        said = [
            tokenizer.decode([t for t in trace.tokens[turn.start : turn.end]
                              if t not in tokenizer.stop_ids])
            for trace in right.traces for turn in trace.turns
        ]  # fmt: skip
        return "".join(f" {text.strip()}" for text in said)


def describe(chat: Chat, trace: Trace, view: View) -> str:
    """What the teacher reads of a trace, up to the first sampled token, in words."""
    start = min((turn.start for turn in trace.turns), default=len(trace.tokens))
    opening = chat.tokenizer.decode(view.tokens[: view.place(start)])
    return f"the privileged branch of {trace.question} reads {view.size} tokens more: {opening!r}"
