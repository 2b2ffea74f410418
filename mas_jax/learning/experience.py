"""One step's experience: questions by position, episodes by a team, and what they were like.

Must not know: programmes, arrays, updates.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from mas_jax.agents import rollout, tree
from mas_jax.agents.setting import Run, Team, World
from mas_jax.evaluation.statistics import (
    cost_per_workflow,
    score_episode,
    shared_turns,
)
from mas_jax.records import Episode, Passage, Question, SearchFailure, StopReason, Trace
from mas_jax.retrieval.index import contents


def collect(
    questions: Sequence[Question], group_size: int, team: Team, *, world: World, run: Run,
    limits: rollout.Limits, shape: tree.Shape | None = None,
) -> list[Episode]:  # fmt: skip
    """`group_size` episodes of each question, in order of question and rollout; with a shape the
    leaves of its trees, which are as many.

    Raises: rollout.TooManyFailures, also where nothing is left to learn from."""
    setting = dict(world=world, run=run, limits=limits)
    if shape is None:
        jobs = [(question, index) for question in questions for index in range(group_size)]
        playing = rollout.play(jobs, team, **setting)
    else:
        jobs = [(question, index) for question in questions for index in range(shape.trees)]
        playing = tree.play(jobs, team, shape, **setting)

    async def _play() -> list[Episode]:
        return [episode async for episode in playing]

    place = {question.uid: number for number, question in enumerate(questions)}
    return sorted(asyncio.run(_play()), key=lambda e: (place[e.question], e.rollout))


def remembering(search: Callable[..., Awaitable]) -> tuple[Callable[..., Awaitable], dict]:
    """The same search, and the text by id of every passage that it has found so far."""
    texts: dict[str, str] = {}

    async def _search(queries: list[str], k: int) -> list[list[Passage] | SearchFailure]:
        results = await search(queries, k)
        for found in results:
            if not isinstance(found, SearchFailure):
                texts.update((passage.id, contents(passage)) for passage in found)
        return results

    return _search, texts


Tally = Mapping[str, tuple[float, float | None]]
"""Metrics before their division: sum and count, or a sum that stays one, whose count is None."""


def divided(*tallies: Tally) -> dict[str, float]:
    """The metrics of all the tallies' episodes together, such as of several hosts; 0 of nothing."""
    values = {}
    for name in dict.fromkeys(name for tally in tallies for name in tally):
        sums, counts = zip(*(tally[name] for tally in tallies if name in tally), strict=True)
        known = [count for count in counts if count is not None]
        values[name] = sum(sums) / (sum(known) or 1) if known else float(sum(sums))
    return values


def describe(episodes: Sequence[Episode]) -> dict[str, float]:
    """The metrics of `tally`."""
    return divided(tally(episodes))


def tally(episodes: Sequence[Episode]) -> Tally:
    """Metrics `rollout/...` of episodes; per role where a role has it.

    reward: mean over those the world did not fail; em: of first candidates, failures are wrong.
    length: tokens that one agent sampled; report_length: of a report. Shares are of generations.
    distinct_queries_frac: different queries of a question over all that its episodes asked.
    dropped_history: entries that a stepwise agent's prompt left out, a turn.
    errors/judge: also single judgements that failed, which their episodes outlive.
    """
    scores = [score_episode(episode) for episode in episodes]
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    count, actions = len(episodes), sum(score.num_actions for score in scores)
    found = {
        "episodes": (count, None),
        "reward": (sum(rewards), len(rewards)),
        "em": (sum(score.correct for score in scores), count),
        "failure_frac": (sum(score.failure != "" for score in scores), count),
        "answered_frac": (sum(score.outcome == "answered" for score in scores), count),
    }
    if actions:
        invalid = sum(score.invalid_actions for score in scores)
        found["valid_action_frac"] = (actions - invalid, actions)
    found |= {name: (value * count, count) for name, value in cost_per_workflow(scores).items()}
    kinds = Counter(score.failure for score in scores if score.failure)
    found |= {f"errors/{kind}": (number, None) for kind, number in kinds.items()}
    judged = [judgement.score for episode in episodes for judgement in episode.judgements]
    if judged:
        missing = kinds["judge"] + sum(score is None for score in judged)
        found |= {"judgements": (len(judged), None), "errors/judge": (missing, None)}
    traces = [trace for episode in episodes for trace in episode.traces]
    for role in sorted({trace.role for trace in traces}):
        own = _tally_role([trace for trace in traces if trace.role == role], count)
        found |= {f"{role}/{name}": value for name, value in own.items()}
    return {f"rollout/{name}": value for name, value in (found | _tally_trees(episodes)).items()}


def _tally_role(own: Sequence[Trace], num_episodes: int) -> Tally:
    """What one role's traces add to `tally`."""
    agents = len({(t.question, t.rollout, t.path, t.candidate) for t in own})
    turns = [turn for trace in own for turn in trace.turns]
    stops = Counter(turn.stop_reason for turn in turns)
    found = {
        "agents": (agents, num_episodes),
        "length": (sum(t.end - t.start for t in turns), agents),
        "valid_action_frac": (sum(t.action != "invalid" for t in turns), len(turns)),
        "cut_off_frac": (stops[StopReason.LENGTH] + stops[StopReason.CONTEXT], len(turns)),
    }
    said = {
        action: [
            (trace.question, trace.tokens[turn.start : turn.end])
            for trace in own for turn in trace.turns if turn.action == action
        ]
        for action in ("search", "report")
    }  # fmt: skip
    if said["search"]:  # how many of a question's queries no other episode asks too
        found["distinct_queries_frac"] = (len(set(said["search"])), len(said["search"]))
    dropped = [turn.dropped for turn in turns if turn.dropped is not None]
    if dropped:
        found["dropped_history"] = (sum(dropped), len(dropped))
    if said["report"]:
        found["report_length"] = (sum(len(x) for _, x in said["report"]), len(said["report"]))
    return found


def _tally_trees(episodes: Sequence[Episode]) -> Tally:
    """Metrics `tree/...`, none without trees: what a leaf did not have to play, as means, which as
    many chains of their own would have; tokens as in `cost_per_workflow`.

    shared_token_frac: share of all tokens of the leaves, prompts as sent and sampled.
    """
    leaves = [episode for episode in episodes if episode.tree is not None]
    if not leaves:
        return {}
    turns = [turn for leaf in leaves for turn in shared_turns(leaf)]
    num_input = sum(turn.start for turn in turns)
    num_output = sum(turn.end - turn.start for turn in turns)
    scores = [score_episode(leaf) for leaf in leaves]
    whole = sum(score.input_tokens + score.output_tokens for score in scores)
    sums = {
        "shared_turns": len(turns),
        "shared_searches": sum(turn.action == "search" for turn in turns),
        "shared_input_tokens": num_input,
        "shared_output_tokens": num_output,
    }
    found = {f"tree/{name}": (value, len(leaves)) for name, value in sums.items()}
    return found | {"tree/shared_token_frac": (num_input + num_output, whole)}
