"""The study's cells about AgentPO: the Actor alone, baselines, Collaborators before and after.

All play toy mathematics. Problems for training are the first so many, each drawn once: as in the
authors' script, more problems are more updates. Must not know: how a cell is run, results.
"""

from ml_collections import ConfigDict

from mas_jax.config_systems import agentpo, toy_mathematics
from mas_jax.learning.study_cells import Cell, Change, both

START, ACTOR_START = "math/collaborator", "math/actor"
OTHER_STARTS = {  # Collaborators of another shape, which learned from the same traces
    "small": ("a Collaborator of a third of the size", "math/collaborator_small"),
    "family": ("a Collaborator of another family", "math/collaborator_family"),
}
PROBLEMS = 500  # to train on, METHODS 3.2
SIZES = (100, 300, PROBLEMS, 1000)  # of the curve of sample efficiency
TEAMS = ("hint", "critic", "roles", "debate", "guided_debate")  # with a Collaborator
# a sixth of the config's: with that, 300 problems teach a hint all that there is
LEARNING_RATE = 5e-5
STRONGER = "agentpo_solver"  # whose policy is the Actor of the cells @stronger


def _mathematics(
    team: str, *, problems: int = PROBLEMS, loss: str = "script", updates: int = 0
) -> Change:
    """Trained on so many problems, once; updates: another number of them."""

    def _change(config: ConfigDict) -> None:
        toy_mathematics(agentpo(config, team=team, loss=loss))
        config.arithmetic.train = problems
        config.train.optimizer.learning_rate = LEARNING_RATE
        config.stages.agentpo.steps = updates or problems // config.train.questions
        # all but the Actor's members of votes and debates speak greedily: one run is all there is
        config.evaluation.update(dict(teams=(team,), num_questions=600, num_runs=1))

    return _change


def _collaboration(**values) -> Change:
    return lambda config: config.collaboration.update(values)


def _untrained(name: str, what: str, team: str, change: Change | None = None, *, seeds: int = 3,
               start: str = START, actor: str = "") -> Cell:  # fmt: skip
    """A team that nobody trains; of one without a Collaborator nothing is trained either way."""
    shared = _mathematics(team if team in TEAMS else "hint")
    changed = shared if change is None else both(shared, change)
    return Cell(name, what, team, seeds, changed, policy="start", start=start, actor=actor)


def _trained(name: str, what: str, team: str, *, seeds: int = 3, start: str = START,
             actor: str = "", **settings) -> Cell:  # fmt: skip
    return Cell(name, what, team, seeds, _mathematics(team, **settings), start=start, actor=actor)


def _played_by(policy: str, name: str, what: str, change: Change | None = None, *, seeds: int = 3,
               actor: str = "") -> Cell:  # fmt: skip
    """The hints of a cell's trained policy in another setting."""
    changed = both(_mathematics("hint"), change) if change else _mathematics("hint")
    return Cell(name, what, "hint", seeds, changed, policy=policy, start=START, actor=actor)


# without a Collaborator, or with one as it was before training
UNTRAINED = (
    _untrained("agentpo_actor", "the Actor alone", "actor"),
    _untrained("agentpo_collaborator", "the Collaborator alone, untrained", "solver"),
    _untrained("agentpo_vote", "the Actor's vote of five", "vote"),
    _untrained("agentpo_mad", "debate of three Actors, two rounds", "mad"),
    _untrained("agentpo_evoagent", "EvoAgent, three experts", "evoagent"),
    *(_untrained(f"agentpo_{team}_base", f"{team}, untrained", team) for team in TEAMS),
)  # fmt: skip

METHODS = (
    *(_trained(f"agentpo_{team}", f"{team}, trained", team) for team in TEAMS),
    _trained("agentpo_solver", "the Actor itself fine-tuned by GRPO, on as many samples", "solver",
             start=ACTOR_START),
    *(_played_by("agentpo_hint", f"agentpo_hint_{control}", f"the trained hint, {what}",
                 _collaboration(control=control))
      for control, what in (("other_problem", "of another problem"),
                            ("no_answer", "without what equals the answer"))),
)  # fmt: skip

SAMPLES = tuple(
    _trained(f"agentpo_{team}_{size}", f"{what}, {size} problems", team, problems=size,
             start=start)
    for team, what, start in (("hint", "hint", START),
                              ("solver", "the Actor itself fine-tuned", ACTOR_START))
    for size in SIZES if size != PROBLEMS
)  # fmt: skip

OTHERS = (
    _trained("agentpo_hint_paper", "hint, the paper's formula", "hint", seeds=1, loss="paper"),
    _trained("agentpo_hint_repeated", "hint, 100 problems drawn as often as 500 are", "hint",
             seeds=1, problems=100, updates=31),
    _trained("agentpo_hint_by_actor", "hint, the Collaborator starts from the Actor's weights",
             "hint", seeds=1, start=ACTOR_START),
    _untrained("agentpo_vote_3", "the Actor's vote of three", "vote", _collaboration(votes=3),
               seeds=1),
    _untrained("agentpo_mad_3", "debate of three Actors, three rounds", "mad",
               _collaboration(rounds=3), seeds=1),
    # an Actor that was itself fine-tuned on 500 problems; who helps it?
    _untrained("agentpo_actor@stronger", "a stronger Actor alone", "actor", actor=STRONGER),
    _untrained("agentpo_hint_base@stronger", "hint for a stronger Actor, untrained", "hint",
               actor=STRONGER),
    _trained("agentpo_hint@stronger", "hint for a stronger Actor, trained with it", "hint",
             actor=STRONGER),
    _played_by("agentpo_hint", "agentpo_transfer@stronger",
               "the hint trained for the Actor, given to a stronger one", actor=STRONGER),
)  # fmt: skip

COLLABORATORS = (
    *(_untrained(f"agentpo_collaborator_{name}", f"{who} alone, untrained", "solver", start=start)
      for name, (who, start) in OTHER_STARTS.items()),
    *(_untrained(f"agentpo_hint_{name}_base", f"hint of {who}, untrained", "hint", start=start)
      for name, (who, start) in OTHER_STARTS.items()),
    *(_trained(f"agentpo_hint_{name}", f"hint of {who}, trained", "hint", start=start)
      for name, (who, start) in OTHER_STARTS.items()),
)  # fmt: skip

GROUPS = {
    "agentpo_untrained": UNTRAINED,
    "agentpo": METHODS,
    "agentpo_samples": SAMPLES,
    "agentpo_others": OTHERS,
    "agentpo_collaborators": COLLABORATORS,
}
