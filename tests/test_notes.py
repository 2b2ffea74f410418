"""Protocols behind a question: a single agent reads them, and the script acts on what they say."""

import asyncio
import dataclasses

import pytest

from mas_jax.agents import rollout
from mas_jax.agents.oracle import Flaws, informed
from mas_jax.agents.protocol_files import read, read_protocols
from mas_jax.agents.scripted import ScriptedSampler
from mas_jax.agents.setting import Run, World
from mas_jax.config import default_config
from mas_jax.config_rules import validate
from mas_jax.data.tokenizer import make_toy_tokenizer
from mas_jax.learning import scenes, study, teams, toy_policy
from mas_jax.learning.views import insert, opening_end
from mas_jax.rewards.exact_match import exact_match_reward

FLAWED = Flaws(
    stop_early=1.0, drop_word=0.5, misread=1.0, skip_search=1.0, from_memory=0.0, shortcut=0.0
)


@pytest.fixture(scope="module")
def scene():
    config = default_config()
    config.world.update(dict(train=70, held_out=14))
    return scenes.make_scene(config, make_toy_tokenizer())


def play(scene, questions, notes, flaws=FLAWED):
    config = default_config()
    sampler = ScriptedSampler(scene.world, scene.chat, scene.prompts, flaws)
    world = World(sampler.sample, scene.retriever.search, exact_match_reward)
    team = dataclasses.replace(teams.make_team(config, "single", scene), notes=notes)
    jobs = [(question, 0) for question in questions]

    async def played():
        episodes = rollout.play(
            jobs, team, world=world, run=Run(0, "train", 0),
            limits=rollout.Limits(**config.rollout),
        )  # fmt: skip
        return {e.question: e async for e in episodes}

    return asyncio.run(played())


def accuracy(episodes):
    return sum(episode.correct[0] for episode in episodes.values()) / len(episodes)


def of_the_question(scene, question):
    """A plan and an answer for a question, as `render` writes them for the toy."""
    return f" | find {question.decomposition[0]} search x | answer {question.golden_answers[0]}"


def test_each_section_takes_flaws_away():
    assert informed(FLAWED, {}) == FLAWED
    planned = informed(FLAWED, {"find": "x"})
    assert (planned.stop_early, planned.drop_word, planned.skip_search) == (0.0, 0.0, 0.0)
    assert planned.misread == 1.0
    assert informed(FLAWED, {"report": "x"}).misread == 0.0
    both = informed(FLAWED, {"find": "x", "from": "y"})
    assert both == dataclasses.replace(Flaws(), from_memory=0.0, shortcut=0.0)


def test_the_note_stands_where_the_view_of_the_same_text_has_it(scene):
    question = scene.world.questions["train"][0]
    note = of_the_question(scene, question)
    (told,) = play(scene, [question], {question.uid: note}).values()
    (plain,) = play(scene, [question], {}).values()
    view = insert(plain.traces[0], scene.tokenizer.encode(note), scene.chat)
    end = opening_end(told.traces[0].tokens, scene.chat, num_examples=0)
    assert told.traces[0].tokens[: end + 1] == view.tokens[: view.at + view.size + 1]


def test_a_reader_of_its_protocol_errs_less_and_of_anothers_as_without(scene):
    questions = scene.world.questions["train"]
    own = {q.uid: of_the_question(scene, q) for q in questions}
    ones = [q for q in questions if len(q.decomposition) == 1]
    other = {q.uid: own[p.uid] for q, p in zip(ones, [*ones[1:], ones[0]], strict=True)}
    without = play(scene, questions, {})
    assert accuracy(without) < 0.3
    assert accuracy(play(scene, questions, own)) > accuracy(without) + 0.5
    misled = play(scene, ones, other)
    names = {q.uid for q in ones if q.decomposition[0] == q.text}  # asked in the plan's own words
    assert names
    for uid in names:  # nothing that it says differs, but the prompt
        assert misled[uid].predictions == without[uid].predictions


def test_a_told_answer_may_be_given_unsearched(scene):
    question = scene.world.questions["train"][0]
    notes = {question.uid: of_the_question(scene, question)}
    (episode,) = play(scene, [question], notes, Flaws(shortcut=1.0)).values()
    assert (episode.num_searches, episode.correct) == (0, (1.0,))
    (episode,) = play(scene, [question], {}, Flaws(shortcut=1.0)).values()
    assert episode.num_searches > 0


def test_the_share_of_the_starts_traces_with_a_protocol(scene):
    questions = scene.world.questions["train"][:40]
    notes = asyncio.run(toy_policy._notes(scene, questions, share=0.5, skill=1.0, seed=3))
    assert len(notes) == 20
    assert sum(text == "" for text in notes.values()) >= 5
    assert notes == asyncio.run(toy_policy._notes(scene, questions, share=0.5, skill=1.0, seed=3))
    config = default_config()
    config.pretrain.teams = ("cascade", "single")
    config.pretrain.protocols.share = 1.0
    traces = toy_policy.flawed_traces(config, scene, split="train", count=14, runs=1)
    texts = [scene.tokenizer.decode(trace.tokens) for trace in traces]
    assert any(text.startswith("<|im_start|>user find") and " | find " in text for text in texts)
    cascade = [text for text in texts if text.startswith("<|im_start|>user search")]
    assert len(cascade) == 14
    assert not any(" | find " in text for text in cascade)


def test_only_the_single_agent_is_evaluated_with_protocols(tmp_path):
    config = default_config()
    config.evaluation.privileged = True
    config.privileged.protocols = str(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="the cascade, none of whose"):
        validate(config)
    config.evaluation.teams = ("single",)
    with pytest.raises(ValueError, match="is not a file; make it"):
        validate(config)


@pytest.mark.parametrize("writer", ["plain", "other_words", "raw-talkative", "alone-plain"])
def test_a_cell_of_the_study_gets_the_protocols_of_its_writer_once(tmp_path, writer):
    config = default_config()
    config.world.update(dict(train=20, held_out=10, families=("nq_like", "2wiki_like")))
    lab = study.Lab(tmp_path, tmp_path / "results", None)
    path = study._protocols(config, writer, lab)
    scene = scenes.make_scene(config, make_toy_tokenizer())
    questions = {q.uid: q for split in ("train", "test") for q in scene.questions[split]}
    found = read_protocols(path)
    assert {record["question"] for record in read(path)} == set(questions)
    assert len(found) > 0.9 * len(questions)
    assert {"answer" in protocol for protocol in found.values()} == {True, False}  # both variants
    is_raw = any("let me think" in str(protocol) for protocol in found.values())
    assert is_raw == writer.startswith("raw-")
    before = path.stat().st_mtime_ns
    assert study._protocols(config, writer, lab) == path
    assert path.stat().st_mtime_ns == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]  # no part is left
