"""The frozen grid: what every cell was before the first compared run, on disk and checked.

Must not know: results.
"""

import functools
import hashlib
import json
from pathlib import Path

from mas_jax.data.world import make_world
from mas_jax.files import write_json
from mas_jax.learning import assembly
from mas_jax.learning.study_grid import CELLS, Cell, changes, make_config

FILE = Path("notebooks/frozen.json")


def describe(cell: Cell) -> dict:
    """All that a cell depends on, as JSON: its changes to the defaults, its world, its start."""
    world = make_config(cell, 0).world
    return {
        "team": cell.team,
        "seeds": cell.seeds,
        "policy": cell.policy,
        "teacher": cell.teacher,
        "start": weights_digest(start_directory(cell.start)),
        "world": _fingerprint(world.seed, world.closed_share, world.train, world.held_out),
        "changes": json.loads(json.dumps(changes(cell))),
    }


@functools.cache
def _fingerprint(seed: int, closed_share: float, train: int, held_out: int) -> str:
    world = make_world(seed, closed_share=closed_share, train=train, held_out=held_out)
    return world.fingerprint


def start_directory(name: str) -> Path:
    """The starting policy of this name, an asset. Raises: FileNotFoundError."""
    return assembly.asset(f"{name}_policy")


@functools.cache
def weights_digest(directory: Path) -> str:
    """Of a policy's weights."""
    found = hashlib.blake2b(digest_size=8)
    for path in sorted(directory.glob("*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()


def freeze(path: Path) -> list[str]:
    """Adds the cells that the file lacks; their names. Raises: ValueError for one that changed."""
    frozen = _read(path)
    for name in frozen:
        check(path, name)
    new = [name for name in CELLS if name not in frozen]
    write_json(path, frozen | {name: describe(CELLS[name]) for name in new})
    return new


def check(path: Path, name: str) -> None:
    """Raises: ValueError unless the cell is in the file as it is now, naming what differs."""
    frozen = _read(path)
    if name not in frozen or name not in CELLS:
        raise ValueError(
            f"{name} is not among the {len(frozen)} cells of {path}; a cell is frozen before it is "
            "run: --freeze adds the new ones"
        )
    now = describe(CELLS[name])
    for key in sorted({*now, *frozen[name]}):
        if now.get(key) != frozen[name].get(key):
            raise ValueError(
                f"{name}: {key} is {now.get(key)!r} now and {frozen[name].get(key)!r} in {path}; "
                "what was frozen stays: make another cell"
            )


def _read(path: Path) -> dict[str, dict]:
    return json.loads(path.read_text()) if path.exists() else {}


def digest(path: Path) -> str:
    """Of the frozen grid."""
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
