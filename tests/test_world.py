"""The toy world: answerable, disjoint over splits, the same wherever it is made."""

import os
import subprocess
import sys
from collections import Counter, defaultdict

import pytest
from conftest import ROOT

from mas_jax.data.world import make_world
from mas_jax.data.world_facts import CLOSED, SPLITS, Entity, Fact, draw_parts
from mas_jax.data.world_questions import FAMILIES, decompose, nest
from mas_jax.data.world_text import (
    NAME_PARTS,
    PROMPT_WORDS,
    RELATIONS,
    parse_ask,
    parse_statement,
    vocabulary,
)


@pytest.fixture(scope="module")
def world():
    return make_world(0)


@pytest.fixture(scope="module")
def told(world):
    """Objects by (relation, name of the subject), from every passage of the corpus."""
    objects = defaultdict(set)
    for passage in world.passages:
        for relation in RELATIONS:
            if stated := parse_statement(relation, passage.text):
                assert stated[0] == passage.title
                objects[relation, stated[0]].add(stated[1])
    return objects


def questions_of(world, family):
    return [q for split in SPLITS for q in world.questions[split] if q.dataset == family]


def is_closed(world, question):
    parsed = parse_ask(question.text)
    return question.dataset == "nq_like" and parsed in world.closed_book


def answers(question, told):
    """Every answer that reading the whole corpus gives, hop by hop."""
    reached = []
    for ask in question.decomposition:
        asks = {ask}
        for hop, objects in enumerate(reached, start=1):
            asks = {a.replace(f"#{hop}", name) for a in asks for name in objects}
        reached.append(set().union(*(told[parse_ask(a)] for a in asks)))
    if question.dataset == "2wiki_like":
        assert len(reached[0]) == len(reached[1]) == 1
        return {"yes" if reached[0] == reached[1] else "no"}
    return reached[-1]


def test_a_chain_of_facts_becomes_one_question_and_its_parts():
    book = Entity("silent garden", "work", "rare")
    person = Entity("alba ackby", "person", "rare")
    city = Entity("ashbury portal", "city", "rare")
    chain = (Fact("author", book, person), Fact("born", person, city))
    assert nest(chain, "where was {s} born") == "where was the author of silent garden born"
    assert decompose(chain, independent=False) == ("who wrote silent garden", "where was #1 born")
    pair = (chain[1], Fact("born", Entity("corba burer", "person", "rare"), city))
    assert decompose(pair, independent=True) == (
        "where was alba ackby born",
        "where was corba burer born",
    )


def test_a_sentence_states_its_own_relation_only():
    assert parse_statement("born", "alba ackby was born in ashbury portal") == (
        "alba ackby",
        "ashbury portal",
    )
    assert parse_statement("employer", "alba ackby was born in ashbury portal") is None
    assert parse_statement("born", "corba burer knows alba ackby , born in ashbury portal") is None
    assert parse_ask("where was alba ackby born") == ("born", "alba ackby")
    assert parse_ask("where was the author of silent garden born") is None


def test_no_text_has_two_meanings():
    names = {kind: " ".join(part[0] for part in parts) for kind, parts in NAME_PARTS.items()}
    for relation in RELATIONS.values():
        subject, object_ = names[relation.subject], names[relation.object]
        for asks in relation.asks.values():
            for ask in asks:
                assert parse_ask(ask.format(s=subject)) == (relation.name, subject)
        for text in relation.passages:
            filled = text.format(s=subject, o=object_)
            means = {r: parse_statement(r, filled) for r in RELATIONS}
            stated = {r: meaning for r, meaning in means.items() if meaning}
            assert stated == {relation.name: (subject, object_)}


def test_reading_the_whole_corpus_gives_the_golden_answers_and_no_other(world, told):
    for split in SPLITS:
        for question in world.questions[split]:
            found = answers(question, told)
            assert found and found <= set(question.golden_answers), question


def test_gold_passages_tell_the_hops(world):
    passages = {passage.id: passage for passage in world.passages}
    assert len(passages) == len(world.passages)
    for question in world.questions["validation"]:
        assert len(question.gold_passages) == len(question.decomposition) == question.hops
        objects = []
        for ask, gold in zip(question.decomposition, question.gold_passages, strict=True):
            relation, _ = parse_ask(ask.replace("#1", "x x").replace("#2", "x x"))
            subject, object_ = parse_statement(relation, passages[gold].text)
            assert subject == passages[gold].title
            objects.append(object_)
        if question.dataset == "2wiki_like":
            assert question.golden_answers == ("yes" if objects[0] == objects[1] else "no",)
        else:
            assert objects[-1] in question.golden_answers


def test_sizes_are_as_asked_for_in_every_family(world):
    assert len(world.passages) == 16_000
    for split, count in {"train": 640, "validation": 80, "test": 80}.items():
        counts = Counter(question.dataset for question in world.questions[split])
        assert counts == dict.fromkeys(FAMILIES, count)
    uids = [q.uid for split in SPLITS for q in world.questions[split]]
    assert len(set(uids)) == len(uids) == 7 * 800
    assert world.questions["test"][0].uid == "nq_like/test/0"
    hops = {family: {q.hops for q in questions_of(world, family)} for family in FAMILIES}
    assert hops == {f: {n} for f, n in zip(FAMILIES, (1, 1, 1, 2, 2, 3, 2), strict=True)}


