"""What a cell of the study is, the config that all of them share, and what a cell changes in it.

Must not know: which cells there are, how one is run, results.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from ml_collections import ConfigDict

from mas_jax.config import default_config, role

Change = Callable[[ConfigDict], None]

WORLD_SEED = 11  # of every compared run; nothing was trained in this world before the freeze
STEPS = 40  # updates of a stage
BETA = 0.1


@dataclass(frozen=True)
class Cell:
    """A system in a setting.

    name: SYSTEM, or SYSTEM@AXIS in another world. team: that is evaluated. policy: "own", which the
    cell trains; "start", untrained; or the cell whose policy plays. teacher: the cell whose policy
    teaches, "" for none. seeds: training seeds 0, 1, ... start: name of the starting policy.
    protocols: the writer of the records that it reads or imitates, of STYLES in
    agents/protocol_oracle.py, behind "raw-" without normalisation of its style, behind "alone-"
    without a team; "" for none. what: one line for tables. change: makes the study's config the
    cell's. actor: the cell whose policy is the frozen Actor, "" for the one that is shipped.
    """

    name: str
    what: str
    team: str
    seeds: int
    change: Change
    policy: str = "own"
    teacher: str = ""
    start: str = "study"
    protocols: str = ""
    actor: str = ""

    @property
    def needs(self) -> tuple[str, ...]:
        """The cells whose policies it plays or learns with, in order of names."""
        return tuple(sorted({self.teacher, self.policy, self.actor} - {"", "own", "start"}))

    @property
    def axis(self) -> str:
        """The axis of the world that the cell lies on, "" for the main world."""
        return self.name.partition("@")[2]


def study_config() -> ConfigDict:
    """What all cells share: world, sizes, evaluation; Stage II as in the paper, in one stage."""
    config = default_config()
    config.world.seed = WORLD_SEED
    for stage in config.stages.values():
        stage.steps = STEPS
    config.stages.student.programme.searcher.beta = BETA
    config.train.stages = ("student",)
    config.train.role_gradient_interval = 0  # a pass for each role
    config.train.checkpoint_interval = 20
    return config


def make_config(cell: Cell, seed: int) -> ConfigDict:
    """The config of a run, but for the directories of its start and teacher."""
    config = study_config()
    cell.change(config)
    config.seed = seed
    return config


def nothing(config: ConfigDict) -> None:
    """No change."""


def both(*changes: Change) -> Change:
    """One change after the other."""

    def _change(config: ConfigDict) -> None:
        for change in changes:
            change(config)

    return _change


def steps(change: Change, steps: int) -> Change:
    """The same for so many updates."""

    def _change(config: ConfigDict) -> None:
        change(config)
        config.stages[config.train.stages[-1]].steps = steps

    return _change


def changes(cell: Cell) -> dict[str, object]:
    """What the cell's config, seed 0, has else than the defaults: value by key; None for a key that
    it lacks. Only the cell's stages count; one that the defaults lack is compared with plain rows.
    """
    config, default = make_config(cell, 0), default_config()
    plain = {
        name: ConfigDict(dict(programme={acting: role() for acting in stage.programme}))
        for name, stage in config.stages.items()
    }
    with default.unlocked():
        found = {name: default.stages.get(name, plain[name]) for name in plain}
        default.stages = ConfigDict(found)
    own, default = flat(config), flat(default)
    return {
        key: own.get(key)
        for key in sorted({*own, *default})
        if own.get(key, _MISSING) != default.get(key, _MISSING)
    }


_MISSING = object()


def flat(config: ConfigDict) -> dict[str, object]:
    """A config's JSON values by dotted key."""
    found: dict[str, object] = {}
    open_ = [("", json.loads(config.to_json_best_effort()))]
    while open_:
        prefix, value = open_.pop()
        if isinstance(value, dict):
            open_ += [(f"{prefix}.{key}" if prefix else key, v) for key, v in value.items()]
        else:
            found[prefix] = value
    return found
