"""Episodes of one step -> what each trace is rewarded with, and its group-relative advantage.

On the host, over all episodes of a group at once, before anything is packed. An *agent* is one
candidate of one path in one episode; its traces (more than one where the template rewrote the past)
share its reward, and it counts once in its group.
Dimensions: X agents of one role. Must not know: arrays of tokens, models, losses.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mas_jax.learning.advantages import group_relative, tree_relative
from mas_jax.learning.programme import Programme, Row
from mas_jax.records import Episode, Trace
from mas_jax.rewards import terms


@dataclass(frozen=True)
class Credited:
    """A trace with its agent's reward and group-relative advantage (0.0 without a group).

    is_dropped: whether drop_zero_variance leaves it out of the policy loss.
    """

    trace: Trace
    reward: float
    advantage: float
    is_dropped: bool


@dataclass(frozen=True)
class _Agent:
    """Who acted, and all that it did: `whole` is its first trace with the turns of all of them."""

    episode: Episode
    whole: Trace


def credit(
    episodes: Sequence[Episode], programme: Programme
) -> tuple[list[Credited], dict[str, float]]:
    """Credited traces in order of question, rollout and trace, and metrics `credit/...`.

    The order of `episodes` changes nothing. An episode that the world failed, or whose correctness
    is not a finite number, is left out with all its traces, and counted.
    Raises: ValueError if a (question, rollout) comes twice, or a role has no row.
    """
    ordered = sorted(episodes, key=lambda episode: (episode.question, episode.rollout))
    _check(ordered, programme)
    scored = [episode for episode in ordered if _is_scored(episode)]
    metrics = {
        "credit/num_episodes": float(len(ordered)),
        "credit/failed_episodes": float(len(ordered) - len(scored)),
    }
    agents = {role: _agents(scored, role) for role in programme}
    shares: dict[Hashable, tuple[float, float, bool]] = {}  # reward, advantage, is_dropped
    for role, row in programme.items():
        if agents[role]:
            share, counts = _credit_role(agents[role], row)
            shares |= share
            metrics |= {f"credit/{role}/{name}": value for name, value in counts.items()}
    traces = [trace for episode in scored for trace in episode.traces]
    for role, number in Counter(trace.role for trace in traces).items():
        metrics[f"credit/{role}/num_traces"] = float(number)
    return [Credited(trace, *shares[_agent_key(trace)]) for trace in traces], metrics


def reward(episode: Episode, agent: Trace, row: Row) -> float:
    """Reward of an agent, whose turns are all in `agent`, by its role's row.

    (1 - weight) correct + weight behaviour, or `correct` alone without a behaviour term. The
    Answerer's correctness is its own candidate's, the others' is made of all candidates'.
    Source: MultiAgent-OPD, 0.9 R_EM + 0.1 b for the Searcher and 0.9 R_EM + 0.1 R_assign for the
    Leader; how five candidates make one R_EM is not stated.
    """
    if row.invalid == "reward" and terms.invalid_action(agent) != 0.0:
        return terms.INVALID_TERM
    own = agent.role == "answerer"
    correct = episode.correct[agent.candidate] if own else CORRECT[row.correct](episode)
    if row.behaviour == "none":
        return correct
    behaviour = BEHAVIOURS[row.behaviour](episode, agent, row)
    return terms.combine(correct, behaviour, weight=row.behaviour_weight)


def _majority(episode: Episode) -> float:
    """Correctness of the prediction that most candidates share; of equals, the earliest."""
    (prediction, _), *_ = Counter(episode.predictions).most_common(1)
    return episode.correct[episode.predictions.index(prediction)]


CORRECT: Mapping[str, Callable[[Episode], float]] = {
    "mean": lambda episode: sum(episode.correct) / len(episode.correct),
    "first": lambda episode: episode.correct[0],
    "majority": _majority,
    "any": lambda episode: max(episode.correct),
}

BEHAVIOURS: Mapping[str, Callable[[Episode, Trace, Row], float]] = {
    "search_activity": lambda episode, agent, row: terms.search_activity(agent),
    "assignment": lambda episode, agent, row: terms.assignment(episode, cap=row.behaviour_cap),
    "invalid_action": lambda episode, agent, row: terms.invalid_action(agent),
    "format": lambda episode, agent, row: terms.answer_format(agent, correct=episode.correct[0]),
}


# --- agents and groups ----------------------------------------------------------------------------


def _agent_key(trace: Trace) -> Hashable:
    return trace.question, trace.rollout, trace.role, trace.path, trace.candidate


def _agents(episodes: Sequence[Episode], role: str) -> list[_Agent]:
    """The agents of a role, each once, however many traces it has."""
    agents: dict[Hashable, _Agent] = {}
    for episode in episodes:
        for trace in episode.traces:
            if trace.role == role:
                key = _agent_key(trace)
                before = agents[key].whole.turns if key in agents else ()
                whole = dataclasses.replace(trace, turns=before + trace.turns)
                agents[key] = _Agent(episode, whole)
    return list(agents.values())


def _credit_role(
    agents: Sequence[_Agent], row: Row
) -> tuple[dict[Hashable, tuple[float, float, bool]], dict[str, float]]:
    """Reward, advantage and whether dropped by agent key, and the role's metrics."""
    keys = [_agent_key(agent.whole) for agent in agents]
    rewards_X = np.asarray([reward(agent.episode, agent.whole, row) for agent in agents])
    advantages_X, is_dropped_X = np.zeros(len(agents)), np.zeros(len(agents), bool)
    metrics = {"num_agents": float(len(agents)), "reward": float(rewards_X.mean())}
    if {"group", "tree"} & set(row.advantages):
        groups_X = [_group_key(agent.whole, row) for agent in agents]
        scaling = dict(scale=row.scale, eps=row.scale_eps)
        if "tree" in row.advantages:
            trees_X = [agent.episode.tree for agent in agents]
            advantages_X, is_constant_X, census = tree_relative(
                rewards_X, groups_X, trees_X, form=row.tree_form, **scaling
            )
        else:
            advantages_X, is_constant_X, census = group_relative(rewards_X, groups_X, **scaling)
        # the teacher's signal does not depend on the rewards being different
        if row.drop_zero_variance and "distillation" not in row.advantages:
            is_dropped_X = is_constant_X
        metrics |= {
            "groups": float(census.num_groups),
            "group_size": census.size_mean,
            "singletons": float(census.singletons),
            "zero_variance_frac": census.zero_variance / census.num_groups,
            "dropped_frac": float(is_dropped_X.mean()),
        }
    shares = zip(rewards_X.tolist(), advantages_X.tolist(), is_dropped_X.tolist(), strict=True)
    return dict(zip(keys, shares, strict=True)), metrics


def _group_key(trace: Trace, row: Row) -> Hashable:
    """What the agents of a role are compared within: a question, or one request of an episode."""
    if row.group_by == "question":
        return trace.question
    return trace.question, trace.rollout, trace.path


def _is_scored(episode: Episode) -> bool:
    """Whether it may be learned from; a reward of 0.0 may, a missing one may not."""
    is_failed = episode.failure is not None or episode.reward is None
    return not is_failed and all(map(math.isfinite, episode.correct))


def _check(episodes: Sequence[Episode], programme: Programme) -> None:
    pairs = Counter((episode.question, episode.rollout) for episode in episodes)
    for (question, rollout), number in pairs.items():
        if number > 1:
            raise ValueError(
                f"{number} episodes of question {question!r}, rollout {rollout}; uids must be "
                "unique over datasets and each rollout be played once"
            )
    for episode in episodes:
        for trace in episode.traces:
            if trace.role not in programme:
                raise ValueError(
                    f"the {episode.team} of {episode.question!r} has a {trace.role}, for which the "
                    f"programme has no row; its rows: {sorted(programme)}"
                )
