"""Tagged text to typed actions. Malformed text is a value too: `Invalid`, with a reason.

Pure functions of text: must not know tokens, prompts or budgets. Only `json.loads` reads what the
policy wrote.
"""

import enum
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

KINDS = ("search", "report", "assign", "select", "answer")
# every tag of the protocol, for tokenizers that give each a token of its own
PROTOCOL_TAGS = tuple(f"<{slash}{kind}>" for kind in KINDS for slash in ("", "/"))

_TAG = re.compile(rf"<(/?)({'|'.join(KINDS)})>")
_ID = re.compile(r"[A-Za-z0-9_.-]{1,16}")
_THOUGHT_END = "</think>"


class Reason(enum.StrEnum):
    """What makes an action invalid; a fixed set, so that it can be counted."""

    NO_ACTION = "no action"
    UNCLOSED = "unclosed tag"
    SEVERAL = "several actions"
    NOT_ALLOWED = "action not allowed"
    EMPTY = "empty"
    MALFORMED = "malformed"
    DUPLICATE_ID = "duplicate id"
    UNKNOWN_ID = "unknown id"
    TOO_MANY = "too many subtasks"


@dataclass(frozen=True)
class Search:
    """Look something up."""

    kind: ClassVar[str] = "search"
    query: str


@dataclass(frozen=True)
class Report:
    """A Searcher's last word on its task."""

    kind: ClassVar[str] = "report"
    text: str


@dataclass(frozen=True)
class Assign:
    """A wave of subtasks, each an id of at most 16 letters, digits, `_.-` and a task."""

    kind: ClassVar[str] = "assign"
    subtasks: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Select:
    """Ids of the reports that the Answerer shall read, in the Leader's order; may be none."""

    kind: ClassVar[str] = "select"
    ids: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """The answer to the question, as it will be scored."""

    kind: ClassVar[str] = "answer"
    text: str


@dataclass(frozen=True)
class Invalid:
    """Text in which there is no action that counts."""

    kind: ClassVar[str] = "invalid"
    reason: Reason


Action = Search | Report | Assign | Select | Answer | Invalid


def closing_tags(kinds: Collection[str]) -> tuple[str, ...]:
    """The stop strings of an agent whose actions are `kinds`."""
    return tuple(f"</{kind}>" for kind in kinds)


def parse(
    text: str,
    *,
    allowed: Collection[str],
    known_ids: Collection[str] = (),
    max_subtasks: int = 0,
) -> Action:
    """The one action in a generation.

    Text up to the last `</think>` and any text before the tag are the agent's thoughts; what
    follows the closing tag is ignored unless it holds another tag.
    allowed: kinds that count now. known_ids: of the reports so far; a Select must name them, an
    Assign must not. Raises nothing, whatever the text.
    """
    body = text.rpartition(_THOUGHT_END)[2]
    tags = [(m[1] == "/", m[2], m.start(), m.end()) for m in _TAG.finditer(body)]
    first = next((i for i, (closes, *_) in enumerate(tags) if not closes), None)
    if first is None:
        return Invalid(Reason.NO_ACTION)
    _, kind, _, start = tags[first]
    rest = tags[first + 1 :]
    if (True, kind) not in [tag[:2] for tag in rest]:
        return Invalid(Reason.UNCLOSED)
    if len(rest) > 1:
        return Invalid(Reason.SEVERAL)
    if kind not in allowed:
        return Invalid(Reason.NOT_ALLOWED)
    content = body[start : rest[0][2]].strip()
    if not content:
        return Invalid(Reason.EMPTY)
    match kind:
        case "search":
            return Search(content)
        case "report":
            return Report(content)
        case "answer":
            return Answer(content)
        case "assign":
            return _assign(content, known_ids, max_subtasks)
    return _select(content, known_ids)


def _load_list(content: str) -> list | None:
    """A JSON list, None if it is not one or holds what cannot be encoded as UTF-8."""
    try:
        value = json.loads(content)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate escape fails here
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else None


def _subtasks(content: str) -> list[tuple[str, str]] | None:
    """(id, task) pairs of the JSON or the terse form, stripped; None if malformed."""
    if content.startswith("["):
        pairs = []
        for item in _load_list(content) or [None]:
            if not isinstance(item, dict):
                return None
            pairs.append((item.get("id"), item.get("task")))
    else:
        pairs = [tuple(part.partition(":")[::2]) for part in content.split(";")]
    if not all(isinstance(value, str) for pair in pairs for value in pair):
        return None
    pairs = [(name.strip(), task.strip()) for name, task in pairs]
    return pairs if all(_ID.fullmatch(name) and task for name, task in pairs) else None


def _assign(content: str, known_ids: Collection[str], max_subtasks: int) -> Action:
    pairs = _subtasks(content)
    if pairs is None:
        return Invalid(Reason.MALFORMED)
    ids = [name for name, _ in pairs]
    if len(set(ids)) < len(ids) or not set(ids).isdisjoint(known_ids):
        return Invalid(Reason.DUPLICATE_ID)
    if len(ids) > max_subtasks:
        return Invalid(Reason.TOO_MANY)
    return Assign(tuple(pairs))


def _select(content: str, known_ids: Collection[str]) -> Action:
    ids = _load_list(content) if content.startswith("[") else content.split()
    if ids is None or not all(isinstance(name, str) for name in ids):
        return Invalid(Reason.MALFORMED)
    if len(set(ids)) < len(ids):
        return Invalid(Reason.DUPLICATE_ID)
    if not set(ids) <= set(known_ids):
        return Invalid(Reason.UNKNOWN_ID)
    return Select(tuple(ids))
