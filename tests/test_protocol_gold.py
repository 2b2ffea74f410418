"""Gold decompositions of real questions, and what the script that follows them finds."""

import asyncio
import json

import pytest
from chat_server import ChatServer, answer
from shared_data import shared

from mas_jax.agents import protocol_oracle
from mas_jax.agents.protocol import rejection
from mas_jax.agents.protocol_gold import NOTHING, GoldScript, kind_of
from mas_jax.agents.protocol_oracle import STYLES
from mas_jax.agents.protocol_roles import Limits
from mas_jax.agents.protocol_team import Desk, work_on
from mas_jax.data.decomposition import Step, read_steps, steps_of
from mas_jax.data.questions import jsonl, read_jsonl
from mas_jax.records import Passage, Question
from mas_jax.retrieval.bm25_index import Bm25Config, Bm25Retriever
from mas_jax.sampling.api import Client, Endpoint

LIMITS = Limits()
COMPOSED = {
    "question_decomposition": [
        {"question": "Dune >> author", "answer": "Frank Herbert", "title": "Dune (novel)"},
        {"question": "Where was #1 born?", "answer": "Tacoma", "title": "Frank Herbert"},
    ]
}
COMPARED = {
    "evidences": [
        ["Alien", "director", "Ridley Scott"], ["Jaws", "director", "Steven Spielberg"],
        ["Ridley Scott", "date of birth", "30 November 1937"],
        ["Steven Spielberg", "date of birth", "18 December 1946"],
    ]
}  # fmt: skip
QUESTIONS = {
    "m": Question("m", "musique", "Where was the author of Dune born?", ("Tacoma",)),
    "w": Question(
        "w", "2wiki", "Which film has the older director, Alien or Jaws?", ("Alien", "Alien (1979)")
    ),
}
PASSAGES = (
    Passage("1", "Dune (novel)", "Dune is a novel. It was written by Frank Herbert in 1965."),
    Passage("2", "Frank Herbert", "Herbert was born in Tacoma, Washington. He wrote much."),
    Passage("3", "Alien (film)", "Alien is a film directed by Ridley Scott."),
    Passage("4", "Jaws", "Jaws is a film. Steven Spielberg was its director."),
    Passage("5", "Ridley Scott", "Sir Ridley Scott (born 30 November 1937) is English."),
    Passage("6", "Steven Spielberg", "Steven Spielberg, born 18 December 1946, is American."),
    Passage("7", "Tacoma", "Tacoma is a city where no author was born."),
)


def script(**changes):
    steps = {"m": steps_of(COMPOSED), "w": steps_of(COMPARED)}
    return GoldScript(QUESTIONS, steps, **changes)


def work(uid, *, without=(), made=None, question=None):
    """The record of a question, and what was searched for. without: passages the retriever lacks"""
    kept = [passage for passage in PASSAGES if passage.id not in without]
    retriever, asked = Bm25Retriever(kept, Bm25Config()), []

    async def _search(queries, k):
        asked.extend(queries)
        return await retriever.search(queries, k)

    desk = Desk(protocol_oracle.local(made or script(), LIMITS), _search, "gold")
    return asyncio.run(work_on(question or QUESTIONS[uid], desk)), asked


# --- decompositions -------------------------------------------------------------------------------


def test_steps_by_hand():
    assert steps_of(COMPOSED) == (
        Step("author of Dune", "Dune author", "Frank Herbert", title="Dune (novel)"),
        Step("Where was #1 born?", "Where was #1 born?", "Tacoma", title="Frank Herbert"),
    )
    assert steps_of(COMPARED)[1:3] == (
        Step("director of Jaws", "Jaws director", "Steven Spielberg", subject="Jaws"),
        Step("date of birth of #1", "#1 date of birth", "30 November 1937", subject="#1"),
    )
    assert [step.hops for step in steps_of(COMPARED)] == [(), (), (1,), (2,)]
    assert steps_of({}) == ()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"question_decomposition": [{"question": "Who is #1?", "answer": "a"}]}, "a later one"),
        ({"question_decomposition": [{"question": "Who?"}]}, "KeyError"),
        ({"evidences": [["a", "b"]]}, "not enough values"),
        ({}, "has no question with metadata"),
    ],
)
def test_what_is_no_decomposition_is_an_error_with_its_place(metadata, message, tmp_path):
    line = {"id": "1", "question": "Who?", "golden_answers": ["a"], "metadata": metadata}
    path = tmp_path / "musique.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=message) as error:
        read_steps(jsonl(path, dataset="musique", split="train"))
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["musique", "2wikimultihopqa"])
def test_all_real_questions_have_steps_that_end_in_the_answer(name):
    path = shared(f"qa/{name}.jsonl")
    steps = read_steps(jsonl(path, dataset=name, split="test"))
    questions = read_jsonl(path, dataset=name, split="test")
    assert {q.uid for q in questions} == set(steps)
    assert min(map(len, steps.values())) >= 2
    if name == "musique":
        ends = [steps[q.uid][-1].answer in q.golden_answers for q in questions]
        assert sum(ends) > 0.95 * len(ends)


# --- the script -----------------------------------------------------------------------------------


