"""Protocols: their shape, the gates, style, and what of them is shown."""

import copy
import json

import jsonschema
import pytest

from mas_jax.agents import protocol as protocols
from mas_jax.agents.protocol import FIELDS, SEED_FIELDS, leaks, normalise, rejection, render, select
from mas_jax.records import Passage, Question

QUESTION = Question("q", "hotpotqa", "Who wrote the novel filmed as Blade Runner?",
                    ("Philip K. Dick", "Dick"))  # fmt: skip
PASSAGES = {
    "p1": Passage("p1", "Blade Runner", "Blade Runner is a film of 1982.\nIt is from a novel."),
    "p2": Passage("p2", "Androids", "The novel was written by Philip K. Dick in 1968."),
}
GOOD = {
    "task_type": "multi_hop",
    "reasoning_plan": [
        {"goal": "Find the novel that the film is from.", "tool": "search",
         "query_hint": "Blade Runner film source", "expected": "title of a novel"},
        {"goal": "Find the writer of that novel.", "tool": "search",
         "query_hint": "novel writer", "expected": "name of a person"},
    ],
    "grounding_facts": [
        {"fact": "The novel was written by Philip K. Dick", "passage_id": "p2"},
        {"fact": "a film of 1982. It is from a novel.", "passage_id": "p1"},
    ],
    "answer": "Philip K. Dick",
    "answer_grounded": True,
}  # fmt: skip
EVIDENCE = {k: v for k, v in GOOD.items() if k != "answer"} | {
    "partial_findings": ["The film is of 1982."], "answer_grounded": False,
}  # fmt: skip


def changed(path, value, base=GOOD):
    found = copy.deepcopy(base)
    *way, last = path
    inside = found
    for key in way:
        inside = inside[key]
    inside[last] = value
    return found


def test_both_variants_pass():
    jsonschema.Draft202012Validator.check_schema(protocols.schema())
    assert rejection(GOOD, QUESTION, PASSAGES, queries=["blade runner"]) is None
    assert rejection(EVIDENCE, QUESTION, PASSAGES) is None


@pytest.mark.parametrize(
    ("gate", "found"),
    [
        ("schema", "no object"),
        ("schema", {k: v for k, v in GOOD.items() if k != "task_type"}),
        ("schema", changed(["task_type"], "two_hop")),
        ("schema", changed(["reasoning_plan"], [])),
        ("schema", changed(["reasoning_plan", 0, "thought"], "hm")),
        ("schema", GOOD | {"partial_findings": ["x"]}),
        ("schema", GOOD | {"answer_grounded": False}),
        ("schema", EVIDENCE | {"answer": "Dick"}),
        ("answer", GOOD | {"answer": "Ridley Scott"}),
        ("grounding", changed(["grounding_facts", 0, "passage_id"], "p1")),
        ("grounding", changed(["grounding_facts", 0, "passage_id"], "p9")),
        ("grounding", changed(["grounding_facts", 0, "fact"], "The novel was by Philip K. Dick")),
        ("leak", changed(["reasoning_plan", 1, "goal"], "Check that philip k dick wrote it.")),
        ("leak", changed(["reasoning_plan", 0, "query_hint"], "novels of DICK")),
        ("leak", changed(["reasoning_plan", 1, "expected"], "Dick", EVIDENCE)),
    ],
)
def test_each_gate_keeps_out_what_it_is_for(gate, found):
    assert rejection(found, QUESTION, PASSAGES).gate == gate


def test_an_answer_is_claimed_just_where_the_work_ended_rightly():
    for found, right in ((GOOD, True), (EVIDENCE, False)):
        assert rejection(found, QUESTION, PASSAGES, is_correct=right) is None
        assert rejection(found, QUESTION, PASSAGES, is_correct=not right).gate == "answer"


def test_a_query_that_was_asked_can_leak_too():
    found = rejection(GOOD, QUESTION, PASSAGES, queries=["film", "was Philip K Dick the writer"])
    assert (found.gate, "Philip K. Dick" in found.message) == ("leak", True)


