"""MAPD's offline multi-agent system: it works on a question once and writes the protocol of it.

Orchestrator (a graph of subtasks), a Searcher for each ready subtask at once, Answerer, who never
sees the golden answers, exact match, Repair where that fails, who does, and Protocolizer. All speak
JSON through one `complete` function, an endpoint's or a local policy's. What a model says that is
no good is an outcome, counted; what an endpoint fails is a `WorldError` and passes through.
Source: METHODS 2.3 and 2.4. Must not know: which endpoint, files, training.
"""

import importlib.resources
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mas_jax.agents import protocol as protocols
from mas_jax.agents.agent import run_all
from mas_jax.agents.protocol import Cleaned, Protocol
from mas_jax.records import FailureKind, Passage, Question, SearchFailure, WorldError
from mas_jax.rewards.exact_match import exact_match

ROLES = ("orchestrator", "searcher", "summarizer", "answerer", "repair", "protocolizer")


@dataclass(frozen=True)
class Limits:
    """Of one question. rounds: of the Orchestrator, while the Answerer has no answer. subtasks: of
    a round. queries: of a subtask. passages: of a query. repairs: after a wrong answer. attempts:
    of one request whose reply is no JSON object of its form."""

    rounds: int = 2
    subtasks: int = 4
    queries: int = 3
    passages: int = 3
    repairs: int = 2
    attempts: int = 2
    max_tokens: int = 1024


@dataclass(frozen=True)
class Desk:
    """What the system works with.

    complete(messages, model=, temperature=, max_tokens=) -> a `Completion`. search(queries, k) as
    in `setting.World`. normalise_style: whether `protocol.normalise` is applied.
    """

    complete: Callable[..., Awaitable]
    search: Callable[..., Awaitable]
    model: str
    temperature: float = 0.0
    limits: Limits = Limits()
    normalise_style: bool = True