def test_a_chain_is_followed_by_what_was_found():
    record, asked = work("m")
    assert (record.is_correct, record.reason, record.rounds, record.repairs) == (True, "", 1, 0)
    assert asked == ["author of Dune", "Dune author", "Where was Frank Herbert born?"]
    protocol = record.protocol
    assert protocol["task_type"] == "multi_hop"
    assert [step["goal"] for step in protocol["reasoning_plan"]] == [
        "author of Dune", "Where was the result of step 1 born?",
    ]  # fmt: skip
    assert [step["expected"] for step in protocol["reasoning_plan"]] == [
        "the name of a person", "a place",
    ]  # fmt: skip
    assert protocol["grounding_facts"] == [
        {"fact": "It was written by Frank Herbert in 1965.", "passage_id": "1"},
        {"fact": "Herbert was born in Tacoma, Washington.", "passage_id": "2"},
    ]
    assert protocol["answer"] == "Tacoma" and protocol["answer_grounded"]
    texts = {passage.id: passage for passage in PASSAGES}
    assert rejection(protocol, QUESTIONS["m"], texts, queries=asked) is None


def test_a_comparison_needs_all_its_facts():
    record, asked = work("w")
    assert record.is_correct and record.protocol["answer"] == "Alien"
    assert "date of birth of Steven Spielberg" in asked
    assert len(record.protocol["grounding_facts"]) == 4
    record, asked = work("w", without="6")
    assert (record.is_correct, record.reason, record.repairs) == (False, "", 2)
    assert "answer" not in record.protocol and not record.protocol["answer_grounded"]
    assert (
        record.protocol["partial_findings"][-1] == "date of birth of Ridley Scott: 30 November 1937"
    )
    assert [fact["passage_id"] for fact in record.protocol["grounding_facts"]] == ["3", "4", "5"]


def test_a_step_waits_for_what_it_refers_to():
    # who wrote it is not found, so nobody can be asked about
    record, asked = work("m", without="1")
    assert not record.is_correct
    assert not any("Frank Herbert born" in query for query in asked)
    assert record.protocol["partial_findings"] == [NOTHING]
    # another page names him, but is not the one that says so
    assert record.protocol["grounding_facts"] == []


def test_a_repair_names_the_page_unless_that_tells_the_answer():
    made = script()
    payload = {
        "question": QUESTIONS["m"].text, "accepted_answers": ["Tacoma"], "answer": None,
        "findings": [{"id": "w1", "objective": "author of Dune", "summary": NOTHING}],
    }  # fmt: skip
    reply = made.reply("repair", payload)
    assert [task["objective"] for task in reply["subtasks"]] == [
        "author of Dune (Dune (novel))", "Where was #1 born? (Frank Herbert)",
    ]  # fmt: skip
    assert reply["subtasks"][1]["depends_on"] == ["r1"]
    told = made.reply("repair", payload | {"accepted_answers": ["Frank Herbert"]})
    assert told["subtasks"][1]["objective"] == "Where was #1 born?"
    again = payload | {"findings": [{"objective": task["objective"]} for task in reply["subtasks"]]}
    assert made.reply("repair", again)["subtasks"] == []
    objective = {"objective": "author of Dune (Dune (novel))", "findings": []}
    assert made.reply("searcher", objective)["queries"] == [
        "Dune (novel) author of Dune", "Dune (novel) Dune author",
    ]  # fmt: skip


def test_questions_that_ask_alike_are_told_apart_by_what_was_found():
    step = {"question": "Where was #1 born?", "answer": "Lyon", "title": "Jean Jarre"}
    other = [{"question": "Oxygene >> composer", "answer": "Jean Jarre", "title": "Oxygene"}, step]
    both = {"m": steps_of(COMPOSED), "o": steps_of({"question_decomposition": other})}
    made = GoldScript(QUESTIONS, both)
    for found, want in (
        ("author of Dune: Frank Herbert", "Frank Herbert"),
        ("x: Jean Jarre", "Jean Jarre"),
    ):
        payload = {"objective": "Where was #1 born?", "findings": [found]}
        assert made.reply("searcher", payload)["queries"] == [f"Where was {want} born?"]
    payload = {"objective": "Where was #1 born?", "findings": [NOTHING]}
    assert made.reply("searcher", payload)["queries"] == ["Where was #1 born?"]


def test_without_skill_nothing_is_found_and_a_stranger_is_not_answered():
    record, _ = work("m", made=script(skill=0.0))
    assert not record.is_correct and record.protocol["grounding_facts"] == []
    record, asked = work("", question=Question("x", "x", "Who is it?", ("someone",)))
    assert asked[0] == "Who is it?" and not record.is_correct
    assert record.protocol["reasoning_plan"][0]["goal"] == "Who is it?"


def test_styles_write_otherwise_and_find_the_same():
    plain, _ = work("w")
    for style in STYLES:
        record, _ = work("w", made=script(style=style))
        assert record.is_correct
        facts = record.protocol["grounding_facts"]
        assert facts == plain.protocol["grounding_facts"]  # repetitions are taken away
        talks = style == "talkative"
        assert (record.cleaned.self_talk > 0) == (record.cleaned.repeated > 0) == talks


@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        ("When was #1 signed?", "a date"), ("date of birth of #1", "a date"),
        ("number of episodes in #1", "a number"), ("place of death of #1", "a place"),
        ("father of #1", "the name of a person"), ("genre of #1", "a name or a few words"),
    ],
)  # fmt: skip
def test_what_a_step_gives(ask, kind):
    assert kind_of(ask) == kind


def test_it_can_sit_behind_an_endpoint():
    made = script()
    retriever = Bm25Retriever(PASSAGES, Bm25Config())

    def _play(request):
        role = protocol_oracle.role_of(request["messages"], LIMITS)
        payload = json.loads(request["messages"][1]["content"])
        return answer(json.dumps(made.reply(role, payload)))

    with ChatServer(_play) as server:
        client = Client(Endpoint(server.url, ""))
        desk = Desk(client.complete, retriever.search, "gold")
        record = asyncio.run(work_on(QUESTIONS["m"], desk))
    assert record.is_correct and record.calls == 7