def test_families_differ_as_their_benchmarks_do(world):
    first, again = Counter(), Counter()
    for passage in world.passages:
        for relation in RELATIONS:
            if parse_statement(relation, passage.text):
                (again if first[relation, passage.title] else first)[relation, passage.title] += 1
    rare = [parse_ask(q.text) for q in questions_of(world, "popqa_like")]
    often = [parse_ask(q.text) for q in questions_of(world, "nq_like") if not is_closed(world, q)]
    # a subject with an alias has one of its tellings under that name
    assert max(again[key] for key in rare) == 0
    assert {again[key] for key in often} == {1, 2}
    for question in questions_of(world, "bamboogle_like"):
        assert len(set(question.golden_answers)) == 2
    verdicts = Counter(q.golden_answers for q in world.questions["test"] if q.hops == 2)
    assert verdicts[("yes",)] == verdicts[("no",)] == 40


def test_every_person_asked_about_has_namesakes_born_elsewhere(world, told):
    born = {name: cities for (relation, name), cities in told.items() if relation == "born"}
    surnames = defaultdict(set)
    for name, cities in born.items():
        surnames[name.split()[1]] |= cities
    for question in questions_of(world, "popqa_like"):
        relation, name = parse_ask(question.text)
        if relation == "born":
            assert len(surnames[name.split()[1]] - born[name]) >= 3


def test_splits_share_no_entity_and_no_fact_but_the_closed_book_ones(world):
    parts = draw_parts(0)
    names = {
        name: {
            n
            for kind, es in part.entities.items()
            if kind != "language"
            for e in es
            for n in e.names
        }
        for name, part in parts.items()
    }
    for one in names:
        for other in names:
            assert one == other or names[one].isdisjoint(names[other])
    golds = {
        split: {
            gold
            for question in world.questions[split]
            if not is_closed(world, question)
            for gold in question.gold_passages
        }
        for split in SPLITS
    }
    assert golds["train"].isdisjoint(golds["validation"] | golds["test"])
    assert golds["validation"].isdisjoint(golds["test"])
    for split in SPLITS:
        for question in world.questions[split]:
            for ask in question.decomposition:
                subject = (parse_ask(ask) or ("", ""))[1]
                home = CLOSED if is_closed(world, question) else split
                assert not subject or subject in names[home]


def test_the_closed_book_share_is_the_same_in_every_world(world):
    other = make_world(1)
    assert world.closed_book == other.closed_book
    for split, count in {"train": 640, "validation": 80, "test": 80}.items():
        closed = [q for q in world.questions[split] if is_closed(world, q)]
        assert len(closed) == round(0.3 * count)
        for question in closed:
            assert world.closed_book[parse_ask(question.text)] in question.golden_answers
    asked = {parse_ask(q.text) for q in world.questions["train"] if is_closed(world, q)}
    assert asked == set(world.closed_book)
    none = make_world(0, closed_share=0.0)
    assert not any(is_closed(none, q) for split in SPLITS for q in none.questions[split])
    assert none.passages == world.passages


def test_another_seed_gives_other_facts_with_the_same_words(world):
    other = make_world(1)
    assert world.fingerprint != other.fingerprint
    known = {(p.title, p.text) for p in world.passages}
    shared = sum((p.title, p.text) in known for p in other.passages)
    assert shared < 0.1 * len(other.passages)  # about 3% tell closed-book facts
    texts = {q.text for q in world.questions["test"] if not is_closed(world, q)}
    assert len(texts & {q.text for q in other.questions["test"]}) < 0.02 * len(texts)


def test_a_world_depends_on_its_arguments_alone(world):
    code = "from mas_jax.data.world import make_world; print(make_world(0).fingerprint)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONHASHSEED": "7"},
    )
    assert done.stdout.strip() == world.fingerprint, done.stderr
    assert make_world(0, train=100).fingerprint != world.fingerprint


def test_all_words_are_in_the_vocabulary_and_passages_are_short(world):
    words = set(vocabulary())
    lengths = []
    for passage in world.passages:
        tokens = f"{passage.title} {passage.text}".split(" ")
        assert words.issuperset(tokens), passage
        lengths.append(len(tokens))
    assert min(lengths) >= 7 and max(lengths) <= 14
    assert 8 <= sum(lengths) / len(lengths) <= 12
    for split in SPLITS:
        for question in world.questions[split]:
            for text in (question.text, *question.golden_answers, *question.decomposition):
                assert words.issuperset(text.split(" ")), text


def test_every_name_part_belongs_to_one_place_in_names_and_nothing_else():
    parts = [word for lists in NAME_PARTS.values() for part in lists for word in part]
    assert max(Counter(parts).values()) == 1
    assert set(parts).isdisjoint(PROMPT_WORDS)
    texts = [t for r in RELATIONS.values() for t in (*r.passages, r.phrase, *r.queries, r.same)]
    assert set(parts).isdisjoint(word for text in texts for word in text.split())


def test_sizes_that_the_facts_cannot_fill_are_errors():
    with pytest.raises(ValueError, match="100 passages wanted"):
        make_world(0, passages=100)
    with pytest.raises(ValueError, match="nq_like questions on train wanted"):
        make_world(0, train=5_000)
    with pytest.raises(ValueError, match=r"closed_share=1\.5"):
        make_world(0, closed_share=1.5)
