"""Topologies: who reads whom, who owns which token, votes, endpoints, and their baselines."""

import asyncio
import dataclasses
import json

import pytest
from scripted_team import QUESTION, RUN, CharTokenizer, make_team

from mas_jax.agents import chat, rollout
from mas_jax.agents.collaboration import (
    Collaboration,
    Texts,
    load_texts,
    majority,
    prompt_names,
    waves,
)
from mas_jax.agents.setting import World
from mas_jax.agents.speaker import Voice
from mas_jax.agents.topology import TOPOLOGIES, Node, Sizes, Topology, check, resampled
from mas_jax.collaboration_rules import SAMPLED, VOTING
from mas_jax.collaboration_rules import TOPOLOGIES as ROLES_OF
from mas_jax.evaluation import answers_told, episode_json
from mas_jax.evaluation.statistics import score_episode
from mas_jax.records import ROLES, UNTOLD, FailureKind, Reply, Sample, StopReason, WorldError
from mas_jax.rewards.integer_answer import extract, integer_match, same_integer

SIZES = Sizes(votes=3, debaters=3, rounds=2, experts=2)
CHAT = chat.make_chat(CharTokenizer(), chat.TOY)
PROBLEM = dataclasses.replace(QUESTION, golden_answers=("5",))


async def is_same(first, second):
    return same_integer(first, second)


def voice(policy, **changes):
    fields = dict(chat=CHAT, temperature=0.0, top_p=1.0, top_k=0, max_tokens=200, context=9000)
    return Voice(policy, **fields | changes)


def team_of(name, topology=None, prompts="math_toy", **changes):
    """A team that plays a topology; changes: of the voices, by role."""
    topology = topology or TOPOLOGIES[name](SIZES)
    voices = {
        "collaborator": voice("student", **dict(temperature=1.0) | changes.get("collaborator", {})),
        "actor": voice("frozen", **changes.get("actor", {})),
    }
    found = Collaboration(
        topology, load_texts(prompts, topology), voices, vote_temperature=0.7,
        answer_of=extract, is_same=is_same,
    )  # fmt: skip
    return dataclasses.replace(make_team("cascade"), name=name, collaboration=found)


class Cast:
    """A world whose sample says by path and turn what a script says; it keeps its requests."""

    def __init__(self, said):
        self.said, self.requests = said, []
        self.world = World(self.sample, None, self.reward, complete=self.complete)

    def _line(self, key):
        line = self.said(key) if callable(self.said) else self.said[key.path, key.turn]
        if isinstance(line, Exception):
            raise line
        return line

    async def sample(self, prompt, *, key, policy, temperature, **knobs):
        self.requests.append((key.path, policy, temperature, CHAT.tokenizer.decode(prompt)))
        ids = (*CHAT.tokenizer.encode(self._line(key)), 1)
        return [Sample(ids, (-0.5,) * len(ids), StopReason.TOKEN)]

    async def complete(self, messages, *, key, policy, temperature, **knobs):
        self.requests.append((key.path, policy, temperature, messages))
        line = self._line(key)
        return line if isinstance(line, Reply) else Reply(line, 11, 4, StopReason.TOKEN)

    async def reward(self, question, predictions):
        return tuple(integer_match(text, question.golden_answers) for text in predictions)


def play(team, said):
    cast = Cast(said)
    episode = asyncio.run(rollout.play_episode(PROBLEM, 0, team, world=cast.world, run=RUN))
    return episode, cast


HINTED = {("hint", 0): " first plus", ("solve", 0): r" so \boxed{5}"}


def test_the_actor_reads_the_hint_and_its_answer_is_the_teams():
    episode, cast = play(team_of("hint"), HINTED)
    asked = f"<|im_start|>user solve {PROBLEM.text} with first plus<|im_end|><|im_start|>assistant"
    assert [request[:3] for request in cast.requests] == [
        ("hint", "student", 1.0), ("solve", "frozen", 0.0),
    ]  # fmt: skip
    assert cast.requests[1][3] == asked
    assert (episode.predictions, episode.reward, episode.outcome) == (("5",), 1.0, "answered")
    assert episode.turns_used == 2


