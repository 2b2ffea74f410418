r"""Integers as answers: the last complete box or answer tag of a text, compared as numbers.

For toy mathematics, whose answers are integers. Must not know: expressions, units, sets.
"""

import re

from mas_jax.rewards import math_answer

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_INTEGER = re.compile(r"[+-]?\d{1,300}")


def extract(text: str) -> str | None:
    r"""The content of the last complete `\boxed{}` of a text, else of the last complete
    `<answer>` tag; None without either, and for an empty one."""
    found = math_answer.extract(text)
    if found is None:
        tags = _TAG.findall(text)
        found = tags[-1] if tags else ""
    return found.strip() or None


def same_integer(first: str, second: str) -> bool:
    """Whether two texts write the same integer, such as 033 and 33."""
    pair = [_INTEGER.fullmatch(text.strip()) for text in (first, second)]
    return None not in pair and int(pair[0][0]) == int(pair[1][0])


def integer_match(prediction: str, golden_answers: tuple[str, ...]) -> float:
    """1.0 if the prediction is the same integer as a golden answer, else 0.0."""
    return float(any(same_integer(prediction, answer) for answer in golden_answers))
