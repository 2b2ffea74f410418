"""The toy world: made-up facts, a corpus that tells them, and questions of one to three hops.

Everything follows from the seed. The facts of train, validation and test are disjoint, and so are
the entities that their questions name; only the closed-book part, which does not depend on the
seed, is asked about in every split. Must not know: tokens, prompts, agents.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b

import numpy as np

from mas_jax.data.world_facts import CLOSED, SPLITS, draw_parts
from mas_jax.data.world_passages import make_passages
from mas_jax.data.world_questions import CLOSED_KINDS, make_questions
from mas_jax.records import Passage, Question, question_fields


@dataclass(frozen=True)
class World:
    """A toy world.

    closed_book: the object's name by (relation, subject's name), the same in every world.
    names: names of the train split by kind. by_text: every question by its text.
    fingerprint: of seed, passages, questions and closed-book facts.
    """

    seed: int
    passages: tuple[Passage, ...]
    questions: Mapping[str, tuple[Question, ...]]
    closed_book: Mapping[tuple[str, str], str]
    names: Mapping[str, tuple[str, ...]]
    fingerprint: str
    by_text: Mapping[str, Question] = field(repr=False)


def make_world(
    seed: int,
    *,
    passages: int = 16_000,
    train: int = 640,
    held_out: int = 80,
    closed_share: float = 0.3,
) -> World:
    """The world of a seed.

    train, held_out: questions a family in the train split, and in validation and test each.
    closed_share: of the questions of `nq_like` in every split, about closed-book facts.
    Raises: ValueError if the sizes ask for more than the facts give.
    """
    if not 0 <= closed_share <= 1:
        raise ValueError(f"closed_share={closed_share} is not in [0, 1]")
    parts = draw_parts(seed)
    corpus, first_passages = make_passages(
        parts, count=passages, rng=np.random.default_rng([seed, 1])
    )
    counts = {split: train if split == "train" else held_out for split in SPLITS}
    questions = make_questions(
        parts,
        first_passages,
        counts=counts,
        closed_share=closed_share,
        rng=np.random.default_rng([seed, 2]),
    )
    closed_book = {
        (fact.relation, fact.subject.name): fact.object.name
        for fact in parts[CLOSED].facts
        if fact.subject.kind in CLOSED_KINDS
    }
    names = {
        kind: tuple(entity.name for entity in entities)
        for kind, entities in parts["train"].entities.items()
    }
    return World(
        seed=seed,
        passages=corpus,
        questions=questions,
        closed_book=closed_book,
        names=names,
        fingerprint=_digest(seed, corpus, questions, closed_book),
        by_text={q.text: q for split in SPLITS for q in questions[split]},
    )


def _digest(
    seed: int,
    passages: tuple[Passage, ...],
    questions: Mapping[str, tuple[Question, ...]],
    closed_book: Mapping[tuple[str, str], str],
) -> str:
    digest = blake2b(digest_size=16)
    lines = [seed, *(asdict(p) for p in passages)]
    lines += [question_fields(q) for split in SPLITS for q in questions[split]]
    lines += sorted([*key, value] for key, value in closed_book.items())
    for line in lines:
        digest.update(json.dumps(line, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()
