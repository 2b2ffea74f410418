"""The roles of MAPD's offline system: what each is told, and the form that its reply must have.

Source: METHODS 2.4. Must not know: who speaks for them, what is made of a reply.
"""

import dataclasses
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass

from mas_jax.agents import protocol as protocols

ROLES = ("orchestrator", "searcher", "summarizer", "answerer", "repair", "solver", "protocolizer")


@dataclass(frozen=True)
class Limits:
    """Of one question. rounds: of the Orchestrator, while the Answerer has no answer. subtasks: of
    a round. queries: of a subtask. passages: of a query. repairs: after a wrong answer. attempts:
    of one request whose reply is no JSON object of its form. turns: of one model alone, the last of
    which is its answer. Raises: ValueError for fewer than one of anything, or than no repair."""

    rounds: int = 2
    subtasks: int = 4
    queries: int = 3
    passages: int = 3
    repairs: int = 2
    attempts: int = 2
    turns: int = 6
    max_tokens: int = 1024

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            least = 0 if name == "repairs" else 1
            if type(value) is not int or value < least:
                raise ValueError(
                    f"offline.{name}={value!r}: want a whole number of at least {least}"
                )


_SUBTASKS = {"subtasks": list}
FORMS: Mapping[str, Mapping] = {
    "orchestrator": {"task_type": str, **_SUBTASKS},
    "searcher": {"queries": list},
    "summarizer": {"summary": str, "evidence_ids": list},
    "answerer": {"answer": (str, type(None))},
    "repair": {"failure_type": str, "diagnosis": str, **_SUBTASKS},
    "solver": {
        "task_type": str, "finding": str, "evidence_ids": list, "goal": str, "queries": list,
        "answer": (str, type(None)),
    },
    "protocolizer": {"reasoning_plan": list},
}  # fmt: skip


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


def fits(reply: Mapping, form: Mapping) -> bool:
    """Whether a reply has a form of FORMS."""
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
