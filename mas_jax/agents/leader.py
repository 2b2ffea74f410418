"""The Leader: plans, sends out waves of parallel Searchers, reads reports, selects the evidence.

Must not know: how a Searcher searches, or who answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mas_jax.agents.actions import Assign, Invalid, Select
from mas_jax.agents.agent import Agent, Play, run_all
from mas_jax.agents.prompts import Message, Prompts, fill
from mas_jax.agents.searcher import MAX_INVALID, report


@dataclass(frozen=True)
class Finding:
    """A Searcher's report under the id that the Leader gave to its subtask."""

    id: str
    text: str


def shown(finding: Finding, prompts: Prompts) -> str:
    """A report as Leader and Answerer read it."""
    text = finding.text or prompts.empty_report
    return fill(prompts.report, {"id": finding.id, "text": text})


async def lead(play: Play) -> list[Finding]:
    """The reports that the Leader selected, in its order.

    All reports, in order of dispatch, after a second invalid action, when its turns are used up, or
    when the context is full. Once no wave or only one turn is left, or a cap of the episode is used
    up, the Leader is told so and an assignment is invalid.
    """
    budgets, prompts = play.team.budgets, play.team.prompts
    agent = Agent(play, "leader", "leader", actions=("assign", "select"))
    agent.hear(_opening(play))
    findings: list[Finding] = []
    waves = 0
    message = Message("")
    while play.turns_left > 0:
        forced = waves == budgets.waves or play.turns_left == 1 or play.is_spent
        if forced:
            message = replace(message, note=prompts.select_now)
        if message != Message(""):
            agent.hear(message)
        action = await agent.act(
            ("select",) if forced else ("assign", "select"),
            known_ids=[finding.id for finding in findings],
            max_subtasks=budgets.subtasks,
        )
        match action:
            case None:
                break
            case Select(ids):
                by_id = {finding.id: finding for finding in findings}
                return [by_id[name] for name in ids]
            case Assign(subtasks):
                waves += 1
                wave = await _dispatch(play, subtasks, waves)
                findings += wave
                message = Message(
                    prompts.reports,
                    {"waves": budgets.waves - waves, "turns": play.turns_left},
                    items=tuple(shown(finding, prompts) for finding in wave),
                    separator=prompts.report_separator,
                )
            case Invalid(reason):
                if agent.num_invalid == MAX_INVALID:
                    break
                message = Message(prompts.invalid, {"reason": reason.value})
    return findings


def _opening(play: Play) -> Message:
    budgets = play.team.budgets
    return Message(
        play.team.prompts.leader,
        {
            "question": play.question.text,
            "subtasks": budgets.subtasks,
            "waves": budgets.waves,
            "turns": budgets.turns,
        },
        examples=play.team.prompts.examples.get("leader", ()),
    )


async def _dispatch(play: Play, subtasks: Sequence[tuple[str, str]], wave: int) -> list[Finding]:
    """Reports of one wave, in order of its subtasks whoever comes back first.

    With fewer turns than Searchers nobody gets one: all reports are empty, and the turns stay with
    the Leader, who can still select.
    """
    grant = play.grant(len(subtasks), max_turns=play.team.budgets.searcher_turns)
    texts = await run_all(
        report(play, task, f"leader/w{wave}.s{index}", grant=grant)
        for index, (_, task) in enumerate(subtasks, start=1)
    )
    return [Finding(name, text) for (name, _), text in zip(subtasks, texts, strict=True)]
