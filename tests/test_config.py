"""Configs: every file loads, every section fits what it is for, contradictions are named."""

import importlib.util
import re

import pytest
from conftest import ROOT

from mas_jax.agents.chat import TEMPLATES
from mas_jax.agents.oracle import Flaws
from mas_jax.agents.rollout import Limits
from mas_jax.agents.setting import Budgets, Sampling
from mas_jax.agents.teams import PLAYS
from mas_jax.config import TEAMS, default_config, validate
from mas_jax.config import TEMPLATES as TEMPLATE_NAMES
from mas_jax.learning.pretrain import PretrainSettings
from mas_jax.sampling.device import EngineSettings, check_settings

CONFIGS = sorted((ROOT / "configs").glob("*.py"))


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_is_valid_and_its_command_names_it(path):
    module = load(path)
    validate(module.get_config())
    command = re.search(r"^python (launch/\w+\.py) .*--config=(\S+)", module.__doc__, re.MULTILINE)
    assert (ROOT / command[1]).is_file()
    assert ROOT / command[2] == path
    assert "mas_jax" not in path.read_text().replace("from mas_jax.config import", "")


def test_every_section_holds_the_arguments_of_what_it_is_for():
    config = default_config()
    check_settings(EngineSettings(**config.engine))
    for team in TEAMS:
        Budgets(**config.budgets[team])
    Sampling(**config.sampling.to_dict())
    Limits(**config.rollout)
    Flaws(**config.pretrain.flaws)
    PretrainSettings(**config.pretrain.settings)
    assert set(PLAYS) == set(TEAMS)
    assert set(TEMPLATES) == set(TEMPLATE_NAMES)


def test_an_unknown_key_names_the_nearest_one():
    config = default_config()
    with pytest.raises((AttributeError, KeyError), match='Did you mean "evaluation"'):
        config.evalution = 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation.teams": ("cascade", "choir")}, "evaluation.teams: 'choir' is unknown"),
        ({"evaluation.split": "dev"}, "evaluation.split='dev'"),
        ({"evaluation.num_runs": 0}, "num_runs=0"),
        ({"model.template": "alpaca"}, "model.template='alpaca'"),
        ({"model.template": "qwen-instruct"}, "does not fit the shipped toy policy"),
        ({"model.checkpoint": "/nowhere"}, "model.checkpoint='/nowhere' is not a directory"),
        (
            {"engine.context": 256},
            "budgets.cascade.context=384 exceeds engine.context=256; raise the engine's",
        ),
        ({"budgets.cascade.observation": 380}, "leave no room in context=384"),
    ],
)
def test_contradictions_are_one_error_with_both_values(changes, message):
    config = default_config()
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(config)
