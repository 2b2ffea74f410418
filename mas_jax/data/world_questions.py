"""Seven families of questions about the toy world, each a likeness of one benchmark.

nq_like         one hop, about entities that the corpus mentions often; partly closed-book knowledge
triviaqa_like   one hop, in words that the passages rarely use
popqa_like      one hop, about entities whose fact is told once
hotpotqa_like   two hops over a bridge entity
2wiki_like      two independent hops: do two subjects share an object, "yes" or "no", half of each
musique_like    three hops
bamboogle_like  two hops whose answer has two names
A yes/no comparison of two copied names is what a tiny model can compute; order would need numbers.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from mas_jax.data.world_facts import CLOSED, SPLITS, Fact, Part
from mas_jax.data.world_text import RELATIONS
from mas_jax.records import Question

FAMILIES = (
    "nq_like",
    "triviaqa_like",
    "popqa_like",
    "hotpotqa_like",
    "2wiki_like",
    "musique_like",
    "bamboogle_like",
)
CLOSED_FAMILY = "nq_like"
CLOSED_KINDS = ("person", "company", "work")  # subjects that closed-book questions ask about
SINGLE_HOP_STYLES = {"nq_like": "frequent", "triviaqa_like": "paraphrased", "popqa_like": "rare"}
COMPARISON = "2wiki_like"

Chain = tuple[Fact, ...]
Draft = tuple[str, Chain, tuple[str, ...]]  # question text, its facts, golden answers


def make_questions(
    parts: Mapping[str, Part],
    first_passages: Mapping[tuple[str, str], str],
    *,
    counts: Mapping[str, int],
    closed_share: float,
    rng: np.random.Generator,
) -> dict[str, tuple[Question, ...]]:
    """Questions by split, `counts[split]` a family, about facts of that split alone.

    closed_share: of `nq_like`, about the closed-book part.
    Raises: ValueError if a split has too few facts for a family.
    """
    questions = {}
    for split in SPLITS:
        made = []
        for family in FAMILIES:
            num_closed = round(closed_share * counts[split]) if family == CLOSED_FAMILY else 0
            drafts = draft(family, parts[split], counts[split] - num_closed, rng)
            drafts += draft(family, parts[CLOSED], num_closed, rng) if num_closed else []
            for index, (text, chain, answers) in enumerate(drafts):
                made.append(
                    Question(
                        uid=f"{family}/{split}/{index}",
                        dataset=family,
                        text=text,
                        golden_answers=answers,
                        hops=len(chain),
                        decomposition=decompose(chain, independent=family == COMPARISON),
                        gold_passages=tuple(
                            first_passages[fact.relation, fact.subject.name] for fact in chain
                        ),
                    )
                )
        questions[split] = tuple(made)
    return questions


def draft(family: str, part: Part, count: int, rng: np.random.Generator) -> list[Draft]:
    """`count` different questions of a family about one part."""
    if family == COMPARISON:
        return draft_comparisons(part, count, rng)
    if family in SINGLE_HOP_STYLES:
        style = SINGLE_HOP_STYLES[family]
        chains = [(fact,) for fact in part.facts if fact.subject.style == style]
        if part.name == CLOSED:
            chains = [(fact,) for fact in part.facts if fact.subject.kind in CLOSED_KINDS]
    elif family == "musique_like":
        style, chains = "frequent", chains_of(part, 3)
    else:
        aliased = family == "bamboogle_like"
        style = "paraphrased" if aliased else "frequent"
        chains = [c for c in chains_of(part, 2) if bool(c[-1].object.alias) == aliased]
    return draft_chains(chains, style, count, rng, what=f"{family} questions on {part.name}")


def chains_of(part: Part, hops: int) -> list[Chain]:
    """All chains of facts in which each is about the object of the one before; no entity twice."""
    by_subject = part.by_subject()
    chains: list[Chain] = [(fact,) for fact in part.facts]
    for _ in range(hops - 1):
        chains = [
            (*chain, by_subject[relation.name, chain[-1].object.name])
            for chain in chains
            for relation in RELATIONS.values()
            if relation.subject == chain[-1].object.kind
        ]
        chains = [c for c in chains if c[-1].object not in [fact.subject for fact in c]]
    return chains


def draft_chains(
    chains: Sequence[Chain], style: str, count: int, rng: np.random.Generator, *, what: str
) -> list[Draft]:
    """`count` questions: every chain once, in random order and phrasing, before any chain twice."""
    asks = [RELATIONS[chain[-1].relation].asks[style] for chain in chains]
    offsets = rng.integers(2, size=len(chains))
    drafts = []
    for round_ in range(max(map(len, asks), default=0)):
        for index in rng.permutation(len(chains)):
            if len(drafts) < count and round_ < len(asks[index]):
                chain = chains[index]
                ask = asks[index][(offsets[index] + round_) % len(asks[index])]
                drafts.append((nest(chain, ask), chain, chain[-1].object.names))
    if len(drafts) < count:
        raise ValueError(f"{count} {what} wanted, {len(drafts)} possible")
    return drafts


def nest(chain: Chain, ask: str) -> str:
    """The question for the last object of a chain that names only its first subject."""
    text = chain[0].subject.name
    for fact in chain[:-1]:
        text = RELATIONS[fact.relation].phrase.format(s=text)
    return ask.format(s=text)


def decompose(chain: Chain, *, independent: bool) -> tuple[str, ...]:
    """One single-hop question a fact; "#1" stands for the answer of the first, and so on."""
    subjects = [fact.subject.name for fact in chain]
    if not independent:
        subjects[1:] = [f"#{hop}" for hop in range(1, len(chain))]
    return tuple(
        RELATIONS[fact.relation].asks["frequent"][0].format(s=subject)
        for fact, subject in zip(chain, subjects, strict=True)
    )


def draft_comparisons(part: Part, count: int, rng: np.random.Generator) -> list[Draft]:
    """Questions whether two subjects share an object that has one name; "yes" for every other."""
    facts = {
        name: [f for f in part.facts if f.relation == name and not f.object.alias]
        for name, relation in RELATIONS.items()
        if relation.same
    }
    pool = [fact for some in facts.values() for fact in some]
    drafts: dict[frozenset[str], Draft] = {}
    for _ in range(100 * count):
        if len(drafts) == count:
            break
        same = len(drafts) % 2 == 0
        one = pool[rng.integers(len(pool))]
        others = [
            f
            for f in facts[one.relation]
            if f.subject != one.subject and (f.object == one.object) == same
        ]
        if not others:
            continue
        other = others[rng.integers(len(others))]
        text = RELATIONS[one.relation].same.format(a=one.subject.name, b=other.subject.name)
        key = frozenset((one.relation, one.subject.name, other.subject.name))
        drafts.setdefault(key, (text, (one, other), ("yes" if same else "no",)))
    if len(drafts) < count:
        raise ValueError(f"{count} comparisons on {part.name} wanted, {len(drafts)} found")
    return list(drafts.values())