@dataclass(frozen=True)
class Finding:
    """What came of a subtask: its objective, a summary, and the passages that support it."""

    id: str
    objective: str
    summary: str
    evidence_ids: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """What a question cost and gave. protocol: None where a gate rejected it or none was written;
    then `reason` is the gate's name, or what kept one from being written.

    malformed: replies that were no JSON object of their form; leaks: repairs that were thrown away
    since they told the answer; cleaned: None without style normalisation.
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


@dataclass
class _Work:
    """One question in progress."""

    question: Question
    desk: Desk
    findings: list[Finding] = field(default_factory=list)
    passages: dict[str, Passage] = field(default_factory=dict)
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
            if reply is not None and _fits(reply, form):
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


_SUBTASKS = {"subtasks": list}
FORMS: Mapping[str, Mapping] = {
    "orchestrator": {"task_type": str, **_SUBTASKS},
    "searcher": {"queries": list},
    "summarizer": {"summary": str, "evidence_ids": list},
    "answerer": {"answer": (str, type(None))},
    "repair": {"failure_type": str, "diagnosis": str, **_SUBTASKS},
    "protocolizer": {"reasoning_plan": list},
}


def instructions(role: str, limits: Limits) -> str:
    """What a role is told, with the budgets in it."""
    folder = importlib.resources.files("mas_jax.agents") / "prompts" / "offline"
    text = folder.joinpath(f"{role}.txt").read_text(encoding="utf-8").removesuffix("\n")
    values = {"subtasks": limits.subtasks, "queries": limits.queries}
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text.replace("{schema}", json.dumps(protocols.schema(), ensure_ascii=False))


def parse_object(text: str | None) -> dict | None:
    """The JSON object that a reply is, perhaps within a code fence; None for anything else, also
    one with half a character, which no file can hold."""
    body = (text or "").strip()
    if body.startswith("```") and body.endswith("```"):
        body = body[3:-3].removeprefix("json")
    try:
        found = json.loads(body)
        json.dumps(found, ensure_ascii=False).encode()
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _fits(reply: Mapping, form: Mapping) -> bool:
    if not all(name in reply and isinstance(reply[name], kind) for name, kind in form.items()):
        return False
    names = reply.get("evidence_ids", ()) if "evidence_ids" in form else ()
    if not all(isinstance(name, str) for name in names):
        return False
    return "subtasks" not in form or all(map(_is_subtask, reply["subtasks"]))


def _is_subtask(item: object) -> bool:
    return (
        isinstance(item, dict)
        and all(isinstance(item.get(name), str) and item[name] for name in ("id", "objective"))
        and isinstance(item.get("depends_on", []), list)
        and all(isinstance(name, str) for name in item.get("depends_on", []))
    )


# --- one question ---------------------------------------------------------------------------------


async def work_on(question: Question, desk: Desk) -> Record:
    """The protocol of a question, and what became of it.

    Raises: WorldError of the endpoint, or of the retriever if it failed every query.
    """
    work = _Work(question, desk)
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
    queries = [q for q in (reply or {}).get("queries", ()) if isinstance(q, str) and q.strip()]
    queries = queries[: limits.queries] or [objective]
    work.queries += queries
    found: dict[str, Passage] = {}
    for result in await work.desk.search(queries, limits.passages):
        if isinstance(result, SearchFailure):
            work.failures.append(result.message)
        else:
            found |= {passage.id: passage for passage in result}
    shown = [{"id": p.id, "title": p.title, "text": p.text} for p in found.values()]
    payload |= {"passages": shown}
    reply = await work.ask("summarizer", payload, FORMS["summarizer"])
    if reply is None:
        return Finding(name, objective, "", ())
    cited = tuple(dict.fromkeys(i for i in reply["evidence_ids"] if i in found))
    work.passages |= {i: found[i] for i in cited}
    return Finding(name, objective, reply["summary"], cited)


async def _answer(work: _Work, diagnosis: str = "") -> str | None:
    payload = {"question": work.question.text, "findings": work.told}
    if diagnosis:
        payload["diagnosis"] = diagnosis
    reply = await work.ask("answerer", payload, FORMS["answerer"])
    return None if reply is None or not (reply["answer"] or "").strip() else reply["answer"]


async def _repaired(work: _Work, answer: str | None) -> tuple[str | None, int]:
    """The answer after as many repairs as it takes or may take, and how many there were."""
    question, golds = work.question, list(work.question.golden_answers)
    for number in range(work.desk.limits.repairs):
        if answer is not None and exact_match(answer, golds):
            return answer, number
        payload = {
            "question": question.text, "accepted_answers": golds, "answer": answer,
            "findings": work.told,
        }  # fmt: skip
        reply = await work.ask("repair", payload, FORMS["repair"])
        if reply is None:
            continue
        told = [reply["diagnosis"], *(task["objective"] for task in reply["subtasks"])]
        if any(protocols.leaks(text, question) for text in told):
            work.counts["leaks"] += 1
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
    shown = [{"id": p.id, "title": p.title, "text": p.text} for p in work.passages.values()]
    payload = {
        "question": question.text, "task_type": task_type, "findings": work.told,
        "passages": shown, "answer": answer, "is_correct": is_correct,
    }  # fmt: skip
    ends = dict(rounds=rounds, repairs=repairs, is_correct=is_correct)
    reply = await work.ask("protocolizer", payload, FORMS["protocolizer"])
    if reply is None:
        return _record(work, None, "protocolizer", "no protocol in form", **ends)
    found = protocols.rejection(reply, question, work.passages, queries=work.queries)
    if found is not None:
        return _record(work, None, found.gate, found.message, **ends)
    cleaned = None
    if work.desk.normalise_style:
        reply, cleaned = protocols.normalise(reply, question)
    return _record(work, reply, "", "", cleaned=cleaned, **ends)


def _record(
    work: _Work, protocol: Protocol | None, reason: str, message: str, *, rounds: int,
    repairs: int = 0, is_correct: bool = False, cleaned: Cleaned | None = None,
) -> Record:  # fmt: skip
    names = ("malformed", "leaks", "calls", "input_tokens", "output_tokens")
    return Record(
        question=work.question.uid, model=work.desk.model, protocol=protocol, reason=reason,
        message=message, is_correct=is_correct, rounds=rounds, repairs=repairs, cost=work.cost,
        cleaned=cleaned, **{name: work.counts[name] for name in names},
    )  # fmt: skip
