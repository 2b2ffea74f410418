"""MAPD's offline multi-agent system: it works on a question once and writes the protocol of it.

Orchestrator (a graph of subtasks), a Searcher for each ready subtask at once, Answerer, who never
sees the golden answers, exact match, Repair where that fails, who does, and Protocolizer. For
comparison one model alone: a Solver searches turn by turn and answers, then the same Protocolizer
and gates; no plan, no parallel work, no repair. All speak JSON through one `complete` function, an
endpoint's or a local policy's. What a model says that is no good is an outcome, counted; what an
endpoint fails is a `WorldError` and passes through.
Source: METHODS 2.3 and 2.4. Must not know: which endpoint, files, training.
"""

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mas_jax.agents import protocol as protocols
from mas_jax.agents.agent import run_all
from mas_jax.agents.protocol import Cleaned, Protocol
from mas_jax.agents.protocol_roles import FORMS, Limits, fits, instructions, parse_object
from mas_jax.records import FailureKind, Passage, Question, SearchFailure, WorldError
from mas_jax.rewards.exact_match import exact_match


@dataclass(frozen=True)
class Said:
    """A completion, of which a desk reads all but the finish_reason; `api_request.Completion` says
    what the fields mean."""

    text: str
    refusal: str | None
    input_tokens: int
    output_tokens: int
    cost: float | None
    finish_reason: str = "stop"


@dataclass(frozen=True)
class Desk:
    """What the system works with.

    complete(messages, model=, temperature=, max_tokens=) -> a `Said`, or what has its fields.
    search(queries, k) as in `setting.World`. normalise_style: whether `protocol.normalise` is
    applied. is_alone: one model works without the team.
    """

    complete: Callable[..., Awaitable]
    search: Callable[..., Awaitable]
    model: str
    temperature: float = 0.0
    limits: Limits = field(default_factory=Limits)
    normalise_style: bool = True
    is_alone: bool = False


@dataclass(frozen=True)
class Finding:
    """What came of a subtask: its objective, the queries asked for it, a summary of what they
    found, and the passages that support it."""

    id: str
    objective: str
    queries: tuple[str, ...]
    summary: str
    evidence_ids: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """What a question cost and gave. protocol: None where a gate rejected it or none was written;
    then `reason` is the gate's name, or what kept one from being written.

    malformed: replies that were no JSON object of their form; leaks: repairs that were thrown away
    since they told the answer; cleaned: None without style normalisation. findings, answer: what
    was looked for, asked, found and answered, in order: the raw trajectory. rounds: of the
    Orchestrator, or turns of one model alone.
    """

    question: str
    model: str
    protocol: Protocol | None
    reason: str
    message: str
    is_correct: bool
    rounds: int
    repairs: int
    malformed: int
    leaks: int
    calls: int
    input_tokens: int
    output_tokens: int
    cost: float | None
    cleaned: Cleaned | None
    findings: tuple[Finding, ...]
    answer: str | None
    is_alone: bool


@dataclass
class _Work:
    """One question in progress."""

    question: Question
    desk: Desk
    findings: list[Finding] = field(default_factory=list)
    passages: dict[str, Passage] = field(default_factory=dict)  # that findings cite
    seen: dict[str, Passage] = field(default_factory=dict)
    queries: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # of searches
    counts: Counter = field(default_factory=Counter)
    cost: float | None = 0.0

    async def ask(self, role: str, payload: Mapping[str, Any], form: Mapping) -> dict | None:
        """A role's reply to a JSON object, None if no attempt has the form."""
        limits = self.desk.limits
        messages = [
            {"role": "system", "content": instructions(role, limits)},
            {"role": "user", "content": json.dumps(payload, ensure_ascii=False)},
        ]
        for _ in range(limits.attempts):
            said = await self.desk.complete(
                messages, model=self.desk.model, temperature=self.desk.temperature,
                max_tokens=limits.max_tokens,
            )  # fmt: skip
            self._count(said)
            reply = None if said.refusal is not None else parse_object(said.text)
            if reply is not None and fits(reply, form):
                return reply
            self.counts["malformed"] += 1
            # another wording: an equal request could have an equal, stored answer
            messages = [
                *messages[:2],
                {"role": "assistant", "content": said.text or said.refusal or "-"},
                {"role": "user", "content": "That is not one JSON object of the form asked for."},
            ]
        return None

    def _count(self, said) -> None:
        self.counts["calls"] += 1
        self.counts["input_tokens"] += said.input_tokens
        self.counts["output_tokens"] += said.output_tokens
        if self.cost is not None:
            self.cost = None if said.cost is None else self.cost + said.cost

    @property
    def told(self) -> list[dict]:
        """The findings as the roles read them."""
        return [{"id": f.id, "objective": f.objective, "summary": f.summary} for f in self.findings]


