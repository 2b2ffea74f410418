"""MAPD's protocols: a JSON object about one question, the gates it must pass, and how it is shown.

The object's shape is `protocol.schema.json`. Succeeded variant: the answer, which was right;
evidence variant: partial findings instead. Must not know: who wrote it, endpoints, training.
"""

import copy
import functools
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema

from mas_jax.records import Passage, Question
from mas_jax.rewards.exact_match import exact_match, normalize_answer

Protocol = dict[str, Any]

GATES = ("schema", "answer", "grounding", "leak")
FIELDS = ("task_type", "reasoning_plan", "grounding_facts", "answer", "partial_findings")
SEED_FIELDS = ("task_type", "reasoning_plan", "grounding_facts")  # the three of the seed's account
_CLOSED = frozenset({"yes", "no"})  # words of any text, so no sign of a leak


@functools.cache
def schema() -> dict:
    """The published JSON Schema."""
    text = importlib.resources.files("mas_jax.agents").joinpath("protocol.schema.json").read_text()
    return json.loads(text)


@dataclass(frozen=True)
class Rejection:
    """Why a protocol is not used: one of GATES, and what was found."""

    gate: str
    message: str


def rejection(
    protocol: object, question: Question, passages: Mapping[str, Passage],
    *, queries: Sequence[str] = (), is_correct: bool | None = None,
) -> Rejection | None:  # fmt: skip
    """The first gate that a protocol fails, None if it passes all.

    schema: its shape. answer: a claimed answer equals a golden one by exact match, and one is
    claimed just where the work ended rightly (is_correct, None for unknown). grounding: each
    fact stands verbatim, but for runs of white space, in the passage it names. leak: no golden
    answer stands in the plan or in a query that was asked; one that the question itself names, and
    "yes" or "no", cannot be a leak.
    """
    validator = jsonschema.Draft202012Validator(schema())
    errors = sorted(validator.iter_errors(protocol), key=lambda error: list(map(str, error.path)))
    if errors:
        where = "/".join(map(str, errors[0].path)) or "protocol"
        return Rejection("schema", f"{where}: {errors[0].message}"[:300])
    answer = protocol.get("answer")
    if answer is not None and not exact_match(answer, question.golden_answers):
        return Rejection("answer", f"{answer!r} is none of {question.golden_answers}")
    if is_correct is not None and (answer is not None) != is_correct:
        claim = "no answer after a right one" if is_correct else f"{answer!r} after a wrong one"
        return Rejection("answer", f"the protocol has {claim}")
    for entry in protocol["grounding_facts"]:
        passage = passages.get(entry["passage_id"])
        source = "" if passage is None else f"{passage.title}\n{passage.text}"
        if passage is None or _spaced(entry["fact"]) not in _spaced(source):
            return Rejection(
                "grounding", f"{entry['fact']!r} does not stand in {entry['passage_id']!r}"
            )
    told = [text for step in protocol["reasoning_plan"] for text in step.values()]
    for text in (*told, *queries):
        if leaked := leaks(text, question):
            return Rejection("leak", f"the answer {leaked!r} stands in {text!r}")
    return None


def leaks(text: str, question: Question) -> str:
    """The first golden answer whose words stand in a text, "" for none."""
    for answer in question.golden_answers:
        is_closed = " ".join(_words(answer)) in _CLOSED
        if not is_closed and holds(text, answer) and not holds(question.text, answer):
            return answer
    return ""


def holds(text: str, piece: str) -> bool:
    """Whether the words of a piece, which has some, stand in a text, as exact match reads them."""
    told, words = _words(piece), _words(text)
    return bool(told) and any(
        words[i : i + len(told)] == told for i in range(len(words) - len(told) + 1)
    )


def _words(text: str) -> list[str]:
    return normalize_answer(text).split()


def _spaced(text: str) -> str:
    return " ".join(text.split())


# --- style ----------------------------------------------------------------------------------------

_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_SELF_TALK = re.compile(
    # an opener only with its comma, and "I" only before a small letter: titles begin so too
    r"^(?i:okay|ok|well|hmm|so|wait|alright|great|sure|now|actually|perhaps|maybe)\s*[,!.]|"
    r"\b(?:(?i:let me|let us|let's)|"
    r"I (?:will|would|should|think|need|believe|guess|wonder|am|have)|I'(?:ll|m|ve|d)|"
    r"[Ww]e (?:should|need|can|could|will|must))\b"
)


@dataclass(frozen=True)
class Cleaned:
    """What style normalisation took away: sentences of self-talk, repeated ones, and facts about
    nothing that the plan or the answer names."""

    self_talk: int
    repeated: int
    irrelevant: int


