"""Roles and teams, played by hand-written scripts: turns, budgets, invalid actions, context."""

import asyncio
import dataclasses
import random

import pytest
from scripted_team import CASCADE, HIERARCHY, QUESTION, RUN, CharTokenizer, Script, make_team

from mas_jax.agents import chat, rollout
from mas_jax.agents.agent import Play, shortened
from mas_jax.agents.prompts import Message, load_prompts, toy_prompt_words
from mas_jax.records import ROLES, Passage, SearchFailure, StopReason


def run(script, team):
    """The episode of a script."""
    return asyncio.run(rollout.play_episode(QUESTION, 0, team, world=script.world, run=RUN))


def turns_of(episode):
    """path -> actions of its turns, over all its traces."""
    actions = {}
    for trace in episode.traces:
        actions.setdefault(trace.path, []).extend(turn.action for turn in trace.turns)
    return actions


def look(word):
    return f"<search> {word}</search>"


def tell(word):
    return f"<report> {word}</report>"


ANSWER = {("answerer", 0): "<answer> ada</answer>"}
# two waves: 1 + (3 + 2) + 1 + 3 x 1 + 1 = 11 turns of the 12
TWO_WAVES = {
    ("leader", 0): "<assign> s1 : one ; s2 : two</assign>",
    # 11 turns left for two Searchers: each gets min(3, 5) = 3, so two searches, then the report
    ("leader/w1.s1", 0): look("a"),
    ("leader/w1.s1", 1): look("b"),
    ("leader/w1.s1", 2): tell("one done"),
    ("leader/w1.s2", 0): look("c"),
    ("leader/w1.s2", 1): tell("two done"),
    ("leader", 1): '<assign>[{"id":"s3","task":"x"},{"id":"s4","task":"y"},{"id":"s5","task":"z"}]'
    "</assign>",
    # 12 - 1 - 5 - 1 = 5 turns left for three: min(3, floor(5 / 3)) = 1 each, the report alone
    ("leader/w2.s1", 0): tell("x done"),
    ("leader/w2.s2", 0): tell("y done"),
    ("leader/w2.s3", 0): tell("z done"),
    ("leader", 2): "<select> s4 s1</select>",
    **ANSWER,
}


# --- turns, by hand -------------------------------------------------------------------------------


def test_turns_of_a_hierarchy_with_two_waves():
    script = Script(TWO_WAVES)
    episode = run(script, make_team("hierarchy"))
    assert turns_of(episode) == {
        "leader": ["assign", "assign", "select"],
        "leader/w1.s1": ["search", "search", "report"],
        "leader/w1.s2": ["search", "report"],
        "leader/w2.s1": ["report"],
        "leader/w2.s2": ["report"],
        "leader/w2.s3": ["report"],
        "answerer": ["answer"],
    }
    assert (episode.turns_used, episode.num_searches, episode.failed_searches) == (11, 3, 0)
    assert (episode.predictions, episode.correct, episode.reward) == (("ada",), (1.0,), 1.0)
    assert (episode.outcome, episode.failure) == ("answered", None)
    assert sorted(script.queries) == ["a", "b", "c"]
    # the third turn of w1.s1 and the only one of each w2 Searcher are forced
    forced = {k.path for k, p, *_ in script.requests if "report now" in CharTokenizer().decode(p)}
    assert forced == {"leader/w1.s1", "leader/w2.s1", "leader/w2.s2", "leader/w2.s3"}
    assert " s1 : one done ; s2 : two done" in script.prompt("leader", 1)
    assert " s3 : x done ; s4 : y done ; s5 : z done" in script.prompt("leader", 2)
    # selected reports in the Leader's order
    assert "who made the thing from s4 : y done ; s1 : one done<" in script.prompt("answerer", 0)


def test_turns_of_a_cascade():
    script = Script(
        {
            **{("searcher", i): look(f"q{i}") for i in range(4)},
            ("searcher", 4): tell("done"),
            **ANSWER,
        }
    )
    episode = run(script, make_team("cascade"))
    assert turns_of(episode) == {"searcher": ["search"] * 4 + ["report"], "answerer": ["answer"]}
    assert (episode.turns_used, episode.num_searches) == (5, 4)
    assert script.prompt("searcher", 3).count("report now") == 0
    assert script.prompt("searcher", 4).endswith(
        " thing about q3 | report now<|im_end|><|im_start|>assistant"
    )
    assert "from s1 : done<|im_end|>" in script.prompt("answerer", 0)


