"""A second opinion on two mathematical answers, in the manner of Qwen2.5-Math's `math_equal`.

The field's published accuracies come from that grader. It reads a percentage as its number, takes
numbers within 1e-4 of each other as equal, and looks at tuples, matrices and equations part by
part before it asks for symbolic equality. Where it is known to be wrong this one differs: brackets
of intervals must agree. Like it, it knows no thousands separated by `{,}`. Without limits of time
or memory, as `math_answer`. Must not know: math-verify, sets of problems.
"""

import math
import re
from collections.abc import Callable, Sequence

TOLERANCE = 1e-4  # relative, of numbers

_DROPPED = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|(?<!\\)\\!\s*|(?<!\\)\\[,;: ]"
    r"|\^\s*\{?\s*\\circ\s*\}?|\\degree|\\?[$%]|~|\\(?:displaystyle|quad|qquad)(?![a-z])"
)
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|textit|mathbf)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"(?<=[\d}])\s*\\(?:text|textbf|mbox|mathrm)\s*\{[^{}]*\}(?:\^\{?\d\}?)?$")
_UNIT_WORDS = re.compile(r"(?<=\d)\s+(?!pi\b)[A-Za-z]{2,}[A-Za-z ]*(?:\^\{?\d\}?)?$")
_SHORT_FRACTION = re.compile(r"\\frac\s*([0-9A-Za-z])\s*([0-9A-Za-z])")
_HALF_FRACTION = re.compile(r"\\frac\s*(\{[^{}]*\})\s*([0-9A-Za-z])|\\frac\s*([0-9A-Za-z])\s*(\{)")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9A-Za-z])")
_CALL_ROOT = re.compile(r"(?<!\\)\bsqrt\(([^()]*)\)")
_SUBSCRIPT = re.compile(r"_\{(\w+)\}")
_MEMBER = re.compile(r"^[A-Za-z]\s*\\in(?![a-z])\s*")
_NAMES = re.compile(r"[A-Za-z]\w?|[A-Za-z]\([A-Za-z]\)|\([A-Za-z](?:,\s*[A-Za-z])+\)")
_BASE = re.compile(r"\d_\d")  # a number to another base, which the parser reads as decimal
_FLOAT = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_FRACTION = re.compile(r"([+-]?)\\frac\{([+-]?[\d.]+)\}\{([+-]?[\d.]+)\}|([+-]?[\d.]+)/([\d.]+)")
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix)\}(.*)\\end\{\1\}", re.DOTALL)
_OPENING, _CLOSING = "([{", ")]}"


def math_equal(gold: str, prediction: str) -> bool:
    """Whether two answers, each the content of a box, are the same in value or form.

    Source: QwenLM/Qwen2.5-Math, evaluation/grader.py, for what is compared with what; the
    module says where this differs.
    """
    return _equal(normalise(gold), normalise(prediction))


def normalise(text: str) -> str:
    """The answer without what says nothing of its value: spacing, dollar, per cent and degree
    signs, the name of what lies in a set, a unit behind a number, a full stop; fractions and roots
    with all their braces."""
    text = text.strip().strip("$").strip().rstrip(".")
    text = text.replace("\n", " ").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = text.replace("\\cfrac", "\\frac").replace("\\le ", "\\leq ").replace("\\ge ", "\\geq ")
    text = _DROPPED.sub("", text).strip()
    text = _UNIT_WORDS.sub("", _UNIT.sub("", text))
    text = _TEXT.sub(lambda match: match[1].strip(), text)
    text = _CALL_ROOT.sub(r"\\sqrt{\1}", _SHORT_ROOT.sub(r"\\sqrt{\1}", text))
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _HALF_FRACTION.sub(_with_braces, text)
    text = _SUBSCRIPT.sub(r"_\1", _MEMBER.sub("", text))
    return " ".join(text.split())


def _with_braces(match: re.Match) -> str:
    if match[1] is not None:
        return f"\\frac{match[1]}{{{match[2]}}}"
    return f"\\frac{{{match[3]}}}{match[4]}"


def number(text: str) -> float | None:
    """The value of a decimal number, with commas between thousands, or of a fraction of two; None
    for all else, infinities too."""
    plain = text.replace(",", "") if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?", text) else text
    plain = plain.replace(" ", "")
    if _FLOAT.fullmatch(plain):
        value = float(plain)
        return value if math.isfinite(value) else None
    match = _FRACTION.fullmatch(plain)
    if match is None:
        return None
    sign = -1.0 if match[1] == "-" else 1.0
    try:
        value = sign * float(match[2] or match[4]) / float(match[3] or match[5])
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _equal(gold: str, prediction: str) -> bool:
    """Normalised answers: by their words, then as numbers, then part by part, then as symbols."""
    if not gold or not prediction:
        return False
    if gold.replace(" ", "").casefold() == prediction.replace(" ", "").casefold():
        return True
    numbers = number(gold), number(prediction)
    if None not in numbers:
        return _near(*numbers)
    for parts in (_matrix, _union, _bracketed, _set, _listed):
        of_gold, of_prediction = parts(gold), parts(prediction)
        if of_gold is not None or of_prediction is not None:
            if of_gold is None or of_prediction is None or of_gold[0] != of_prediction[0]:
                break
            agree = unordered if parts in (_union, _set, _listed) else _in_order
            return agree(of_gold[1], of_prediction[1], _equal)
    if "=" in gold or "=" in prediction:
        return _equal_equations(gold, prediction)
    return _equal_symbols(gold, prediction)


