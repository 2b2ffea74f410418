"""Configs: every file loads, fits what it is for and trains; contradictions are named."""

import dataclasses
import os
import re
import shlex
import subprocess
import sys

import pytest
from config_files import CONFIGS, load
from conftest import ROOT

from mas_jax.agents.chat import TEMPLATES
from mas_jax.agents.oracle import Flaws
from mas_jax.agents.rollout import Limits
from mas_jax.agents.setting import Budgets, Sampling
from mas_jax.agents.teams import PLAYS
from mas_jax.choices import BACKENDS, DIALECTS, REMATS, SCHEDULES, TEAMS
from mas_jax.choices import TEMPLATES as TEMPLATE_NAMES
from mas_jax.collaboration_rules import TOPOLOGIES
from mas_jax.config import cascade_programme, default_config, role
from mas_jax.config_rules import validate
from mas_jax.config_systems import only_stage, single_agent
from mas_jax.learning import loop, update
from mas_jax.learning.alarms import AlarmSettings
from mas_jax.learning.pretrain import PretrainSettings
from mas_jax.learning.programme import make_programme
from mas_jax.model import qwen3, sharding
from mas_jax.records import ROLES
from mas_jax.retrieval import dialects, index
from mas_jax.retrieval.index import IndexConfig
from mas_jax.sampling.engine_settings import EngineSettings, check_settings


def flat(config):
    """Values by dotted key."""
    if not hasattr(config, "items"):
        return {"": config}
    return {
        f"{name}.{key}".removesuffix("."): value
        for name, below in config.items()
        for key, value in flat(below).items()
    }


def with_checkpoint(config, directory):
    """The config with checkpoint directories and records that are there, where it names some."""
    if config.model.checkpoint:
        config.model.checkpoint = str(directory)
    if config.teacher.checkpoint:
        config.teacher.checkpoint = str(directory)
    records = directory / "protocols.jsonl"
    records.touch()
    if config.actor.checkpoint:
        config.actor.checkpoint = str(directory)
    if config.privileged.protocols:
        config.privileged.protocols = str(records)
    if config.trajectories:
        config.trajectories = str(records)
    return config


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_is_valid_and_imports_nothing_else(name, tmp_path):
    config = with_checkpoint(load(name).get_config(), tmp_path)
    validate(config)
    for engine in (config.engine, config.actor.engine):
        check_settings(EngineSettings(**engine))
    for stage in config.train.stages:
        programme = make_programme(config.stages[stage].programme.to_dict())
        assert any(row.learns for row in programme.values())
    source = CONFIGS[name].read_text()
    for part in ("config", "config_systems"):
        source = source.replace(f"from mas_jax.{part} import", "")
    assert "mas_jax" not in source


@pytest.mark.parametrize("name", CONFIGS)
def test_every_docstring_holds_a_command_that_runs_this_config(name):
    lines = re.findall(r"^((?:python|bash) launch/.*)$", load(name).__doc__, re.MULTILINE)
    assert lines
    for line in lines:
        program, script, *flags = shlex.split(line)
        assert (ROOT / script).is_file()
        if program == "bash":
            assert script == f"launch/{name}.sh"
            continue
        values = dict(flag.removeprefix("--").split("=") for flag in flags)
        file, _, _ = values.pop("config").partition(":")  # after it an argument of get_config
        assert ROOT / file == CONFIGS[name]
        for place in ("workdir", "out"):
            values.pop(place, None)
        known = flat(load(name).get_config()).keys()
        assert {key.removeprefix("config.") for key in values} <= known


