"""What a system cost, by stage and role: searches, tokens, accelerator-seconds.

Stages are names such as "teacher", "student" and "evaluation": the cost of a student holds its
teacher's, so pass the entries of both to `total`. Must not know: how time was measured, prices.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from mas_jax.evaluation.report import Grid
from mas_jax.evaluation.statistics import count_input_tokens, shared_turns
from mas_jax.records import Episode

_ALL = "all"
JUDGE = "judge"  # no role of a team; its tokens are in judgements, not in traces


@dataclass(frozen=True)
class Entry:
    """What one role spent in one stage; sums, not means.

    searches: that the role asked for. input_tokens: prompts as sent, summed over generations, also
    where a prefix was cached; output_tokens: sampled. training_tokens: of its rows in updates.
    accelerator_s: seconds times devices, apportioned to roles (see where entries are made).
    """

    stage: str
    role: str
    searches: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    training_tokens: int = 0
    accelerator_s: float = 0.0


def play_entries(
    stage: str, episodes: Iterable[Episode], *, accelerator_s: float
) -> tuple[Entry, ...]:
    """What playing these episodes cost each role, roles in order of their names.

    Turns that another leaf of an episode's tree played are that one's. accelerator_s: measured
    for all of them together, seconds times devices. No record says which
    role used it: it is apportioned by tokens, input and output alike, and is kept under role ""
    where there are none. Raises: ValueError if accelerator_s is negative.
    """
    searches, input_tokens, output_tokens = Counter(), Counter(), Counter()
    for episode in episodes:
        for role in sorted({trace.role for trace in episode.traces}):
            own = [trace for trace in episode.traces if trace.role == role]
            shared = shared_turns(episode) if role == "searcher" else ()
            turns = [turn for trace in own for turn in trace.turns][len(shared) :]
            searches[role] += sum(turn.action == "search" for turn in turns)
            input_tokens[role] += count_input_tokens(own) - sum(turn.start for turn in shared)
            output_tokens[role] += sum(turn.end - turn.start for turn in turns)
        for judgement in episode.judgements:
            searches[JUDGE] += 0  # has an entry, though it may have said nothing
            input_tokens[JUDGE] += judgement.input_tokens
            output_tokens[JUDGE] += judgement.output_tokens
    work = {role: input_tokens[role] + output_tokens[role] for role in sorted(searches)}
    shares = _apportioned(accelerator_s, work)
    return tuple(
        Entry(
            stage,
            role,
            searches=searches[role],
            input_tokens=input_tokens[role],
            output_tokens=output_tokens[role],
            accelerator_s=shares[role],
        )
        for role in sorted(shares)
    )


def training_entries(
    stage: str, tokens_by_role: Mapping[str, int], *, accelerator_s: float
) -> tuple[Entry, ...]:
    """What the updates of a stage cost each role.

    tokens_by_role: all tokens of the role's rows that went through an update, summed over steps and
    passes, prompts included. accelerator_s: of scoring and updating, seconds times devices,
    apportioned by these tokens; under role "" where there are none.
    Raises: ValueError if accelerator_s or a count is negative.
    """
    shares = _apportioned(accelerator_s, tokens_by_role)
    return tuple(
        Entry(stage, role, training_tokens=tokens_by_role.get(role, 0), accelerator_s=shares[role])
        for role in sorted(shares)
    )


def by_role(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Sums over stages, one entry a role in order of names; their stage is "all"."""
    grouped: dict[str, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(entry.role, []).append(entry)
    return tuple(_sum(own, _ALL, role) for role, own in sorted(grouped.items()))


def by_stage(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Sums over roles, one entry a stage in the order in which stages come; their role is "all"."""
    grouped: dict[str, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(entry.stage, []).append(entry)
    return tuple(_sum(own, stage, _ALL) for stage, own in grouped.items())


def total(entries: Iterable[Entry]) -> Entry:
    """The sum over stages and roles."""
    return _sum(tuple(entries), _ALL, _ALL)


def grid(entries: Sequence[Entry], *, title: str, num_workflows: int, are_parts: bool) -> Grid:
    """A row for each entry and one for each stage, divided by `num_workflows`; 1 for sums.

    are_parts: whether the stages are parts of one thing, which then has a row for all of them;
    stages that are systems to compare have no sum. Raises: ValueError if num_workflows is below 1.
    """
    if num_workflows < 1:
        raise ValueError(f"num_workflows={num_workflows}; want the number of episodes, or 1")
    header = ("stage", "role", "searches", "input", "output", "trained", "accelerator s")
    rows = tuple(
        (
            entry.stage,
            entry.role or "(none)",
            f"{entry.searches / num_workflows:,.2f}",
            f"{entry.input_tokens / num_workflows:,.0f}",
            f"{entry.output_tokens / num_workflows:,.0f}",
            f"{entry.training_tokens / num_workflows:,.0f}",
            f"{entry.accelerator_s / num_workflows:,.2f}",
        )
        for entry in (*entries, *by_stage(entries), *([total(entries)] if are_parts else []))
    )
    return Grid(title, header, rows, num_text=2)


def _apportioned(accelerator_s: float, work: Mapping[str, int]) -> dict[str, float]:
    """Shares of the time in proportion to the work."""
    if accelerator_s < 0 or any(amount < 0 for amount in work.values()):
        raise ValueError(f"accelerator_s={accelerator_s}, tokens {dict(work)}; want none below 0")
    whole = sum(work.values())
    if whole == 0:
        rest = {"": accelerator_s} if accelerator_s else {}
        return dict.fromkeys(work, 0.0) | rest
    return {role: accelerator_s * amount / whole for role, amount in work.items()}


def _sum(entries: Sequence[Entry], stage: str, role: str) -> Entry:
    names = [field.name for field in fields(Entry) if field.name not in ("stage", "role")]
    return Entry(stage, role, **{n: sum(vars(entry)[n] for entry in entries) for n in names})
