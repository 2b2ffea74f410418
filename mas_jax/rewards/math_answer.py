"""The answer of a worked solution, and whether it equals the one that counts as right.

Both run without limits of time or memory: text that a model wrote goes through `math_workers`.
Must not know: whose answer it is, which set of problems it is for.
"""

import logging
import re
from collections.abc import Mapping, Sequence

MATCH_TYPES = ("latex", "expr")
DEFAULTS = {
    "match_types": MATCH_TYPES,
    "precision": 6,
    "strict": True,
    "allow_set_relation_comp": False,
}

# a backslash may have been escaped once more on its way through JSON
_PIECE = re.compile(r"\\+(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
# what says where the mathematics of a text is; an answer alone has none of it
_DELIMITER = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\(?:boxed|fbox)\b")
_COMMAND = re.compile(r"\\(?:text\w*|mbox|mathrm|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
# at the end of a box; the parser takes it for multiplication. `\right.` is half of a pair
_FULL_STOP = re.compile(r"(?<!\\right)[\s.,;]+$")
_WORD = re.compile(r"[A-Za-z]{2,}")


def extract(text: str) -> str | None:
    """What stands in the last complete box of a text, None where there is none.

    A box is `\\boxed{…}` or `\\fbox{…}` with the brace that closes it; `\\{` and `\\}` are signs,
    not braces. Of a box in a box it is the inner one. A blank box is none: prompts and models name
    the empty command. Linear in the text.
    """
    open_braces: list[int | None] = []  # where the content of a box starts, None for other braces
    start, content = -1, None
    for piece in _PIECE.finditer(text):
        sign = piece[0]
        if sign == "}":
            opened = open_braces.pop() if open_braces else None
            if opened is not None and opened > start and text[opened : piece.start()].strip():
                start, content = opened, text[opened : piece.start()].strip()
        elif sign.endswith("{") and sign != "\\{":
            open_braces.append(piece.end() if len(sign) > 1 else None)
    return content


def graded_text(text: str, *, window: int) -> str | None:
    """What of a solution is compared with the answer: its last box, None without one; with a
    window its last `window` characters, as AgentPO's authors have it (300), None of no text.

    Source: METHODS §3.2.
    """
    return (text[-window:] or None) if window else extract(text)


def is_equivalent(gold: str, prediction: str, *, options: Mapping | None = None) -> bool:
    """Whether a prediction says the same number, expression, set or relation as the gold answer.

    Equal texts are equal; all else is math-verify's verdict, in which the order of the two matters
    (an equation x = 5 is answered by 5). Each is an answer alone, such as the content of a box, or
    a text in which the library looks for it by delimiters and by words such as "answer".
    options: any of `DEFAULTS`: match_types, what is looked for, "latex" in delimiters and "expr",
    plain numbers; precision, decimals in which floats must agree; strict, whether names of
    variables count and sets are not tuples; allow_set_relation_comp, whether a relation may answer
    where a set is asked. No signal is set, in whichever thread.
    Raises: ValueError for an option that is not known.
    Source: huggingface/Math-Verify 0.9.
    """
    if unknown := sorted(set(options or {}) - DEFAULTS.keys()):
        raise ValueError(f"options {unknown} are unknown; there are {sorted(DEFAULTS)}")
    chosen = DEFAULTS | dict(options or {})
    if gold.strip() == prediction.strip():
        return bool(gold.strip())
    from math_verify import verify  # takes a second to import, and only this needs it

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it sets no signal
    types = chosen["match_types"]
    return verify(
        _parse(gold, types),
        _parse(prediction, types),
        float_rounding=chosen["precision"],
        strict=chosen["strict"],
        allow_set_relation_comp=chosen["allow_set_relation_comp"],
        timeout_seconds=None,
    )


def _parse(text: str, match_types: Sequence[str]) -> list:
    """The expression that a text holds, and its words, as math-verify's `parse` gives them."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    kinds = {"latex": LatexExtractionConfig(), "expr": ExprExtractionConfig()}
    if unknown := sorted(set(match_types) - kinds.keys()):
        raise ValueError(f"match_types {unknown} are unknown; there are {sorted(kinds)}")
    if "latex" in match_types and is_bare(text):
        text = f"${_FULL_STOP.sub('', text)}$"
    return parse(text, [kinds[kind] for kind in match_types], parsing_timeout=None)


def is_bare(text: str) -> bool:
    """Whether a text is an answer alone, in LaTeX without delimiters, and no sentence with one."""
    return not _DELIMITER.search(text) and len(_WORD.findall(_COMMAND.sub(" ", text))) < 3
