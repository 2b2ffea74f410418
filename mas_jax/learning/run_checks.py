"""What must hold of a finished run whatever its accuracy: read off its summary and metrics.

That the chat's tokens are exact and every token has its owner is checked where a run starts
(`policy_files.check_chat`); the gap between sampler and trainer shows it again on what was played.
Must not know: how anything was played or trained.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from mas_jax import metrics
from mas_jax.evaluation.report import Grid

MAX_GAP = 1e-3  # nats, between a sampled token's log-prob in the engine and in the trainer
MAX_INT8_GAP = math.log(2.0)  # where the importance weight of an int8 sampler's token is cut off


@dataclass(frozen=True)
class Check:
    """A figure of a part of the run, the bound that it must keep, and whether it does."""

    part: str
    what: str
    figure: float
    bound: str
    holds: bool


def of_evaluation(workdir: Path) -> list[Check]:
    """Of an evaluation: no episode failed or is missing, no search failed, and some were made.

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
    most = max(team["per_workflow"]["searches"] for team in teams.values())
    return [*checks, Check("all", "searches a workflow, most", most, "> 0", most > 0)]


def of_training(workdir: Path) -> list[Check]:
    """Of each stage of a training run: what the sampler drew is what the trainer scores, unless the
    stage imitates and no sampler drew; nothing failed, no trace was too long, every loss is a
    number.

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
    return checks


def grid(checks: list[Check]) -> Grid:
    """A row for each check."""
    rows = tuple(
        (c.part, c.what, f"{c.figure:.3g}", c.bound, "yes" if c.holds else "NO") for c in checks
    )
    return Grid("What must hold", ("part", "what", "figure", "bound", "holds"), rows, num_text=2)
