"""Exact match and token F1 of a short answer against every answer that counts as right.

Must not know: how the prediction was extracted. Score only text that the Answerer produced; a
passage may well contain an answer tag.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from mas_jax.records import Question

_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
# TriviaQA's script adds two typographic quotation marks and the acute accent to the ASCII ones
_TRIVIAQA_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "\u2018\u2019\u00b4", " "))
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# an answer of this kind shares no partial credit with any other answer
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})

Normalizer = Callable[[str], str]


def normalize_answer(text: str) -> str:
    """The text in lower case, without ASCII punctuation and articles, single-spaced.

    Punctuation is deleted, not replaced ("Jay-Z" is "jayz", "1,000" is "1000"); accents and
    typographic quotation marks stay. Source: SQuAD v1.1's evaluation script, steps in its order.
    """
    without_punctuation = text.lower().translate(_ASCII_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", without_punctuation).split())


def normalize_triviaqa(text: str) -> str:
    """The text as TriviaQA's script compares it: punctuation becomes a space, not nothing.

    For comparing with numbers that were scored so; never mix the two in one table.
    """
    spaced = text.lower().translate(_TRIVIAQA_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", spaced).split())


def exact_match(
    prediction: str, golden_answers: Sequence[str], *, normalize: Normalizer = normalize_answer
) -> float:
    """1.0 if the normalised prediction equals any normalised golden answer, else 0.0.

    What normalises to nothing ("", "The", "?!") never matches, on either side.
    Raises: TypeError if golden_answers is one string, whose characters would be the answers.
    """
    predicted = normalize(prediction)
    golds = [normalize(gold) for gold in _as_answers(golden_answers)]
    return float(predicted != "" and predicted in golds)


async def exact_match_reward(question: Question, predictions: tuple[str, ...]) -> tuple[float, ...]:
    """1.0 for every prediction that matches a golden answer, else 0.0."""
    return tuple(exact_match(text, question.golden_answers) for text in predictions)


def token_f1(
    prediction: str, golden_answers: Sequence[str], *, normalize: Normalizer = normalize_answer
) -> float:
    """Largest F1, over golden answers, of the two normalised answers as bags of words.

    yes, no and noanswer score 0.0 against everything but themselves, so "yes, both" earns nothing
    against "yes". Raises: TypeError if golden_answers is one string.
    Source: FlashRAG and HotpotQA's evaluation.
    """
    predicted = normalize(prediction)
    golds = [normalize(gold) for gold in _as_answers(golden_answers)]
    return max((_bag_f1(predicted, gold) for gold in golds), default=0.0)


def _bag_f1(predicted: str, gold: str) -> float:
    if predicted != gold and not _CLOSED_ANSWERS.isdisjoint((predicted, gold)):
        return 0.0
    return words_f1(predicted.split(), gold.split())


def words_f1(predicted_words: Sequence[str], gold_words: Sequence[str]) -> float:
    """F1 of two bags of words; 0.0 if they share none."""
    num_common = (Counter(predicted_words) & Counter(gold_words)).total()
    if num_common == 0:
        return 0.0
    precision, recall = num_common / len(predicted_words), num_common / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def _as_answers(golden_answers: Sequence[str]) -> Sequence[str]:
    if isinstance(golden_answers, str):
        raise TypeError(f"golden_answers={golden_answers!r} is one string; pass a sequence of them")
    return golden_answers