def test_each_role_owns_its_own_tokens_and_the_trained_one_no_other():
    episode, _ = play(team_of("hint"), HINTED)
    owners = {trace.role: set(trace.owners) for trace in episode.traces}
    assert owners == {
        "collaborator": {0, ROLES["collaborator"]}, "actor": {0, ROLES["actor"]},
    }  # fmt: skip
    assert [trace.policy for trace in episode.traces] == ["student", "frozen"]
    for trace in episode.traces:
        (turn,) = trace.turns
        said = CHAT.tokenizer.decode(trace.tokens[turn.start : turn.end])
        assert said == HINTED[trace.path, 0] + "<|im_end|>"
    assert episode_json.from_json(json.loads(json.dumps(episode_json.to_json(episode)))) == episode


@pytest.mark.parametrize("trained", ["draft", "critique", "revise"])
def test_any_node_may_be_the_trained_one(trained):
    topology = dataclasses.replace(TOPOLOGIES["critic"](SIZES), trained=(trained,))
    said = {("draft", 0): r"\boxed{4}", ("critique", 0): "one more", ("revise", 0): r"\boxed{5}"}
    episode, cast = play(team_of("critic", topology), said)
    policies = {path: policy for path, policy, _, _ in cast.requests}
    assert [path for path, policy in policies.items() if policy == "student"] == [trained]
    assert r"done \boxed{4} comment one more<|im_end|>" in cast.requests[2][3]
    assert episode.reward == 1.0


def test_debaters_read_each_other_in_one_conversation_and_vote():
    lines = {("a1", 0): "4", ("a2", 0): "5", ("a3", 0): "6", ("a1", 1): "5", ("a2", 1): "05",
             ("a3", 1): "6"}  # fmt: skip
    said = {key: rf"\boxed{{{line}}}" for key, line in lines.items()}
    episode, cast = play(team_of("debate"), said)
    second = [request for request in cast.requests if "others" in request[3]]
    assert [r[:3] for r in second] == [
        ("a1", "student", 1.0), ("a2", "frozen", 0.7), ("a3", "frozen", 0.7),
    ]  # fmt: skip
    # the second turn goes on behind the first: question, own solution, the others'
    assert (
        r"assistant\boxed{5}<|im_end|><|im_start|>user others \boxed{4} | \boxed{6} again"
        in (second[1][3])
    )
    assert len(episode.traces) == 3 and [len(trace.turns) for trace in episode.traces] == [2, 2, 2]
    assert episode.predictions == ("5",)  # 5 and 05 outvote 6


def test_a_vote_draws_its_members_apart_and_leaves_out_who_has_no_answer():
    said = {("solve1", 0): "hm", ("solve2", 0): r"\boxed{4}", ("solve3", 0): r"\boxed{4}"}
    episode, cast = play(team_of("vote"), said)
    assert {request[2] for request in cast.requests} == {0.7}
    assert episode.predictions == ("4",) and episode.reward == 0.0
    first = episode.traces[0].turns[0]
    assert (first.action, first.reason) == ("invalid", "no answer")


def test_no_answer_at_all_is_the_policys_outcome_and_wrong():
    episode, _ = play(team_of("actor"), {("solve", 0): "hm"})
    assert (episode.outcome, episode.reward, episode.failure) == ("invalid", 0.0, None)


def test_what_no_prompt_has_room_for_is_wrong_and_counted():
    asked = f"<|im_start|>user hint {PROBLEM.text}<|im_end|><|im_start|>assistant"
    length = len(CHAT.tokenizer.encode_template(asked))
    fits = team_of("hint", collaborator=dict(max_tokens=20, context=length + 20))
    assert play(fits, HINTED)[0].outcome == "answered"
    tight = team_of("hint", collaborator=dict(max_tokens=20, context=length + 19))
    episode, cast = play(tight, HINTED)
    assert (episode.outcome, episode.reward, cast.requests) == ("context", 0.0, [])


def test_thoughts_are_not_passed_on():
    said = {**HINTED, ("hint", 0): "<think>it is 5</think>\n\nadd them"}
    _, cast = play(team_of("hint"), said)
    assert " with add them<|im_end|>" in cast.requests[1][3]
    assert "it is 5" not in cast.requests[1][3]