# --- one question ---------------------------------------------------------------------------------


async def work_on(question: Question, desk: Desk) -> Record:
    """The protocol of a question, and what became of it.

    Raises: WorldError of the endpoint, or of the retriever if it failed every query.
    """
    work = _Work(question, desk)
    if desk.is_alone:
        task_type, answer, turns = await _alone(work)
        if not turns:
            return _record(work, None, "solver", "no turn in form", rounds=0)
        return await _written(work, task_type, answer, rounds=turns, repairs=0)
    task_type, answer, rounds = "others", None, 0
    for rounds in range(1, desk.limits.rounds + 1):
        payload = {"question": question.text, "findings": work.told}
        plan = await work.ask("orchestrator", payload, FORMS["orchestrator"])
        if plan is None:
            return _record(work, None, "orchestrator", "no plan in form", rounds=rounds)
        task_type = plan["task_type"]
        await _search_all(work, plan["subtasks"][: desk.limits.subtasks], prefix=f"w{rounds}")
        answer = await _answer(work)
        if answer is not None:
            break
    answer, repairs = await _repaired(work, answer)
    return await _written(work, task_type, answer, rounds=rounds, repairs=repairs)


async def _alone(work: _Work) -> tuple[str, str | None, int]:
    """What one model makes of the question: its type, the answer, and how many turns it took."""
    limits, turns, task_type = work.desk.limits, [], "others"
    for left in range(limits.turns - 1, -1, -1):
        payload = {"question": work.question.text, "turns": turns, "turns_left": left}
        reply = await work.ask("solver", payload, FORMS["solver"])
        if reply is None:
            break
        task_type = reply["task_type"]
        if turns:
            asked, found = turns[-1], {p["id"] for p in turns[-1]["passages"]}
            cited = tuple(dict.fromkeys(i for i in reply["evidence_ids"] if i in found))
            queries, name = tuple(asked["queries"]), f"t{len(turns)}"
            work.findings.append(Finding(name, asked["goal"], queries, reply["finding"], cited))
            work.passages |= {i: work.seen[i] for i in cited}
        queries = _queries(reply, limits)
        if not queries or not left:
            answer = (reply["answer"] or "").strip()
            return task_type, answer or None, len(turns) + 1
        shown = await _look_up(work, queries)
        turns.append({"goal": reply["goal"], "queries": queries, "passages": shown})
    return task_type, None, len(turns)


async def _search_all(work: _Work, subtasks: Sequence[Mapping], *, prefix: str) -> None:
    """Works on the subtasks, those that wait for nothing more at once.

    One that waits for what is not there, or for itself by a circle, waits no longer.
    """
    names = {str(item["id"]) for item in subtasks}
    waiting, done = list(subtasks), {}
    while waiting:
        ready = [t for t in waiting if not (set(t.get("depends_on", ())) & names) - done.keys()]
        ready = ready or waiting  # a circle
        needs = [[done[name] for name in t.get("depends_on", ()) if name in done] for t in ready]
        found = await run_all(
            _searched(work, f"{prefix}.{task['id']}", task["objective"], known)
            for task, known in zip(ready, needs, strict=True)
        )
        done |= {str(task["id"]): f for task, f in zip(ready, found, strict=True)}
        work.findings += found
        waiting = [task for task in waiting if task not in ready]


async def _searched(work: _Work, name: str, objective: str, known: Sequence[Finding]) -> Finding:
    """One Searcher's finding."""
    limits = work.desk.limits
    payload = {"objective": objective, "findings": [f.summary for f in known]}
    reply = await work.ask("searcher", payload, FORMS["searcher"])
    queries = _queries(reply or {"queries": ()}, limits) or [objective]
    shown = await _look_up(work, queries)
    payload |= {"passages": shown}
    reply = await work.ask("summarizer", payload, FORMS["summarizer"])
    if reply is None:
        return Finding(name, objective, tuple(queries), "", ())
    found = {passage["id"] for passage in shown}
    cited = tuple(dict.fromkeys(i for i in reply["evidence_ids"] if i in found))
    work.passages |= {i: work.seen[i] for i in cited}
    return Finding(name, objective, tuple(queries), reply["summary"], cited)


