"""What training cost: a step's entries of the ledger as metrics, and a run's read back from them.

Metrics are `cost/ROLE/FIELD` as in `ledger.Entry`, sums over all hosts. Accelerator-seconds are
those of the phases, idle devices included: play by tokens, scoring and updates by trained tokens.
Validation, certificates and norms of gradients by role are not counted.
Must not know: how a step is made.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from mas_jax import metrics
from mas_jax.evaluation import ledger
from mas_jax.learning import hosts
from mas_jax.learning.programme import TEACHER
from mas_jax.records import ROLES, Episode

NOBODY = "nobody"  # stands for the role "" of the ledger
_WHO = (*ROLES, ledger.JUDGE, NOBODY)
_FIELDS = ("searches", "input_tokens", "output_tokens", "training_tokens", "accelerator_s")


def of_step(
    episodes: Sequence[Episode], tokens_by_role: Mapping[str, int], *, play_s: float, train_s: float
) -> dict[str, float]:
    """The metrics of a step; every host calls it with its own episodes, tokens and seconds.

    tokens_by_role: that went through the step's updates, prompts included.
    """
    num_devices = jax.local_device_count()
    entries = ledger.by_role(
        (
            *ledger.play_entries("", episodes, accelerator_s=play_s * num_devices),
            *ledger.training_entries("", tokens_by_role, accelerator_s=train_s * num_devices),
        )
    )
    own = {entry.role or NOBODY: entry for entry in entries}
    values = {
        f"cost/{role}/{field}": float(getattr(own[role], field))
        for role in _WHO
        for field in _FIELDS
        if role in own
    }
    by_host = hosts.gather(values)
    names = dict.fromkeys(name for found in by_host for name in found)
    sums = {name: sum(found.get(name, 0.0) for found in by_host) for name in names}
    return {name: value for name, value in sums.items() if value}


def of_stage(directory: Path) -> tuple[ledger.Entry, ...]:
    """What a stage has cost so far, an entry a role, from its metrics; none without a file."""
    path = directory / metrics.FILE
    if not path.exists():
        return ()
    sums: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(_FIELDS, 0.0))
    for line in metrics.read(path):
        for name, value in line.items():
            if name.startswith("cost/"):
                _, role, field = name.split("/")
                sums[role][field] += value
    return tuple(_entry(directory.name, role, found) for role, found in sorted(sums.items()))


def _entry(stage: str, role: str, found: Mapping[str, float]) -> ledger.Entry:
    counts = {name: round(found[name]) for name in _FIELDS if name != "accelerator_s"}
    role = "" if role == NOBODY else role
    return ledger.Entry(stage, role, **counts, accelerator_s=found["accelerator_s"])


def of_policy(directory: Path) -> tuple[ledger.Entry, ...]:
    """What the run that trained the policy RUN/STAGE/policy spent on it, its teacher's training
    included, and that of the stages that it went on from; none for a directory of no run."""
    stage = directory.resolve().parent
    names = [stage.name] if stage.name == TEACHER else [TEACHER, stage.name]
    path = stage.parent / "config.json"
    train = json.loads(path.read_text())["train"] if path.exists() else {}
    if train.get("continued"):
        names = list(train["stages"])[: list(train["stages"]).index(stage.name) + 1]
    return tuple(entry for name in names for entry in of_stage(stage.parent / name))