def test_the_single_agent_answers_itself_and_must_in_its_last_turn():
    script = Script({("single", 0): look("a"), ("single", 1): "<answer> ada</answer>"})
    episode = run(script, make_team("single", budgets=dataclasses.replace(CASCADE, turns=2)))
    assert turns_of(episode) == {"single": ["search", "answer"]}
    assert (episode.predictions, episode.reward, episode.turns_used) == (("ada",), 1.0, 2)
    assert episode.traces[0].role == "searcher"
    searched, answered = episode.traces[0].turns
    assert (searched.query, searched.found) == ("a", ("p1",))
    assert (answered.query, answered.found) == ("", ())
    assert script.prompt("single", 1).endswith("answer now<|im_end|><|im_start|>assistant")


@pytest.mark.parametrize(
    ("cap", "left", "searchers", "each"),
    [(3, 11, 2, 3), (3, 5, 2, 2), (3, 5, 3, 1), (3, 3, 4, 0), (3, 0, 1, 0), (0, 9, 1, 0)],
)
def test_turns_are_granted_by_floor_and_cap(cap, left, searchers, each):
    team = make_team("hierarchy", budgets=dataclasses.replace(HIERARCHY, turns=left))
    play = Play(QUESTION, 0, team=team, world=Script({}).world, run=RUN)
    assert play.grant(searchers, max_turns=cap).turns == each
    assert play.grant(searchers, max_turns=cap).searches == HIERARCHY.searches


# --- caps of the whole episode --------------------------------------------------------------------


def test_a_cap_on_searches_is_shared_out_at_dispatch_and_ends_the_leader_too():
    script = Script(
        {
            ("leader", 0): "<assign> s1 : one ; s2 : two</assign>",
            # 3 searches for two: floor(3 / 2) = 1 each, then the report
            ("leader/w1.s1", 0): look("a"),
            ("leader/w1.s1", 1): tell("x"),
            ("leader/w1.s2", 0): look("b"),
            ("leader/w1.s2", 1): tell("y"),
            ("leader", 1): "<assign> s3 : three</assign>",
            # 3 - 2 = 1 search left for one
            ("leader/w2.s1", 0): look("c"),
            ("leader/w2.s1", 1): tell("z"),
            ("leader", 2): "<select> s3</select>",  # none left: it must
            **ANSWER,
        }
    )
    budgets = dataclasses.replace(HIERARCHY, all_searches=3)
    episode = run(script, make_team("hierarchy", budgets=budgets))
    assert len(script.queries) == 3
    assert "report now" in script.prompt("leader/w1.s1", 1)
    assert "report now" in script.prompt("leader/w2.s1", 1)
    assert "select now" not in script.prompt("leader", 1)
    assert "select now" in script.prompt("leader", 2)
    assert episode.outcome == "answered"


def test_a_search_beyond_the_cap_is_invalid():
    script = Script(
        {("searcher", 0): look("a"), ("searcher", 1): look("b"), ("searcher", 2): tell("x"),
         **ANSWER}
    )  # fmt: skip
    episode = run(
        script, make_team("cascade", budgets=dataclasses.replace(CASCADE, all_searches=1))
    )
    assert turns_of(episode)["searcher"] == ["search", "invalid", "report"]
    assert len(script.queries) == 1


def test_a_cap_on_tokens_makes_an_agent_end_once_it_is_used_up():
    says = {("searcher", 0): look("a"), ("searcher", 1): tell("x"), **ANSWER}
    longer = {("searcher", 1): look("b"), ("searcher", 2): tell("x")}
    free = Script(says | longer)
    run(free, make_team("cascade"))
    first = next(ids for key, ids, *_ in free.requests if (key.path, key.turn) == ("searcher", 0))
    used = len(first) + len(look("a"))  # the prompt as sent, and a character a token
    for cap, ends in ((used, True), (used + 1, False)):
        script = Script(says if ends else free.says)
        run(script, make_team("cascade", budgets=dataclasses.replace(CASCADE, all_tokens=cap)))
        assert ("report now" in script.prompt("searcher", 1)) == ends


