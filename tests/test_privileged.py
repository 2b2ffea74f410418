"""What the privileged branch is shown: protocols, controls, and a rollout where there is none."""

import json

import pytest
from scripted_team import CharTokenizer

from mas_jax.agents import chat
from mas_jax.agents import protocol as protocols
from mas_jax.agents.chat import Conversation
from mas_jax.choices import CONTROLS, FALLBACKS, FORMS, PROTOCOL_FIELDS
from mas_jax.learning import privileged
from mas_jax.learning.privileged import Privilege, describe, texts
from mas_jax.records import Episode, Question, Sample, StopReason, Trace

TALK = chat.make_chat(CharTokenizer(), chat.INSTRUCT)


def protocol(word):
    steps = [{"goal": f"find {word} first", "tool": "search", "query_hint": word, "expected": "x"}]
    return {
        "task_type": "single_hop", "reasoning_plan": steps, "grounding_facts": [],
        "answer": word, "answer_grounded": True,
    }  # fmt: skip


PROTOCOLS = {f"q{i}": protocol(word) for i, word in enumerate(("ant", "bee", "cat", "dog"))}


def shown(control="none", fields=protocols.FIELDS, seed=0):
    return texts(PROTOCOLS, fields=fields, form="toy", control=control, seed=seed)


def test_controls():
    own = shown()
    assert own["q1"] == " | find find bee first search bee | answer bee"
    assert shown("empty") == dict.fromkeys(PROTOCOLS, "")
    mixed = shown("shuffled")
    for uid, text in own.items():
        assert sorted(mixed[uid].split()) == sorted(text.split())
    assert mixed != own
    wrong = shown("wrong")
    assert sorted(wrong.values()) == sorted(own.values())
    assert not any(wrong[uid] == own[uid] for uid in own)
    assert shown("wrong") == wrong  # by the seed
    with pytest.raises(ValueError, match="'none', 'empty'"):
        shown("blank")


def test_a_field_that_is_left_out_is_not_shown():
    assert shown(fields=("answer",))["q1"] == " | answer bee"
    # of which nothing can be shown has no text, rather than an empty one
    assert shown(fields=("task_type",)) == {}


def test_in_json_too_a_protocol_without_any_of_the_fields_has_no_text():
    found = texts(PROTOCOLS, fields=("partial_findings",), form="json", control="none", seed=0)
    assert found == {}


def test_a_control_shows_no_question_of_another_split(tmp_path):
    path = tmp_path / "protocols.jsonl"
    lines = [json.dumps({"question": uid, "protocol": p}) for uid, p in PROTOCOLS.items()]
    path.write_text("\n".join(lines) + "\n")
    section = dict(protocols=str(path), fields=(), form="toy", control="wrong")
    asked = [Question(uid, "d", uid, ("a",)) for uid in ("q0", "q1")]
    found = privileged.read_texts(section, asked, seed=0)
    assert found == {"q0": shown()["q1"], "q1": shown()["q0"]}
    with pytest.raises(ValueError, match=r"of 4 questions and none of these, such as 'new'"):
        privileged.read_texts(section, [Question("new", "d", "?", ("a",))], seed=0)


def test_choices_of_the_config_are_those_of_the_code():
    assert (CONTROLS, FALLBACKS) == (privileged.CONTROLS, privileged.FALLBACKS)
    assert PROTOCOL_FIELDS == protocols.FIELDS
    for form in FORMS:
        assert protocols.render(PROTOCOLS["q0"], form)


def played(uid, rollout, said, *, correct, failure=None):
    conversation = Conversation(TALK, f"What is {uid}?")
    ids = tuple(TALK.tokenizer.encode(said)) + TALK.tokenizer.stop_ids[:1]
    conversation.append(Sample(ids, (-1.0,) * len(ids), StopReason.TOKEN), owner=2, action="answer")
    (strand,) = conversation.strands
    trace = Trace(
        tuple(strand.tokens), tuple(strand.owners), tuple(strand.logprobs), uid, rollout,
        "searcher", "searcher", "p", tuple(strand.turns),
    )  # fmt: skip
    return Episode(
        question=uid, rollout=rollout, team="single", traces=(trace,), predictions=(said,),
        correct=(correct,), reward=correct, num_searches=0, failed_searches=0, turns_used=1,
        outcome="answered", failure=failure, retrieved=(),
    )  # fmt: skip


EPISODES = [
    played("q1", 0, "no", correct=0.0),
    played("q1", 1, "bee", correct=1.0),
    played("new", 1, "second", correct=1.0),
    played("new", 0, "first", correct=0.0),
    played("new", 2, "third", correct=1.0),
    played("lost", 0, "no", correct=0.0),
]


def opening(view_of, episode):
    view = view_of(episode.traces[0])
    return None if view is None else TALK.tokenizer.decode(view.tokens[view.at :][: view.size])


def test_a_question_without_a_protocol_shows_the_first_correct_rollout_of_its_group():
    privilege = Privilege(shown(), TALK)
    view_of, counts = privilege.of(EPISODES)
    assert opening(view_of, EPISODES[0]) == " | find find bee first search bee | answer bee"
    assert opening(view_of, EPISODES[2]) is None  # it would read what it says
    for episode in EPISODES[3:5]:
        assert opening(view_of, episode) == " second"
    assert opening(view_of, EPISODES[5]) is None
    assert counts == dict.fromkeys(
        ("privileged/protocols", "privileged/rollouts", "privileged/nothing"), 1
    )


def test_texts_have_a_digest_that_follows_every_one_of_them():
    one, other = Privilege(shown(), TALK).digest(), Privilege(shown("wrong"), TALK).digest()
    assert one == Privilege(dict(reversed(shown().items())), TALK).digest() != other
    mixed = shown("shuffled")
    fewer = texts(
        {"q2": PROTOCOLS["q2"]}, fields=protocols.FIELDS, form="toy", control="shuffled", seed=0
    )
    assert fewer["q2"] == mixed["q2"]  # whatever else is in the file


def test_without_the_fallback_such_a_question_has_no_view():
    view_of, counts = Privilege(shown(), TALK, fallback="none").of(EPISODES)
    assert opening(view_of, EPISODES[3]) is None
    assert counts["privileged/nothing"] == 2


@pytest.mark.parametrize("control", CONTROLS[1:])
def test_under_a_control_no_rollout_is_shown(control):
    assert privileged.fallback_of("rollout", control="none") == "rollout"
    fallback = privileged.fallback_of("rollout", control=control)
    view_of, counts = Privilege(shown(control), TALK, fallback=fallback).of(EPISODES)
    assert opening(view_of, EPISODES[3]) is None
    assert counts["privileged/rollouts"] == 0


def test_an_empty_protocol_is_the_identity():
    view_of, counts = Privilege(shown("empty"), TALK).of(EPISODES[:2])
    trace = EPISODES[0].traces[0]
    view = view_of(trace)
    assert (view.tokens, view.size) == (trace.tokens, 0)
    assert counts["privileged/protocols"] == 1


def test_the_first_example_can_be_read():
    view_of, _ = Privilege(shown(), TALK).of(EPISODES)
    trace = EPISODES[0].traces[0]
    text = describe(TALK, trace, view_of(trace))
    assert "of q1 reads 46 tokens more" in text
    assert "What is q1? | find find bee first search bee | answer bee<|im_end|>" in text