@pytest.mark.parametrize(
    ("text", "question", "golds", "leaked"),
    [
        ("who is dickens", "?", ("Dick",), ""),  # words, not letters
        ("The Dick, Philip", "?", ("Philip Dick",), ""),  # in order
        ("compare A and B", "Which is older, A or Bob?", ("Bob",), ""),
        ("compare A and Bob", "Which is older, A or Bob?", ("Bob",), ""),  # the question names it
        ("compare A and Bob", "Which is older, A or C?", ("Bob",), "Bob"),
        ("is it so, yes or no", "?", ("yes",), ""),  # a word of any text
        ("in 1968", "?", ("1968",), "1968"),
        ("anything", "?", ("the",), ""),  # normalises to nothing
    ],
)
def test_leaks_by_hand(text, question, golds, leaked):
    assert leaks(text, Question("q", "d", question, golds)) == leaked


def test_style_is_taken_away_and_counted():
    talk = "Okay, let me think about this. "
    styled = copy.deepcopy(GOOD)
    for step in styled["reasoning_plan"]:
        step["goal"] = talk + step["goal"]
    styled["reasoning_plan"].append(copy.deepcopy(styled["reasoning_plan"][0]))
    styled["grounding_facts"].append({"fact": "is a film", "passage_id": "p1"})
    off = {"fact": "Of 1982.", "passage_id": "p1"}  # no word of four letters that is asked for
    styled["grounding_facts"].append(off | {"fact": "of 1982."})
    plain, cleaned = normalise(styled, QUESTION)
    assert [s["goal"] for s in plain["reasoning_plan"]] == [
        s["goal"] for s in GOOD["reasoning_plan"]
    ]
    assert (cleaned.self_talk, cleaned.repeated) == (3, 1)
    assert off["fact"].lower() not in [f["fact"] for f in plain["grounding_facts"]]
    assert cleaned.irrelevant == 1
    assert normalise(GOOD, QUESTION) == (GOOD, type(cleaned)(0, 0, 0))
    assert rejection(plain, QUESTION, PASSAGES) is None


def test_a_fact_that_only_a_relevant_one_names_is_relevant():
    # no step of the plan can name Dick's birth, his town, or its mayor
    facts = ("Philip Dick wrote it.", "Born in Ohio was Philip.", "Ohio is a state.", "Rome fell.")
    chain = changed(
        ["grounding_facts"], [{"fact": fact, "passage_id": "p1"} for fact in reversed(facts)]
    )
    plain, cleaned = normalise(chain, QUESTION)
    assert [f["fact"] for f in plain["grounding_facts"]] == list(reversed(facts[:3]))
    assert cleaned.irrelevant == 1


def test_titles_are_no_self_talk():
    told = "Great Britain won. Now You See Me came second. I Am Legend, too. Well known it is."
    plain, cleaned = normalise(changed(["reasoning_plan", 0, "goal"], told), QUESTION)
    assert (plain["reasoning_plan"][0]["goal"], cleaned.self_talk) == (told, 0)


def test_a_field_that_is_all_self_talk_stays():
    only = changed(["reasoning_plan", 0, "goal"], "I should look.")
    plain, cleaned = normalise(only, QUESTION)
    assert plain["reasoning_plan"][0]["goal"] == "I should look."
    assert cleaned.self_talk == 0


def test_fields_are_chosen_and_grounding_goes_with_the_answer():
    assert set(select(GOOD, SEED_FIELDS)) == set(SEED_FIELDS)
    assert select(GOOD, FIELDS) == GOOD
    assert select(GOOD, ("answer",)) == {"answer": "Philip K. Dick", "answer_grounded": True}
    assert "answer_grounded" not in select(EVIDENCE, FIELDS)
    with pytest.raises(ValueError, match="'plan' is none of"):
        select(GOOD, ("plan",))


def test_what_is_shown():
    text = render(GOOD, "json")
    assert json.loads(text.split("\n")[-1]) == GOOD
    toy = render(GOOD, "toy")
    assert toy.startswith(" | find Find the novel")
    assert toy.endswith(" | answer Philip K. Dick")
    assert render({}, "toy") == ""
    with pytest.raises(ValueError, match="choose 'json' or 'toy'"):
        render(GOOD, "xml")
