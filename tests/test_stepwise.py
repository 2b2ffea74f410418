"""The single agent whose turns are prompts of their own: what each reads, drops, and is taught."""

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_team import CASCADE, QUESTION, RUN, CharTokenizer, Script, make_team
from test_credit import ROW
from test_tree import Leaves, grow

from mas_jax.agents import chat
from mas_jax.agents.prompts import load_prompts, load_stepwise, toy_prompt_words
from mas_jax.agents.rollout import play_episode
from mas_jax.agents.tree import Shape
from mas_jax.evaluation import episode_json
from mas_jax.evaluation.statistics import score_episode
from mas_jax.learning.credit import credit
from mas_jax.learning.experience import describe
from mas_jax.learning.privileged import Privilege
from mas_jax.records import Passage

SAYS = ("<search>thing maker</search>", "<search>maker name</search>", "<answer>ada</answer>")
ANSWERED = {("single", turn): text for turn, text in enumerate(SAYS)}


def finds(query):
    return [Passage("p1", query.title(), f"about {query}"), Passage("p2", "More", "of it")]


def team(**changes):
    budgets = replace(CASCADE, **changes.pop("budgets", {}))
    return make_team("single", budgets=budgets, stepwise=True, **changes)


def played(says=ANSWERED, *, made=None, rollout=0):
    script = Script(says, finds=finds)
    made = made or team()
    return script, asyncio.run(
        play_episode(QUESTION, rollout, made, world=script.world, run=RUN)
    )  # fmt: skip


# --- prompts --------------------------------------------------------------------------------------


def test_each_turn_has_a_prompt_of_its_own_with_the_history():
    script, episode = played()
    first = "<|im_start|>user find who made the thing"
    entries = (
        " search thing maker | Thing Maker about thing maker | More of it |",
        " search maker name | Maker Name about maker name | More of it |",
    )
    ends = "<|im_end|><|im_start|>assistant"
    assert [script.prompt("single", turn) for turn in range(3)] == [
        first + ends, first + entries[0] + ends, first + "".join(entries) + ends,
    ]  # fmt: skip
    assert episode.correct == (1.0,)


def test_a_real_templates_prompts_are_its_own_rendering_of_one_users_turn():
    made = team(template=chat.NOT_THINKING, prompts="small")
    script, _ = played(made=made)
    examples = load_prompts("small").examples["single"]
    entry = "<search>{0}</search>\nPassages:\n{1}: about {0}\nMore: of it"
    history = [entry.format(q, q.title()) for q in ("thing maker", "maker name")]
    opening = "Question: who made the thing"
    for turn in range(3):
        text = opening + ("\nSo far:\n" + "\n".join(history[:turn]) if turn else "")
        (ids,) = [prompt for key, prompt, *_ in script.requests if key.turn == turn]
        assert ids == chat.Conversation(made.chat, text, examples=examples).prompt()


def test_there_is_a_trace_a_turn_that_holds_what_was_sent_and_sampled():
    script, episode = played()
    assert [len(trace.turns) for trace in episode.traces] == [1, 1, 1]
    tokenizer = CharTokenizer()
    for trace, said, (_, prompt, *_) in zip(episode.traces, SAYS, script.requests, strict=True):
        (turn,) = trace.turns
        assert trace.tokens[: turn.start] == prompt
        assert trace.tokens[turn.start :] == tuple(tokenizer.encode(said))
        assert set(trace.owners[: turn.start]) == {0}
        assert set(trace.owners[turn.start :]) == {2}
    assert [trace.turns[0].query for trace in episode.traces] == ["thing maker", "maker name", ""]
    score = score_episode(episode)
    assert score.input_tokens == sum(len(prompt) for _, prompt, *_ in script.requests)
    assert (score.turns_used, score.num_searches, score.critical_steps) == (3, 2, 3)