def test_fewer_turns_than_searchers_give_empty_reports_without_a_generation():
    script = Script(
        {
            ("leader", 0): "<assign> s1 : one ; s2 : two</assign>",
            ("leader", 1): "<select> s2</select>",
            **ANSWER,
        }
    )
    team = make_team("hierarchy", budgets=dataclasses.replace(HIERARCHY, turns=2))
    episode = run(script, team)
    # 1 turn left for two Searchers: floor(1 / 2) = 0; it stays with the Leader, who must select
    assert turns_of(episode) == {"leader": ["assign", "select"], "answerer": ["answer"]}
    assert episode.turns_used == 2
    assert " s1 : nothing ; s2 : nothing select now<" in script.prompt("leader", 1)


def test_when_the_turns_are_used_up_all_reports_are_selected():
    script = Script(
        {
            ("leader", 0): "<assign> s1 : one ; s2 : two</assign>",
            ("leader/w1.s1", 0): tell("x"),
            ("leader/w1.s2", 0): tell("y"),
            **ANSWER,
        }
    )
    team = make_team("hierarchy", budgets=dataclasses.replace(HIERARCHY, turns=3))
    episode = run(script, team)
    assert (episode.turns_used, episode.outcome) == (3, "answered")
    assert "from s1 : x ; s2 : y<" in script.prompt("answerer", 0)


def test_no_wave_left_means_that_an_assignment_is_invalid():
    script = Script(
        {
            ("leader", 0): "<assign> s1 : one</assign>",
            ("leader/w1.s1", 0): tell("x"),
            ("leader", 1): "<assign> s2 : two</assign>",
            ("leader", 2): "<select> s1</select>",
            **ANSWER,
        }
    )
    episode = run(script, make_team("hierarchy", budgets=dataclasses.replace(HIERARCHY, waves=1)))
    assert turns_of(episode)["leader"] == ["assign", "invalid", "select"]
    assert script.prompt("leader", 2).endswith(" invalid select now<|im_end|><|im_start|>assistant")


def test_a_selection_of_nothing_leaves_the_answerer_with_the_question():
    script = Script({("leader", 0): "<select>[]</select>", **ANSWER})
    episode = run(script, make_team("hierarchy"))
    assert (episode.turns_used, episode.num_searches, episode.reward) == (1, 0, 1.0)
    assert "who made the thing from nothing<" in script.prompt("answerer", 0)


@pytest.mark.parametrize("searches", [0, 1, 2])
def test_a_searcher_searches_no_more_than_its_budget(searches):
    says = {("searcher", i): look("q") for i in range(searches)}
    script = Script({**says, ("searcher", searches): tell("x"), **ANSWER})
    team = make_team("cascade", budgets=dataclasses.replace(CASCADE, searches=searches))
    episode = run(script, team)
    assert (episode.num_searches, episode.turns_used) == (searches, searches + 1)
    assert "report now" in script.prompt("searcher", searches)


def test_no_turns_at_all_is_an_outcome():
    none = dataclasses.replace(CASCADE, turns=0)
    episode = run(Script(ANSWER), make_team("cascade", budgets=none))
    assert (episode.turns_used, episode.outcome, episode.reward) == (0, "answered", 1.0)
    episode = run(Script({}), make_team("single", budgets=none))
    assert (episode.predictions, episode.reward, episode.outcome) == (("",), 0.0, "no turns")
    assert episode.traces == () and episode.failure is None


# --- invalid actions ------------------------------------------------------------------------------


def test_one_invalid_action_is_corrected_and_costs_a_turn():
    script = Script(
        {("searcher", 0): "what", ("searcher", 1): look("q"), ("searcher", 2): tell("x"), **ANSWER}
    )
    episode = run(script, make_team("cascade"))
    turns = episode.traces[0].turns
    assert [turn.action for turn in turns] == ["invalid", "search", "report"]
    assert [turn.reason for turn in turns] == ["no action", "", ""]
    assert episode.turns_used == 3
    assert script.prompt("searcher", 1).endswith("user invalid<|im_end|><|im_start|>assistant")


