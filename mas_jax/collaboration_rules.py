"""The rules of settings for teams of a Collaborator and an Actor; `config_rules.py` asks for them.

Must not know: defaults, what is built.
"""

import math

from ml_collections import ConfigDict

from mas_jax.choices import check_choice

TOPOLOGIES: dict[str, tuple[str, ...]] = {  # agents/topology.py, likewise
    "actor": ("actor",),
    "solver": ("collaborator",),
    "vote": ("actor",),
    "hint": ("collaborator", "actor"),
    "critic": ("collaborator", "actor"),
    "roles": ("collaborator", "actor"),
    "evoagent": ("actor",),
    "evoagent_checked": ("actor",),
    "mad": ("actor",),
    "debate": ("collaborator", "actor"),
    "guided_debate": ("collaborator", "actor"),
}
READING = ("critic", "debate")  # whose Collaborator reads what the Actor said
ALONE = ("solver",)  # whose Collaborator nobody reads
VOTING = ("vote", "mad", "debate", "guided_debate")  # with several answers
SAMPLED = ("hint", "critic", "roles")  # whose one answer may be drawn several times
WINDOWS = (0, 300)  # of what the reward reads: all, or as the authors' script
SUBJECTS = ("facts", "mathematics")
CONTROLS = ("none", "other_problem", "no_answer")  # agents/collaboration.py
ACTORS = ("none", "policy", "api")  # learning/samplers.py make_policies


def check_collaboration(config: ConfigDict, team: str, *, where: str) -> None:
    """A topology has the Actor that it needs, and room for what both of its roles say.

    Raises: ValueError with the values and what to change.
    """
    a = config.actor
    for name in config.math_pretrain.teams:
        check_choice("math_pretrain.teams", name, TOPOLOGIES)
    if "actor" in TOPOLOGIES[team] and a.kind == "none":
        raise ValueError(
            f"{where}={team!r} has an Actor, and actor.kind='none'; set 'policy' or 'api'"
        )
    if a.kind == "api" and not (a.base_url and a.model):
        raise ValueError(
            f"actor.kind='api' with base_url={a.base_url!r} and model={a.model!r}; name both"
        )
    _check_price(a)
    _check_controls(config, team, where=where)
    if config.collaboration.reward_window not in WINDOWS:
        raise ValueError(
            f"collaboration.reward_window={config.collaboration.reward_window}; choose from "
            f"{WINDOWS}: the last box of all that the Actor said, or its last 300 characters"
        )
    for key in ("votes", "debaters", "rounds", "experts", "actor_samples"):
        if config.collaboration[key] < 1:
            raise ValueError(f"collaboration.{key}={config.collaboration[key]} must be at least 1")
    voices = [("collaboration", config.collaboration, "engine", config.engine)]
    if a.kind == "policy":  # an endpoint sees to its own
        voices.append(("actor", a, "actor.engine", a.engine))
    for name, voice, at, engine in voices:
        if not 0 < voice.max_tokens < voice.context <= engine.context:
            raise ValueError(
                f"{name}.max_tokens={voice.max_tokens} must be above 0 and below {name}.context="
                f"{voice.context}, and that at most {at}.context={engine.context}"
            )


def _check_price(actor: ConfigDict) -> None:
    """What an endpoint costs is two amounts or nothing, and a cap needs it."""
    if len(actor.price) not in (0, 2) or any(not 0 <= amount < math.inf for amount in actor.price):
        raise ValueError(
            f"actor.price={actor.price}: want two amounts of at least 0, money per million tokens "
            "in and out, or () where they are not known"
        )
    if not 0 <= actor.max_cost < math.inf or (actor.max_cost and not actor.price):
        raise ValueError(
            f"actor.max_cost={actor.max_cost} with actor.price={actor.price}: want an amount of at "
            "least 0, 0 for no cap, and a price to count it by"
        )


def _check_controls(config: ConfigDict, team: str, *, where: str) -> None:
    """What takes the worth of a Collaborator's words away fits the team."""
    single, several = config.collaboration.control, config.evaluation.controls
    if single not in CONTROLS:
        raise ValueError(f"collaboration.control={single!r}; choose from {CONTROLS}")
    if set(several) - set(CONTROLS[1:]) or len(set(several)) < len(several):
        raise ValueError(
            f"evaluation.controls={several}; choose from {CONTROLS[1:]}, each once: the team also "
            "plays without one"
        )
    if several and single != "none":
        raise ValueError(
            f"collaboration.control={single!r} is of every team, and evaluation.controls={several} "
            "play beside teams under none; set the first to 'none', or clear the second"
        )
    named = dict.fromkeys(several, f"evaluation.controls={several}")
    named |= {single: f"collaboration.control={single!r}"}
    if "other_problem" in named and team in READING:
        raise ValueError(
            f"{named['other_problem']} and {where}={team!r}, whose Collaborator reads solutions of "
            "the problem itself; take it out, or leave 'no_answer' alone"
        )
    if "no_answer" in named and team in ALONE:
        raise ValueError(
            f"{named['no_answer']} and {where}={team!r}, whose Collaborator nobody reads; take one "
            "of the two out"
        )


def check_evaluated(config: ConfigDict) -> None:
    """What is compared in an evaluation is there. Raises: ValueError."""
    e = config.evaluation
    if e.matched_votes and not {"actor", e.matched_votes} <= set(e.teams) & set(TOPOLOGIES):
        raise ValueError(
            f"evaluation.matched_votes={e.matched_votes!r} measures that team and the Actor alone, "
            f"and evaluation.teams={e.teams}; name both there, or clear it"
        )
    if e.controls and not any("collaborator" in TOPOLOGIES.get(team, ()) for team in e.teams):
        raise ValueError(
            f"evaluation.controls={e.controls} are of a Collaborator's words, and no team of "
            f"evaluation.teams={e.teams} has one; add one, such as 'hint', or clear them"
        )
