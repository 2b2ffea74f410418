"""The teams: who works with whom. Each plays one episode and returns the answers' endings.

cascade: Searcher -> Answerer. hierarchy: Leader -> waves of Searchers -> Answerer.
single: one search agent that answers itself. The rest are topologies of a Collaborator and an
Actor: `topology.py`.
"""

from mas_jax.agents.agent import Play
from mas_jax.agents.answerer import answer
from mas_jax.agents.collaboration import play_topology
from mas_jax.agents.leader import Finding, lead, shown
from mas_jax.agents.searcher import Ending, report
from mas_jax.agents.setting import Budgets, Run, Sampling, Team, World
from mas_jax.agents.single import search_and_answer
from mas_jax.agents.topology import TOPOLOGIES

__all__ = ["PLAYS", "Budgets", "Run", "Sampling", "Team", "World"]


async def play_cascade(play: Play) -> list[Ending]:
    """One Searcher whose task is the question; the Answerer reads its report as `s1`."""
    grant = play.grant(1, max_turns=play.team.budgets.searcher_turns)
    text = await report(play, play.question.text, "searcher", grant=grant)
    return await answer(play, [shown(Finding("s1", text), play.team.prompts)])


async def play_hierarchy(play: Play) -> list[Ending]:
    """A Leader with its Searchers; the Answerer reads what the Leader selected."""
    findings = await lead(play)
    return await answer(play, [shown(finding, play.team.prompts) for finding in findings])


async def play_single(play: Play) -> list[Ending]:
    """One agent, one prediction."""
    return [await search_and_answer(play)]


PLAYS = {
    "cascade": play_cascade,
    "hierarchy": play_hierarchy,
    "single": play_single,
    **dict.fromkeys(TOPOLOGIES, play_topology),
}