def _queries(reply: Mapping, limits: Limits) -> list[str]:
    queries = [q for q in reply["queries"] if isinstance(q, str) and q.strip()]
    return queries[: limits.queries]


async def _look_up(work: _Work, queries: Sequence[str]) -> list[dict[str, str]]:
    """The passages that queries find, each once, as roles read them."""
    work.queries += queries
    found: dict[str, Passage] = {}
    for result in await work.desk.search(queries, work.desk.limits.passages):
        if isinstance(result, SearchFailure):
            work.failures.append(result.message)
        else:
            found |= {passage.id: passage for passage in result}
    work.seen |= found
    return _shown(found)


def _shown(passages: Mapping[str, Passage]) -> list[dict[str, str]]:
    return [{"id": p.id, "title": p.title, "text": p.text} for p in passages.values()]


async def _answer(work: _Work, diagnosis: str = "") -> str | None:
    payload = {"question": work.question.text, "findings": work.told}
    if diagnosis:
        payload["diagnosis"] = diagnosis
    reply = await work.ask("answerer", payload, FORMS["answerer"])
    return None if reply is None or not (reply["answer"] or "").strip() else reply["answer"]


async def _repaired(work: _Work, answer: str | None) -> tuple[str | None, int]:
    """The answer after as many repairs as it takes or may take, and how many there were."""
    question, golds = work.question, list(work.question.golden_answers)
    leaked = ""
    for number in range(work.desk.limits.repairs):
        if answer is not None and exact_match(answer, golds):
            return answer, number
        payload = {
            "question": question.text, "accepted_answers": golds, "answer": answer,
            "findings": work.told,
        } | ({"rejected": leaked} if leaked else {})  # fmt: skip
        reply = await work.ask("repair", payload, FORMS["repair"])
        if reply is None:
            continue
        told = [reply["diagnosis"], *(task["objective"] for task in reply["subtasks"])]
        if any(protocols.leaks(text, question) for text in told):
            work.counts["leaks"] += 1
            leaked = "your last repair told an accepted answer in its diagnosis or an objective"
            continue
        if reply["failure_type"] == "search":
            subtasks = reply["subtasks"][: work.desk.limits.subtasks]
            await _search_all(work, subtasks, prefix=f"r{number + 1}")
        answer = await _answer(work, reply["diagnosis"])
    return answer, work.desk.limits.repairs


async def _written(
    work: _Work, task_type: str, answer: str | None, *, rounds: int, repairs: int
) -> Record:
    """The protocol after its gates."""
    question = work.question
    if work.queries and len(work.failures) == len(work.queries):
        raise WorldError(FailureKind.RETRIEVER, f"every search failed: {work.failures[0]}")
    is_correct = answer is not None and bool(exact_match(answer, question.golden_answers))
    payload = {
        "question": question.text, "task_type": task_type, "findings": work.told,
        "passages": _shown(work.passages), "answer": answer, "is_correct": is_correct,
    }  # fmt: skip
    ends = dict(rounds=rounds, repairs=repairs, answer=answer, is_correct=is_correct)
    reply = await work.ask("protocolizer", payload, FORMS["protocolizer"])
    if reply is None:
        return _record(work, None, "protocolizer", "no protocol in form", **ends)
    found = protocols.rejection(
        reply, question, work.passages, queries=work.queries, is_correct=is_correct
    )
    if found is not None:
        return _record(work, None, found.gate, found.message, **ends)
    cleaned = None
    if work.desk.normalise_style:
        reply, cleaned = protocols.normalise(reply, question)
    return _record(work, reply, "", "", cleaned=cleaned, **ends)


def _record(
    work: _Work, protocol: Protocol | None, reason: str, message: str, *, rounds: int,
    repairs: int = 0, answer: str | None = None, is_correct: bool = False,
    cleaned: Cleaned | None = None,
) -> Record:  # fmt: skip
    names = ("malformed", "leaks", "calls", "input_tokens", "output_tokens")
    return Record(
        question=work.question.uid, model=work.desk.model, protocol=protocol, reason=reason,
        message=message, is_correct=is_correct, rounds=rounds, repairs=repairs, cost=work.cost,
        cleaned=cleaned, findings=tuple(work.findings), answer=answer,
        is_alone=work.desk.is_alone, **{name: work.counts[name] for name in names},
    )  # fmt: skip
