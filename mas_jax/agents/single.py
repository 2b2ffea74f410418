"""The single search agent: it searches and then answers the question itself.

Its role is "searcher", with a prompt of its own; its answer is the only prediction.
"""

from mas_jax.agents.agent import Agent, Play
from mas_jax.agents.prompts import Message
from mas_jax.agents.searcher import Ending, search_until


async def search_and_answer(play: Play) -> Ending:
    """The answer to the question within the episode's turns, the last of which must be it."""
    agent = Agent(play, "searcher", "single", actions=("search", "answer"))
    prompts, question = play.team.prompts, play.question
    agent.hear(
        Message(
            prompts.single, {"question": question.text},
            note=play.team.notes.get(question.uid, ""),
            examples=prompts.examples.get("single", ()),
        )
    )  # fmt: skip
    now = prompts.answer_now
    grant = play.grant(1, max_turns=play.turns_left)
    return await search_until(agent, "answer", grant=grant, now=now)
