"""The demo: trains a team in two stages and shows, with intervals, whether it got better.

Must not know: how a stage trains, or how an episode is played.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from mas_jax import metrics
from mas_jax.evaluation import bootstrap, plots, report
from mas_jax.learning import evaluate, pipeline
from mas_jax.learning.evaluate import System

# name in tables -> (stage whose policy plays, "" for the start; team)
SYSTEMS = {
    "untrained cascade": ("", "cascade"),
    "untrained hierarchy": ("", "hierarchy"),
    "teacher": ("teacher", "cascade"),
    "teacher in hierarchy": ("teacher", "hierarchy"),
    "no Searcher signal": ("no_signal", "hierarchy"),
    "trained team": ("student", "hierarchy"),
}
COMPARISONS = (
    ("teacher", "untrained cascade"),
    ("trained team", "untrained hierarchy"),
    ("trained team", "no Searcher signal"),
    ("trained team", "teacher in hierarchy"),
)
CURVES = {"teacher": "teacher", "student": "trained team", "no_signal": "no Searcher signal"}


def run(prepared: pipeline.Pipeline, console: Console) -> dict:
    """Trains what is not trained yet, evaluates, and writes summary.json and demo.png; the summary.

    What an interrupted call had done is not done again; `wall_s` is of this call.
    """
    start = time.perf_counter()
    policies = pipeline.run(prepared, console)
    trained_s = time.perf_counter() - start
    systems = [
        System(name, team, policies[stage] if stage else prepared.start_directory)
        for name, (stage, team) in SYSTEMS.items()
    ]
    evaluation = evaluate.prepare_systems(
        prepared.config, prepared.workdir / "evaluation", systems, prepared.scene, prepared.engines
    )
    results = evaluate.play(evaluation, console)
    summary = report.summary(list(results.values()), k=prepared.config.evaluation.num_runs)
    means = {name: bootstrap.question_means(*result) for name, result in results.items()}
    summary["comparisons"] = [
        {"system": better, "against": other}
        | dataclasses.asdict(bootstrap.paired(means[better], means[other]))
        for better, other in COMPARISONS
    ]
    summary["intervals"] = {
        name: dataclasses.asdict(bootstrap.interval(values)) for name, values in means.items()
    }
    summary["seed"] = prepared.config.seed
    summary["world"] = prepared.scene.world.fingerprint
    summary["train_s"], summary["wall_s"] = trained_s, time.perf_counter() - start
    (prepared.workdir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    _plot(prepared.workdir, summary)
    console.print(report.tables(summary))
    console.print(_comparison_table(summary))
    console.print(
        f"written to {prepared.workdir}/summary.json and demo.png after {summary['wall_s']:.0f} s "
        f"({trained_s:.0f} s of training)"
    )
    return summary


def collect(workdirs: Sequence[Path]) -> list[dict]:
    """What the README shows of finished demos, one a seed. Raises: FileNotFoundError."""
    kept = ("seed", "world", "num_questions", "num_runs", "comparisons", "train_s", "wall_s")
    record = []
    for workdir in workdirs:
        summary = json.loads((workdir / "summary.json").read_text())
        systems = {
            name: {
                **team["macro"],
                "searches": team["per_workflow"]["searches"],
                "tokens": team["per_workflow"]["input_tokens"]
                + team["per_workflow"]["output_tokens"],
            }
            for name, team in summary["teams"].items()
        }
        record.append({key: summary[key] for key in kept} | {"systems": systems})
    return sorted(record, key=lambda entry: entry["seed"])


def markdown(record: Sequence[dict]) -> str:
    """The README's two tables: every system, and every comparison, in each seed."""
    seeds = [f"seed {entry['seed']}" for entry in record]
    lines = [
        f"| system | {' | '.join(seeds)} | searches | tokens |",
        f"| --- |{' --- |' * (len(seeds) + 2)}",
    ]
    for name in SYSTEMS:
        own = [entry["systems"][name] for entry in record]
        cells = [
            f"{100 * s['avg']:.1f} / {100 * s['pass_at_k']:.1f} / {100 * s['all_at_k']:.1f}"
            for s in own
        ]
        searches, tokens = (
            " / ".join(f"{s[key]:.{digits}f}" for s in own)
            for key, digits in (("searches", 2), ("tokens", 0))
        )
        lines.append(f"| {name} | {' | '.join(cells)} | {searches} | {tokens} |")
    lines += ["", f"| avg@4, points | {' | '.join(seeds)} |", f"| --- |{' --- |' * len(seeds)}"]
    for index, (better, other) in enumerate(COMPARISONS):
        cells = []
        for entry in record:
            row = entry["comparisons"][index]
            low, high = 100 * row["low"], 100 * row["high"]
            cells.append(f"{100 * row['difference']:+.1f} [{low:.1f}, {high:.1f}]")
        lines.append(f"| {better} - {other} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _comparison_table(summary: dict) -> Table:
    table = Table(box=box.SIMPLE, title="avg@k, points; paired 95% interval over questions")
    for column in ("system", "against", "difference", "interval"):
        table.add_column(column, justify="left" if column in ("system", "against") else "right")
    for row in summary["comparisons"]:
        table.add_row(
            row["system"],
            row["against"],
            f"{100 * row['difference']:+.1f}",
            f"[{100 * row['low']:.1f}, {100 * row['high']:.1f}]",
        )
    return table


def _plot(workdir: Path, summary: dict) -> None:
    """demo.png: learning curves of the stages, and every system's accuracy against its cost."""
    curves = []
    for stage, label in CURVES.items():
        lines = metrics.read(workdir / stage / metrics.FILE)
        steps = [line["step"] for line in lines]
        curves.append(plots.Curve(label, steps, [line["rollout/em"] for line in lines]))
    points = [
        plots.Point(
            name,
            interval["difference"],
            interval["low"],
            interval["high"],
            summary["teams"][name]["per_workflow"]["searches"],
        )
        for name, interval in summary["intervals"].items()
    ]
    plots.demo(
        workdir / "demo.png", curves, points,
        quantity="EM on training questions", accuracy="avg@4", cost="searches a workflow",
    )  # fmt: skip
