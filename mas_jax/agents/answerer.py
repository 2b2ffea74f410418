"""The Answerer: the question and the chosen evidence, n candidate answers. Costs no turns.

Must not know: who found or chose the evidence.
"""

from collections.abc import Sequence

from mas_jax.agents.actions import Answer, Invalid
from mas_jax.agents.agent import Agent, Play, run_all
from mas_jax.agents.prompts import Message
from mas_jax.agents.searcher import MAX_INVALID, Ending
from mas_jax.records import Sample


async def answer(play: Play, evidence: Sequence[str]) -> list[Ending]:
    """Endings of all candidates, drawn in one request; text "" where a candidate has no answer."""
    prompts, num = play.team.prompts, play.team.sampling.candidates
    agent = Agent(play, "answerer", "answerer", actions=("answer",))
    agent.hear(
        Message(
            prompts.answerer,
            {"question": play.question.text},
            items=tuple(evidence) or (prompts.no_reports,),
            separator=prompts.report_separator,
            examples=prompts.examples.get("answerer", ()),
        )
    )
    samples = await agent.generate(num, path=agent.path)
    if samples is None:
        return [Ending("", "context")] * num
    return await run_all(
        _settle(agent.fork(candidate), sample) for candidate, sample in enumerate(samples)
    )


async def _settle(agent: Agent, sample: Sample) -> Ending:
    """One candidate's answer: an invalid one is corrected once, in a request of its own."""
    action = agent.take(sample, ("answer",))
    while isinstance(action, Invalid):
        if agent.num_invalid == MAX_INVALID:
            return Ending("", "invalid")
        agent.hear(Message(agent.play.team.prompts.invalid, {"reason": action.reason.value}))
        # candidates may have said the same; their second draws must not be the same
        samples = await agent.generate(1, path=f"{agent.path}/c{agent.candidate}")
        action = None if samples is None else agent.take(samples[0], ("answer",))
    return Ending(action.text, "answered") if isinstance(action, Answer) else Ending("", "context")