def test_mistakes_are_in_the_history_and_the_last_call_is_not():
    says = {
        ("single", 0): "what?", ("single", 1): "<search>maker</search>",
        ("single", 2): "<search>name</search>",
    }  # fmt: skip
    script, episode = played(says, made=team(budgets=dict(turns=3)))
    find, now = " find who made the thing", " answer now"
    told = [
        script.prompt("single", turn).split("user")[1].split("<|im_end|>")[0] for turn in (1, 2)
    ]
    assert told == [f"{find} invalid", f"{find} invalid search maker | Maker about maker | More of "
                    f"it |{now}"]  # fmt: skip
    assert episode.outcome == "invalid"
    # told twice to answer: the note stands at the end alone
    says = {
        ("single", 0): "<search>maker</search>", ("single", 1): "<search>maker</search>",
        ("single", 2): "<answer>ada</answer>",
    }  # fmt: skip
    script, episode = played(says, made=team(budgets=dict(searches=1)))
    told = [script.prompt("single", turn) for turn in (1, 2)]
    assert [text.count(now) for text in told] == [1, 1]
    assert all(text.endswith(f"{now}<|im_end|><|im_start|>assistant") for text in told)
    assert episode.correct == (1.0,)


def test_a_note_behind_the_question_ends_every_prompt_as_a_view_shows_it():
    text = " | answer ada"
    _, episode = played(made=team(budgets=dict(searches=2)))
    view_of, _ = Privilege({QUESTION.uid: text}, team().chat).of([episode])
    noted = replace(team(budgets=dict(searches=2)), notes={QUESTION.uid: text})
    _, other = played(made=noted)
    for trace, same in zip(episode.traces, other.traces, strict=True):
        assert view_of(trace).tokens == same.tokens


# --- too long -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(82, 400), st.integers(2, 5), st.integers(1, 40))
def test_the_oldest_is_dropped_first_and_never_the_question(context, searches, words):
    says = {("single", i): f"<search>query {i}</search>" for i in range(searches)}
    says[("single", searches)] = "<answer>ada</answer>"
    made = team(budgets=dict(context=context, turns=searches + 1, searches=searches), max_tokens=25)
    script = Script(says, finds=lambda query: [Passage("p", f"about {query}", "word " * words)])
    episode = asyncio.run(play_episode(QUESTION, 0, made, world=script.world, run=RUN))
    assert len(script.requests) == searches + 1
    for turn, (trace, (_, prompt, *_)) in enumerate(
        zip(episode.traces, script.requests, strict=True)
    ):
        text = CharTokenizer().decode(prompt)
        assert text.startswith("<|im_start|>user find who made the thing")
        kept = [i for i in range(turn) if f"search query {i}" in text]
        dropped = trace.turns[0].dropped
        assert kept == list(range(dropped, turn))  # the newest ones
        if kept:
            assert len(prompt) + 25 <= context
    dropped = [trace.turns[0].dropped for trace in episode.traces]
    assert describe([episode])["rollout/searcher/dropped_history"] == pytest.approx(
        sum(dropped) / len(dropped)
    )


def test_dropping_by_hand():
    # "find who made the thing" opens with 24 characters, its marks and "user" and "assistant" are
    # 1 + 4 + 1 + 1 + 9 ids; an entry " search q0 | A word |" has 21; 30 may be sampled; the last
    # prompt ends with the 11 of " answer now"
    says = {("single", i): f"<search>q{i}</search>" for i in range(4)}
    says[("single", 4)] = "<answer>ada</answer>"
    fixed, entry = 24 + 16 + 30 + 11, 21
    for room, want in ((4, [0, 0, 0, 0, 0]), (2, [0, 0, 0, 1, 2]), (1, [0, 0, 1, 2, 3])):
        made = team(budgets=dict(context=fixed + room * entry), max_tokens=30)
        script = Script(says, finds=lambda query: [Passage("p", "A", "word")])
        episode = asyncio.run(play_episode(QUESTION, 0, made, world=script.world, run=RUN))
        assert [trace.turns[0].dropped for trace in episode.traces] == want
        assert describe([episode])["rollout/searcher/dropped_history"] == sum(want) / 5