def normalise(protocol: Protocol, question: Question) -> tuple[Protocol, Cleaned]:
    """A protocol in a plain style, and how much was taken away.

    Sentences that address the writer itself go, unless a field would be empty; so do steps, facts
    and findings that were said before, and facts that share neither a word of four letters or more
    with the question, a step or the answer, nor a name with a fact that does.
    """
    found = copy.deepcopy(protocol)
    talk = 0
    for step in found["reasoning_plan"]:
        for key in ("goal", "expected"):
            step[key], taken = _without_talk(step[key])
            talk += taken
    if "partial_findings" in found:
        plain = [_without_talk(text) for text in found["partial_findings"]]
        found["partial_findings"] = [text for text, _ in plain]
        talk += sum(taken for _, taken in plain)
    repeated = 0
    lists = {"reasoning_plan": "goal", "grounding_facts": "fact", "partial_findings": None}
    for name, key in lists.items():
        if name in found:
            kept = _distinct(found[name], key)
            repeated += len(found[name]) - len(kept)
            found[name] = kept
    about = {word for text in _named(found, question) for word in _words(text) if len(word) > 3}
    facts = _relevant(found["grounding_facts"], about)
    irrelevant = len(found["grounding_facts"]) - len(facts)
    found["grounding_facts"] = facts
    return found, Cleaned(talk, repeated, irrelevant)


def _named(protocol: Protocol, question: Question) -> list[str]:
    """Texts that say what a protocol is about."""
    steps = [step[key] for step in protocol["reasoning_plan"] for key in ("goal", "query_hint")]
    return [question.text, protocol.get("answer", ""), *steps]


def _relevant(facts: Sequence[Mapping], about: set[str]) -> list[Mapping]:
    """Facts about one of these words, and in turn those that name what such a fact names: the plan
    of a chain does not name what its first steps give."""
    kept, names = [], set()
    while new := [
        f for f in facts
        if f not in kept and (about & set(_words(f["fact"])) or names & _names(f["fact"]))
    ]:  # fmt: skip
        kept += new
        names |= {name for f in new for name in _names(f["fact"])}
    return [f for f in facts if f in kept]


def _names(text: str) -> set[str]:
    """Words of four letters or more that begin with a capital."""
    return {word for word in re.findall(r"\w{4,}", text) if word[0].isupper()}


def _without_talk(text: str) -> tuple[str, int]:
    sentences = _SENTENCE.split(text.strip())
    kept = [sentence for sentence in sentences if not _SELF_TALK.search(sentence)]
    return (" ".join(kept), len(sentences) - len(kept)) if kept else (text, 0)


def _distinct(items: Sequence, key: str | None) -> list:
    seen: dict[str, object] = {}
    for item in items:
        seen.setdefault(" ".join(_words(item if key is None else item[key])), item)
    return list(seen.values())


# --- what the privileged branch reads -------------------------------------------------------------

# by form: what only one who has read a protocol says; signs that a student leaks it
MARKERS: Mapping[str, tuple[str, ...]] = {
    "json": (
        "protocol", "privileged", "task_type", "reasoning_plan", "query_hint", "grounding_facts",
        "answer_grounded", "partial_findings", "grounding fact", "partial finding",
        "reasoning plan", "given above", "as provided", "according to the plan", "the given answer",
        "the provided answer",
    ),
    "toy": ("| find", "| from", "| report", "| answer"),
}  # fmt: skip


def select(protocol: Protocol, fields: Sequence[str]) -> Protocol:
    """The protocol with these of FIELDS alone; answer_grounded stays beside the answer.

    Raises: ValueError for another field.
    """
    unknown = sorted(set(fields) - set(FIELDS))
    if unknown:
        raise ValueError(f"protocol field {unknown[0]!r} is none of {FIELDS}")
    kept = {name: protocol[name] for name in FIELDS if name in fields and name in protocol}
    if "answer" in kept:
        kept["answer_grounded"] = protocol["answer_grounded"]
    return kept


def render(protocol: Protocol, form: str) -> str:
    """A protocol as the text that ends the user's turn: "json", or "toy", in the toy world's words.

    Raises: ValueError for another form.
    """
    if form == "json":
        body = json.dumps(protocol, ensure_ascii=False, separators=(", ", ": "))
        return f"\n\nA protocol of how this question was worked on before:\n{body}"
    if form != "toy":
        raise ValueError(f"protocol form {form!r}: choose 'json' or 'toy'")
    parts = []
    if steps := protocol.get("reasoning_plan"):
        told = (f"{step['goal']} search {step['query_hint']}" for step in steps)
        parts.append(" find " + " ; ".join(told))
    if facts := protocol.get("grounding_facts"):
        parts.append(" from " + " ; ".join(entry["fact"] for entry in facts))
    if findings := protocol.get("partial_findings"):
        parts.append(" report " + " ; ".join(findings))
    if "answer" in protocol:
        parts.append(f" answer {protocol['answer']}")
    return "".join(f" |{part}" for part in parts)
