"""Whether a run may go on under another config: what differs is said, what is free is not."""

import pytest

from mas_jax.config import default_config
from mas_jax.learning.continuation import check_config, check_unchanged


def test_a_config_that_contradicts_lists_the_differing_keys_with_both_values():
    saved = {"seed": 1, "optim": {"lr": 1e-4, "betas": [0.9, 0.99]}, "log": {"every": 5}, "old": {}}
    same = {"seed": 1, "optim": {"lr": 1e-4, "betas": (0.9, 0.99)}, "log": {"every": 5}, "old": {}}
    check_config(saved, same, free=())
    wanted = {"seed": True, "optim": {"lr": 2e-4, "betas": [0.9, 0.99]}, "log": {"every": 9}}
    with pytest.raises(ValueError) as error:
        check_config(saved, wanted, free=("log", "lo"))
    message = str(error.value)
    assert "optim.lr: checkpoint 0.0001, now 0.0002" in message
    assert "seed: checkpoint 1, now true" in message
    assert "old: checkpoint {}, now absent" in message
    assert "betas" not in message and "log" not in message
    check_config(saved, wanted, free=("log.every", "optim", "seed", "old"))
    newer = saved | {"later": {"key": 0}}
    check_config(saved, newer, free=(), defaults={"later": {"key": 0}, "seed": 7})
    with pytest.raises(ValueError, match=r"later\.key: checkpoint absent, now 0"):
        check_config(saved, newer, free=(), defaults={"later": {"key": 1}})
    with pytest.raises(ValueError, match=r"log\.every: checkpoint 5, now 9"):
        check_config(saved, saved | {"log": {"every": 9}}, free=("lo", "log.eve"))


def test_a_run_goes_on_where_only_the_making_of_starting_policies_has_changed():
    now = default_config()
    now.math_pretrain.steps.actor += 1
    now.pretrain.settings.steps += 1
    check_unchanged(default_config().to_dict(), now.to_dict())
    now.train.group_size += 1
    with pytest.raises(
        ValueError, match=r"checkpoint: train\.group_size: checkpoint \d+, now \d+;"
    ):
        check_unchanged(default_config().to_dict(), now.to_dict())
