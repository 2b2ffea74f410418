"""The words that the roles are shown, read from text files: `prompts/full`, `prompts/toy`.

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
}


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The first message of each role, and the texts that observations are made of.

    information, reports: around passages and around reports, which are joined by `*_separator`.
    *_now: appended when nothing else may be done. truncated: stands where text was left out.
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


def fill(text: str, values: Mapping[str, object]) -> str:
    """`text` with every `{name}` replaced, in one pass."""
    return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), text)


@dataclasses.dataclass(frozen=True)
class Message:
    """A prompt or an observation before it is put together, so that it can be shortened.

    text: one of the prompts' texts. values: of its placeholders, `items` excepted, which are joined
    by the separator. note: a fixed line behind it all.
    """

    text: str
    values: Mapping[str, object] = dataclasses.field(default_factory=dict)
    items: tuple[str, ...] = ()
    separator: str = ""
    note: str = ""

    def render(self, items: Sequence[str]) -> str:
        """The text with these items in place of its own."""
        return fill(self.text, {**self.values, "items": self.separator.join(items)}) + self.note


def load_prompts(name: str | Path) -> Prompts:
    """A prompt set: "full", "toy", or a folder of one's own with the same files.

    Raises: ValueError if a text is missing, unknown, or has a placeholder it cannot have.
    """
    shipped = importlib.resources.files("mas_jax.agents") / "prompts"
    folder = shipped / name if name in ("full", "toy") else Path(name)
    texts = json.loads((folder / "observations.json").read_text(encoding="utf-8"))
    for role in _ROLES:
        texts[role] = (folder / f"{role}.txt").read_text(encoding="utf-8").removesuffix("\n")
    fields = {field.name for field in dataclasses.fields(Prompts)}
    if set(texts) != fields:
        raise ValueError(
            f"prompts {name}: missing {sorted(fields - set(texts))}, "
            f"unknown {sorted(set(texts) - fields)}"
        )
    for key, text in texts.items():
        found = set(_PLACEHOLDER.findall(text))
        allowed, needed = _ALLOWED.get(key, set()), _NEEDED.get(key, set())
        if not needed <= found <= allowed:
            raise ValueError(
                f"prompts {name}: {key} has placeholders {sorted(found)}, "
                f"must have {sorted(needed)}, may have {sorted(allowed)}"
            )
    return Prompts(**texts)


def toy_prompt_words() -> tuple[str, ...]:
    """Every word of the toy prompts, sorted; the toy tokenizer has one token for each."""
    texts = [_PLACEHOLDER.sub(" ", t) for t in dataclasses.astuple(load_prompts("toy"))]
    return tuple(sorted({word for text in texts for word in text.split()}))
