"""The settings and the starting policies of a Collaborator and its Actor."""

import asyncio
import dataclasses
import gc
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from config_files import load
from conftest import ROOT
from rich.console import Console
from test_batch import ROW, make_credited, pack_alone
from tiny_agentpo import save_both, small_config, weights

from mas_jax.agents.chat import TEMPLATES, make_chat
from mas_jax.agents.collaboration import toy_collaboration_words, without
from mas_jax.config_rules import validate
from mas_jax.data.arithmetic import make_arithmetic, make_arithmetic_tokenizer
from mas_jax.data.questions import write_jsonl
from mas_jax.files import write_json
from mas_jax.learning import (
    collaboration,
    evaluate,
    math_policy,
    pipeline,
    policy_files,
    scenes,
    teams,
)
from mas_jax.learning.programme import make_programme
from mas_jax.learning.study_agentpo import OTHER_STARTS, START
from mas_jax.model import hf, qwen3
from mas_jax.records import UNTOLD

QUIET = Console(quiet=True)
COLLABORATOR_STARTS = (START, *(start for _, start in OTHER_STARTS.values()))


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return save_both(tmp_path_factory.mktemp("policies"))


# --- starting policies ----------------------------------------------------------------------------


def test_one_call_makes_both_starting_policies(tmp_path):
    config = load("agentpo_toy").get_config()
    config.math_pretrain.update(dict(problems=30, held_out=4, teams=("hint", "debate")))
    config.math_pretrain.settings.update(dict(rows=4, warmup_steps=1))
    config.math_pretrain.steps.update(dict(actor=3, collaborator=2))
    records = math_policy.make(config, tmp_path / "made", QUIET)
    for name in ("actor", "collaborator"):
        place = math_policy.directory_of(tmp_path / "made", name)
        assert np.isfinite(records[name]["held_out_loss"])
        assert json.loads((place / "pretrain.json").read_text()) == records[name]
        assert policy_files.load_tokenizer(place).encode(" plus") != []
    actor, collaborator = (tmp_path / "made" / f"{name}_policy" for name in math_policy.POLICIES)
    assert weights(actor) != weights(collaborator)
    with pytest.raises(FileExistsError, match="actor_policy exists"):
        math_policy.make(config, tmp_path / "made", QUIET)
    config.math_pretrain.preset = "toy-1m-qwen"
    with pytest.raises(ValueError, match=r"math_pretrain\.preset: .*mean 'toy-1m-qwen2\.5'"):
        math_policy.make(config, tmp_path / "other", QUIET)


def test_collaborators_that_are_shipped_learned_from_the_same_and_differ_in_shape():
    places = [policy_files.asset(f"{start}_policy") for start in COLLABORATOR_STARTS]
    made = [json.loads((place / "pretrain.json").read_text()) for place in places]
    presets = [record["math_pretrain"].pop("preset") for record in made]
    assert presets == ["toy-1m", "toy-300k", "toy-1m-qwen2.5"]
    for key in ("math_pretrain", "tokenizer"):
        assert all(record[key] == made[0][key] for record in made)
    models = [hf.load_config(place) for place in places]
    for preset, model in zip(presets, models, strict=True):
        sizes = dict(vocab_size=models[0].vocab_size, max_positions=models[0].max_positions)
        assert model == dataclasses.replace(qwen3.PRESETS[preset], **sizes)
    counts = [qwen3.param_count(model) for model in models]
    assert counts[1] == pytest.approx(counts[0] / 3, rel=0.05)
    assert counts[2] == pytest.approx(counts[0], rel=0.01)


def test_first_traces_hold_good_and_bad_hints_and_no_problem_that_is_played():
    config = load("agentpo_toy").get_config()
    chat = make_chat(make_arithmetic_tokenizer(toy_collaboration_words()), TEMPLATES["toy"])
    questions = make_arithmetic(0, train=150, held_out=1).questions["train"]
    for name in ("actor", "hint"):
        episodes = math_policy.scripted_episodes(config, chat, name, questions)
        assert 0.3 < np.mean([episode.reward for episode in episodes]) < 0.6
    config.math_pretrain.collaborator = dict(plan=1.0)  # without a flaw
    episodes = math_policy.scripted_episodes(config, chat, "hint", questions)
    assert {episode.reward for episode in episodes} == {1.0}
    played = make_arithmetic(**config.arithmetic)
    texts = {q.text for found in played.questions.values() for q in found}
    learned = math_policy._questions(config.math_pretrain, texts)
    assert len(learned) == config.math_pretrain.problems
    assert not texts & {question.text for question in learned}


# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actor.kind": "none"}, r"evaluation\.teams='actor' has an Actor, and actor\.kind='none'"),
        ({"data.subject": "facts"}, r"'actor' and data\.subject='facts'"),
        ({"stages.agentpo.programme.actor.trained": True}, r"actor\.trained=True: the Actor is"),
        ({"actor.kind": "api"}, r"base_url='' and model=''; name both"),
        ({"actor.price": (2.0,)}, r"actor\.price=\(2\.0,\): want two amounts of at least 0"),
        ({"actor.price": (2.0, -1.0)}, r"actor\.price=\(2\.0, -1\.0\): want two amounts"),
        ({"actor.max_cost": 5.0}, r"max_cost=5\.0 with actor\.price=\(\): want .* and a price"),
        ({"actor.kind": "polcy"}, r"did you mean 'policy'"),
        ({"actor.base_url": "http://me:secret@x"}, "actor.base_url holds '@'"),
        ({"collaboration.max_tokens": 192}, r"collaboration\.max_tokens=192 must be above 0 and"),
        ({"actor.context": 500}, r"500, and that at most actor\.engine\.context=192"),
        ({"train.row_length": 96}, r"below collaboration\.context=192"),
        ({"stages.agentpo.team": "cascade"}, r"'cascade' and data\.subject='mathematics'"),
        ({"stages.agentpo.sampler": "oracle"}, r"sampler='oracle' searches for facts"),
        ({"data.corpus": "x"}, "nobody searches"),
        ({"collaboration.control": "wrong"}, "control='wrong'; choose from"),
        ({"collaboration.control": "other_problem", "evaluation.teams": ("critic",)},
         "'critic', whose Collaborator reads solutions"),
        ({"collaboration.control": "no_answer", "evaluation.teams": ("solver",)},
         "'solver', whose Collaborator nobody reads"),
        ({"collaboration.actor_samples": 0}, r"actor_samples=0 must be at least 1"),
        ({"collaboration.actor_samples": 4, "collaboration.vote_temperature": 0.0},
         r"vote_temperature=0\.0 are 4 equal solutions; set a temperature above 0"),
        ({"data.first": -1}, r"data\.first=-1 must be at least 1, or 0 for all"),
        ({"train.patience": 2, "train.validation_interval": 0}, r"patience=2 counts validations"),
        ({"train.patience": -1}, r"patience=-1 counts validations"),
        ({"evaluation.controls": ("none",)}, r"controls=\('none',\); choose from"),
        ({"evaluation.controls": ("no_answer",), "collaboration.control": "no_answer"},
         "'no_answer' is of every team, and evaluation.controls="),
        ({"evaluation.controls": ("other_problem",), "evaluation.teams": ("critic",)},
         r"evaluation\.controls=\('other_problem',\) and .*'critic', whose Collaborator reads"),
        ({"evaluation.controls": ("no_answer",), "evaluation.teams": ("actor", "vote")},
         "no team of .* has one; add one, such as 'hint'"),
        ({"evaluation.matched_votes": "critic"}, r"matched_votes='critic' measures that team and"),
        ({"collaboration.reward_window": 200}, r"reward_window=200; choose from \(0, 300\)"),
        ({"collaboration.votes": 0}, r"collaboration\.votes=0 must be at least 1"),
        ({"collaboration.debaters": 0}, r"collaboration\.debaters=0 must be at least 1"),
        ({"collaboration.rounds": 0}, r"collaboration\.rounds=0 must be at least 1"),
        ({"math_pretrain.teams": ("hint", "critc")}, r"math_pretrain\.teams: 'critc' .*'critic'"),
        ({"evaluation.caps.tokens": (9,)}, "are of teams that search"),
    ],
)  # fmt: skip
def test_settings_that_contradict_are_one_clear_error(places, changes, message):
    config = small_config(places, **changes)
    with pytest.raises(ValueError, match=message):
        validate(config)


def test_prompts_that_are_not_there_are_an_error_before_anything_is_loaded(places, tmp_path):
    config = small_config(places, **{"collaboration.prompts": str(tmp_path / "none")})
    for prepare in (pipeline.prepare, evaluate.prepare):
        with pytest.raises(FileNotFoundError, match=r"none: node '\w+' wants \w+\.user\.txt"):
            prepare(config, tmp_path / "run")


