"""Gold decompositions of real questions: the single-hop steps that lead to the answer.

Read from what MuSiQue (`question_decomposition`) and 2WikiMultihopQA (`evidences`) publish beside
their questions. Must not know: who follows the steps, what was retrieved.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mas_jax.data.questions import Source, parse, words

HOP = re.compile(r"#(\d+)")  # stands for the answer of an earlier step, counted from 1
_SIGNS = '"\u201c\u201d '


@dataclass(frozen=True)
class Step:
    """One fact to find. ask: what of, perhaps with references such as "#1"; bare: the same as words
    to search for. answer: what it gives. title: of the page that states it, "" where that is not
    known; subject: what the fact is about, "" where that is not known."""

    ask: str
    bare: str
    answer: str
    title: str = ""
    subject: str = ""

    @property
    def hops(self) -> tuple[int, ...]:
        """Numbers of the steps that it refers to."""
        return tuple(map(int, HOP.findall(self.ask)))


def read_steps(source: Source) -> dict[str, tuple[Step, ...]]:
    """The steps of each question of a source that has any, by uid.

    Raises: ValueError that names the place of a line whose steps are malformed, and if no question
    has any; as `questions.read` for a line that is none.
    """
    found = {}
    for place, line in source.lines():
        try:
            question = parse(line, dataset=source.dataset, split=source.split)
            steps = steps_of(line.get("metadata") or {})
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise ValueError(f"{place}: no question with steps ({error!r})") from error
        if steps:
            found[question.uid] = steps
    if not found:
        raise ValueError(
            f"{source.origin['file']} has no question with metadata.question_decomposition or "
            "metadata.evidences; take MuSiQue's or 2WikiMultihopQA's"
        )
    return found


def steps_of(metadata: Mapping) -> tuple[Step, ...]:
    """The steps that a question's metadata hold, () for none. Raises: ValueError, KeyError,
    TypeError or AttributeError for what has another form."""
    if given := metadata.get("question_decomposition"):
        steps = tuple(_of_question(step) for step in given)
    else:
        steps = _of_evidences(metadata.get("evidences") or ())
    for number, step in enumerate(steps, start=1):
        if any(not 0 < hop < number for hop in step.hops):
            raise ValueError(f"step {number} refers to a later one: {step.ask!r}")
    return steps


def _of_question(step: Mapping) -> Step:
    """MuSiQue's: a question, or "subject >> relation"."""
    ask = step["question"].strip()
    subject, sign, relation = (part.strip() for part in ask.partition(">>"))
    answer, title = step["answer"].strip(), (step.get("title") or "").strip()
    if not sign:
        return Step(ask, ask, answer, title)
    return Step(f"{relation} of {subject}", f"{subject} {relation}", answer, title)


def _of_evidences(evidences: list) -> tuple[Step, ...]:
    """2Wiki's triples; a subject that an earlier triple gave becomes a reference to it."""
    steps: list[Step] = []
    for subject, relation, answer in evidences:
        subject, answer = subject.strip(_SIGNS), answer.strip(_SIGNS)
        given = [i for i, step in enumerate(steps, start=1) if words(step.answer) == words(subject)]
        name = f"#{given[0]}" if given else subject
        steps.append(
            Step(f"{relation} of {name}", f"{name} {relation}", answer, subject=name)
        )  # fmt: skip
    return tuple(steps)