def test_a_second_invalid_action_ends_each_role_its_own_way():
    script = Script({("searcher", 0): "a", ("searcher", 1): "b", **ANSWER})
    episode = run(script, make_team("cascade"))
    assert turns_of(episode)["searcher"] == ["invalid"] * 2
    assert "from s1 : nothing<" in script.prompt("answerer", 0)
    assert (episode.outcome, episode.turns_used) == ("answered", 2)

    says = {**TWO_WAVES, ("leader", 1): "a", ("leader", 2): "<select> s9</select>"}
    script = Script(says)
    episode = run(script, make_team("hierarchy"))
    assert [t.reason for t in episode.traces[0].turns] == ["", "no action", "unknown id"]
    assert "from s1 : one done ; s2 : two done<" in script.prompt("answerer", 0)

    script = Script({("searcher", 0): tell("x"), ("answerer", 0): "a", ("answerer/c0", 1): "b"})
    episode = run(script, make_team("cascade"))
    assert (episode.predictions, episode.reward, episode.outcome) == (("",), 0.0, "invalid")
    assert (episode.turns_used, episode.failure) == (1, None)

    episode = run(Script({("single", 0): "a", ("single", 1): "b"}), make_team("single"))
    assert (episode.predictions, episode.reward, episode.outcome) == (("",), 0.0, "invalid")


def test_a_search_in_place_of_the_forced_report_is_invalid():
    says = {("searcher", 0): look("q"), ("searcher", 1): look("r"), **ANSWER}
    two = dataclasses.replace(CASCADE, turns=2)
    script = Script(says)
    episode = run(script, make_team("cascade", budgets=two))
    assert [(t.action, t.reason) for t in episode.traces[0].turns] == [
        ("search", ""),
        ("invalid", "action not allowed"),
    ]
    assert (script.queries, episode.turns_used) == (["q"], 2)
    # with a turn to spare the report is asked for again
    one_search = dataclasses.replace(CASCADE, searches=1)
    script = Script({**says, ("searcher", 2): tell("x")})
    episode = run(script, make_team("cascade", budgets=one_search))
    assert turns_of(episode)["searcher"] == ["search", "invalid", "report"]
    assert script.prompt("searcher", 2).endswith(
        " invalid report now<|im_end|><|im_start|>assistant"
    )


def test_a_cut_off_action_is_invalid_and_nothing_is_added_to_what_was_sampled():
    script = Script({("searcher", 0): tell("y" * 60), ("searcher", 1): tell("x"), **ANSWER})
    episode = run(script, make_team("cascade", max_tokens=30))
    trace = episode.traces[0]
    assert trace.turns[0].stop_reason == StopReason.LENGTH
    assert (trace.turns[0].action, trace.turns[0].reason) == ("invalid", "unclosed tag")
    assert (
        trace.turns[0].end - trace.turns[0].start
        == 30
        == sum(1 for owner in trace.owners[: trace.turns[1].start] if owner)
    )


# --- candidates -----------------------------------------------------------------------------------


def test_candidates_are_traces_with_a_shared_prefix():
    texts = [f"<answer> {word}</answer>" for word in ("ada", "bob", "ada")]
    script = Script({("searcher", 0): tell("x"), ("answerer", 0): texts})
    episode = run(script, make_team("cascade", candidates=3))
    answers = [trace for trace in episode.traces if trace.role == "answerer"]
    assert [trace.candidate for trace in answers] == [0, 1, 2]
    assert {trace.path for trace in answers} == {"answerer"}
    starts = {trace.turns[0].start for trace in answers}
    (start,) = starts
    assert len({trace.tokens[:start] for trace in answers}) == 1
    assert (episode.predictions, episode.correct) == (("ada", "bob", "ada"), (1.0, 0.0, 1.0))
    assert episode.reward == pytest.approx(2 / 3)
    assert [r[3] for r in script.requests if r[0].path == "answerer"] == [3]  # one request