WITHOUT_OPENAI = """
import importlib.util, runpy, sys
sys.argv = sys.argv[1:]
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "openai" else found(name, *more)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("script", ["train", "evaluate"])
def test_an_actor_at_an_endpoint_without_its_package_is_one_line(places, tmp_path, script):
    arguments = [
        f"launch/{script}.py", "--config=configs/agentpo_toy.py", f"--workdir={tmp_path}/run",
        f"--config.model.checkpoint={places[0]}", "--config.actor.kind=api",
        "--config.actor.base_url=http://127.0.0.1:9", "--config.actor.model=m",
        "--config.actor.checkpoint=",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_OPENAI, *arguments],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode != 0
    assert "no openai package: pip install 'mas_jax[api]'" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_how_an_actor_is_asked_may_change_on_resume_and_who_it_is_may_not(places, tmp_path):
    config = small_config(places)
    write_json(tmp_path / "config.json", pipeline.as_json(config))
    config.actor.update(
        dict(timeout_s=9.0, retries=1, concurrency=2, cache="a", remember="b", key_variable="K",
             base_url="http://moved:1/v1", price=(2.0, 12.0), max_cost=9.0)
    )  # fmt: skip
    pipeline._check_workdir(config, tmp_path)
    config.actor.temperature = 0.5
    with pytest.raises(ValueError, match=r"actor\.temperature: checkpoint 0\.0, now 0\.5"):
        pipeline._check_workdir(config, tmp_path)


def test_a_control_acts_in_evaluation_and_not_in_training(places):
    config = small_config(places, **{"collaboration.control": "no_answer"})
    scene = scenes.make_scene(config, policy_files.load_tokenizer(places[0]))
    for training, control in ((True, "none"), (False, "no_answer")):
        team = teams.make_team(config, "hint", scene, training=training)
        assert team.collaboration.control == control


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("add 5 to 2", "add  to 2"), ("it is 5.", "it is ."), ("(5)", "()"), ("x=5", "x="),
        ("15 and 5.5 and 50", "15 and 5.5 and 50"), ("-5 or 5/7 or 7/5", "-5 or 5/7 or 7/5"),
    ],
)  # fmt: skip
def test_an_answer_is_taken_out_where_it_stands_by_itself(text, left):
    assert without(text, ("5",)) == left


def test_records_go_on_where_the_endpoint_has_moved_and_not_where_roundings_may(places):
    config = small_config(places)
    before = collaboration.settings(config, "hint")
    config.actor.update(dict(base_url="http://elsewhere/v1", retries=9))
    config.actor.engine.num_pages += 8
    assert collaboration.settings(config, "hint") == before
    config.actor.engine.decode_rows += 1
    assert collaboration.settings(config, "hint") != before


def test_training_draws_from_the_first_problems_alone(places):
    config = small_config(places, **{"data.first": 7})
    scene = scenes.make_scene(config, policy_files.load_tokenizer(places[0]))
    drawn = {scene.training.at(position, seed=0).uid for position in range(14)}
    assert drawn == {question.uid for question in scene.questions["train"][:7]}
    assert len(scene.questions["train"]) == 20  # nothing else depends on it
    config.data.first = 21
    with pytest.raises(ValueError, match=r"data\.first=21, and the sources .* have \[20\]; lower"):
        scenes.make_scene(config, scene.tokenizer)


# --- problems of files ----------------------------------------------------------------------------


def file_scene(places, directory):
    """A scene whose problems are of MATH500, which is graded by value, and its config."""
    config = small_config(places)
    lines = [{"id": "a", "question": "half of 1?", "golden_answers": [r"\frac{1}{2}"]}]
    write_jsonl(directory / "math500.jsonl", lines)
    config.data.test = (str(directory / "math500.jsonl"),)
    return scenes.make_scene(config, policy_files.load_tokenizer(places[0])), config


def test_problems_of_files_are_graded_by_the_rule_of_their_set(places, tmp_path):
    scene, config = file_scene(places, tmp_path)
    (problem,) = scene.questions["test"]
    found = asyncio.run(scene.reward(problem, ("0.5", r"\dfrac12", "2", "")))
    assert found == (1.0, 1.0, 0.0, 0.0)
    graded = scene.graded
    assert (graded["jobs"], graded["no_answer"], graded["time"]) == (3, 1, 0)
    assert scene.identity["grading"] == "by set"
    team = teams.make_team(config, "vote", scene).collaboration
    assert team.answer_of(r"so \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert asyncio.run(team.is_same(r"\frac{1}{2}", "0.5"))
    assert not asyncio.run(team.is_same("1/3", "2/3"))
    toy = scenes.make_scene(small_config(places), scene.tokenizer)
    assert asyncio.run(toy.reward(problem, ("0.5",))) == (0.0,)  # integers, in this process


def test_the_authors_window_rewards_the_end_of_a_solution_and_only_in_training(places, tmp_path):
    """390 characters behind a box hide it; a number at the end needs none."""
    scene, config = file_scene(places, tmp_path)
    (problem,) = scene.questions["test"]
    hidden = r"So \boxed{\frac{1}{2}}. " + 30 * "That is all. "
    unboxed = 200 * "hm " + "so the answer is $0.5$"

    def rewards(window, *, training):
        config.collaboration.reward_window = window
        team = teams.make_team(config, "hint", scene, training=training).collaboration
        found = tuple(team.answer_of(text) or "" for text in (hidden, unboxed))
        return asyncio.run(scene.reward(problem, found))

    assert rewards(0, training=True) == (1.0, 0.0)
    assert rewards(300, training=True) == (0.0, 1.0)
    assert rewards(300, training=False) == (1.0, 0.0)


def test_the_authors_window_hides_a_toy_answer_before_it(places):
    config = small_config(places, **{"collaboration.reward_window": 300})
    scene = scenes.make_scene(config, policy_files.load_tokenizer(places[0]))
    team = teams.make_team(config, "hint", scene, training=True).collaboration
    assert team.answer_of(r"\boxed{7}" + 291 * ".") == "7"
    assert team.answer_of(r"\boxed{7}" + 292 * ".") is None


def test_a_window_is_of_one_solution_and_a_debate_has_several(places):
    config = small_config(places, "debate", **{"collaboration.reward_window": 300})
    with pytest.raises(ValueError, match=r"team='debate' votes on several answers; set 0"):
        validate(config)


def test_a_solution_is_drawn_several_times_in_training_alone_and_where_there_is_one(places):
    config = small_config(places, **{"collaboration.actor_samples": 3})
    scene = scenes.make_scene(config, policy_files.load_tokenizer(places[0]))
    for training, num_answers in ((True, 3), (False, 1)):
        found = teams.make_team(config, "hint", scene, training=training).collaboration
        assert (len(found.topology.answers), found.is_sampled) == (num_answers, training)
    debate = small_config(places, "debate", **{"collaboration.actor_samples": 3})
    with pytest.raises(ValueError, match=r"team='debate' has no such; set 1, or a team of"):
        validate(debate)


def test_the_processes_that_grade_end_with_the_scene(places, tmp_path):
    gc.collect()  # scenes of other tests
    scene, _ = file_scene(places, tmp_path)
    (problem,) = scene.questions["test"]
    before = threading.active_count()
    asyncio.run(scene.reward(problem, ("0.5",)))
    assert threading.active_count() > before
    del scene
    gc.collect()
    assert threading.active_count() <= before  # threads of other tests may end meanwhile


# --- configs --------------------------------------------------------------------------------------


def test_the_papers_formula_differs_from_the_script_in_two_values():
    script, paper = (load("agentpo").get_config(*args) for args in ((), ("paper",)))
    rows = [config.stages.agentpo.programme.collaborator for config in (script, paper)]
    differing = {key for key in rows[0] if rows[0][key] != rows[1][key]}
    assert differing == {"aggregation", "kl_coef"}
    assert (rows[0].clip_low, rows[0].clip_high, rows[0].dual_clip) == (0.2, 0.28, 10.0)
    assert (rows[0].kl_coef, rows[0].entropy_coef, rows[0].aggregation) == (0.0, 0.0, "token")
    assert (rows[1].kl_coef, rows[1].aggregation) == (1e-3, "sequence")
    assert make_programme(script.stages.agentpo.programme.to_dict())["actor"].learns is False
    assert script.collaboration.context - script.collaboration.max_tokens == 256
    with pytest.raises(ValueError, match=r"variant 'papr': want at most one .* got 'papr'"):
        load("agentpo").get_config("papr")


@pytest.mark.parametrize("team", ["hint", "critic", "roles", "debate", "guided_debate", "solver"])
def test_every_team_of_the_config_has_room_for_what_its_collaborator_reads(team):
    """At the sizes of METHODS 3.1: an Actor's words have at most 2,048 of its own tokens."""
    config = load("agentpo").get_config(f"{team},paper")
    validate(config, has_weights=False)
    assert config.stages.agentpo.team == team
    assert config.stages.agentpo.programme.collaborator.kl_coef == 1e-3
    c, words = config.collaboration, config.actor.max_tokens
    read = {"critic": words, "debate": 2 * words + c.max_tokens}.get(team, 0)
    assert c.context - c.max_tokens >= read + 256
    assert config.train.row_length >= c.context and config.evaluation.num_questions >= 1517
    assert set(config.evaluation.teams) == {"actor", "vote", team}


