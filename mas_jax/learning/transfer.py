"""Collaborators with Actors that they were not trained for: every pair evaluated, as a matrix.

A pair is an evaluation of its own, so Collaborators and Actors may be of any size and family, and a
killed run goes on from the records. Must not know: how an evaluation plays.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ml_collections import ConfigDict
from rich.console import Console

from mas_jax.collaboration_rules import TOPOLOGIES
from mas_jax.config_rules import validate
from mas_jax.evaluation import bootstrap, report
from mas_jax.evaluation.report import Grid
from mas_jax.evaluation.significance import Values
from mas_jax.files import write_json
from mas_jax.learning import evaluate

ALONE = "alone"
_PARTY = re.compile(r"([\w.-]+)=([^,]+)(?:,([^,]+))?")

Changes = Mapping[str, str]  # of the config, by dotted key


def read_collaborators(texts: Sequence[str]) -> dict[str, Changes]:
    """Changes by name of "NAME=CHECKPOINT" or "NAME=CHECKPOINT,TEMPLATE", in order.

    Raises: ValueError for another form, a name that comes twice, the name "alone", or none.
    """
    return {
        name: {"model.checkpoint": place} | ({"model.template": more} if more else {})
        for name, (place, more) in _read("collaborator", "CHECKPOINT[,TEMPLATE]", texts).items()
    }


def read_actors(texts: Sequence[str]) -> dict[str, Changes]:
    """Changes by name of frozen policies, "NAME=CHECKPOINT" or "NAME=CHECKPOINT,TEMPLATE", and of
    those behind endpoints, "NAME=URL,MODEL", in order.

    Raises: as `read_collaborators`; ValueError for an endpoint without a model.
    """
    found: dict[str, Changes] = {}
    for name, (place, more) in _read("actor", "CHECKPOINT[,TEMPLATE] or URL,MODEL", texts).items():
        if not re.match("https?:", place):
            found[name] = {"actor.kind": "policy", "actor.checkpoint": place}
            found[name] |= {"actor.template": more} if more else {}
        elif more:
            found[name] = {"actor.kind": "api", "actor.base_url": place, "actor.model": more}
        else:
            raise ValueError(f"actor {name!r} is an endpoint without a model; give NAME=URL,MODEL")
    return found


def _read(kind: str, form: str, texts: Sequence[str]) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for text in texts:
        match = _PARTY.fullmatch(text)
        if match is None or match[1] in (*found, ALONE):
            raise ValueError(
                f"{kind} {text!r}: want NAME={form}, each NAME once and none {ALONE!r}, which is "
                "the Actor by itself"
            )
        found[match[1]] = (match[2], match[3] or "")
    if not found:
        raise ValueError(f"no {kind} is given; want at least one NAME={form}")
    return found


def make_configs(
    config: ConfigDict, collaborators: Mapping[str, Changes], actors: Mapping[str, Changes]
) -> dict[tuple[str, str], ConfigDict]:
    """The config of each evaluation, by Actor and Collaborator, or "alone", all checked.

    The team is the one of `evaluation.teams` that has both; what the config says of either party
    holds where an argument says nothing else. The Actor alone plays beside the first Collaborator,
    whose weights its records name though it never speaks.
    Raises: ValueError for no such team or several, or settings that contradict.
    """
    teams = [t for t in config.evaluation.teams if len(TOPOLOGIES.get(t, ())) == 2]
    if len(teams) != 1:
        raise ValueError(
            f"evaluation.teams={config.evaluation.teams} has {teams or 'no team'} of a "
            "Collaborator and an Actor; name exactly one, such as ('hint',)"
        )
    first = next(iter(collaborators.values()))
    found = {}
    for actor, theirs in actors.items():
        for name, own in {ALONE: first, **collaborators}.items():
            made = config.copy_and_resolve_references()
            made.update_from_flattened_dict({**own, **theirs})
            made.evaluation.update(
                dict(teams=("actor",) if name == ALONE else (teams[0],), controls=(),
                     matched_votes="")
            )  # fmt: skip
            validate(made)
            found[actor, name] = made
    return found


def run(
    configs: Mapping[tuple[str, str], ConfigDict], workdir: Path, console: Console
) -> dict[str, dict]:
    """By Actor and Collaborator, as JSON: `avg`, the macro average, and `less_alone`, the paired
    difference from the Actor alone, None of itself, with 95% intervals over questions.

    Also in workdir/transfer.json and on the console. Records are workdir/ACTOR/COLLABORATOR/; what
    they hold is not played again. Raises: as `evaluate.prepare`; `rollout.TooManyFailures`.
    """
    means: dict[tuple[str, str], Values] = {}
    for (actor, name), config in configs.items():
        console.print(f"{actor}: {name}", markup=False, highlight=False)
        prepared = evaluate.prepare(config, workdir / actor / name)
        ((plan, scores),) = evaluate.play(prepared, console).values()
        means[actor, name] = bootstrap.question_means(plan, scores)
    matrix: dict[str, dict] = {}
    for (actor, name), values in means.items():
        less = None if name == ALONE else bootstrap.paired(values, means[actor, ALONE])
        matrix.setdefault(actor, {})[name] = {
            "avg": dataclasses.asdict(bootstrap.interval(values)),
            "less_alone": less and dataclasses.asdict(less),
        }
    write_json(workdir / "transfer.json", matrix)
    table = grid(matrix)
    (workdir / "transfer.md").write_text(report.to_markdown(table))
    console.print(report.to_rich(table))
    return matrix


def grid(matrix: Mapping[str, Mapping[str, Mapping]]) -> Grid:
    """The Actor alone and a row for each Collaborator, a column for each Actor, in points: average,
    difference from that Actor alone and its interval."""
    names = next(iter(matrix.values()))
    return Grid(
        "Each Collaborator with each Actor: points, less the Actor alone [95% interval]",
        ("Collaborator", *matrix),
        tuple((name, *(_cell(row[name]) for row in matrix.values())) for name in names),
    )


def _cell(found: Mapping) -> str:
    average, less = f"{100 * found['avg']['difference']:.2f}", found["less_alone"]
    if less is None:
        return average
    interval = report.interval_text(bootstrap.Interval(**less))
    return f"{average} {100 * less['difference']:+.2f} {interval}"