def test_a_failure_of_the_world_keeps_what_was_said():
    said = {**HINTED, ("solve", 0): WorldError(FailureKind.SAMPLER, "gone")}
    episode, _ = play(team_of("hint"), said)
    assert episode.reward is None and episode.failure.kind == FailureKind.SAMPLER
    assert [trace.role for trace in episode.traces] == ["collaborator"]


def test_a_thought_that_is_cut_short_is_neither_passed_on_nor_an_answer():
    said = {("hint", 0): "add <think>it is 5", ("solve", 0): r"<think> maybe \boxed{5}"}
    episode, cast = play(team_of("hint"), said)
    assert " with add<|im_end|>" in cast.requests[1][3]
    assert (episode.outcome, episode.reward) == ("invalid", 0.0)
    assert episode.traces[1].turns[0].reason == "no answer"


def test_a_control_of_words_leaves_the_collaborators_own_vote_as_it_was():
    """In a debate it answers too: 5 of a1 and a3 against 6, though a2 and a3 do not read a1's."""
    said = {("a1", 0): "5", ("a2", 0): "6", ("a3", 0): "4", ("a1", 1): "5", ("a2", 1): "6",
            ("a3", 1): "5"}  # fmt: skip
    said = {key: rf"\boxed{{{line}}}" for key, line in said.items()}
    episode, cast = play(controlled("no_answer", "debate"), said)
    assert episode.predictions == ("5",)
    read = [text for path, _, _, text in cast.requests if path == "a2"][1]
    assert r"others \boxed{} | \boxed{4} again" in read


def controlled(control, name="hint"):
    team = team_of(name)
    changed = dataclasses.replace(
        team.collaboration, control=control, others={PROBLEM.uid: "another one"}
    )
    return dataclasses.replace(team, collaboration=changed)


def test_a_control_takes_what_a_hint_is_worth_away():
    said = {**HINTED, ("hint", 0): "it is 5, not 15 or 5.5 (5)."}
    _, cast = play(controlled("no_answer"), said)
    assert " with it is , not 15 or 5.5 ().<|im_end|>" in cast.requests[1][3]
    _, cast = play(controlled("other_problem"), said)
    assert " hint another one<|im_end|>" in cast.requests[0][3]
    assert f" solve {PROBLEM.text} with it is 5" in cast.requests[1][3]
    _, cast = play(controlled("none"), said)
    assert f" hint {PROBLEM.text}<|im_end|>" in cast.requests[0][3]


def test_answers_told_are_counted_where_the_problem_does_not_hold_them():
    problem = dataclasses.replace(PROBLEM, text="two and three?")
    lines = ["it is 5.", "<think>5</think> add", "15 or 5.5"]
    episodes = [play(team_of("hint"), {**HINTED, ("hint", 0): line})[0] for line in lines]
    counted = answers_told.count(episodes, {problem.uid: problem}, CHAT.tokenizer)
    assert counted == {"episodes": 3, "told": 1}
    holding = {problem.uid: dataclasses.replace(problem, text="is 5 prime?")}
    assert answers_told.count(episodes, holding, CHAT.tokenizer) == {"episodes": 0, "told": 0}
    alone, _ = play(team_of("actor"), {("solve", 0): r"\boxed{5}"})
    assert answers_told.count([alone], {problem.uid: problem}, CHAT.tokenizer)["episodes"] == 0


# --- an Actor behind an endpoint ------------------------------------------------------------------


def test_an_endpoints_actor_takes_text_and_its_tokens_are_counted_and_untold():
    team = team_of("hint", prompts="math", actor=dict(chat=None))
    episode, cast = play(team, {**HINTED, ("solve", 0): r"<think>?</think> \boxed{5}"})
    path, policy, temperature, messages = cast.requests[1]
    assert (path, policy, temperature) == ("solve", "frozen", 0.0)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[1]["content"].startswith(f"{PROBLEM.text}\n\n[Hint: first plus]")
    actor = episode.traces[1]
    assert actor.tokens == (UNTOLD,) * 15 and set(actor.owners[11:]) == {ROLES["actor"]}
    (turn,) = actor.turns
    assert (turn.start, turn.end, turn.text) == (11, 15, r"<think>?</think> \boxed{5}")
    hint = episode.traces[0].turns[0]
    score = score_episode(episode)
    assert score.input_tokens == hint.start + 11
    assert score.output_tokens == hint.end - hint.start + 4
    assert episode.reward == 1.0
    assert episode_json.from_json(json.loads(json.dumps(episode_json.to_json(episode)))) == episode


