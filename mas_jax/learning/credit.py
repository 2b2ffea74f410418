"""Episodes of one step -> what each trace and turn is rewarded with, and group-relative advantages.

On the host, over all episodes of a group at once, before anything is packed. An *agent* is one
candidate of one path in one episode; its traces (more than one where the template rewrote the past)
share its reward, and it counts once in its group, or as often as its row's alignment and the error
of its reward say.
Dimensions: X agents of one role. Must not know: arrays of tokens, models, losses.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mas_jax.learning import turn_credit
from mas_jax.learning.advantages import error_weights, group_relative, tree_relative
from mas_jax.learning.alignment import aligned_weights, target_count
from mas_jax.learning.programme import Programme, Row
from mas_jax.learning.turn_credit import Sources
from mas_jax.records import Episode, Trace
from mas_jax.rewards import terms


@dataclass(frozen=True)
class Credited:
    """A trace with its agent's reward and group-relative advantage (0.0 without a group).

    is_dropped: whether drop_zero_variance leaves it out of the policy loss. weight: how often the
    trace counts.
    turn_advantages: of each turn, beside `advantage` on its tokens. turn_rewards: of each turn,
    earned with its last token, beside `reward`, which the trace earns with its last. Both may be
    empty, which is 0 for every turn.
    """

    trace: Trace
    reward: float
    advantage: float
    is_dropped: bool
    weight: float = 1.0
    turn_advantages: tuple[float, ...] = ()
    turn_rewards: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Share:
    """What an agent is credited with: as `Credited`, turns of all its traces in order."""

    reward: float
    advantage: float
    is_dropped: bool
    weight: float
    turn_advantages: tuple[float, ...]
    turn_rewards: tuple[float, ...]


@dataclass(frozen=True)
class _Agent:
    """Who acted, and all that it did: `whole` is its first trace with the turns of all of them."""

    episode: Episode
    whole: Trace


def credit(
    episodes: Sequence[Episode],
    programme: Programme,
    sources: Sources | None = None,
    *,
    agree: Callable[[int], int] = lambda value: value,
) -> tuple[list[Credited], dict[str, float]]:
    """Credited traces in order of question, rollout and trace, and metrics `credit/...`.

    The order of `episodes` changes nothing. An episode that the world failed, or whose correctness
    is not a finite number, is left out with all its traces, and counted; so is an agent whose
    reward its judge left missing. sources: what rows with `reads_questions` read beside. agree: one
    number for all hosts of their own, such as the largest, which alignment multiplies all weights
    by.
    Raises: ValueError if a (question, rollout) comes twice, a role has no row or, where its row
    reads them, no sources, or a row wants judgements that nobody made.
    """
    ordered = sorted(episodes, key=lambda episode: (episode.question, episode.rollout))
    _check(ordered, programme, sources)
    scored = [episode for episode in ordered if _is_scored(episode)]
    metrics = {
        "credit/num_episodes": float(len(ordered)),
        "credit/failed_episodes": float(len(ordered) - len(scored)),
    }
    agents = {role: _agents(scored, role) for role in programme}
    targets = {  # by every host, also one without agents of the role
        role: agree(target_count(_counts(scored, agents[role])))
        for role, row in programme.items()
        if row.alignment == "weights"
    }
    shares: dict[Hashable, _Share] = {}
    for role, row in programme.items():
        if agents[role]:
            share, counts = _credit_role(agents[role], row, targets.get(role), sources)
            shares |= share
            metrics |= {f"credit/{role}/{name}": value for name, value in counts.items()}
    traces = [t for episode in scored for t in episode.traces if _agent_key(t) in shares]
    for role, number in Counter(trace.role for trace in traces).items():
        metrics[f"credit/{role}/num_traces"] = float(number)
    return _spread(traces, shares), metrics


# metrics of a role that are no sums: the largest, or means, of what
_LARGEST = ("aligned_to", "weight_max")
_MEANS = {
    "reward": "rewarded", "dropped_frac": "rewarded", "turn_reward": "rewarded",
    "judge_score": "rewarded", "reward_error": "rewarded", "group_size": "groups",
    "zero_variance_frac": "groups", "step_group_size": "step_groups",
    "step_constant_frac": "step_turns",
}  # fmt: skip


def over_hosts(by_host: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of `credit` for all hosts' episodes from those of each host's own, which are of
    questions of its own; means weighted by what they are means of."""
    counted = [dict(metrics) for metrics in by_host]
    for metrics in counted:
        for role in {name.split("/")[1] for name in metrics if name.count("/") == 2}:
            of = f"credit/{role}/"
            agents = metrics.get(f"{of}num_agents", 0.0)
            metrics[f"{of}rewarded"] = agents - metrics.get(f"{of}judge_failures", 0.0)
            groups, size = (metrics.get(f"{of}step_{x}", 0.0) for x in ("groups", "group_size"))
            metrics[f"{of}step_turns"] = groups * size
    values = {}
    for name in dict.fromkeys(name for metrics in by_host for name in metrics):
        of, _, last = name.rpartition("/")
        having = [metrics for metrics in counted if name in metrics]
        found = [metrics[name] for metrics in having]
        if last in _LARGEST:
            values[name] = max(found)
        elif last in _MEANS:
            weights = [metrics[f"{of}/{_MEANS[last]}"] for metrics in having]
            pairs = zip(found, weights, strict=True)
            values[name] = sum(x * weight for x, weight in pairs) / (sum(weights) or 1)
        else:
            values[name] = sum(found)
    return values