ACTORS = {  # kind, model or checkpoint
    "llama-3.1-8b": ("api", "meta-llama/Llama-3.1-8B-Instruct"),
    "llama-3.2-3b": ("api", "meta-llama/Llama-3.2-3B-Instruct"),
    "qwen2.5-math-7b": ("policy", "Qwen2.5-Math-7B"),
    "qwen-plus": ("api", "qwen-plus"),
}
COLLABORATORS = {  # checkpoint, template
    "qwen2.5-3b": ("Qwen2.5-3B-Instruct", "qwen2.5-instruct"),
    "qwen2.5-1.5b": ("Qwen2.5-1.5B-Instruct", "qwen2.5-instruct"),
    "qwen2.5-7b": ("Qwen2.5-7B-Instruct", "qwen2.5-instruct"),
    "smollm2-1.7b": ("SmolLM2-1.7B-Instruct", "smollm2"),
}


@pytest.mark.parametrize("actor", ACTORS)
@pytest.mark.parametrize("collaborator", COLLABORATORS)
def test_every_pair_of_the_paper_is_a_config_that_holds_together(actor, collaborator):
    config = load("agentpo").get_config(f"{collaborator},{actor}")
    validate(config, has_weights=False)
    a, model = config.actor, config.model
    assert (model.checkpoint, model.template) == COLLABORATORS[collaborator]
    assert (a.kind, a.checkpoint if a.kind == "policy" else a.model) == ACTORS[actor]
    # both parties' heads are split over an engine's chips, and trained rows over all
    for name in (collaborator, actor):
        heads = qwen3.PRESETS[name].num_kv_heads if name in qwen3.PRESETS else 32
        assert heads % config.mesh.tensor == 0
    assert config.train.micro_rows % config.train.mesh.fsdp == 0
    assert config.actor.max_tokens == 2048 and config.stages.agentpo.team == "hint"


