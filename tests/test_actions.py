"""Tagged text to typed actions."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mas_jax.agents import actions
from mas_jax.agents.actions import (
    Answer,
    Assign,
    Invalid,
    Reason,
    Report,
    Search,
    Select,
    parse,
)

ALL = actions.KINDS


def read(text, allowed=ALL, known=("s1", "s2", "s3"), most=4):
    return parse(text, allowed=allowed, known_ids=known, max_subtasks=most)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<search>who</search>", Search("who")),
        ("I should look. <search> who \n</search>", Search("who")),
        ("<think>not <answer>x</answer></think>\n\n<search>who</search>", Search("who")),
        ("<think>cut short <search>who</search>", Search("who")),
        ("</report><search>who</search>, and so on", Search("who")),
        ("<report>a < b & <b>c</b></report>", Report("a < b & <b>c</b>")),
        ("<answer>42</answer>", Answer("42")),
        ("<select>s1 s3</select>", Select(("s1", "s3"))),
        ('<select>["s3", "s1"]</select>', Select(("s3", "s1"))),
        ("<select>[]</select>", Select(())),
        (
            "<assign>a : find x ; b : find y: z</assign>",
            Assign((("a", "find x"), ("b", "find y: z"))),
        ),
        (
            '<assign>\n[{"id": "a", "task": "x; y"}, {"task": " z ", "id": "b", "n": 1}]</assign>',
            Assign((("a", "x; y"), ("b", "z"))),
        ),
    ],
)
def test_well_formed_text_becomes_its_action(text, action):
    assert read(text) == action


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", Reason.NO_ACTION),
        ("who is it </search>", Reason.NO_ACTION),
        ("<Search>x</Search>", Reason.NO_ACTION),
        ("<think><search>x</search></think>", Reason.NO_ACTION),
        ("<search>x", Reason.UNCLOSED),
        ("<search>x</report>", Reason.UNCLOSED),
        ("<search>x</search><report>y</report>", Reason.SEVERAL),
        ("<search>x</search><search>y</search>", Reason.SEVERAL),
        ("<report>see <answer> z</report>", Reason.SEVERAL),
        ("<search> <search>x</search>", Reason.SEVERAL),
        ("<search> \n\t</search>", Reason.EMPTY),
        ("<assign></assign>", Reason.EMPTY),
        ("<assign>find x</assign>", Reason.MALFORMED),
        ("<assign>a : </assign>", Reason.MALFORMED),
        ("<assign>a : x ;</assign>", Reason.MALFORMED),
        ("<assign>[]</assign>", Reason.MALFORMED),
        ('<assign>[{"id": 1, "task": "x"}]</assign>', Reason.MALFORMED),
        ('<assign>[{"id": "a"}]</assign>', Reason.MALFORMED),
        ('<assign>["a"]</assign>', Reason.MALFORMED),
        ('<assign>[{"id": "a", "task": "x"}</assign>', Reason.MALFORMED),
        ('<assign>[{"id": "a/../b", "task": "x"}]</assign>', Reason.MALFORMED),
        ('<assign>[{"id": "a", "task": "\\ud800"}]</assign>', Reason.MALFORMED),
        ("<assign>" + "[" * 100_000 + "</assign>", Reason.MALFORMED),
        ("<select>[" + "9" * 5000 + "]</select>", Reason.MALFORMED),
        ("<select>[1]</select>", Reason.MALFORMED),
        ("<assign>a : x ; a : y</assign>", Reason.DUPLICATE_ID),
        ("<assign>s1 : x</assign>", Reason.DUPLICATE_ID),
        ("<select>s1 s1</select>", Reason.DUPLICATE_ID),
        ("<select>s1 s9</select>", Reason.UNKNOWN_ID),
        ("<assign>a:1;b:2;c:3;d:4;e:5</assign>", Reason.TOO_MANY),
    ],
)
def test_malformed_text_is_invalid_with_its_reason(text, reason):
    assert read(text) == Invalid(reason)


def test_an_action_that_the_agent_may_not_take_now_is_invalid():
    assert read("<search>x</search>", allowed=("report",)) == Invalid(Reason.NOT_ALLOWED)
    assert read("<report>x</report>", allowed=("report",)) == Report("x")


def test_the_stop_strings_are_the_closing_tags():
    assert actions.closing_tags(("search", "report")) == ("</search>", "</report>")
    assert set(actions.closing_tags(ALL)) < set(actions.PROTOCOL_TAGS)
    assert len(actions.PROTOCOL_TAGS) == 10


_PIECES = st.sampled_from(
    [*actions.PROTOCOL_TAGS, "<think>", "</think>", '"s1"', '"id"', '"task"', "s1", "\\ud83d"]
) | st.sampled_from("[]{}:;, \n\0")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(_PIECES, st.text(max_size=8)), max_size=24).map("".join))
def test_no_text_raises_and_what_is_valid_keeps_its_promises(text):
    action = read(text)
    match action:
        case Invalid(reason):
            assert reason in set(Reason)
        case Assign(subtasks):
            ids = [name for name, _ in subtasks]
            assert 1 <= len(ids) == len(set(ids)) <= 4 and not {"s1", "s2", "s3"} & set(ids)
            assert all(task.strip() == task != "" for _, task in subtasks)
        case Select(ids):
            assert set(ids) <= {"s1", "s2", "s3"} and len(set(ids)) == len(ids)
        case Search(words) | Report(words) | Answer(words):
            assert words and words == words.strip() and words in text


_TASK = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(
    lambda t: t.strip() == t and not actions._TAG.search(t) and "</think>" not in t
)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.from_regex(r"t[a-z0-9]{0,4}", fullmatch=True), _TASK, max_size=4, min_size=1)
)
def test_any_tasks_survive_the_json_form(tasks):
    text = json.dumps([dict(id=name, task=task) for name, task in tasks.items()])
    assert read(f"<assign>{text}</assign>") == Assign(tuple(tasks.items()))