def test_each_invalid_candidate_is_corrected_in_a_request_of_its_own():
    script = Script(
        {
            ("searcher", 0): tell("x"),
            ("answerer", 0): ["so", "<answer> ada</answer>", "so"],
            ("answerer/c0", 1): "<answer> eve</answer>",
            ("answerer/c2", 1): "no",
        }
    )
    episode = run(script, make_team("cascade", candidates=3))
    assert episode.predictions == ("eve", "ada", "")
    assert (episode.outcome, episode.turns_used) == ("answered", 1)
    answers = [trace for trace in episode.traces if trace.role == "answerer"]
    assert [[t.action for t in trace.turns] for trace in answers] == [
        ["invalid", "answer"],
        ["answer"],
        ["invalid", "invalid"],
    ]


# --- context --------------------------------------------------------------------------------------


def test_max_tokens_is_clamped_to_what_the_context_leaves():
    script = Script({("searcher", 0): look("q"), ("searcher", 1): tell("x"), **ANSWER})
    team = make_team("cascade")
    length = len("0user search who made the thing10assistant")
    small = dataclasses.replace(CASCADE, context=length + 60)
    run(script, dataclasses.replace(team, budgets=small))
    key, prompt, _, _, max_tokens = script.requests[0]
    assert (key.path, len(prompt), max_tokens) == ("searcher", length, 60)


def test_a_full_context_is_an_outcome_of_the_policy():
    full = dataclasses.replace(CASCADE, context=10)
    for name in ("cascade", "single"):
        episode = run(Script({}), make_team(name, budgets=full, candidates=1))
        assert (episode.outcome, episode.reward, episode.failure) == ("context", 0.0, None)
        assert (episode.predictions, episode.traces, episode.turns_used) == (("",), (), 0)


def test_a_sample_that_fills_the_engines_context_ends_the_agent():
    script = Script({("searcher", 0): "endless", ("answerer", 0): "<answer> ada</answer>"})

    async def sample(prompt, **request):
        samples = await script.sample(prompt, **request)
        if request["key"].path == "answerer":
            return samples
        return [dataclasses.replace(s, stop_reason=StopReason.CONTEXT) for s in samples]

    world = dataclasses.replace(script.world, sample=sample)
    episode = asyncio.run(
        rollout.play_episode(QUESTION, 0, make_team("cascade"), world=world, run=RUN)
    )
    assert turns_of(episode) == {"searcher": ["invalid"], "answerer": ["answer"]}
    assert "from s1 : nothing<" in script.prompt("answerer", 0)


def test_an_observation_that_does_not_fit_loses_whole_passages_and_is_marked():
    def finds(query):
        return [Passage(str(i), f"t{i}", "word " * 9 + "end") for i in range(3)]

    says = {("searcher", 0): look("q"), ("searcher", 1): tell("x"), **ANSWER}
    # a passage, " t0 word ... end |", is 3 + 1 + 48 + 2 = 54 characters, the marker 4
    for room, shown in [(162, 3), (161, 2), (112, 2), (111, 1), (58, 1)]:
        script = Script(says, finds=finds)
        team = make_team("cascade", budgets=dataclasses.replace(CASCADE, observation=room))
        run(script, team)
        prompt = script.prompt("searcher", 1)
        assert (prompt.count("end |"), prompt.count(" cut")) == (shown, int(shown < 3)), room
        assert prompt.endswith((" cut" if shown < 3 else "|") + "<|im_end|><|im_start|>assistant")
    script = Script(says, finds=finds)
    run(script, make_team("cascade", budgets=dataclasses.replace(CASCADE, observation=20)))
    assert script.prompt("searcher", 1).endswith(
        "user t0 word word cut<|im_end|><|im_start|>assistant"
    )


def test_the_context_left_for_an_observation_keeps_room_for_the_next_turn():
    says = {("searcher", 0): look("q"), ("searcher", 1): tell("x"), **ANSWER}
    script = Script(says, finds=lambda query: [Passage("1", "t", "a" * 10_000)])
    team = make_team("cascade", budgets=dataclasses.replace(CASCADE, observation=9999, context=700))
    episode = run(script, team)
    _, prompt, _, _, max_tokens = script.requests[1]
    assert (len(prompt), max_tokens) == (500, 200)  # to the last character
    assert "aaa cut<" in script.prompt("searcher", 1)
    assert turns_of(episode)["searcher"] == ["search", "report"]


