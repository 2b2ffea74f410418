"""The oracle through the real chat, teams and index: the ceiling, and the starting traces."""

import functools
from collections import Counter, defaultdict

import pytest

from mas_jax.agents.oracle import Flaws
from mas_jax.agents.prompts import toy_prompt_words
from mas_jax.config import default_config, role
from mas_jax.data.tokenizer import make_toy_tokenizer
from mas_jax.learning import scenes
from mas_jax.learning.credit import credit
from mas_jax.learning.programme import make_programme
from mas_jax.learning.toy_policy import flawed_traces, scripted_episodes
from mas_jax.learning.turn_credit import Sources
from mas_jax.retrieval.index import contents


@functools.cache
def make_scene() -> scenes.Scene:
    return scenes.make_scene(default_config(), make_toy_tokenizer())


def play(name, flaws=None, count=70):
    return scripted_episodes(
        default_config(), name, make_scene(), split="test", count=count, runs=1,
        flaws=Flaws() if flaws is None else flaws,
    )  # fmt: skip


def test_every_word_of_the_toy_prompts_is_one_token():
    tokenizer = make_toy_tokenizer()
    for word in toy_prompt_words():
        assert len(tokenizer.encode(f" {word}")) == 1, word


@pytest.mark.parametrize("name", ["cascade", "hierarchy", "single"])
def test_the_ceiling_of_every_team_is_above_95_percent_in_every_family(name):
    rewards = defaultdict(list)
    for episode in play(name):
        assert episode.failure is None
        rewards[episode.question.split("/")[0]].append(episode.reward)
    assert len(rewards) == 7
    for family, values in rewards.items():
        assert sum(values) / len(values) >= 0.95, family


def test_episodes_are_as_short_as_the_toy_needs():
    lengths = {
        name: sum(len(t.tokens) for e in play(name) for t in e.traces) / 70
        for name in ("cascade", "hierarchy")
    }
    assert lengths["cascade"] < 175
    assert lengths["hierarchy"] < 320


def test_flaws_cost_accuracy_and_searches_and_are_drawn_from_the_request():
    config = default_config()
    flaws = Flaws(**config.pretrain.flaws)
    flawed = play("cascade", flaws)
    assert flawed == play("cascade", flaws)
    config.rollout.concurrent = 3
    assert flawed == scripted_episodes(
        config, "cascade", make_scene(), split="test", count=70, runs=1, flaws=flaws
    )
    right = sum(e.reward for e in flawed) / 70
    assert 0.2 < right < 0.6
    searches = Counter(e.num_searches for e in flawed)
    assert searches[0] and searches[1] and searches[2]  # learning can move their number both ways


def test_starting_traces_hold_every_role_and_only_sampled_tokens_are_owned():
    traces = flawed_traces(default_config(), make_scene(), split="validation", count=7, runs=1)
    assert {t.role for t in traces} == {"leader", "searcher", "answerer"}
    tokenizer = make_scene().tokenizer
    for trace in traces:
        assert len(trace.owners) == len(trace.tokens)
        for turn in trace.turns:
            said = tokenizer.decode(trace.tokens[turn.start : turn.end])
            assert said.startswith("<") and said.endswith(">")
            assert all(trace.owners[turn.start : turn.end])


def test_turns_of_single_agents_in_the_toy_world_are_credited():
    scene, flaws = make_scene(), Flaws(**default_config().pretrain.flaws)
    episodes = scripted_episodes(
        default_config(), "single", scene, split="test", count=14, runs=4, flaws=flaws
    )
    questions = {question.uid: question for question in scene.questions["test"]}
    sources = Sources(questions, {p.id: contents(p) for p in scene.world.passages})
    changes = dict(turn_reward="search_progress", outcome="f1_and_keys")
    row = make_programme({"searcher": role(advantages=("group", "step"), **changes).to_dict()})
    credited, metrics = credit(episodes, row, sources)
    turns = [
        (turn.action, value)
        for c in credited
        for turn, value in zip(c.trace.turns, c.turn_rewards, strict=True)
    ]
    searches = [value for action, value in turns if action == "search"]
    assert all(value == 0.0 for action, value in turns if action != "search")
    assert all(-1.0 <= value <= 1.0 for value in searches)
    # most searches of a script find a gold passage
    assert sum(value > 0.1 for value in searches) > len(searches) / 2
    assert metrics["credit/searcher/step_group_size"] > 1.5
    assert any(value > 0 for c in credited for value in c.turn_advantages)
    assert max(c.reward for c in credited) > 1.3
