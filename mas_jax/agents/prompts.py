"""The words that the roles are shown, read from text files: `prompts/full`, `small`, `toy`.

Placeholders are `{name}`; outside text put in their place is never read for placeholders itself.
Must not know: tokens, budgets, what a role does.
"""

import dataclasses
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_PLACEHOLDER = re.compile(r"\{([a-z]+)\}")
_ROLES = ("leader", "searcher", "answerer", "single")
# what may stand in each text; the rest have none
_ALLOWED = {
    "leader": {"question", "subtasks", "waves", "turns"},
    "searcher": {"task"},
    "answerer": {"question", "items"},
    "single": {"question"},
    "passage": {"index", "title", "text"},
    "information": {"items"},
    "search_failed": {"kind"},
    "report": {"id", "text"},
    "reports": {"items", "waves", "turns"},
    "invalid": {"reason"},
    "looked_up": {"query", "found"},
    "history": {"items"},
    "judge": {"question", "subtask", "searches", "report"},
}
_NEEDED = {
    "leader": {"question"},
    "searcher": {"task"},
    "answerer": {"question", "items"},
    "single": {"question"},
    "passage": {"title", "text"},
    "information": {"items"},
    "report": {"id", "text"},
    "reports": {"items"},
    "looked_up": {"query", "found"},
    "history": {"items"},
    "judge": {"subtask", "report"},
}


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The first message of each role, and the texts that observations are made of.

    information, reports: around passages and around reports, which are joined by `*_separator`.
    *_now: appended when nothing else may be done. truncated: stands where text was left out.
    examples: by role, exchanges (user, assistant) that its conversation begins with, for models
    that follow an example rather than a description.
    """

    leader: str
    searcher: str
    answerer: str
    single: str
    passage: str
    passage_separator: str
    information: str
    no_passages: str
    search_failed: str
    report: str
    report_separator: str
    empty_report: str
    no_reports: str
    reports: str
    report_now: str
    answer_now: str
    select_now: str
    invalid: str
    truncated: str
    examples: Mapping[str, tuple[tuple[str, str], ...]] = dataclasses.field(default_factory=dict)


def fill(text: str, values: Mapping[str, object]) -> str:
    """`text` with every `{name}` replaced, in one pass."""
    return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), text)


@dataclasses.dataclass(frozen=True)
class Message:
    """A prompt or an observation before it is put together, so that it can be shortened.

    text: one of the prompts' texts. values: of its placeholders, `items` excepted, which are joined
    by the separator. note: a fixed line behind it all. examples: exchanges before it, where it is
    the first of a conversation.
    """

    text: str
    values: Mapping[str, object] = dataclasses.field(default_factory=dict)
    items: tuple[str, ...] = ()
    separator: str = ""
    note: str = ""
    examples: tuple[tuple[str, str], ...] = ()

    def render(self, items: Sequence[str]) -> str:
        """The text with these items in place of its own."""
        return fill(self.text, {**self.values, "items": self.separator.join(items)}) + self.note


def load_prompts(name: str | Path) -> Prompts:
    """A prompt set: "full", "small", "toy", or a folder of one's own with the same files.

    examples.json, if there is one, holds lists of [user, assistant] by role.
    Raises: ValueError if a text is missing, unknown, or has a placeholder it cannot have, or an
    example is not such a pair.
    """
    folder = _folder(name)
    texts = json.loads((folder / "observations.json").read_text(encoding="utf-8"))
    for role in _ROLES:
        texts[role] = (folder / f"{role}.txt").read_text(encoding="utf-8").removesuffix("\n")
    _check_texts(name, texts, {field.name for field in dataclasses.fields(Prompts)} - {"examples"})
    return Prompts(**texts, examples=_examples(name, folder / "examples.json"))


def _folder(name: str | Path) -> Path:
    shipped = importlib.resources.files("mas_jax.agents") / "prompts"
    return shipped / name if name in ("full", "small", "toy") else Path(name)


def _check_texts(name: str | Path, texts: Mapping[str, str], fields: set[str]) -> None:
    if set(texts) != fields:
        raise ValueError(
            f"prompts {name}: missing {sorted(fields - set(texts))}, "
            f"unknown {sorted(set(texts) - fields)}"
        )
    for key, text in texts.items():
        _check_placeholders(name, key, text)


def _check_placeholders(name: str | Path, key: str, text: str) -> None:
    found = set(_PLACEHOLDER.findall(text))
    allowed, needed = _ALLOWED.get(key, set()), _NEEDED.get(key, set())
    if not needed <= found <= allowed:
        raise ValueError(
            f"prompts {name}: {key} has placeholders {sorted(found)}, "
            f"must have {sorted(needed)}, may have {sorted(allowed)}"
        )


def load_judge_prompt(name: str | Path) -> str:
    """What a judge of subtasks is asked: `judge.txt` of a prompt set that has one ("full", "small")
    or of a folder of one's own.

    Raises: ValueError if there is none, or it has a placeholder it cannot have.
    """
    path = _folder(name) / "judge.txt"
    if not path.is_file():
        raise ValueError(f"prompts {name}: there is no judge.txt; take 'full' or 'small'")
    text = path.read_text(encoding="utf-8").removesuffix("\n")
    _check_placeholders(name, "judge", text)
    return text


@dataclasses.dataclass(frozen=True)
class Stepwise:
    """The texts of a prompt that tells what happened before.

    looked_up: a search and what it found. history: behind the opening, around such entries and what
    was said of invalid actions, which are joined by the separator.
    """

    looked_up: str
    history: str
    separator: str


def load_stepwise(name: str | Path) -> Stepwise:
    """`stepwise.json` of a prompt set. Raises: ValueError if there is none, a text is missing or
    unknown, or has a placeholder it cannot have."""
    path = _folder(name) / "stepwise.json"
    if not path.is_file():
        raise ValueError(
            f"prompts {name}: there is no stepwise.json; take 'full', 'small' or 'toy'"
        )
    texts = json.loads(path.read_text(encoding="utf-8"))
    _check_texts(name, texts, {field.name for field in dataclasses.fields(Stepwise)})
    return Stepwise(**texts)


def _examples(name: str | Path, path: Path) -> dict[str, tuple[tuple[str, str], ...]]:
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    for role, pairs in found.items():
        good = all(len(pair) == 2 and all(isinstance(x, str) for x in pair) for pair in pairs)
        if role not in _ROLES or not good:
            raise ValueError(
                f"prompts {name}: examples of {role!r} must be of one of {_ROLES}, and lists of "
                "[user, assistant]"
            )
    return {role: tuple((user, said) for user, said in pairs) for role, pairs in found.items()}


def toy_prompt_words() -> tuple[str, ...]:
    """Every word of the toy prompts, sorted; the toy tokenizer has one token for each."""
    prompts = load_prompts("toy")
    texts = [_PLACEHOLDER.sub(" ", t) for t in vars(prompts).values() if isinstance(t, str)]
    return tuple(sorted({word for text in texts for word in text.split()}))
