"""The toy world's corpus: every fact told one to three times among near misses.

A near miss shares the entity, the surname or the relation with what a question asks for. A passage
is titled by the entity that it is about. Must not know: questions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mas_jax.data.world_facts import COPIES, Entity, Fact, Part
from mas_jax.data.world_text import ALIAS, DECOYS, NEAR_MISSES, RELATIONS
from mas_jax.records import Passage

NEAR_MISS_SHARE = 0.5  # of the facts whose relation has one


@dataclass(frozen=True)
class Telling:
    """A passage without an id; `tells` is its (relation, subject) if it is a fact's first one."""

    title: str
    text: str
    tells: tuple[str, str] | None = None


def make_passages(
    parts: Mapping[str, Part], *, count: int, rng: np.random.Generator
) -> tuple[tuple[Passage, ...], dict[tuple[str, str], str]]:
    """The corpus in random order, and the id of each fact's first passage by (relation, subject).

    Raises: ValueError if `count` is too small for one to three passages a fact.
    """
    told: dict[tuple[str, str], Telling] = {}
    for part in parts.values():
        for fact in part.facts:
            for telling in tell_fact(fact, rng):
                told.setdefault((telling.title, telling.text), telling)
        for telling in [*tell_aliases(part), *tell_near_misses(part, rng)]:
            told.setdefault((telling.title, telling.text), telling)
    if len(told) > count:
        raise ValueError(f"{count} passages wanted, the facts alone take {len(told)}")
    everyone = [
        (part, entity)
        for part in parts.values()
        for kind in DECOYS
        for entity in part.entities[kind]
    ]
    while len(told) < count:
        part, entity = everyone[rng.integers(len(everyone))]
        telling = tell_decoy(entity, part, rng)
        told.setdefault((telling.title, telling.text), telling)
    tellings = list(told.values())
    passages, first = [], {}
    for index, place in enumerate(rng.permutation(count)):
        telling = tellings[place]
        passages.append(Passage(f"p{index}", telling.title, telling.text))
        if telling.tells:
            first[telling.tells] = passages[-1].id
    return tuple(passages), first


def tell_fact(fact: Fact, rng: np.random.Generator) -> list[Telling]:
    """A fact in as many phrasings as its subject's style asks for.

    The first uses the subject's name and a phrasing with the relation's keyword; the second uses
    the subject's alias if there is one, in title and text, so that either name leads to the fact.
    """
    forms = RELATIONS[fact.relation].passages
    keyword_form = int(rng.integers(2))
    others = [1 - keyword_form, *(2 + rng.permutation(len(forms) - 2))]
    if not fact.subject.alias:
        others = [others[i] for i in rng.permutation(len(others))]
    copies = max(COPIES[fact.subject.style], len(fact.subject.names))
    tellings = []
    for copy, form in enumerate([keyword_form, *others][:copies]):
        subject = fact.subject.names[copy % len(fact.subject.names)]
        object_ = fact.object.names[rng.integers(len(fact.object.names))]
        tells = None if copy else (fact.relation, fact.subject.name)
        text = forms[form].format(s=subject, o=object_)
        tellings.append(Telling(subject, text, tells))
    return tellings


def tell_aliases(part: Part) -> list[Telling]:
    """One passage for every entity with two names that says so."""
    return [
        Telling(entity.name, ALIAS.format(s=entity.name, o=entity.alias))
        for entities in part.entities.values()
        for entity in entities
        if entity.alias
    ]


def tell_near_misses(part: Part, rng: np.random.Generator) -> list[Telling]:
    """For some subjects a passage of theirs that tells the same relation of somebody else."""
    tellings = []
    for relation, text in NEAR_MISSES.items():
        facts = [fact for fact in part.facts if fact.relation == relation]
        for fact in facts:
            other = facts[rng.integers(len(facts))]
            if other.subject != fact.subject and rng.random() < NEAR_MISS_SHARE:
                names = dict(s=fact.subject.name, x=other.subject.name, o=other.object.name)
                tellings.append(Telling(fact.subject.name, text.format(**names)))
    return tellings


def tell_decoy(entity: Entity, part: Part, rng: np.random.Generator) -> Telling:
    """Something about an entity that no question asks for."""
    options = DECOYS[entity.kind]
    text, kind = options[rng.integers(len(options))]
    other = entity
    while other == entity:
        other = part.entities[kind][rng.integers(len(part.entities[kind]))]
    return Telling(entity.name, text.format(s=entity.name, o=other.name))