def test_an_endpoints_debater_is_told_what_it_said_and_each_answer_costs():
    team = team_of("mad", actor=dict(chat=None))
    episode, cast = play(team, lambda key: rf"\boxed{{{key.path[1]}{key.turn}}}")
    last = next(r for r in cast.requests if r[0] == "a2" and len(r[3]) > 1)[3]
    assert [m["role"] for m in last] == ["user", "assistant", "user"]
    assert last[1]["content"] == r"\boxed{20}" and r"\boxed{10} | \boxed{30}" in last[2]["content"]
    assert len(episode.traces) == 6  # 3 debaters x 2 rounds
    assert score_episode(episode).input_tokens == 6 * 11


def test_an_endpoint_that_declines_is_no_answer_and_one_that_fails_is_the_worlds_failure():
    declined = Reply("", 11, 0, StopReason.TOKEN, is_refused=True)
    team = team_of("actor", actor=dict(chat=None))
    episode, _ = play(team, {("solve", 0): declined})
    assert (episode.outcome, episode.reward) == ("invalid", 0.0)
    assert episode.traces[0].turns[0].reason == "refused"
    failed, _ = play(team, {("solve", 0): RuntimeError("no route")})
    assert failed.reward is None and failed.failure.kind == FailureKind.API


# --- the spec -------------------------------------------------------------------------------------


def test_every_topology_is_sound_has_its_prompts_and_the_roles_of_its_team():
    assert set(TOPOLOGIES) == set(ROLES_OF)
    for name, build in TOPOLOGIES.items():
        topology = build(SIZES)
        check(topology)
        assert topology.roles == ROLES_OF[name]
        assert (len(topology.answers) > 1) == (name in VOTING)
        for prompts in ("math", "math_toy"):
            texts = load_texts(prompts, topology)
            assert set(texts.user) == set(prompt_names([topology]))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_one_answer_of_the_actors_is_drawn_several_times_and_no_other(name):
    topology = TOPOLOGIES[name](SIZES)
    assert resampled(topology, 1) == topology
    if name in (*SAMPLED, "actor", "evoagent", "evoagent_checked"):
        found = resampled(topology, 3)
        check(found)
        before = len(topology.nodes) - 1
        assert [node.is_varied for node in found.nodes[before:]] == [True] * 3
        assert found.answers == tuple(f"{topology.answers[0]}.s{i}" for i in (1, 2, 3))
        assert found.nodes[:before] == topology.nodes[:before]
    else:
        with pytest.raises(ValueError, match="want one node, the Actor's, alone"):
            resampled(topology, 3)


def test_a_hint_is_worth_the_mean_of_its_solutions_and_its_error_is_known():
    """Two of four right: 1/2, and sqrt(1/2 1/2 / 4) = 1/4."""
    topology = resampled(TOPOLOGIES["hint"](SIZES), 4)
    team = team_of("hint", topology)
    team = dataclasses.replace(
        team, collaboration=dataclasses.replace(team.collaboration, is_sampled=True)
    )
    said = {("hint", 0): " first plus", ("solve.s1", 0): r"\boxed{5}", ("solve.s2", 0): "hm",
            ("solve.s3", 0): r"\boxed{4}", ("solve.s4", 0): r"\boxed{05}"}  # fmt: skip
    episode, cast = play(team, said)
    assert episode.predictions == ("5", "", "4", "05") and episode.correct == (1.0, 0.0, 0.0, 1.0)
    assert (episode.reward, episode.reward_error, episode.outcome) == (0.5, 0.25, "answered")
    assert [(path, temperature) for path, _, temperature, _ in cast.requests] == [
        ("hint", 1.0), *((f"solve.s{i}", 0.7) for i in (1, 2, 3, 4)),
    ]  # fmt: skip
    assert len({request[3] for request in cast.requests[1:]}) == 1  # the same prompt
    assert score_episode(episode).critical_steps == 2
    assert episode_json.from_json(json.loads(json.dumps(episode_json.to_json(episode)))) == episode
    once, _ = play(team_of("hint"), HINTED)
    assert once.reward_error is None and "reward_error" not in episode_json.to_json(once)