def _spread(traces: Sequence[Trace], shares: Mapping[Hashable, _Share]) -> list[Credited]:
    """The traces with their agents' shares; each trace has its own turns' part."""
    used: Counter[Hashable] = Counter()
    credited = []
    for trace in traces:
        key = _agent_key(trace)
        part = slice(used[key], used[key] + len(trace.turns))
        used[key] = part.stop
        s = shares[key]
        turns = (s.turn_advantages[part], s.turn_rewards[part])
        credited.append(Credited(trace, s.reward, s.advantage, s.is_dropped, s.weight, *turns))
    return credited


def reward(episode: Episode, agent: Trace, row: Row, sources: Sources | None = None) -> float:
    """Reward of an agent, whose turns are all in `agent`, by its role's row.

    (1 - weight) outcome + weight behaviour, or the outcome alone without a behaviour term: the
    correctness, or what `row.outcome` makes of it (`turn_credit.py`). The Answerer's correctness is
    its own candidate's, the others' is made of all candidates'. With a judge see `terms.judged`;
    NaN where it failed.
    Source: MultiAgent-OPD, 0.9 R_EM + 0.1 b for the Searcher and 0.9 R_EM + 0.1 R_assign for the
    Leader; how five candidates make one R_EM is not stated.
    """
    if row.invalid == "reward" and terms.invalid_action(agent) != 0.0:
        return terms.INVALID_TERM
    own = agent.role == "answerer"
    correct = episode.correct[agent.candidate] if own else CORRECT[row.correct](episode)
    correct = turn_credit.outcome(episode, agent, row, sources, correct=correct)
    if row.behaviour == "none":
        return correct
    if row.behaviour == "judge":
        return terms.judged(agent, correct, _judgement(episode, agent), weights=row.judge_weights)
    behaviour = BEHAVIOURS[row.behaviour](episode, agent, row)
    return terms.combine(correct, behaviour, weight=row.behaviour_weight)


