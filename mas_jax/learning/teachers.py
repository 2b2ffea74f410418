"""Teachers: whose weights score the student's tokens.

A teacher's size is free, its vocabulary is the student's. Scores are taken by the trainer's own
forward pass, at the student's temperature, on the student's token ids; a row of the programme says
whether the teacher reads them in the student's context or in a view with more (`views.py`).
Must not know: what a score is used for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from mas_jax.agents.chat import Chat
from mas_jax.model import qwen3


@dataclass(frozen=True)
class Teacher:
    """Weights that score and their model; `name` is what programme rows call it."""

    name: str
    params: qwen3.Params
    config: qwen3.ModelConfig


def ema(average: qwen3.Params, params: qwen3.Params, *, decay: float) -> qwen3.Params:
    """decay average + (1 - decay) params, leaf by leaf, in the average's dtype."""
    return jax.tree.map(
        lambda old, new: (decay * old + (1.0 - decay) * new.astype(old.dtype)).astype(old.dtype),
        average,
        params,
    )


@dataclass(frozen=True)
class Voice:
    """What a teacher and a student must share for one to score the other's tokens.

    vocabulary: the tokenizer's fingerprint. probe: ids of one conversation under the chat's
    template. stop_ids: what ends a turn.
    """

    vocabulary: str
    vocab_size: int
    probe: tuple[int, ...]
    stop_ids: tuple[int, ...]
    temperature: float


def voice(chat: Chat, *, vocab_size: int, temperature: float) -> Voice:
    """The voice of a policy that speaks through `chat`."""
    probe = chat.message("user", "a probe") + chat.answer + chat.prefill + chat.closing(())
    tokenizer = chat.tokenizer
    return Voice(tokenizer.fingerprint, vocab_size, probe, tuple(tokenizer.stop_ids), temperature)


def check_voices(student: Voice, teacher: Voice, *, where: str | Path) -> None:
    """Raises: ValueError that names what teacher and student do not share.

    Qwen sizes pad the vocabulary's rows differently; what counts is the tokenizer and its size.
    """
    pairs = (
        ("tokenizer", student.vocabulary, teacher.vocabulary),
        ("number of tokens", student.vocab_size, teacher.vocab_size),
        ("chat template", student.probe, teacher.probe),
        ("stop tokens", student.stop_ids, teacher.stop_ids),
        ("temperature", student.temperature, teacher.temperature),
    )
    for what, ours, theirs in pairs:
        if ours != theirs:
            raise ValueError(
                f"teacher {where}: its {what} is not the student's ({theirs} against {ours}), so "
                "it cannot score the student's tokens; choose a teacher of the same family"
            )


def needed(teachers: Mapping[str, Teacher], names: frozenset[str]) -> dict[str, Teacher]:
    """The teachers of these names. Raises: ValueError for one that the run does not have."""
    missing = sorted(names - teachers.keys())
    if missing:
        raise ValueError(
            f"the programme reads teacher {missing[0]!r}, and this run has {sorted(teachers)}; "
            "train it in an earlier stage named 'teacher', or set teacher.checkpoint"
        )
    return {name: teachers[name] for name in sorted(names)}