@pytest.mark.parametrize(
    ("items", "room", "kept"),
    [
        ([], 0, []),
        (["ab", "cd"], 4, ["ab", "cd"]),
        (["ab", "cd"], 3, ["ab~"]),
        (["ab cd"], 4, ["ab~"]),
        (["ab cd ef"], 6, ["ab cd~"]),
        (["ab cd ef"], 7, ["ab cd~"]),
        (["abcdef"], 4, ["abc~"]),
        (["abcdef", "x"], 1, ["~"]),
        (["abcdef"], 0, ["~"]),
    ],
)
def test_texts_are_shortened_by_items_then_words_then_characters(items, room, kept):
    assert shortened(items, lambda k: sum(map(len, k)) <= room, "~") == kept


# --- what a search shows --------------------------------------------------------------------------


def test_a_failed_search_is_seen_by_the_agent_and_flagged():
    def finds(query):
        return SearchFailure("timeout", "no answer") if query == "a" else []

    says = {("searcher", 0): look("a"), ("searcher", 1): look("b"), ("searcher", 2): tell("x")}
    script = Script({**says, **ANSWER}, finds=finds)
    episode = run(script, make_team("cascade", prompts="full", template=chat.INSTRUCT))
    assert (episode.num_searches, episode.failed_searches, episode.failure) == (2, 1, None)
    assert "The search failed (timeout)" in script.prompt("searcher", 1)
    assert "Nothing was found" in script.prompt("searcher", 2)
    assert episode.reward == 1.0


def test_passages_are_shown_in_the_form_of_the_prompt_set():
    found = [Passage("1", "T {items}", "one"), Passage("2", "U", "two {nothing}")]
    says = {("searcher", 0): look("a"), ("searcher", 1): tell("x"), **ANSWER}
    script = Script(says, finds=lambda query: found)
    run(script, make_team("cascade", prompts="full", template=chat.INSTRUCT))
    shown = "Doc 1(Title: T {items}) one\nDoc 2(Title: U) two {nothing}"
    assert f"<information>\n{shown}\n</information><" in script.prompt("searcher", 1)
    script = Script(says, finds=lambda query: found)
    run(script, make_team("cascade"))
    assert "user T {items} one | U two {nothing} |<" in script.prompt("searcher", 1)


# --- invariants -----------------------------------------------------------------------------------


def test_arrival_order_of_parallel_searchers_changes_nothing():
    paths = sorted({path for path, _ in TWO_WAVES if path.startswith("leader/")})
    team = make_team("hierarchy")
    episodes, orders = [], set()
    for seed in range(12):
        delays = {path: random.Random(f"{seed} {path}").randrange(20) for path in paths}
        script = Script(TWO_WAVES, delays=delays)
        episodes.append(run(script, team))
        orders.add(tuple(script.queries))
    assert len(orders) > 2  # the schedules did differ
    assert all(episode == episodes[0] for episode in episodes)


@pytest.mark.parametrize("template", chat.TEMPLATES.values(), ids=list(chat.TEMPLATES))
@pytest.mark.parametrize("prompts", ["toy", "full"])
def test_sampled_ids_stand_verbatim_at_their_turns_and_nothing_else_is_owned(template, prompts):
    script = Script({key: f"<think>hm</think>\n\n{text}" for key, text in TWO_WAVES.items()})
    drawn = []

    async def sample(prompt, **request):
        samples = await script.sample(prompt, **request)
        drawn.extend((request["key"].path, prompt, s.tokens, s.logprobs) for s in samples)
        return samples

    world = dataclasses.replace(script.world, sample=sample)
    team = make_team("hierarchy", template=template, prompts=prompts)
    episode = asyncio.run(rollout.play_episode(QUESTION, 0, team, world=world, run=RUN))
    seen = []
    for trace in episode.traces:
        owned = [False] * len(trace.tokens)
        for turn in trace.turns:
            span = slice(turn.start, turn.end)
            seen.append(
                (trace.path, trace.tokens[: turn.start], trace.tokens[span], trace.logprobs[span])
            )
            owned[span] = [True] * (turn.end - turn.start)
            assert set(trace.owners[span]) == {ROLES[trace.role]}
        others = [i for i, mine in enumerate(owned) if not mine]
        assert sum(trace.logprobs[i] for i in others) == 0.0
        assert {trace.owners[i] for i in others} == {0}
        assert len(trace.tokens) == len(trace.owners) == len(trace.logprobs)
    assert sorted(seen) == sorted(drawn)  # each drawn once, from the tokens before it
    assert episode.reward == 1.0


