"""What must hold of a finished run whatever its accuracy: read off its summary and metrics.

That the chat's tokens are exact and every token has its owner is checked where a run starts
(`policy_files.check_chat`); the gap between sampler and trainer shows it again on what was played.
Must not know: how anything was played or trained.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mas_jax import metrics
from mas_jax.collaboration_rules import TOPOLOGIES
from mas_jax.evaluation.report import Grid

MAX_GAP = 1e-3  # nats, between a sampled token's log-prob in the engine and in the trainer
MAX_INT8_GAP = math.log(2.0)  # where the importance weight of an int8 sampler's token is cut off
REPLACED = "engine/actor_replacements"  # of a policy in our own engines, counted since the start


@dataclass(frozen=True)
class Check:
    """A figure of a part of the run, the bound that it must keep, and whether it does."""

    part: str
    what: str
    figure: float
    bound: str
    holds: bool


def of_evaluation(workdir: Path) -> list[Check]:
    """Of an evaluation: no episode failed or is missing, no search failed; some were made, except
    by teams of a topology, which write and never search.

    Raises: FileNotFoundError if it has not ended.
    """
    teams = json.loads((workdir / "summary.json").read_text())["teams"]
    checks = []
    for name, team in teams.items():
        cost = team["per_workflow"]
        for what, figure in (
            ("episodes failed", team["num_failed"]),
            ("episodes missing", team["num_missing"]),
            ("searches failed", cost["failed_searches"]),
        ):
            checks.append(Check(name, what, figure, "0", figure == 0))
        if _is_topology(name):
            checks.append(_above_0(name, "tokens written a workflow", cost["output_tokens"]))
    searches = [t["per_workflow"]["searches"] for n, t in teams.items() if not _is_topology(n)]
    if searches:
        checks.append(_above_0("all", "searches a workflow, most", max(searches)))
    return checks


def of_training(workdir: Path) -> list[Check]:
    """Of each stage of a training run: what the sampler drew is what the trainer scores, unless the
    stage imitates and no sampler drew; nothing failed, no trace was too long, every loss is a
    number. Tokens of a trained role went into the loss, those of a frozen one into none, and a
    frozen Actor's weights, where they are here, are those that it began with.

    Raises: FileNotFoundError if a stage that began has no policy yet, or none began.
    """
    stages = sorted(path.parent for path in workdir.glob(f"*/{metrics.FILE}"))
    if not stages:
        raise FileNotFoundError(f"{workdir} holds no {metrics.FILE} of a stage; train first")
    checks, max_gap = [], MAX_GAP
    config = json.loads((workdir / "config.json").read_text())
    imitated = {name for name, one in config["stages"].items() if one["sampler"] != "policy"}
    settings = config["engine"]
    if "weights" in settings and settings["weights"] == "int8":  # runs of before have no such key
        max_gap = MAX_INT8_GAP
    for stage in stages:
        if not (stage / "policy" / "config.json").exists():
            raise FileNotFoundError(f"{stage}/policy does not exist; let the training end")
        lines = metrics.read(stage / metrics.FILE)
        names = {name for line in lines for name in line}
        gaps = [name for name in names if name.endswith("/sampler_log_ratio_abs_max")]
        if stage.name not in imitated:
            gap = max((line.get(name, 0.0) for line in lines for name in gaps), default=math.inf)
            checks.append(
                Check(stage.name, "sampler-trainer gap, nats, most", gap, f"< {max_gap:.2g}",
                      gap < max_gap)
            )  # fmt: skip
        for what, name in (
            ("share of episodes failed", "rollout/failure_frac"),
            ("searches failed", "rollout/failed_searches"),
            ("traces too long", "batch/too_long"),
        ):
            most = max(line[name] for line in lines)
            checks.append(Check(stage.name, what, most, "0", most == 0))
        number = sum(not math.isfinite(line["update/loss"]) for line in lines)
        checks.append(Check(stage.name, "losses not finite", number, "0", number == 0))
        checks += _of_roles(stage.name, config["stages"][stage.name]["programme"], lines)
    return checks


def _of_roles(stage: str, programme: Mapping[str, Mapping], lines: list[dict]) -> list[Check]:
    tokens = {
        role: sum(line.get(f"update/{role}/tokens", 0.0) for line in lines) for role in programme
    }
    trained = sum(tokens[role] for role, row in programme.items() if row["trained"])
    checks = [_above_0(stage, "tokens of trained roles in the loss", trained)]
    for role, row in programme.items():
        if not row["trained"]:
            what = f"tokens of the {role} in the loss"
            checks.append(Check(stage, what, tokens[role], "0", tokens[role] == 0))
    replaced = [line[REPLACED] for line in lines if REPLACED in line]
    if replaced:
        most = max(replaced)
        checks.append(Check(stage, "changes of the actor's weights", most, "0", most == 0))
    return checks


def _is_topology(system: str) -> bool:
    """Whether a system, such as "hint, without the answer", is of a team that never searches."""
    return system.partition(",")[0] in TOPOLOGIES


def _above_0(part: str, what: str, figure: float) -> Check:
    return Check(part, what, figure, "> 0", figure > 0)


def grid(checks: list[Check]) -> Grid:
    """A row for each check."""
    rows = tuple(
        (c.part, c.what, f"{c.figure:.3g}", c.bound, "yes" if c.holds else "NO") for c in checks
    )
    return Grid("What must hold", ("part", "what", "figure", "bound", "holds"), rows, num_text=2)