def test_conversations_have_no_history_to_drop():
    script = Script(ANSWERED, finds=finds)
    episode = asyncio.run(
        play_episode(QUESTION, 0, make_team("single"), world=script.world, run=RUN)
    )
    assert "rollout/searcher/dropped_history" not in describe([episode])
    assert "dropped" not in json.dumps(episode_json.to_json(episode))


def test_episodes_survive_their_files():
    _, episode = played(made=team(budgets=dict(context=230)))
    assert max(trace.turns[0].dropped for trace in episode.traces) > 0
    assert episode_json.from_json(json.loads(json.dumps(episode_json.to_json(episode)))) == episode


# --- what is learned from it ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "prompts"),
    [(chat.TOY, "toy"), (chat.NOT_THINKING, "small"), (chat.SMOLLM2, "full")],
)
def test_the_privileged_text_ends_every_turns_prompt(template, prompts):
    made = team(template=template, prompts=prompts)
    _, episode = played(made=made)
    examples = made.prompts.examples.get("single", ())
    text = " It was Ada."
    privilege = Privilege({QUESTION.uid: text}, made.chat, num_examples=len(examples))
    view_of, counts = privilege.of([episode])
    assert counts["privileged/protocols"] == 1
    ids = tuple(made.chat.tokenizer.encode(text))
    for trace in episode.traces:
        view, (turn,) = view_of(trace), trace.turns
        assert view.tokens[view.at : view.at + view.size] == ids
        assert view.tokens[view.at + view.size] == made.chat.end[0]
        # behind the whole history: the next mark is the agent's own turn
        rest = view.tokens[view.at + view.size : view.place(turn.start)]
        assert rest == (*made.chat.end, *made.chat.after, *made.chat.answer, *made.chat.prefill)
        assert view.tokens[view.place(turn.start) :] == trace.tokens[turn.start :]


def test_every_turns_trace_has_the_episodes_outcome():
    _, right = played()
    wrong = {**ANSWERED, ("single", 2): "<answer>bob</answer>"}
    _, other = played(wrong, rollout=1)
    row = replace(ROW, advantages=("group",), outcome="correct", behaviour="none")
    credited, metrics = credit([right, other], {"searcher": row})
    assert [c.reward for c in credited] == [1.0] * 3 + [0.0] * 3
    assert {c.advantage for c in credited[:3]} == {-c.advantage for c in credited[3:]}
    assert credited[0].advantage > 0
    assert metrics["credit/searcher/num_agents"] == 2
    assert metrics["credit/searcher/num_traces"] == 6


def test_trees_share_the_turns_of_stepwise_agents():
    trunk, *others = grow(Leaves(), Shape(trees=1, expansions=12, rounds=1), stepwise=True)
    assert {leaf.shared_turns for leaf in others} == {0, 1, 2}
    for leaf in others:
        same = [
            (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
            for one, other in zip(leaf.traces, trunk.traces, strict=True)
        ]
        assert same == [turn < leaf.shared_turns for turn in range(3)]


# --- texts ----------------------------------------------------------------------------------------


def test_the_toys_history_is_made_of_words_that_its_tokenizer_has():
    texts = vars(load_stepwise("toy")).values()
    words = {word for text in texts for word in text.replace("{", " {").split()}
    assert {word for word in words if "{" not in word} <= {*toy_prompt_words(), "|"}


def test_a_folder_without_the_texts_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"there is no stepwise\.json"):
        load_stepwise(tmp_path)
    (tmp_path / "stepwise.json").write_text(json.dumps({"looked_up": "{query}", "history": ""}))
    with pytest.raises(ValueError, match="missing \\['separator'\\]"):
        load_stepwise(tmp_path)