def test_without_room_for_a_prompt_every_sample_is_wrong():
    topology = resampled(TOPOLOGIES["hint"](SIZES), 3)
    team = team_of("hint", topology, collaborator=dict(max_tokens=20, context=21))
    team = dataclasses.replace(
        team, collaboration=dataclasses.replace(team.collaboration, is_sampled=True)
    )
    episode, _ = play(team, HINTED)
    assert (episode.outcome, episode.correct) == ("context", (0.0, 0.0, 0.0))


def steps(name_or_topology, sizes=SIZES, said=None, **voices):
    """Critical steps of an episode in which every node speaks, and how many turns it had."""
    is_name = isinstance(name_or_topology, str)
    topology = TOPOLOGIES[name_or_topology](sizes) if is_name else name_or_topology
    episode, _ = play(team_of("hint", topology, **voices), said or (lambda key: r"\boxed{5}"))
    assert episode.outcome == "answered"
    turns = sum(len(trace.turns) for trace in episode.traces)
    return score_episode(episode).critical_steps, turns


@pytest.mark.parametrize("actor", [{}, dict(chat=None)], ids=["local", "endpoint"])
def test_nodes_of_a_wave_are_one_critical_step(actor):
    """By hand: (steps, turns); steps count what had to wait, turns everything."""
    assert steps("actor", actor=actor) == (1, 1)
    assert steps("vote", actor=actor) == (1, 3)  # 3 votes at once
    assert steps("hint", actor=actor) == (2, 2)
    assert steps("critic", actor=actor) == (3, 3)  # draft, critique, revision
    assert steps("roles", actor=actor) == (4, 4)
    for agents, rounds in ((3, 2), (2, 3), (4, 1)):
        sizes = Sizes(votes=3, debaters=agents, rounds=rounds, experts=2)
        for team in ("mad", "debate"):  # n agents at once, r times
            assert steps(team, sizes, actor=actor) == (rounds, agents * rounds)
        assert steps("guided_debate", sizes, actor=actor) == (1 + rounds, 1 + agents * rounds)
    # draft and both experts, both their solutions, then one revision after the other
    assert steps("evoagent", actor=actor) == (4, 7)


def test_a_wave_that_nobody_spoke_in_is_no_step():
    """Both experts are discarded: draft and experts, and two checks at once."""
    said = {("draft", 0): r"\boxed{5}", ("expert1", 0): "?", ("expert2", 0): "?",
            ("check1", 0): "Discard", ("check2", 0): "Discard"}  # fmt: skip
    assert steps("evoagent_checked", said=said) == (2, 5)


def test_an_agent_that_speaks_again_beside_another_waits_with_it():
    """a and b first; c reads both; then a again beside d, who also waited for c alone."""
    topology = Topology(
        nodes=(
            Node("a1", "solve", agent="a"),
            Node("b", "solve"),
            Node("c", "critique", {"solution": ("a1", "b")}),
            Node("a2", "debate", {"solutions": ("c",)}, agent="a"),
            Node("d", "critique", {"solution": ("c",)}),
        ),
        answers=("a2",),
    )
    assert steps(topology) == (3, 5)


def test_nodes_speak_as_soon_as_what_they_read_is_said():
    critic = [[node.name for node in wave] for wave in waves(TOPOLOGIES["critic"](SIZES))]
    assert critic == [["draft"], ["critique"], ["revise"]]
    debate = [[node.name for node in wave] for wave in waves(TOPOLOGIES["guided_debate"](SIZES))]
    assert debate == [["hint"], ["a1.r1", "a2.r1", "a3.r1"], ["a1.r2", "a2.r2", "a3.r2"]]


