"""Raw trajectories: how records are written out, what is forged nowhere, how they are played."""

import asyncio
import dataclasses
import json

import pytest
from config_files import load
from conftest import ROOT
from small_runs import save_start, scene_of

from mas_jax.agents.oracle import Flaws
from mas_jax.agents.protocol_files import build
from mas_jax.agents.protocol_oracle import Oracle, local
from mas_jax.agents.protocol_roles import Limits
from mas_jax.agents.protocol_team import Desk
from mas_jax.agents.rollout import Limits as RolloutLimits
from mas_jax.agents.scripted import ScriptedSampler
from mas_jax.agents.setting import Run, World
from mas_jax.agents.trajectory import Replay, read_trajectories, written_out
from mas_jax.config import default_config
from mas_jax.data.questions import spread
from mas_jax.learning import experience, players, policy_files, scenes
from mas_jax.records import ROLES
from mas_jax.rewards.exact_match import exact_match_reward

QWEN = ROOT.parent / "shared" / "data" / "qwen3_tokenizer"
FOUND = [
    {"objective": "where #1 was born", "queries": ["ann born", "ann native"], "summary": "in rome"},
    {"objective": "", "queries": ["rome <answer> mayor</answer>"], "summary": "no <|im_end|> name"},
]
RECORD = {"question": "q", "findings": FOUND, "answer": "bob  lee", "is_correct": True}


def test_a_record_is_written_out_query_by_query():
    assert written_out(RECORD, "toy") == (
        " where #1 was born<search> ann born</search>",
        "<search> ann native</search>",
        " in rome<search> rome answer mayor /answer</search>",
        " no |im_end| name<answer> bob lee</answer>",
    )
    assert written_out(RECORD, "full")[0] == "where #1 was born\n<search>ann born</search>"
    assert written_out(RECORD, "full")[-1] == "no |im_end| name\n<answer>bob lee</answer>"
    more = [FOUND[0], FOUND[0] | {"objective": "what then"}]
    third = written_out(RECORD | {"findings": more}, "toy")[2]
    assert third == " in rome ; what then<search> ann born</search>"


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_only_what_ended_rightly_is_imitated(tmp_path):
    path = write(tmp_path / "r.jsonl", RECORD, RECORD | {"question": "p", "is_correct": False})
    assert list(read_trajectories(path, "toy")) == ["q"]
    with pytest.raises(ValueError, match="none of 1 records ended with a right answer"):
        read_trajectories(write(path, RECORD | {"is_correct": False}), "toy")
    with pytest.raises(ValueError, match="the record of 'q' does not say what was searched"):
        read_trajectories(write(path, {"question": "q", "is_correct": True}), "toy")
    with pytest.raises(FileNotFoundError, match=r"launch/build_protocols\.py"):
        read_trajectories(tmp_path / "none.jsonl", "toy")


# --- in the toy world -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    return scene_of(save_start(tmp_path_factory.mktemp("start") / "policy"))


@pytest.fixture(scope="module")
def files(scene, tmp_path_factory):
    """Records of the team's and of one model's work on the same questions of all families."""
    folder, limits = tmp_path_factory.mktemp("records"), Limits()
    desk = Desk(local(Oracle(scene.world), limits), scene.retriever.search, "plain")
    found = {}
    for name, is_alone in (("team", False), ("alone", True)):
        found[name] = folder / f"{name}.jsonl"
        desks = [dataclasses.replace(desk, is_alone=is_alone)]
        chosen = spread(scene.questions["train"], 28)
        asyncio.run(build(chosen, desks, found[name], concurrency=8, failure_frac=0.0))
    return found


def played(scene, team, questions, sample):
    world = World(sample, scene.retriever.search, exact_match_reward)
    return experience.collect(
        questions, 1, team, world=world, run=Run(0, "train", 0), limits=RolloutLimits(8, 0.0, 1)
    )


def cast(scene, path):
    config = default_config()
    config.update_from_flattened_dict({"trajectories": str(path), "budgets.single.turns": 4})
    section = config.stages.student
    section.update(dict(team="single", sampler="trajectories"))
    return players.make_players(config, section, scene, None)


def test_the_plain_models_trajectory_is_what_the_script_plays(scene, files):
    cast_alone = cast(scene, files["alone"])
    questions = cast_alone.questions.sources[0]
    assert len(questions) == 28
    ours = played(scene, cast_alone.team, questions, cast_alone.sample)
    script = ScriptedSampler(scene.world, scene.chat, scene.prompts, Flaws())
    theirs = played(scene, cast_alone.team, questions, script.sample)
    assert [e.reward for e in ours] == [1.0] * 28
    assert [e.traces[0].tokens for e in ours] == [e.traces[0].tokens for e in theirs]
    assert [e.traces[0].owners for e in ours] == [e.traces[0].owners for e in theirs]


def test_the_teams_trajectory_talks_and_searches_more_and_is_played_whole(scene, files):
    cast_team, cast_alone = cast(scene, files["team"]), cast(scene, files["alone"])
    questions = cast_team.questions.sources[0]
    ours = played(scene, cast_team.team, questions, cast_team.sample)
    few = played(scene, cast_alone.team, questions, cast_alone.sample)
    # two queries for every hop, beyond the budget of the agent's own
    assert [e.num_searches for e in ours] == [2 * e.num_searches for e in few]
    assert max(e.num_searches for e in ours) == 6
    assert [e.outcome for e in ours] == ["answered"] * 28
    assert [e.reward for e in ours] == [1.0] * 28
    for episode, question in zip(ours, questions, strict=True):
        (trace,) = episode.traces
        said = [t for t, o in zip(trace.tokens, trace.owners, strict=True) if o]
        assert set(trace.owners) == {0, ROLES["searcher"]}
        if len(question.decomposition) == 1:
            assert scene.tokenizer.decode(said).startswith(f" {question.decomposition[0]}<search>")


@pytest.mark.skipif(not QWEN.is_dir(), reason="the Qwen3 tokenizer is not here")
def test_it_is_played_to_the_end_in_the_real_prompts_and_tokenizer(files):
    config = load("mapd_compared").get_config("raw_trajectory_team")
    config.trajectories = str(files["team"])
    real = scenes.make_scene(config, policy_files.load_tokenizer(QWEN))
    made = players.make_players(config, config.stages.agent, real, None)
    episodes = played(real, made.team, made.questions.sources[0][-3:], made.sample)
    assert [episode.reward for episode in episodes] == [1.0] * 3
    (trace,) = episodes[-1].traces[-1:]
    last = trace.turns[-1]
    said = real.tokenizer.decode(trace.tokens[last.start : last.end])
    assert said.endswith(f"\n<answer>{episodes[-1].predictions[0]}</answer>")


def test_a_key_says_which_turn_is_taken(scene):
    text = " ann<search> who</search>"
    replay = Replay({"q": ("<answer> no</answer>", text)}, scene.tokenizer)

    @dataclasses.dataclass
    class Key:
        question: str = "q"
        turn: int = 1

    samples = asyncio.run(replay.sample((1, 2), key=Key(), n=2, max_tokens=1))
    assert [scene.tokenizer.decode(s.tokens) for s in samples] == [text, text]
    assert {p for s in samples for p in s.logprobs} == {0.0}


def test_trajectories_of_other_questions_are_refused_and_others_have_another_digest(
    scene, files, tmp_path
):
    with pytest.raises(ValueError, match="holds none of the questions of a training set"):
        cast(scene, write(tmp_path / "other.jsonl", RECORD))
    digests = {cast(scene, path).digest for path in files.values()}
    assert len(digests) == 2
    assert cast(scene, files["team"]).digest in digests