@pytest.mark.parametrize(
    ("name", "other", "differences"),
    [
        ("toy_untrained_teacher", "toy", {"stages.student.programme.searcher.teacher"}),
        ("toy_no_searcher_signal", "toy", {"stages.student.programme.searcher.advantages"}),
        (
            "toy_searcher_outcome",
            "toy",
            {f"stages.student.programme.searcher.{key}"
             for key in ("advantages", "behaviour", "entropy_coef")},
        ),
        (
            "toy_answerer_by_context",
            "toy",
            {f"stages.{stage}.programme.answerer.group_by" for stage in ("teacher", "student")},
        ),
        (
            "toy_exact_kl",
            "toy",
            {f"stages.student.programme.searcher.{key}"
             for key in ("advantages", "divergence", "divergence_coef")},
        ),
        (
            "toy_prompted_critic",
            "toy",
            {f"stages.student.programme.searcher.{key}"
             for key in ("advantages", "behaviour", "scale", "alignment", "beta", "entropy_coef")},
        ),
        ("toy_paper_beta", "toy", {"stages.student.programme.searcher.beta"}),
        ("toy_jsd", "toy_exact_kl", {"stages.student.programme.searcher.divergence"}),
        ("toy_protocol_one", "mapd_toy", {"privileged.protocols"}),
        ("toy_raw_trajectory_team", "toy_raw_trajectory_one", {"trajectories"}),
        (
            "toy_logit_matching",
            "toy_protocol_grpo",
            {"teacher.checkpoint"} | {
                f"stages.agent.programme.searcher.{key}"
                for key in ("advantages", "divergence", "aggregation", "kl_coef")
            },
        ),
        (
            "opd_1p7b",
            "opd",
            {"model.checkpoint", "model.template", "mesh.tensor", "engine.num_pages",
             "train.mesh.fsdp", "train.micro_rows"},
        ),
    ],
)  # fmt: skip
def test_a_variant_differs_in_what_it_is_named_for_only(name, other, differences):
    ours, theirs = (flat(load(n).get_config()) for n in (name, other))
    assert {key for key in ours | theirs if ours.get(key) != theirs.get(key)} == differences


def test_the_stages_of_opd_have_the_papers_values():
    config = load("opd").get_config()
    t, student = config.train, config.stages.student.programme
    assert (t.questions, t.group_size, t.candidates, config.stages.student.steps) == (
        128, 8, 5, 200,
    )  # fmt: skip
    assert (t.optimizer.learning_rate, t.optimizer.warmup_steps, t.temperature) == (1e-6, 10, 1.0)
    assert (config.budgets.cascade.turns, config.budgets.hierarchy.turns) == (5, 12)
    searcher = student.searcher
    assert (searcher.advantages, searcher.beta, searcher.kl_coef, searcher.entropy_coef) == (
        ("distillation",), 0.01, 0.0, 0.0,
    )  # fmt: skip
    for name, behaviour in (("leader", "assignment"), ("answerer", "none")):
        row = student[name]
        assert (row.advantages, row.behaviour) == (("group",), behaviour)
        assert (row.kl_coef, row.kl_reference, row.kl_estimator) == (1e-3, "teacher", "k3")
    teacher = config.stages.teacher.programme
    assert (teacher.searcher.behaviour, teacher.searcher.behaviour_weight) == (
        "search_activity", 0.1,
    )  # fmt: skip
    assert config.stages.teacher.team == "cascade"


# --- sections -------------------------------------------------------------------------------------


def test_every_section_holds_the_arguments_of_what_it_is_for():
    config = default_config()
    check_settings(EngineSettings(**config.engine))
    for team in TEAMS:
        Budgets(**config.budgets[team])
    Sampling(**config.sampling.to_dict())
    Limits(**config.rollout)
    Flaws(**config.pretrain.flaws)
    PretrainSettings(**config.pretrain.settings)
    IndexConfig(**config.retriever)
    AlarmSettings(**config.train.alarms, distilled=())
    update.OptimizerSettings(**config.train.optimizer)
    assert {field.name for field in dataclasses.fields(loop.TrainSettings)} <= set(config.train)
    assert set(config.train.mesh) == set(config.mesh) == set(sharding.MESH_AXES)


def test_the_names_to_choose_from_are_those_that_exist():
    assert set(PLAYS) == {*TEAMS, *TOPOLOGIES}
    assert set(TEMPLATES) == set(TEMPLATE_NAMES)
    assert set(update.SCHEDULES) == set(SCHEDULES)
    assert set(qwen3.REMAT_POLICIES) == set(REMATS)
    assert (*index.BACKENDS, "bm25") == BACKENDS
    assert set(dialects.DIALECTS) == set(DIALECTS)
    assert {name for roles in TEAMS.values() for name in roles} <= set(ROLES)


