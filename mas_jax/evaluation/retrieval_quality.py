"""How good a retriever is on questions with known answers: gold recall, and has-answer.

Letters: Q questions. Must not know: how anything is searched, jax.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mas_jax.evaluation.statistics import gold_recall
from mas_jax.evaluation.taxonomy import has_answer
from mas_jax.records import Passage, Question, SearchFailure
from mas_jax.retrieval.index import Answer, contents
from mas_jax.rewards.exact_match import normalize_answer

DEPTHS = (1, 3, 5, 10)


@dataclass(frozen=True)
class Quality:
    """Means over questions, by depth. has_answer: a golden answer stands in one of the first k
    passages (of questions that are not yes/no). gold_recall: the share of a question's gold
    passages among them, or of its gold pages any passage of which is (of the num_with_gold
    questions whose gold is known whole)."""

    num_answerable: int
    has_answer: dict[int, float]
    num_with_gold: int
    gold_recall: dict[int, float]


def answer_rank(question: Question, passages: Sequence[Passage]) -> int | None:
    """Place, from 0, of the first passage that `has_answer`; None if none has."""
    for place, passage in enumerate(passages):
        text = contents(passage)
        if any(has_answer(text, answer) for answer in question.golden_answers):
            return place
    return None


def measure(questions: Sequence[Question], found_Q: Sequence[Answer]) -> Quality:
    """The quality of what was found for each question, best first; a failure is nothing found.

    Raises: ValueError if there is not one result a question.
    """
    if len(questions) != len(found_Q):
        raise ValueError(f"{len(found_Q)} results for {len(questions)} questions")
    lists_Q = [[] if isinstance(found, SearchFailure) else found for found in found_Q]
    pairs = list(zip(questions, lists_Q, strict=True))
    answerable = [
        (q, found)
        for q, found in pairs
        if not all(normalize_answer(answer) in ("yes", "no") for answer in q.golden_answers)
    ]
    ranks = [answer_rank(*pair) for pair in answerable]
    with_gold = [(q, found) for q, found in pairs if gold_recall(q, ()) is not None]
    return Quality(
        num_answerable=len(answerable),
        has_answer={k: _mean([float(r is not None and r < k) for r in ranks]) for k in DEPTHS},
        num_with_gold=len(with_gold),
        gold_recall={
            k: _mean([gold_recall(q, _names(found[:k])) for q, found in with_gold]) for k in DEPTHS
        },
    )


def _names(passages: Sequence[Passage]) -> list[tuple[str, str]]:
    return [(passage.id, passage.title) for passage in passages]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
