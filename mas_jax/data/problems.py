"""Mathematical problems as `Problem`: the test sets, and what MATH and GSM8K have to train on.

Files are JSONL as `data/questions.py` reads it; what a set says of its problems stands in their
metadata: level, subject, the tolerance of OlympiadBench. Must not know: how answers are compared.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from mas_jax.data import questions
from mas_jax.data.questions import Source, jsonl
from mas_jax.records import Problem

# amc23 is the field's 40 problems of 2023, amc83 its 83 of 2022 and 2023
TEST_SETS = ("aime24", "amc23", "amc83", "math500", "minerva_math", "olympiadbench", "gsm8k")
_DATASET = re.compile(rf"({'|'.join(sorted(TEST_SETS, key=len, reverse=True))}|math)(_train\d*)?")


def dataset_of(path: Path) -> str | None:
    """The set that a file is named for, such as math of math_train.jsonl and gsm8k of
    gsm8k_train2000.jsonl; None for a file of anything else."""
    match = _DATASET.fullmatch(path.stem)
    return match[1] if match else None


def parse(line: Mapping, *, dataset: str, split: str) -> Problem:
    """One line of a set of problems.

    `uid` is dataset/split/id. Levels may be written 3 or "Level 3"; others ("Level ?") are 0.
    Raises: ValueError as `questions.parse`, and for a tolerance that is no number.
    """
    question = questions.parse(line, dataset=dataset, split=split)
    metadata = line.get("metadata") or {}
    level = re.search(r"\d+", str(metadata.get("level", "")))
    subject = next(filter(None, map(metadata.get, ("subject", "subfield", "type"))), "")
    return Problem(
        **vars(question),
        level=int(level[0]) if level else 0,
        subject=subject,
        tolerance=float(metadata.get("error") or 0.0),
        is_multiple=bool(metadata.get("is_multiple_answer")),
    )


def read(source: Source) -> tuple[Problem, ...]:
    """The problems of a source, in order. Raises: as `questions.read`."""
    return questions.read(source, parse=parse)


def read_jsonl(path: Path, *, split: str) -> tuple[Problem, ...]:
    """The problems of a file that is named for its set, in order.

    Raises: as `questions.read_jsonl`; ValueError for another name.
    """
    dataset = dataset_of(path)
    if dataset is None:
        raise ValueError(
            f"{path} is named for no set of problems; name it SET.jsonl, SET of "
            f"{('math', *TEST_SETS)}, or SET_train.jsonl"
        )
    return read(jsonl(path, dataset=dataset, split=split))


def as_line(problem: Problem, extra: Mapping) -> dict:
    """A problem as a line that `parse` reads again as the same problem, under the same split.

    extra: more metadata, such as how often an Actor was right.
    """
    metadata = {
        "level": problem.level,
        "subject": problem.subject,
        "error": problem.tolerance or None,
        "is_multiple_answer": problem.is_multiple,
    }
    _, split, name = problem.uid.split("/", 2)
    return {
        "id": name,
        "question": problem.text,
        "golden_answers": list(problem.golden_answers),
        "metadata": metadata | {"split": split} | dict(extra),
    }


def write_jsonl(path: Path, lines: Iterable[Mapping]) -> None:
    """Writes lines at once: a kill leaves no file or a whole one."""
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    questions.write_jsonl(partial, lines)
    partial.replace(path)