def _near(gold: float, prediction: float) -> bool:
    """Also with either of them read as a percentage."""
    return any(
        math.isclose(value, prediction, rel_tol=TOLERANCE)
        for value in (gold, gold / 100, gold * 100)
    )


Parts = tuple[str, list[str]] | None  # what holds them together, which must agree, and they


def _matrix(text: str) -> Parts:
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    rows = [row.split("&") for row in re.split(r"\\\\", match[2]) if row.strip()]
    shape = "x".join(str(len(row)) for row in rows)
    return f"matrix {shape}", [cell.strip() for row in rows for cell in row]


def _union(text: str) -> Parts:
    parts = split(text, "\\cup")
    return ("union", parts) if len(parts) > 1 else None


def _bracketed(text: str) -> Parts:
    """A tuple, an interval or a point: in round or square brackets that hold at least two."""
    if text[0] not in "([" or text[-1] not in ")]" or len(split(text, "=")) > 1:
        return None
    parts = split(text[1:-1], ",")
    return (text[0] + text[-1], parts) if len(parts) > 1 else None


def _set(text: str) -> Parts:
    if not (text.startswith("\\{") and text.endswith("\\}")):
        return None
    return "set", split(text[2:-2], ",")


def _listed(text: str) -> Parts:
    parts = split(re.sub(r"\s+(?:and|or)\s+", ",", text), ",")
    return ("list", parts) if len(parts) > 1 and number(text) is None else None


def split(text: str, separator: str) -> list[str]:
    """The pieces of a text between separators that stand in no brackets, stripped, without blank
    ones. Half-open intervals are brackets as well."""
    pieces, depth, start, at = [], 0, 0, 0
    while at < len(text):
        if text[at] in _OPENING:
            depth += 1
        elif text[at] in _CLOSING:
            depth -= 1
        elif depth == 0 and text.startswith(separator, at):
            pieces.append(text[start:at])
            start = at = at + len(separator)
            continue
        at += 1
    return [piece.strip() for piece in [*pieces, text[start:]] if piece.strip()]


Equal = Callable[[str, str], bool]


def _in_order(gold: Sequence[str], prediction: Sequence[str], equal: Equal) -> bool:
    return len(gold) == len(prediction) and all(map(equal, gold, prediction))


def unordered(gold: Sequence[str], prediction: Sequence[str], equal: Equal) -> bool:
    """Whether each part of the one has a part of the other to itself, the first that equals it."""
    if len(gold) != len(prediction):
        return False
    left = list(prediction)
    for part in gold:
        found = next((other for other in left if equal(part, other)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _equal_equations(gold: str, prediction: str) -> bool:
    """Two equations with one "=" each, up to sign; or a variable's value against the value."""
    sides = gold.split("="), prediction.split("=")
    if len(sides[0]) == len(sides[1]) == 2:
        if sides[0][0].strip() == sides[1][0].strip() and _equal(*(s[1].strip() for s in sides)):
            return True
        one, other = (f"({left})-({right})" for left, right in sides)
        return _equal_symbols(one, other) or _equal_symbols(one, f"-({other})")
    values = [_value_of(side) for side in sides]
    return None not in values and len(sides[0]) != len(sides[1]) and _equal(*values)


def _value_of(sides: Sequence[str]) -> str | None:
    """What an equation says that its variable, tuple of variables or function is, or all of a text
    that is no equation; None for another equation."""
    if len(sides) == 1:
        return sides[0]
    return sides[1].strip() if len(sides) == 2 and _NAMES.fullmatch(sides[0].strip()) else None


def _equal_symbols(gold: str, prediction: str) -> bool:
    """Whether sympy sees one value, function or object in two LaTeX expressions."""
    import sympy  # takes a second to import, and only this needs it

    one, other = _parse(gold), _parse(prediction)
    if one is None or other is None:
        return False
    if one == other:
        return True
    try:
        difference = sympy.simplify(one - other)
        if difference == 0:
            return True
        return not difference.free_symbols and _near(float(sympy.N(one)), float(sympy.N(other)))
    except (TypeError, ValueError, AttributeError, NotImplementedError):
        return False  # sets, relations, matrices of other shapes, complex numbers


def _parse(text: str):
    """A LaTeX expression as sympy's, None if it is none. No text is ever evaluated as Python."""
    from latex2sympy2_extended import latex2sympy

    if _BASE.search(text):
        return None
    try:
        found = latex2sympy(text.replace("**", "^"), normalization_config=None)
        return found.doit()
    except MemoryError:
        raise
    except Exception:  # the parser raises bare Exceptions
        return None
