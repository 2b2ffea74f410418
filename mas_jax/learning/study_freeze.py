"""The frozen grid: what every cell was before its first run, on disk and checked.

The file holds the defaults of `config.py`, those of a plain row, the prompts' digest and the caps,
and of every cell what it changes, its world and its start: together, all that a cell depends on.
Must not know: results.
"""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mas_jax.agents.collaboration import load_texts
from mas_jax.agents.prompts import load_prompts
from mas_jax.agents.protocol_oracle import STYLES
from mas_jax.agents.protocol_roles import Limits
from mas_jax.agents.topology import TOPOLOGIES, Sizes
from mas_jax.config import default_config, role
from mas_jax.data.arithmetic import make_arithmetic
from mas_jax.data.world import make_world
from mas_jax.files import write_json
from mas_jax.learning import policy_files
from mas_jax.learning.study_cells import Cell, changes, flat, make_config
from mas_jax.learning.study_grid import CAPPED_RUNS, CAPS, CELLS, PROTOCOL_SKILL

FILE = Path("notebooks/frozen.json")


def describe(cell: Cell) -> dict:
    """What a cell is beside the defaults, as JSON."""
    config = make_config(cell, 0)
    return {
        "team": cell.team,
        "seeds": cell.seeds,
        "policy": cell.policy,
        "teacher": cell.teacher,
        "start": weights_digest(start_directory(cell.start)),
        "world": _fingerprint(config),
        "changes": json.loads(json.dumps(changes(cell))),
        **({"protocols": cell.protocols} if cell.protocols else {}),
        **(_actor(cell, config) if config.data.subject == "mathematics" else {}),
    }


def _actor(cell: Cell, config: ConfigDict) -> dict[str, str]:
    """Who the frozen Actor is, and what it and the Collaborator are told."""
    c = config.collaboration
    topology = TOPOLOGIES[cell.team](Sizes(c.votes, c.debaters, c.rounds, c.experts))
    shipped = weights_digest(policy_files.actor_directory(config))
    return {
        "actor": cell.actor or shipped,
        "texts": digest(dataclasses.asdict(load_texts(c.prompts, topology))),
    }


def _shared() -> dict[str, dict]:
    """What all cells depend on, section by section."""
    caps = {kind: list(values) for kind, values in CAPS.items()}
    # how toy mathematics' policies are made, which no cell plays; a cell's start is its weights
    defaults = {k: v for k, v in flat(default_config()).items() if not k.startswith("math_")}
    return {
        "defaults": defaults,
        "row": flat(role()),
        "evaluation": {"caps": caps, "capped_runs": CAPPED_RUNS},
        "protocols": {
            "skill": PROTOCOL_SKILL,
            "limits": dataclasses.asdict(Limits()),
            "styles": json.loads(json.dumps(dict(STYLES))),
        },
        "prompts": {"toy": digest(dataclasses.asdict(load_prompts("toy")))},
    }


def _fingerprint(config: ConfigDict) -> str:
    """Of the toy world, or of the problems, that a config plays in."""
    if config.data.subject == "mathematics":
        return _problems(**config.arithmetic)
    w = config.world
    return _world(w.seed, w.closed_share, w.train, w.held_out)


@functools.cache
def _world(seed: int, closed_share: float, train: int, held_out: int) -> str:
    world = make_world(seed, closed_share=closed_share, train=train, held_out=held_out)
    return world.fingerprint


@functools.cache
def _problems(seed: int, train: int, held_out: int) -> str:
    return make_arithmetic(seed, train=train, held_out=held_out).fingerprint


def start_directory(name: str) -> Path:
    """The starting policy of this name, an asset. Raises: FileNotFoundError."""
    return policy_files.asset(f"{name}_policy")


@functools.cache
def weights_digest(directory: Path) -> str:
    """Of a policy's weights, read once."""
    return policy_files.weights_digest(directory, size=8)


def digest(value: Any) -> str:
    """Of a JSON value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def freeze(path: Path) -> list[str]:
    """Adds the cells that the file lacks, and keys of the defaults that are new since; the cells'
    names. Raises: ValueError if anything that is there has changed."""
    frozen = read(path) if path.exists() else {"cells": {}}
    shared = _shared()
    for name in frozen["cells"]:
        check(path, name)
    new = [name for name in CELLS if name not in frozen["cells"]]
    cells = frozen["cells"] | {name: describe(CELLS[name]) for name in new}
    write_json(path, shared | {"cells": cells})
    return new


def check(path: Path, name: str) -> None:
    """Raises: ValueError unless the cell is in the file, and it and what it depends on are as they
    were, naming what differs; new keys of the defaults, which no cell changes, may be there."""
    frozen = read(path)
    if name not in frozen["cells"] or name not in CELLS:
        raise ValueError(
            f"{name} is not among the {len(frozen['cells'])} cells of {path}; a cell is frozen "
            "before it is run: --freeze adds the new ones"
        )
    for section, values in _shared().items():
        known = {k: value for k, value in values.items() if k in frozen.get(section, {})}
        _compare(section, frozen.get(section, {}), known, path)
    _compare(name, frozen["cells"][name], describe(CELLS[name]), path)


def _compare(what: str, before: dict, now: dict, path: Path) -> None:
    for key in sorted({*now, *before}):
        if now.get(key) != before.get(key):
            raise ValueError(
                f"{what}: {key} is {now.get(key)!r} now and {before.get(key)!r} in {path}; what "
                "was frozen stays: make another cell"
            )


def read(path: Path) -> dict[str, dict]:
    """The frozen grid. Raises: ValueError if there is none."""
    if not path.exists():
        raise ValueError(f"no frozen grid at {path}; run this at the top of a checkout")
    return json.loads(path.read_text())