def test_experts_refine_one_after_another():
    assert [[node.name for node in wave] for wave in waves(TOPOLOGIES["evoagent"](SIZES))] == [
        ["draft", "expert1", "expert2"], ["solve1", "solve2"], ["refine1"], ["refine2"],
    ]  # fmt: skip
    said = {(name, 0): rf"\boxed{{{n}}}" for n, name in enumerate(
        ("draft", "expert1", "expert2", "solve1", "solve2", "refine1", "refine2"))}  # fmt: skip
    episode, cast = play(team_of("evoagent"), said)
    assert r"done \boxed{5} comment \boxed{4}<|im_end|>" in cast.requests[-1][3]
    assert episode.predictions == ("6",) and {r[1] for r in cast.requests} == {"frozen"}


def test_an_expert_that_is_discarded_is_not_asked_and_refines_nothing():
    """The second of two: its solution and its refinement are left out, the one before stays."""
    said = {(name, 0): rf"\boxed{{{n}}}" for n, name in enumerate(
        ("draft", "expert1", "expert2", "solve1", "solve2", "refine1", "refine2"))}  # fmt: skip
    said |= {("check1", 0): "Retain.", ("check2", 0): "I would discard it."}
    topology = TOPOLOGIES["evoagent_checked"](SIZES)
    episode, cast = play(team_of("evoagent_checked", topology, prompts="math"), said)
    asked = [path for path, *_ in cast.requests]
    assert sorted(asked) == ["check1", "check2", "draft", "expert1", "expert2", "refine1", "solve1"]
    assert episode.predictions == ("5",)  # of refine1
    (shown,) = [text for path, _, _, text in cast.requests if path == "check2"]
    assert r"the newest last: \boxed{1}" in shown and r"\boxed{2}" in shown
    retained, _ = play(
        team_of("evoagent_checked", topology, prompts="math"), said | {("check2", 0): "Retain"}
    )
    assert retained.predictions == ("6",) and len(retained.traces) == 9
    none, cast = play(
        team_of("evoagent_checked", topology, prompts="math"), said | {("check1", 0): "DISCARD"}
    )
    assert none.predictions == ("0",)  # the draft's
    with pytest.raises(ValueError, match=r"'a' reads \['b'\], which are no nodes before it"):
        check(Topology((Node("a", "solve", judge="b"),), ("a",)))


def test_a_new_topology_is_a_few_lines():
    topology = Topology(
        (
            Node("plan", "hint"),
            Node("check", "critique", {"solution": ("plan",)}),
            Node("solve", "hinted", {"hint": ("plan", "check")}),
        ),
        answers=("solve",),
        trained=("check",),
    )
    said = {("plan", 0): "a", ("check", 0): "b", ("solve", 0): r"\boxed{5}"}
    episode, cast = play(team_of("hint", topology), said)
    assert " with a | b<|im_end|>" in cast.requests[2][3] and episode.reward == 1.0


def test_a_topology_that_cannot_be_played_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match=r"'a' reads \['b'\], which are no nodes before it"):
        check(Topology((Node("a", "hinted", {"hint": ("b",)}), Node("b", "hint")), ("a",)))
    with pytest.raises(ValueError, match=r"answers=\(\) must be some of"):
        check(Topology((Node("a", "solve"),), ()))
    with pytest.raises(ValueError, match=r"trained=\('b',\) of the agents \['a'\]"):
        check(Topology((Node("a", "solve"),), ("a",), ("b",)))
    with pytest.raises(FileNotFoundError, match=r"node 'a' wants nothing\.user\.txt"):
        load_texts("math", Topology((Node("a", "nothing"),), ("a",)))
    unread = Topology((Node("h", "hint"), Node("a", "solve", {"hint": ("h",)})), ("a",))
    with pytest.raises(ValueError, match=r"solve\.user\.txt has placeholders \['question'\]"):
        load_texts("math", unread)


def test_most_votes_win_and_of_equals_the_first():
    assert asyncio.run(majority(["1", "2", "02", "1"], is_same)) == "1"
    assert asyncio.run(majority(["3", "2", "02"], is_same)) == "2"
    assert asyncio.run(majority([], is_same)) is None
    assert isinstance(load_texts("math", TOPOLOGIES["hint"](SIZES)), Texts)
