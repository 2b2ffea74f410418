"""Builds protocols of many questions into one JSONL file, a record a line, and reads them again.

A question whose endpoint or retriever failed has no line: the same command tries it again. Must not
know: which endpoint, training.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mas_jax.agents.agent import run_all
from mas_jax.agents.protocol import Protocol
from mas_jax.agents.protocol_team import Desk, Record, work_on
from mas_jax.agents.rollout import TooManyFailures
from mas_jax.records import Question, WorldError

MIN_FAILURES = 10  # fewer are an endpoint's bad moment


def read(path: Path) -> list[dict]:
    """The records of a file, [] without one; a last line that a kill cut is left out.

    Raises: ValueError for another line that is no record.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")  # a kill may have cut a character
    found = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            found.append(json.loads(line.decode()))
        except ValueError as error:
            if number == len(lines):  # no line end behind it
                break
            raise ValueError(f"{path}, line {number} is no record: {error}") from error
    return found


def check_kind(path: Path, *, is_alone: bool, normalise_style: bool) -> None:
    """Raises: ValueError for a file that cannot be read, or holds records of the other kind: of the
    team where one model shall work alone, of another treatment of style, or the reverse."""
    for record in read(path):
        if record.get("is_alone", False) != is_alone:  # a record of before says nothing
            kinds = ("the team", "one model alone")
            raise ValueError(
                f"{path} holds records of {kinds[not is_alone]}, and these would be of "
                f"{kinds[is_alone]}; name another file"
            )
        if record["protocol"] is not None and (record["cleaned"] is not None) != normalise_style:
            raise ValueError(
                f"{path} holds protocols with{'out' * normalise_style} normalised style, and these "
                f"would be with{'out' * (not normalise_style)} it; name another file"
            )


def read_protocols(path: Path) -> dict[str, Protocol]:
    """The protocols that passed, by question. Raises: FileNotFoundError; ValueError for a question
    that has two records."""
    if not path.exists():
        raise FileNotFoundError(f"no protocols at {path}; make them with launch/build_protocols.py")
    found: dict[str, Protocol] = {}
    seen: set[str] = set()
    for record in read(path):
        if record["question"] in seen:
            raise ValueError(f"{path} has two records of {record['question']!r}; delete one")
        seen.add(record["question"])
        if record["protocol"] is not None:
            found[record["question"]] = record["protocol"]
    return found


async def build(
    questions: Sequence[Question], desks: Sequence[Desk], path: Path, *, concurrency: int,
    failure_frac: float, tell: Callable[[int, int, int], None] = lambda *_: None,
) -> None:  # fmt: skip
    """Writes the records that a file lacks; question i is worked on at desk i modulo their number.

    tell(done, of, failed): called after each question. Raises: TooManyFailures once more than
    failure_frac of the questions of this run failed, and MIN_FAILURES; what is written stays.
    """
    _cut_tail(path)
    known = {record["question"] for record in read(path)}
    jobs = [
        (question, desks[number % len(desks)])
        for number, question in enumerate(questions) if question.uid not in known
    ]  # fmt: skip
    waiting, done, failures = iter(jobs), 0, []

    async def _worker(file) -> None:
        nonlocal done
        for question, desk in waiting:  # shared: each is drawn once
            try:
                record = await work_on(question, desk)
            except WorldError as error:
                failures.append(str(error))
            else:
                file.write(as_line(record))
                file.flush()
            done += 1
            tell(done, len(jobs), len(failures))
            if len(failures) >= MIN_FAILURES and len(failures) > failure_frac * done:
                raise TooManyFailures(
                    f"{len(failures)} of {done} questions failed, such as: {failures[0]}; "
                    f"{len(read(path))} are in {path}, and the same command goes on"
                )

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        await run_all(_worker(file) for _ in range(concurrency))


def as_line(record: Record) -> str:
    """A record as one line of JSON."""
    return json.dumps(dataclasses.asdict(record), ensure_ascii=False) + "\n"


def summarise(records: Sequence[Mapping]) -> str:
    """What a build gave, as lines of text: of all, and of each writer where there are several. A
    right protocol passed its gates and holds an answer, which is then the golden one; its share is
    of the writer's questions."""
    models = sorted({record["model"] for record in records})
    groups = {"all": records} | (
        {m: [r for r in records if r["model"] == m] for m in models} if len(models) > 1 else {}
    )
    return "\n".join(_line(name, group) for name, group in groups.items())


def _line(name: str, records: Sequence[Mapping]) -> str:
    number = max(len(records), 1)
    reasons: dict[str, int] = {}
    for record in records:
        if record["reason"]:
            reasons[record["reason"]] = reasons.get(record["reason"], 0) + 1
    passed = sum(record["protocol"] is not None for record in records)
    correct = sum(record["is_correct"] for record in records)
    # one of the evidence variant may come of work that answered rightly, and answers nothing
    right = sum(bool(record["protocol"]) and "answer" in record["protocol"] for record in records)
    means = {
        key: sum(record[key] for record in records) / number
        for key in ("calls", "input_tokens", "output_tokens", "repairs", "malformed")
    }
    costs = [record["cost"] for record in records]
    money = "price unknown" if None in costs else f"cost {sum(costs):.4f}"
    rejected = ", ".join(f"{k} {v}" for k, v in sorted(reasons.items())) or "none"
    return (
        f"{name}: {passed} of {len(records)} passed, {correct} answered rightly, right protocols "
        f"{right / number:.1%}; rejected: "
        f"{rejected}; a question: {means['calls']:.1f} calls, {means['input_tokens']:,.0f} + "
        f"{means['output_tokens']:,.0f} tokens, {means['repairs']:.2f} repairs, "
        f"{means['malformed']:.2f} malformed replies; {money}"
    )


def _cut_tail(path: Path) -> None:
    """Takes a last line away that a kill cut."""
    if path.exists():
        text = path.read_bytes()
        if not text.endswith(b"\n"):
            os.truncate(path, text.rfind(b"\n") + 1)
