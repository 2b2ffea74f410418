"""Entities and facts of the toy world, drawn per split: no fact links two splits.

Must not know: passages, questions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from mas_jax.data.world_text import NAME_PARTS, RELATIONS

SPLITS = ("train", "validation", "test")
CLOSED = "closed"  # the closed-book part: the same in every world
CLOSED_SEED = 20_240  # of the closed-book part; another value is another starting policy

# entities by kind; languages are shared by all parts, since questions ask for them, not about them
COUNTS: dict[str, dict[str, int]] = {
    "train": dict(country=60, city=180, person=520, company=180, work=240),
    "validation": dict(country=15, city=45, person=130, company=45, work=60),
    "test": dict(country=15, city=45, person=130, company=45, work=60),
    CLOSED: dict(country=10, city=30, person=45, company=20, work=20),
}
# how often the facts about an entity are told, with the share of entities
COPIES = {"frequent": 3, "paraphrased": 2, "rare": 1}
COPY_SHARES = {"frequent": 0.35, "paraphrased": 0.35, "rare": 0.3}
ALIASED_KINDS = ("city", "company")
ALIASED_SHARE = 0.4


@dataclass(frozen=True)
class Entity:
    """A thing with a name. alias: a second name, "" for none. style: a key of COPIES."""

    name: str
    kind: str
    style: str
    alias: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The name, and the alias if there is one."""
        return (self.name, self.alias) if self.alias else (self.name,)


@dataclass(frozen=True)
class Fact:
    """One value of a functional relation."""

    relation: str
    subject: Entity
    object: Entity


@dataclass(frozen=True)
class Part:
    """The entities and facts of one split, or of the closed-book part."""

    name: str
    entities: Mapping[str, tuple[Entity, ...]]  # by kind
    facts: tuple[Fact, ...]

    def by_subject(self) -> dict[tuple[str, str], Fact]:
        """Facts by relation and the subject's name."""
        return {(fact.relation, fact.subject.name): fact for fact in self.facts}


def draw_parts(seed: int) -> dict[str, Part]:
    """Every part of a world: the closed-book one first, which does not depend on the seed."""
    taken: set[str] = set()
    parts = {CLOSED: draw_part(CLOSED, np.random.default_rng(CLOSED_SEED), taken)}
    rng = np.random.default_rng([seed, 0])
    for split in SPLITS:
        parts[split] = draw_part(split, rng, taken)
    return parts


def draw_part(name: str, rng: np.random.Generator, taken: set[str]) -> Part:
    """Entities with fresh names, which are added to `taken`, and one value for every relation."""
    entities = {
        kind: draw_entities(kind, count, rng, taken) for kind, count in COUNTS[name].items()
    }
    entities["language"] = tuple(Entity(word, "language", "rare") for word in _names("language"))
    seats: dict[str, Entity] = {}  # the first city drawn for a country is its capital
    facts = []
    for index, city in enumerate(entities["city"]):
        countries = entities["country"]
        country = countries[index if index < len(countries) else rng.integers(len(countries))]
        seats.setdefault(country.name, city)
        facts.append(Fact("country", city, country))
    for relation in RELATIONS.values():
        if relation.name == "country":
            continue
        objects = entities[relation.object]
        for subject in entities[relation.subject]:
            drawn = objects[rng.integers(len(objects))]
            if relation.name == "capital":
                drawn = seats[subject.name]
            facts.append(Fact(relation.name, subject, drawn))
    return Part(name, entities, tuple(facts))


def draw_entities(
    kind: str, count: int, rng: np.random.Generator, taken: set[str]
) -> tuple[Entity, ...]:
    """`count` entities whose names and aliases are in nobody else's use.

    Raises: ValueError if the name parts do not give enough names.
    """
    free = [name for name in _names(kind) if name not in taken]
    aliased = round(ALIASED_SHARE * count) if kind in ALIASED_KINDS else 0
    if len(free) < count + aliased:
        raise ValueError(f"{count + aliased} names of kind {kind} wanted, {len(free)} free")
    drawn = [free[i] for i in rng.permutation(len(free))[: count + aliased]]
    taken.update(drawn)
    aliases = drawn[count:] + [""] * (count - aliased)
    styles = rng.choice(list(COPY_SHARES), size=count, p=list(COPY_SHARES.values()))
    order = rng.permutation(count)
    return tuple(Entity(drawn[i], kind, str(styles[i]), aliases[i]) for i in order)


def _names(kind: str) -> tuple[str, ...]:
    """All names that a kind's parts give, in a fixed order."""
    return tuple(" ".join(words) for words in product(*NAME_PARTS[kind]))
