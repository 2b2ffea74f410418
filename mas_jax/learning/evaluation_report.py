"""What is made of an evaluation's records: summary.json, tables, plots, the console.

Must not know: how systems are played.
"""

import asyncio
import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from mas_jax.agents.topology import COLLABORATOR
from mas_jax.collaboration_rules import TOPOLOGIES
from mas_jax.evaluation import (
    answers_told,
    bootstrap,
    collaborator_effect,
    ledger,
    plots,
    problem_sets,
    published,
    report,
    second_opinion,
    significance,
    taxonomy,
)
from mas_jax.evaluation.report import Grid
from mas_jax.evaluation.statistics import COSTS
from mas_jax.learning import cost, systems
from mas_jax.learning.systems import Prepared, Results
from mas_jax.rewards.math_sets import Agreement


def seconds_of(workdir: Path) -> dict[str, float]:
    """Seconds of device calls, times devices, that playing each system took, over all calls."""
    path = workdir / "accelerator_s.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write(
    prepared: Prepared, results: Results, played: Mapping[str, object], console: Console
) -> dict:
    """The summary of every system with what this call `played`, as JSON; all tables on the console,
    and in workdir/tables.md and tables.tex."""
    summary = report.summary(list(results.values()), k=prepared.config.evaluation.num_runs)
    of_teams, grids = _collaborators(prepared, results)
    graders = _graders(prepared)
    summary |= of_teams | {"graders": {n: dataclasses.asdict(a) for n, a in graders.items()}}
    summary |= played
    path = prepared.workdir / "summary.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")
    more = [*_compare(results), *grids, *_follow(prepared)]
    _plot(prepared, results, summary)
    # seven sets beside each system's name and origin: too wide for a terminal
    wide = [published.beside(summary)] if prepared.config.evaluation.published else []
    for name, text, one in (
        ("tables.md", report.markdown(summary), report.to_markdown),
        ("tables.tex", report.latex(summary), report.to_latex),
    ):
        (prepared.workdir / name).write_text("\n".join([text, *map(one, [*more, *wide])]))
    console.print(report.tables(summary))
    console.print(*(report.to_rich(grid) for grid in more))
    for name, found in graders.items():
        console.print(f"{name}: {found.text(examples=3)}", markup=False, highlight=False)
    if wide:
        console.print(f"published numbers beside these: {prepared.workdir}/tables.md")
    console.print(f"written to {path} after {summary['play_s']:.0f} s of play")
    return summary


def _compare(results: Results) -> list[Grid]:
    """Every system less the first: over all sets, and on each with Holm's correction."""
    means = {name: bootstrap.question_means(*result) for name, result in results.items()}
    first, *others = means
    return [
        report.set_grid(
            {
                "all, macro": significance.over_all(means[other], means[first]),
                **significance.over_sets(means[other], means[first]),
            },
            title=f"{other} less {first}, avg@{results[first][0].num_runs} in points, 95% interval",
        )
        for other in others
    ]


def _plot(prepared: Prepared, results: Results, summary: Mapping) -> None:
    """Every system's accuracy, with its interval, against what it spent: two plots."""
    intervals = {
        name: bootstrap.interval(bootstrap.question_means(*result))
        for name, result in results.items()
    }
    for cost_name, names in COSTS.items():
        points = [
            plots.Point(
                name, found.difference, found.low, found.high,
                sum(summary["teams"][name]["per_workflow"][part] for part in names),
            )
            for name, found in intervals.items()
        ]  # fmt: skip
        plots.accuracy_against_cost(
            prepared.workdir / f"accuracy_against_{cost_name}.png", points,
            accuracy=f"avg@{summary['num_runs']}", cost=f"{cost_name} a workflow",
        )  # fmt: skip


def _follow(prepared: Prepared) -> list[Grid]:
    """Where answers got lost, a column for each system; what each role of each system cost; what
    training the weights cost, for each that a run of ours made."""
    chat, categories, entries = prepared.scene.chat, {}, []
    accelerator_s = seconds_of(prepared.workdir)
    for system, plan in prepared.plans.items():
        questions = {q.uid: q for q in plan.questions}
        if system.team not in TOPOLOGIES:  # of what was searched, reported and selected
            categories[system.name] = [
                taxonomy.categorise(episode, questions[episode.question], chat=chat)
                for episode in prepared.read(system)
            ]
        entries += ledger.play_entries(
            system.name, prepared.read(system), accelerator_s=accelerator_s[system.name]
        )
    num_workflows = len(plan.questions) * plan.num_runs
    trained = {directory: cost.of_policy(directory) for directory in
               sorted({system.directory for system in prepared.plans})}  # fmt: skip
    return [
        *([taxonomy.grid(categories, title="What became of the episodes")] if categories else []),
        ledger.grid(
            entries, title="Cost a workflow by role", num_workflows=num_workflows, are_parts=False
        ),
        *(
            ledger.grid(
                spent, title=f"Cost of training {directory}, sums", num_workflows=1, are_parts=True
            )
            for directory, spent in trained.items()
            if spent
        ),
    ]


def _collaborators(prepared: Prepared, results: Results) -> tuple[dict, list[Grid]]:
    """Of teams of a Collaborator and an Actor: how often the answer was told, each set by itself,
    what words were worth under controls, and how votes matched tokens; for summary and tables."""
    e, plans = prepared.config.evaluation, prepared.plans
    told = _answers_told(prepared)
    found, grids = {"answers_told": told}, []
    sets = {
        system.name: problem_sets.describe(
            *results[system.name],
            functools.partial(prepared.read, system),
        )
        for system in plans
        if system.team in TOPOLOGIES
    }
    if sets:
        found["problem_sets"] = sets
        grids.append(problem_sets.grid(sets, num_runs=e.num_runs))
    alone = next((s for s in plans if s.team == "actor"), None)
    for free, under in systems.controls(prepared.config, list(plans)).items():
        names = [system.name for system in (alone, free, *under) if system is not None]
        means = {name: bootstrap.question_means(*results[name]) for name in names}
        rows = collaborator_effect.describe(means, told, alone=alone and alone.name, free=free.name)
        found.setdefault("effect", {})[free.name] = rows
        title = f"What the words of {free.name} are worth, avg@{e.num_runs} in points, 95%"
        grids.append(collaborator_effect.grid(rows, title=title))
    if e.matched_votes:
        found["matched_votes"] = matched = systems.describe_match(prepared.config, plans, results)
        grids.append(systems.match_grid(matched))
    return found, grids


def _graders(prepared: Prepared) -> dict[str, Agreement]:
    """By system, where the second grader differs; nothing where problems have one grader."""
    grading = prepared.scene.grading
    if grading is None or grading.second is None:
        return {}
    return {
        system.name: asyncio.run(
            second_opinion.compare(
                prepared.read(system),
                {q.uid: q for q in plan.questions},
                grading.second,
            )
        )
        for system, plan in prepared.plans.items()
    }


def _answers_told(prepared: Prepared) -> dict[str, dict[str, int]]:
    """By system with a Collaborator: how often it told the answer, to itself too in a debate."""
    return {
        system.name: answers_told.count(
            prepared.read(system),
            {q.uid: q for q in plan.questions},
            prepared.scene.tokenizer,
        )
        for system, plan in prepared.plans.items()
        if COLLABORATOR in TOPOLOGIES.get(system.team, ())
    }
