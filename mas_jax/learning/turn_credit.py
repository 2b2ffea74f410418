"""Credit of single search agents: outcomes, rewards of turns, and advantages of turns.

An agent here is one trace with all turns of the agent in order (`credit.py` joins them).
Dimensions: X turns of all agents. Must not know: arrays of tokens, models, losses.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mas_jax.learning.advantages import alike, group_relative, returns_to_go
from mas_jax.learning.programme import Row
from mas_jax.records import Episode, Question, Trace
from mas_jax.rewards import search
from mas_jax.rewards.exact_match import token_f1


@dataclass(frozen=True)
class Sources:
    """What credit reads beside the episodes: their questions by uid, and texts of passages by id,
    of all that searches found and of gold passages where they are known."""

    questions: Mapping[str, Question]
    texts: Mapping[str, str]


def outcome(
    episode: Episode, agent: Trace, row: Row, sources: Sources | None, *, correct: float
) -> float:
    """The agent's outcome by `row.outcome`, see `rewards/search.py`; correct: what it is without.

    The answer is the episode's first prediction: the only one of a single agent.
    """
    if row.outcome == "correct":
        return correct
    is_valid = search.is_well_formed(agent)
    if row.outcome == "format_tiers":
        is_answered = bool(agent.turns) and agent.turns[-1].action == "answer"
        return search.format_tiers(correct, is_valid, is_answered)
    question = sources.questions[episode.question]
    f1 = token_f1(episode.predictions[0], question.golden_answers)
    if row.outcome == "f1_or_format":
        return search.f1_or_format(f1, is_valid)
    queries = [turn.query for turn in agent.turns if turn.action == "search"]
    keys = search.search_key_f1(queries, question.decomposition)
    return search.f1_and_keys(f1, keys, weight=row.key_weight)


def turn_rewards(agent: Trace, row: Row, sources: Sources | None) -> tuple[float, ...]:
    """Reward of each turn by `row.turn_reward`: a search's progress, 0.0 of other turns; empty
    without one."""
    if row.turn_reward == "none":
        return ()
    names = sources.questions[agent.question].gold_passages
    gold = [sources.texts[name] for name in names if name in sources.texts]
    found = [turn.found for turn in agent.turns if turn.action == "search"]
    values = iter(search.search_progress(found, gold, sources.texts))
    return tuple(next(values) if turn.action == "search" else 0.0 for turn in agent.turns)


def states(agent: Trace, question: Question, texts: Mapping[str, str]) -> list[str]:
    """The observation that each turn answers: the question, then what the turn before brought.

    That is the text of the passages it found, else its action and what was wrong with it.
    Source: GiGPO's anchor state of a search step in verl-agent is the latest observation. What
    template and budgets make of it (numbers, cuts, "answer now") is left out.
    """
    told = [question.text]
    for turn in agent.turns[:-1]:
        shown = "\n".join(texts[name] for name in turn.found)
        told.append(shown or f"{turn.action} {turn.reason}".strip())
    return told[: len(agent.turns)]


def step_advantages(
    agents: Sequence[Trace],
    rewards: Sequence[float],
    rewards_of_turns: Sequence[Sequence[float]],
    row: Row,
    sources: Sources,
) -> tuple[list[tuple[float, ...]], dict[str, float]]:
    """step_weight times each turn's return relative to its anchor group, by agent, and metrics.

    rewards: of each agent, earned in its last turn beside that turn's own. Anchor groups: turns of
    one question's agents whose observations are alike; agents must stand in an order of their own,
    since the first member of a group stands for it.
    Source: GiGPO (arXiv 2505.10978) eqs. 5-8, with step_weight 1, step_discount 0.95 and, for
    search, observations of similarity 0.9; scaled as the row's "group" advantages.
    """
    returns, observations, questions = [], [], []
    for agent, reward, own in zip(agents, rewards, rewards_of_turns, strict=True):
        earned = np.asarray(own or np.zeros(len(agent.turns)), np.float64)
        if len(earned):
            earned[-1] += reward
        returns.append(returns_to_go(earned, discount=row.step_discount))
        question = sources.questions[agent.question]
        observations += states(agent, question, sources.texts)
        questions += [agent.question] * len(agent.turns)
    groups = alike(observations, questions, similarity=row.step_similarity)
    returns_X = np.concatenate(returns) if returns else np.zeros(0)
    values_X, is_constant_X, census = group_relative(
        returns_X, groups, scale=row.scale, eps=row.scale_eps
    )
    values = iter((row.step_weight * values_X).tolist())
    parts = [tuple(itertools.islice(values, len(agent.turns))) for agent in agents]
    return parts, {
        "step_groups": float(census.num_groups),
        "step_group_size": census.size_mean,
        "step_singletons": float(census.singletons),
        "step_constant_frac": float(is_constant_X.mean()) if len(is_constant_X) else 0.0,
    }