def _judgement(episode: Episode, agent: Trace) -> float | None:
    scores = {judgement.path: judgement.score for judgement in episode.judgements}
    if agent.path not in scores:
        raise ValueError(
            f"{agent.path} of {episode.question!r}, rollout {episode.rollout}, was not judged; "
            "behaviour='judge' needs a World with a judge"
        )
    return scores[agent.path]


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
    "search_cost": lambda episode, agent, row: terms.search_cost(
        episode.num_searches if agent.role == "leader" else terms.num_searches(agent),
        cap=row.behaviour_cap,
    ),
    "invalid_action": lambda episode, agent, row: terms.invalid_action(agent),
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
    agents: Sequence[_Agent], row: Row, target: int | None, sources: Sources | None
) -> tuple[dict[Hashable, _Share], dict[str, float]]:
    """Shares by agent key, and the role's metrics. Agents without a reward are left out.

    target: number that alignment brings each episode's agents to, None without it.
    """
    rewards = [reward(agent.episode, agent.whole, row, sources) for agent in agents]
    metrics = {"num_agents": float(len(agents))}
    if row.behaviour == "judge":
        metrics |= _judge_metrics(agents)
    agents = [agent for agent, r in zip(agents, rewards, strict=True) if not math.isnan(r)]
    if not agents:
        return {}, metrics
    keys = [_agent_key(agent.whole) for agent in agents]
    rewards_X = np.asarray([r for r in rewards if not math.isnan(r)])
    advantages_X, is_dropped_X = np.zeros(len(agents)), np.zeros(len(agents), bool)
    metrics["reward"] = float(rewards_X.mean())
    weights_X, found = _weights(agents, rewards_X, row, target)
    metrics |= found
    if {"group", "tree"} & set(row.advantages):
        groups_X = [_group_key(agent.whole, row) for agent in agents]
        scaling = dict(scale=row.scale, eps=row.scale_eps)
        if "tree" in row.advantages:
            trees_X = [agent.episode.tree for agent in agents]
            advantages_X, is_constant_X, census = tree_relative(
                rewards_X, groups_X, trees_X, form=row.tree_form, **scaling
            )
        else:
            advantages_X, is_constant_X, census = group_relative(
                rewards_X, groups_X, weights_X=weights_X, **scaling
            )
        # neither a teacher's signal nor a turn's depends on the rewards being different
        if row.drop_zero_variance and not {"distillation", "step"} & set(row.advantages):
            is_dropped_X = is_constant_X
        metrics |= {
            "groups": float(census.num_groups),
            "group_size": census.size_mean,
            "singletons": float(census.singletons),
            "zero_variance_frac": census.zero_variance / census.num_groups,
            "dropped_frac": float(is_dropped_X.mean()),
        }
    turn_rewards = [turn_credit.turn_rewards(agent.whole, row, sources) for agent in agents]
    turn_advantages: list[tuple[float, ...]] = [()] * len(agents)
    if row.turn_reward != "none":
        metrics["turn_reward"] = sum(map(sum, turn_rewards)) / len(agents)
    if "step" in row.advantages:
        turn_advantages, found = turn_credit.step_advantages(
            [agent.whole for agent in agents], rewards_X.tolist(), turn_rewards, row, sources
        )
        metrics |= found
    arrays = (rewards_X, advantages_X, is_dropped_X, weights_X)
    columns = (*(values_X.tolist() for values_X in arrays), turn_advantages, turn_rewards)
    shares = itertools.starmap(_Share, zip(*columns, strict=True))
    return dict(zip(keys, shares, strict=True)), metrics


def _weights(
    agents: Sequence[_Agent], rewards_X: np.ndarray, row: Row, target: int | None
) -> tuple[np.ndarray, dict[str, float]]:
    """How often each agent counts: by alignment, and by the errors of rewards that several
    solutions measure; and metrics of either."""
    weights_X, metrics = np.ones(len(agents)), {}
    if target is not None:
        weights_X = aligned_weights([_episode_key(agent.episode) for agent in agents], target)
        metrics["aligned_to"] = float(target)
    errors = [agent.episode.reward_error for agent in agents]
    if None not in errors:
        groups_X = [_group_key(agent.whole, row) for agent in agents]
        weights_X = weights_X * error_weights(rewards_X, np.asarray(errors), groups_X)
        metrics["reward_error"] = sum(errors) / len(errors)
    if metrics:
        metrics["weight_max"] = float(weights_X.max())
    return weights_X, metrics


def _judge_metrics(agents: Sequence[_Agent]) -> dict[str, float]:
    """How many of the agents have no judgement, and the mean of those that there are."""
    scores = [_judgement(agent.episode, agent.whole) for agent in agents]
    given = [score for score in scores if score is not None]
    failures = {"judge_failures": float(len(scores) - len(given))}
    return failures | ({"judge_score": sum(given) / len(given)} if given else {})


def _episode_key(episode: Episode) -> Hashable:
    return episode.question, episode.rollout


def _counts(episodes: Sequence[Episode], agents: Sequence[_Agent]) -> list[int]:
    """How many of the agents each episode has."""
    counts = Counter(_episode_key(agent.episode) for agent in agents)
    return [counts[_episode_key(episode)] for episode in episodes]


def _group_key(trace: Trace, row: Row) -> Hashable:
    """What the agents of a role are compared within: a question, or one request of an episode."""
    if row.group_by == "question":
        return trace.question
    return trace.question, trace.rollout, trace.path


def _is_scored(episode: Episode) -> bool:
    """Whether it may be learned from; a reward of 0.0 may, a missing one may not."""
    is_failed = episode.failure is not None or episode.reward is None
    return not is_failed and all(map(math.isfinite, episode.correct))


def _check(episodes: Sequence[Episode], programme: Programme, sources: Sources | None) -> None:
    readers = [role for role, row in programme.items() if row.reads_questions]
    known = () if sources is None else sources.questions
    for episode in episodes if readers else ():
        if episode.question not in known:
            raise ValueError(
                f"the rows of {readers} read questions, and that of {episode.question!r} is not "
                "among the sources; give credit() the questions that were played"
            )
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
