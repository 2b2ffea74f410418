"""What an evaluation compares: teams with weights, as they are and under changes of the config.

Must not know: how a system is played, what is made of its records.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ml_collections import ConfigDict

from mas_jax.agents.topology import COLLABORATOR
from mas_jax.collaboration_rules import TOPOLOGIES
from mas_jax.evaluation import records_file
from mas_jax.evaluation.records_file import Plan
from mas_jax.evaluation.report import Grid
from mas_jax.evaluation.statistics import COSTS, EpisodeScore, cost_per_workflow
from mas_jax.learning import scenes
from mas_jax.records import Episode
from mas_jax.sampling.policies import Policies
from mas_jax.sampling.replicas import Replicas


@dataclass(frozen=True)
class System:
    """A team with weights: what tables call it, and where its policy lies in the HF layout.

    changes: of the config that it plays under, as (dotted key, value) pairs.
    """

    name: str
    team: str
    directory: Path
    changes: tuple[tuple[str, object], ...] = ()

    def changed(self, words: str, key: str, value: object) -> "System":
        """The same under one more change, which its name says in these words."""
        name, changes = f"{self.name}, {words}", (*self.changes, (key, value))
        return dataclasses.replace(self, name=name, changes=changes)


@dataclass(frozen=True)
class Prepared:
    """An evaluation that is ready to play: systems and their plans, and what they play with.

    notes: what they read behind each question.
    """

    config: ConfigDict
    workdir: Path
    scene: scenes.Scene
    engines: Replicas | Policies
    plans: Mapping[System, Plan]
    notes: Mapping[str, str]

    def path(self, system: System) -> Path:
        """The records of a system."""
        return self.workdir / f"{system.name.replace(',', '').replace(' ', '_')}.jsonl"

    def read(self, system: System) -> Iterator[Episode]:
        """The recorded episodes of a system. Raises: as `records_file.read`."""
        return records_file.read(self.path(system), self.plans[system])


Results = Mapping[str, tuple[Plan, Sequence[EpisodeScore]]]


# what a cap means: searches stop at it; the action that ends an agent still costs its tokens
CAPPED = {"searches": "at most {} searches", "tokens": "ending after {} tokens"}
CONTROLLED = {"other_problem": "shown another problem", "no_answer": "without the answer"}


def variants(config: ConfigDict, systems: Sequence[System]) -> list[System]:
    """The systems as they are, and again under each cap of `evaluation.caps` on an episode's
    searches or tokens, compared at equal cost beside how they play freely; those with a
    Collaborator also under each of `evaluation.controls`."""
    capped = [
        system.changed(CAPPED[kind].format(cap), f"budgets.{system.team}.all_{kind}", cap)
        for kind in ("searches", "tokens")
        for cap in config.evaluation.caps[kind]
        for system in systems
    ]
    controlled = [under for system in systems for under in _controlled(config, system)]
    return [*systems, *capped, *controlled]


def _controlled(config: ConfigDict, system: System) -> list[System]:
    if COLLABORATOR not in TOPOLOGIES.get(system.team, ()):
        return []
    return [
        system.changed(CONTROLLED[control], "collaboration.control", control)
        for control in config.evaluation.controls
    ]


def controls(config: ConfigDict, systems: Sequence[System]) -> dict[System, list[System]]:
    """By system with a Collaborator, those of the systems that are it under a control."""
    found = {system: _controlled(config, system) for system in systems}
    return {system: under for system, under in found.items() if set(under) & set(systems)}


def matched_votes(
    config: ConfigDict, systems: Sequence[System], scores: Mapping[str, Sequence[EpisodeScore]]
) -> System:
    """Self-consistency with as many votes as spend the tokens a problem of the team that
    `evaluation.matched_votes` names, to the nearest and at least one.

    scores: by name of system. A vote costs what the Actor alone does, its prompt and its solution;
    the team all that its parties read and wrote. Raises: ValueError if the Actor alone spent
    nothing.
    """
    team = config.evaluation.matched_votes
    by_team = {system.team: system for system in systems if not system.changes}
    wanted, one = (tokens_of(scores[by_team[name].name]) for name in (team, "actor"))
    if not one:
        raise ValueError("the Actor alone spent no token, so no number of votes matches any")
    plain = System("vote", "vote", by_team["actor"].directory)
    votes = max(1, round(wanted / one))
    return plain.changed(f"at the tokens of {team}", "collaboration.votes", votes)


def tokens_of(scores: Sequence[EpisodeScore]) -> float:
    """Tokens a problem, read and written by all parties, each generation's prompt as sent."""
    spent = cost_per_workflow(scores)
    return sum(spent[part] for part in COSTS["tokens"])


def as_played(config: ConfigDict, system: System) -> ConfigDict:
    """The config with the system's changes."""
    if not system.changes:
        return config
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(dict(system.changes))
    return config


def describe_match(config: ConfigDict, plans: Mapping[System, Plan], results: Results) -> dict:
    """How near the votes of `matched_votes` came, as JSON: the system, its votes, the tokens a
    problem of it and of the team, and their ratio."""
    team = config.evaluation.matched_votes
    system = next(s for s in plans if s.team == "vote" and s.changes)
    spent, wanted = (tokens_of(results[name][1]) for name in (system.name, team))
    return {
        "system": system.name,
        "team": team,
        "votes": dict(system.changes)["collaboration.votes"],
        "tokens": {"vote": spent, "team": wanted},
        "ratio": spent / wanted,
    }


def match_grid(found: Mapping) -> Grid:
    """What `describe_match` says, as one row."""
    spent = found["tokens"]
    return Grid(
        f"Self-consistency at the tokens a problem of {found['team']}",
        ("system", "votes", "tokens", f"tokens of {found['team']}", "ratio"),
        (
            (
                found["system"],
                str(found["votes"]),
                f"{spent['vote']:,.0f}",
                f"{spent['team']:,.0f}",
                f"{found['ratio']:.2f}",
            ),
        ),
    )
