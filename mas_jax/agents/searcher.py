"""The Searcher: a task, queries and their passages, a report. Its prompt is the same in every team.

`search_until` is that loop; the single agent, which answers instead of reporting, uses it too.
Must not know: who gave the task or reads the report, or the budget beyond its own grant.
"""

from dataclasses import dataclass, replace

from mas_jax.agents.actions import Invalid, Search
from mas_jax.agents.agent import Agent, Play
from mas_jax.agents.prompts import Message
from mas_jax.agents.setting import Grant, JudgeJob

MAX_INVALID = 2  # the first is corrected, the second ends the agent


@dataclass(frozen=True)
class Ending:
    """How an agent ended: its last words, "" if none, and the outcome as in `Episode`."""

    text: str
    outcome: str


async def report(play: Play, task: str, path: str, *, grant: Grant) -> str:
    """The report on a task within a grant; "" after a second invalid action, without a turn, or
    when the context is full."""
    agent = Agent(play, "searcher", path, actions=("search", "report"))
    prompts = play.team.prompts
    examples = prompts.examples.get("searcher", ())
    agent.hear(Message(prompts.searcher, {"task": task}, examples=examples))
    now = prompts.report_now
    text = (await search_until(agent, "report", grant=grant, now=now)).text
    if agent.num_generations:
        asked = play.question.text
        play.jobs.append(JudgeJob(asked, path, task, tuple(agent.searches), text))
    return text


async def search_until(agent: Agent, final: str, *, grant: Grant, now: str) -> Ending:
    """Searches until the agent takes its `final` action.

    With one turn, no search or no token of its grant left it is told so by the line `now`, and a
    search is invalid.
    """
    play = agent.play
    searches_left = grant.searches
    message = Message("")
    for turns_left in range(grant.turns, 0, -1):
        forced = turns_left == 1 or searches_left == 0 or agent.tokens_used >= grant.tokens
        if forced:
            message = replace(message, note=now)
        if message != Message(""):
            agent.hear(message)
        action = await agent.act((final,) if forced else ("search", final))
        match action:
            case None:
                return Ending("", "context")
            case Search(query):
                searches_left -= 1
                message, found = await play.look_up(query)
                agent.searches.append((query, message.items))
                agent.conversation.note_search(query, found)
            case Invalid(reason):
                if agent.num_invalid == MAX_INVALID:
                    break
                message = Message(play.team.prompts.invalid, {"reason": reason.value})
            case _:
                return Ending(action.text, "answered")
    return Ending("", "invalid" if agent.num_invalid else "no turns")