def test_an_unknown_key_names_the_nearest_one():
    config = default_config()
    with pytest.raises((AttributeError, KeyError), match='Did you mean "evaluation"'):
        config.evalution = 1
    with pytest.raises((AttributeError, KeyError), match='Did you mean "kl_coef"'):
        role(kl_coeff=1.0)
    with pytest.raises((AttributeError, KeyError), match='Did you mean "steps"'):
        load("toy_sft").get_config().stages.sft.step = 1


def test_an_unknown_flag_of_the_command_names_the_nearest_key(tmp_path):
    command = [
        sys.executable, "launch/train.py", "--config=configs/toy.py", f"--workdir={tmp_path}",
        "--config.train.qestions=4",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode != 0
    assert 'Did you mean "questions"' in done.stderr
    assert not list(tmp_path.iterdir())


# --- rules ----------------------------------------------------------------------------------------

_STUDENT = "stages.student.programme"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation.teams": ("cascade", "choir")}, "evaluation.teams: 'choir' is unknown"),
        ({"evaluation.split": "dev"}, "evaluation.split: 'dev' is unknown"),
        ({"evaluation.num_runs": 0}, "evaluation.num_runs=0 must be at least 1"),
        ({"evaluation.caps.tokens": (0,)}, "caps.tokens=(0,) must each be at least 1"),
        ({"train.questions": 0}, "train.questions=0 must be at least 1"),
        ({"train.candidates": 0}, "train.candidates=0 must be at least 1"),
        ({"train.updates_per_batch": 0}, "train.updates_per_batch=0 must be at least 1"),
        ({"certify.num_questions": 0}, "certify.num_questions=0 must be at least 1"),
        ({"stages.teacher.steps": 0}, "stages.teacher.steps=0 must be at least 1"),
        ({"train.temperature": 0.0}, "train.temperature=0.0 must be above 0"),
        ({"pretrain.settings.steps": 100}, "has 100 steps and warmup_steps=100"),
        ({"math_pretrain.steps.actor": 6}, "math_pretrain.steps.actor has 6 steps and warmup"),
        ({"train.remat": "some"}, "train.remat: 'some' is unknown"),
        ({"train.optimizer.schedule": "cosin"}, "'cosin' is unknown; did you mean 'cosine'?"),
        ({"model.template": "alpaca"}, "model.template: 'alpaca' is unknown"),
        ({"model.template": "qwen-instruct"}, "does not fit the shipped toy policy"),
        ({"model.checkpoint": "/nowhere"}, "model.checkpoint='/nowhere' is not a directory"),
        ({"teacher.checkpoint": "/nowhere"}, "teacher.checkpoint='/nowhere' is not a directory"),
        (
            {"engine.context": 256},
            "budgets.cascade.context=384 exceeds engine.context=256; raise the engine's",
        ),
        (
            {"evaluation.teams": ("single",), "budgets.hierarchy.context": 512},
            "budgets.hierarchy.context=512 exceeds engine.context=384",
        ),
        ({"budgets.cascade.observation": 380}, "leave no room in context=384"),
        (
            {"train.row_length": 256},
            "train.row_length=256 is below budgets.cascade.context=384",
        ),
        (
            {"train.micro_rows": 8, "train.mesh.data": 3, "train.mesh.fsdp": 2},
            "train.micro_rows=8 is not divisible by 6, which is train.mesh.data=3 x fsdp=2",
        ),
        ({"train.stages": ("teecher",)}, "'teecher' is unknown; did you mean 'teacher'?"),
        ({"train.stages": ("teacher", "teacher")}, "('teacher', 'teacher') must name"),
        ({"train.stages": ()}, "train.stages=() must name at least one"),
        ({"stages.teacher.team": "cascde"}, "'cascde' is unknown; did you mean 'cascade'?"),
        ({"stages.teacher.sampler": "orcale"}, "'orcale' is unknown; did you mean 'oracle'?"),
        ({"stages.teacher.sampler": "oracle"}, "stage's sampler is 'oracle'"),
        (
            {"stages.teacher.sampler": "oracle", "model.prompts": "full"},
            "reads the toy prompts only, and model.prompts='full'",
        ),
        (
            {"stages.student.team": "cascade"},
            "has rows for ['answerer', 'leader', 'searcher'] and its team, the cascade, acts as "
            "['answerer', 'searcher']",
        ),
        ({"stages.teacher.team": "single"}, "the single, acts as ['searcher']"),
        (
            {"stages.teacher.programme.searcher.behaviour": "assignment"},
            "stages.teacher.programme.searcher.behaviour='assignment'",
        ),
        (
            {"train.group_size": 1},
            "train.group_size=1, candidates=5 and group_by='question'; raise",
        ),
        (
            {"train.candidates": 1, f"{_STUDENT}.answerer.group_by": "context"},
            f"{_STUDENT}.answerer.advantages=('group',) compare a group, which has one member",
        ),
        (
            {f"{_STUDENT}.leader.advantages": ("gae",)},
            f"{_STUDENT}.leader.advantages=('gae',) need a critic, and train.value_head=False",
        ),
        (
            {f"{_STUDENT}.searcher.outcome": "f1_or_format"},
            "outcome='f1_or_format', turn_reward='none' and advantages=('distillation',) credit an "
            "agent that searches and answers itself, and the team is the hierarchy",
        ),
        (
            {f"{_STUDENT}.searcher.advantages": ("group", "step")},
            "advantages=('group', 'step') credit an agent that searches and answers itself",
        ),
        ({"train.stages": ("student",)}, "reads 'teacher', and train.stages=('student',)"),
        ({"train.stages": ("student", "teacher")}, "has no stage 'teacher' before it"),
        (
            {"stages.teacher.programme.answerer.kl_coef": 0.1},
            "stages.teacher.programme.answerer reads 'teacher'",
        ),
        (
            {"teacher.checkpoint": "/", "train.stages": ("teacher",)},
            "teacher.checkpoint='/' takes the place of the stage 'teacher'",
        ),
    ],
)
def test_contradictions_are_one_error_with_both_values(changes, message):
    config = default_config()
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"teacher.checkpoint": "/", "train.stages": ("student",)},
        {"teacher.checkpoint": "/"},  # the stage "teacher" is then left out
        {"train.group_size": 2},
        {"train.group_size": 1, "stages.teacher.programme.searcher.advantages": (),
         f"{_STUDENT}.leader.trained": False},
        {f"{_STUDENT}.searcher.advantages": ("gae",), f"{_STUDENT}.searcher.trained": False},
        {f"{_STUDENT}.searcher.teacher": "ema"},
        {"train.stages": ("teacher",)},
        {"train.micro_rows": 8, "train.mesh.data": 2, "train.mesh.fsdp": 4},
    ],
)  # fmt: skip
def test_settings_that_look_odd_but_fit_are_accepted(changes):
    config = default_config()
    config.update_from_flattened_dict(changes)
    validate(config)