def test_the_searchers_prompt_is_the_same_in_every_team_and_budget():
    in_wave = {
        ("leader", 0): f"<assign> s7 : {QUESTION.text} ; s8 : other</assign>",
        ("leader/w1.s1", 0): tell("x"),
        ("leader/w1.s2", 0): tell("y"),
        ("leader", 1): "<select> s7</select>",
        **ANSWER,
    }
    for prompts in ("toy", "full"):
        one, two = Script({("searcher", 0): tell("x"), **ANSWER}), Script(in_wave)
        run(one, make_team("cascade", prompts=prompts, template=chat.INSTRUCT))
        run(two, make_team("hierarchy", prompts=prompts, template=chat.INSTRUCT))
        assert one.prompt("searcher", 0) == two.prompt("leader/w1.s1", 0)
        assert QUESTION.text in one.prompt("searcher", 0)


def test_keys_name_the_generation_and_policies_their_role():
    script = Script(TWO_WAVES)
    episode = run(script, make_team("hierarchy"))
    keys = [key for key, *_ in script.requests]
    assert {(key.path, key.turn) for key in keys} == set(TWO_WAVES)
    assert len(set(keys)) == len(keys)
    shared = {(k.seed, k.purpose, k.step, k.question, k.rollout) for k in keys}
    assert shared == {(3, "eval", 7, "toy/1", 0)}
    names = {"leader": "lead", "searcher": "seek", "answerer": "tell"}
    assert all(trace.policy == names[trace.role] for trace in episode.traces)
    assert {policy for _, _, policy, *_ in script.requests} == set(names.values())


# --- prompts --------------------------------------------------------------------------------------


def test_the_toy_prompts_are_made_of_the_listed_words():
    words = toy_prompt_words()
    assert {"search", "lead", "answer", "from", "report", "now", "invalid", "|", ":"} <= set(words)
    script = Script(TWO_WAVES)
    run(script, make_team("hierarchy"))
    scripted = set(" ".join(TWO_WAVES.values()).replace("<", " ").replace(">", " ").split())
    known = {*words, *scripted, *QUESTION.text.split(), "thing", "about", "user", "x", "y", "z"}
    for path, turn in (("leader", 0), ("leader/w1.s1", 2), ("leader/w2.s1", 0), ("answerer", 0)):
        text = script.prompt(path, turn)
        for mark in ("<|im_start|>user", "<|im_start|>assistant", "<|im_end|>", "<", ">"):
            text = text.replace(mark, " ")
        assert set(text.split()) <= known, (path, turn)


def test_outside_text_in_a_prompt_is_not_read_for_placeholders():
    message = Message("{question} from{items}", {"question": "{items} {x}"}, items=(" {question}",))
    assert message.render(message.items) == "{items} {x} from {question}"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("searcher.txt", "find it", "searcher has placeholders"),
        ("leader.txt", "{question} {answer}", "leader has placeholders"),
        ("observations.json", "{}", "missing"),
    ],
)
def test_prompt_files_of_ones_own_are_checked(tmp_path, file, text, message):
    full = load_prompts("full")
    for role in ("leader", "searcher", "answerer", "single"):
        (tmp_path / f"{role}.txt").write_text(dataclasses.asdict(full)[role])
    source = chat.__file__.replace("chat.py", "prompts/full/observations.json")
    with open(source) as observations:
        (tmp_path / "observations.json").write_text(observations.read())
    assert load_prompts(tmp_path) == full
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_prompts(tmp_path)