@pytest.mark.parametrize("team", ["hint", "critic", "roles", "debate", "guided_debate"])
def test_a_qwen_math_actor_has_room_in_its_context_for_what_it_reads(team):
    """4,096 positions: a problem, then a hint of 768, or solutions of 1,024 and a critique."""
    config = load("agentpo").get_config(f"qwen2.5-math-7b,{team}")
    validate(config, has_weights=False)
    a, words = config.actor, config.collaboration.max_tokens
    model = qwen3.PRESETS["qwen2.5-math-7b"]
    assert a.context == a.engine.context == max(a.engine.buckets) == model.max_positions
    longest = {"hint": words, "critic": a.max_tokens + words, "roles": 2 * a.max_tokens}
    if team in longest:
        assert 256 + longest[team] + a.max_tokens <= a.context
    assert a.max_tokens == (2048 if team == "hint" else 1024)
    assert TEMPLATES[a.template].opening.startswith("Please reason step by step")


def test_an_actor_that_is_played_here_can_be_what_is_trained():
    config = load("agentpo").get_config("solver,qwen2.5-math-7b")
    validate(config, has_weights=False)
    model = qwen3.PRESETS["qwen2.5-math-7b"]
    assert (config.model.checkpoint, config.model.template) == ("Qwen2.5-Math-7B", "qwen2.5-math")
    assert config.engine.context == max(config.engine.buckets) == model.max_positions
    assert model.num_kv_heads % config.mesh.tensor == 0


def test_words_of_a_variant_are_one_of_each_kind():
    with pytest.raises(ValueError, match=r"got 'qwen-plus'\. team: hint, .*actor: llama-3.1-8b, "):
        load("agentpo").get_config("llama-3.2-3b,qwen-plus")


def test_a_batch_of_two_policies_is_never_trained_on():
    row = ROW
    credited = [make_credited([1, 2], [0, 4], role="collaborator")]
    other = dataclasses.replace(credited[0].trace, policy="actor")
    untold = dataclasses.replace(credited[0].trace, tokens=(UNTOLD, UNTOLD))
    programme = {"collaborator": row}
    pack_alone(credited, programme)
    for trace in (other, untold):
        with pytest.raises(ValueError, match=r"roles \['collaborator'\] learn and were played by"):
            pack_alone([*credited, dataclasses.replace(credited[0], trace=trace)], programme)