_CRITIC = {
    "stages.student.programme.searcher.behaviour": "judge",
    "stages.student.programme.searcher.advantages": ("group",),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"judge.kind": "orcale"}, "judge.kind: 'orcale' is unknown; did you mean 'oracle'?"),
        ({"judge.accuracy": 1.5}, "judge.accuracy=1.5 is outside [0, 1]"),
        ({"judge.kind": "length", "judge.length_bias": -0.1}, "judge.length_bias=-0.1 is outside"),
        ({"judge.length_bias": 0.5}, "judge.length_bias=0.5 is of kind 'length', and"),
        ({"judge.full_words": 0}, "judge.full_words=0 must be at least 1"),
        ({"judge.kind": "policy"}, "and model.template='toy' has none"),
        ({"judge.kind": "api", "judge.model": "m"}, "base_url='' and model='m'; name both"),
        ({"judge.kind": "api", "judge.base_url": "http://me:key@host"}, "judge.base_url holds '@'"),
        (
            {"data.test": ("t.jsonl",), "data.server": "http://host"},
            "judge.kind='oracle' knows the toy world only, and data.test=('t.jsonl',)",
        ),
    ],
)
def test_a_judge_that_cannot_judge_is_one_error_and_only_where_it_is_asked(changes, message):
    config = default_config()
    config.update_from_flattened_dict(changes)
    validate(config)
    config.update_from_flattened_dict(_CRITIC)
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(config)


