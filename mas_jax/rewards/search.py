"""Rewards of single search agents: of the whole episode, and of each search.

Pure functions of a Trace, strings and numbers. Every reward is of what the agent itself wrote: its
prediction is the last answer it gave, never text of its prompt or of a passage.
Must not know: which role programme uses a reward, where passages come from.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from mas_jax.records import Trace
from mas_jax.rewards.exact_match import normalize_answer, words_f1

# words of a sub-question that no search needs
_FUNCTION_WORDS = frozenset(
    (
        "what", "which", "who", "whom", "whose", "when", "where", "why", "how", "is", "are", "was",
        "were", "be", "been", "do", "does", "did", "has", "have", "had", "of", "in", "on", "at",
        "by", "for", "from", "to", "with", "and", "or", "that", "this", "it", "its",
    )
)  # fmt: skip
_REFERENCE = re.compile(r"#\d+")  # to the answer of an earlier sub-question


def is_well_formed(agent: Trace) -> bool:
    """Whether every turn of an agent was a valid action and the last one its answer.

    Source: Search-R1's qa_em_format.py asks for thoughts in tags of their own and nothing between
    tags; our protocol lets thoughts stand free before the one action, so that is what is checked.
    """
    actions = [turn.action for turn in agent.turns]
    return bool(actions) and actions[-1] == "answer" and "invalid" not in actions


def format_tiers(correct: float, is_valid: bool, is_answered: bool) -> float:
    """1 if correct and valid, 0.8 if correct alone, 0.2 if valid alone, 0.1 for another answer, 0
    without one.

    `correct` between 0 and 1 lies between its tiers. Source: Search-R1 v0.3, qa_em_format.py, and
    Tree-GRPO's scripts; the retrieval score is 0 there by default. The 0.1 and 0 are what the
    published scorer means to give and does not (METHODS 4.1).
    """
    if not is_answered:
        return 0.0
    high, low = (1.0, 0.2) if is_valid else (0.8, 0.1)
    return low + (high - low) * correct


def f1_or_format(f1: float, is_valid: bool) -> float:
    """F1 if above 0, else 0.1 if the format is valid, else 0.

    Source: ReSearch (arXiv 2503.19470). It has the answer boxed inside its tags; ours is the text
    between the tags.
    """
    return f1 if f1 > 0 else 0.1 * is_valid


def f1_and_keys(f1: float, key_f1: float, *, weight: float) -> float:
    """F1 of the answer plus weight times that of the search keys.

    Source: StepSearch (arXiv 2505.15107), where the weight is 0.618.
    """
    return f1 + weight * key_f1


def key_words(text: str) -> list[str]:
    """The normalised words of a query or sub-question without function words and references."""
    words = normalize_answer(_REFERENCE.sub(" ", text)).split()
    return [word for word in words if word not in _FUNCTION_WORDS]


def search_key_f1(queries: Sequence[str], decomposition: Sequence[str]) -> float:
    """Mean over sub-questions of the best F1 of any query's key words with theirs, in [0, 1].

    0.0 without queries or without a decomposition; a sub-question without key words is left out.
    Source: StepSearch; it had a model write key words for each sub-question, which are its own
    words here.
    """
    asked = [key_words(query) for query in queries]
    keys = [words for part in decomposition if (words := key_words(part))]
    if not asked or not keys:
        return 0.0
    return sum(max(words_f1(query, key) for query in asked) for key in keys) / len(keys)


def search_progress(
    found: Sequence[Sequence[str]], gold: Sequence[str], texts: Mapping[str, str]
) -> list[float]:
    """Reward of each search, in order: information gain less redundancy, in [-1, 1].

    found: ids of what each search brought; gold: texts of the passages that hold the facts; texts:
    by id. Gain: mean over gold passages of how far the search's best match with it rises above the
    best of earlier searches (0 before the first). Redundancy: share of its passages that earlier
    searches had found. A search that found nothing has 0; without gold passages there is no gain.
    Match: cosine of TF-IDF vectors, whose document frequencies are those among the gold passages,
    so that it does not depend on what else was found.
    Source: StepSearch, its step reward; which texts its frequencies are of is not stated.
    """
    weights = _inverse_frequencies(gold)
    gold_vectors = [_unit_vector(text, weights) for text in gold]
    best, seen, rewards = [0.0] * len(gold), set(), []
    for names in found:
        vectors = [_unit_vector(texts[name], weights) for name in names]
        now = [
            max((_cosine(vector, wanted) for vector in vectors), default=0.0)
            for wanted in gold_vectors
        ]
        rises = [max(new - old, 0.0) for new, old in zip(now, best, strict=True)]
        gain = sum(rises) / len(rises) if rises else 0.0
        redundancy = sum(name in seen for name in names) / len(names) if names else 0.0
        rewards.append(gain - redundancy)
        best = [max(pair) for pair in zip(now, best, strict=True)]
        seen.update(names)
    return rewards


# --- TF-IDF ---------------------------------------------------------------------------------------


def _inverse_frequencies(texts: Sequence[str]) -> Mapping[str, float]:
    """ln((1 + n) / (1 + df)) + 1 of each word of n texts; "" stands for a word of none."""
    counts = Counter(word for text in texts for word in set(normalize_answer(text).split()))
    n = len(texts)
    return {word: math.log((1 + n) / (1 + df)) + 1 for word, df in counts.items()} | {
        "": math.log(1 + n) + 1
    }


def _unit_vector(text: str, weights: Mapping[str, float]) -> dict[str, float]:
    counts = Counter(normalize_answer(text).split())
    vector = {word: n * weights.get(word, weights[""]) for word, n in counts.items()}
    norm = math.sqrt(math.fsum(value * value for value in vector.values()))
    return {word: value / norm for word, value in vector.items()}


def _cosine(left: Mapping[str, float], right: Mapping[str, float]) -> float:
    """Cosine of two unit vectors without negative entries; at most 1, whatever is rounded."""
    return min(1.0, math.fsum(value * right[word] for word, value in left.items() if word in right))