def test_judges_that_fit_are_accepted():
    for changes in (
        {},
        {"judge.kind": "length", "judge.length_bias": 0.5, "judge.accuracy": 0.8},
        {"judge.kind": "api", "judge.model": "m", "judge.base_url": "http://host/v1"},
    ):
        config = default_config()
        config.update_from_flattened_dict(_CRITIC | changes)
        validate(config)


def test_a_judge_needs_subtasks():
    config = default_config()
    programme = cascade_programme()
    programme.searcher.behaviour = "judge"
    with programme.unlocked():
        del programme["answerer"]
    only_stage(config, "agent", team="single", sampler="policy", programme=programme)
    with pytest.raises(ValueError, match=r"stages\.agent\.team='single' has no subtasks"):
        validate(config)


@pytest.mark.parametrize(
    ("acting", "changes", "message"),
    [
        (
            "leader",
            dict(behaviour="judge"),
            "leader.behaviour='judge', alignment='none': a judge and",
        ),
        (
            "answerer",
            dict(alignment="weights"),
            "answerer.behaviour='none', alignment='weights': a judge and",
        ),
        ("searcher", dict(alignment="copies"), "searcher.alignment='copies'; choose from"),
        ("searcher", dict(judge_weights=(0.5, 0.5)), "judge_weights=(0.5, 0.5): want three"),
        ("searcher", dict(judge_weights=(0.1, 0.4, 2.0)), "want three in [0, 1]"),
        ("searcher", dict(behaviour="judge", invalid="reward"), "contradicts behaviour='judge'"),
    ],
)
def test_rows_of_a_critic_that_contradict_are_named(acting, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_programme({acting: role(**changes).to_dict()})


def test_a_single_agent_learns_with_one_row():
    config = default_config()
    programme = cascade_programme()
    with programme.unlocked():
        del programme["answerer"]
    only_stage(config, "agent", team="single", sampler="policy", programme=programme)
    validate(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.group_size": 1}, "advantages=('step',) compare a group, which has one member"),
        (
            {"data.server": "http://x", "data.test": ("x",), "data.corpus": ""},
            "turn_reward='search_progress' reads gold passages' texts, which data.server='http://x'",
        ),
    ],
)
def test_a_single_agents_contradictions_are_named(changes, message):
    config = single_agent(default_config(), advantages=("step",), turn_reward="search_progress")
    validate(config)
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_discount": 1.5}, r"searcher\.step_discount=1\.5, step_similarity=0\.9: want"),
        ({"step_similarity": 0.0}, r"step_similarity=0\.0: want the first in \[0, 1\]"),
        ({"step_weight": -1.0}, r"searcher\.step_weight=-1\.0 is negative"),
        ({"outcome": "f2"}, r"searcher\.outcome='f2'; choose from \('correct',"),
        ({"turn_reward": "search_progress"}, r"advantages=\('group',\), none of which reads"),
    ],
)
def test_a_row_of_turns_that_contradicts_itself_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        make_programme({"searcher": role(**changes).to_dict()})


def test_the_single_agents_are_what_was_published():
    rows = {
        name: load(name).get_config().stages.agent.programme.searcher
        for name in (
            "toy_search_r1_grpo", "toy_search_r1_ppo", "toy_research", "toy_stepsearch", "toy_gigpo"
        )
    }  # fmt: skip
    for row in rows.values():
        kl = (row.kl_coef, row.kl_reference, row.kl_estimator, row.entropy_coef)
        assert kl == (1e-3, "initial", "k3", 1e-3)
    signals = {name: (r.advantages, r.outcome, r.turn_reward) for name, r in rows.items()}
    assert signals == {
        "toy_search_r1_grpo": (("group",), "correct", "none"),
        "toy_search_r1_ppo": (("gae",), "correct", "none"),
        "toy_research": (("group",), "f1_or_format", "none"),
        "toy_stepsearch": (("gae",), "f1_and_keys", "search_progress"),
        "toy_gigpo": (("group", "step"), "correct", "none"),
    }
    gigpo = rows["toy_gigpo"]
    assert (gigpo.step_weight, gigpo.step_discount, gigpo.step_similarity) == (1.0, 0.95, 0.9)


def test_a_reward_for_searching_is_a_searchers_alone():
    rows = {"answerer": role(behaviour="search_activity").to_dict()}
    with pytest.raises(ValueError, match=r"programme\.answerer\.behaviour='search_activity'"):
        make_programme(rows)


# --- trees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train.group_size": 8},
            "train.group_size=8 is not 6, the leaves of a question with train.tree={",
        ),
        ({"train.tree.rounds": 2}, "train.group_size=6 is not 10"),
        ({"train.tree.expansions": 0}, "each must be at least 1; train.tree.trees=0 is without"),
        ({"train.tree.trees": -1}, "each must be at least 1; train.tree.trees=0 is without"),
        ({"train.tree.trees": 0}, "advantages 'tree' compare leaves, and train.tree.trees=0"),
        (
            {"train.stages": ("teacher",), "evaluation.teams": ("cascade",)},
            "train.tree.trees=2 and stages.teacher.team='cascade': only the team 'single'",
        ),
    ],
)
def test_contradictions_of_trees_are_one_error(changes, message):
    config = load("toy_tree_grpo").get_config()
    with config.unlocked():
        config.stages.teacher = default_config().stages.teacher
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(config)


def test_leaves_may_be_compared_as_one_group():
    config = load("toy_tree_grpo").get_config()
    config.stages.agent.programme.searcher.advantages = ("group",)
    validate(config)


def test_a_row_that_compares_with_the_question_twice_is_an_error():
    rows = {"searcher": role(advantages=("group", "tree")).to_dict()}
    with pytest.raises(ValueError, match="leave out 'group'"):
        make_programme(rows)
    with pytest.raises(ValueError, match="tree_form='product'"):
        make_programme({"searcher": role(tree_form="product").to_dict()})


# --- the privileged branch ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"privileged.protocols": "nowhere.jsonl"}, r"nowhere.*launch/build_protocols\.py"),
        ({"privileged.protocols": ""}, "privileged.protocols is empty"),
        ({"privileged.control": "emty"}, "did you mean 'empty'"),
        ({"privileged.fields": ("answr",)}, "did you mean 'answer'"),
        ({"privileged.form": "xml"}, "privileged.form"),
        ({"train.view_length": 383}, "holds less than train.row_length=384"),
    ],
)
def test_a_branch_that_cannot_read_is_refused(changes, message, tmp_path):
    config = with_checkpoint(load("mapd_toy").get_config(), tmp_path)
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        validate(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trajectories": "nowhere.jsonl"}, r"'nowhere.jsonl' is not.*launch/build_protocols\.py"),
        ({"trajectories": ""}, "trajectories='' is not a file"),
        ({"stages.agent.sampler": "trajectory"}, "did you mean 'trajectories'"),
        ({"stages.agent.sampler": "oracle"}, "the stage's sampler is 'oracle'"),
        ({"stages.imitation.team": "cascade"}, "says what one agent says, and the team is the ca"),
        (
            {"stages.imitation.programme.searcher.advantages": ("group",)},
            "the stage's sampler is 'trajectories'; set policy_loss='sft'",
        ),
        ({"train.learning_rates": (1e-5,)}, r"learning_rates=\(1e-05,\) must be one for each of"),
    ],
)
def test_a_teacher_without_trajectories_is_refused(changes, message, tmp_path):
    config = with_checkpoint(load("toy_sft_ppo").get_config(), tmp_path)
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        validate(config)


def test_only_the_single_agent_has_such_a_branch(tmp_path):
    config = with_checkpoint(load("toy_grpo_cascade").get_config(), tmp_path)
    row = config.stages.grpo.programme.searcher
    row.update(dict(view="privileged", divergence="reverse_kl", teacher="live"))
    with pytest.raises(ValueError, match="set team='single', or view='none'"):
        validate(config)


def test_only_the_single_agent_takes_its_turns_one_by_one(tmp_path):
    config = with_checkpoint(load("mapd_toy").get_config(), tmp_path)
    config.model.stepwise = True
    validate(config)
    config.stages.agent.sampler = "oracle"
    with pytest.raises(ValueError, match=r"stages\.agent is played by the single with sampler='or"):
        validate(config)
    config.stages.agent.sampler = "policy"
    config.evaluation.teams = ("single", "cascade")
    with pytest.raises(ValueError, match=r"evaluation\.teams is played by the cascade"):
        validate(config)
