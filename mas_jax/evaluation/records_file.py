"""The records of an evaluation: JSON lines, a header and then one line an episode.

The header says which evaluation the file belongs to. A line counts once its newline is written, so
a process may be killed at any byte. Must not know: how episodes are played or scored.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mas_jax.evaluation import episode_json
from mas_jax.records import Episode, Question, question_fields

FORMAT = 1
_NO_HEADER = "{} is not a file of records: its first line is no header"


@dataclass(frozen=True)
class Plan:
    """What an evaluation plays: every question `num_runs` times by one team.

    settings: JSON values; everything else that the results depend on (policy, sampling, seed,
    index, prompts). They are written into the records and must be equal on a resume.
    name: what tables call this team with these weights; the team's own where empty.
    """

    team: str
    questions: tuple[Question, ...]
    num_runs: int
    settings: Mapping
    name: str = ""

    @property
    def label(self) -> str:
        """The name in tables."""
        return self.name or self.team


def check_plan(plan: Plan) -> None:
    """Raises: ValueError if the plan is empty or names a question twice."""
    times = Counter(question.uid for question in plan.questions)
    repeated = sorted(uid for uid, number in times.items() if number > 1)
    if repeated:
        raise ValueError(f"question {repeated[0]!r} is planned more than once; make uids unique")
    if not times or plan.num_runs < 1:
        raise ValueError(f"{len(times)} questions, num_runs={plan.num_runs}; want at least 1 each")


def fingerprint(questions: tuple[Question, ...]) -> str:
    """Hash of the questions with all their fields, in whatever order they come."""
    ordered = sorted(map(question_fields, questions), key=lambda value: value["uid"])
    return hashlib.blake2b(json.dumps(ordered).encode(), digest_size=16).hexdigest()


def resume(path: Path, plan: Plan) -> set[tuple[str, int]]:
    """(question, rollout) of every episode in the file, which is made ready to be appended to.

    A new file gets its header; a cut last line is removed, and from a file that is
    unfinished, or has no other, every episode that the world failed: it is played again.
    Raises: ValueError if the file belongs to another evaluation or a whole line is damaged.
    """
    check_plan(plan)
    header = _header_line(plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    if path.stat().st_size < len(header) and header.startswith(path.read_bytes()):
        path.write_bytes(header)
    episodes = list(read(path, plan))
    kept = [episode for episode in episodes if episode.failure is None]
    if not kept or len(episodes) < len(plan.questions) * plan.num_runs:
        if len(kept) < len(episodes):
            _remove_failed(path)
        episodes = kept
    with path.open("rb+") as file:
        file.truncate(sum(len(line) for line in _whole_lines(path)))
    return {(episode.question, episode.rollout) for episode in episodes}


def _remove_failed(path: Path) -> None:
    """Leaves the header and the episodes that did not fail, in a file that is whole at any time."""
    lines, kept = _whole_lines(path), path.with_name(path.name + ".kept")
    with kept.open("wb") as file:
        file.write(next(lines))
        file.writelines(line for line in lines if json.loads(line)["episode"]["failure"] is None)
    kept.replace(path)


def read(path: Path, plan: Plan) -> Iterator[Episode]:
    """The recorded episodes of a plan, in the order they ended; a cut last line is left out.

    Raises: ValueError as in `resume`, naming the line.
    """
    lines = _whole_lines(path)
    _check_header(path, next(lines, b""), plan)
    yield from (episode_json.from_json(record["episode"]) for record in _records(path, lines))


def read_any(path: Path) -> tuple[dict, dict[str, Question], list[Episode]]:
    """The header of a file of whatever plan, its questions by uid, with what it holds of them, and
    its episodes. Raises: ValueError as in `resume`."""
    lines = _whole_lines(path)
    try:
        header = dict(json.loads(next(lines, b"")))
    except (ValueError, TypeError) as error:
        raise ValueError(_NO_HEADER.format(path)) from error
    if header.get("format") != FORMAT:
        raise ValueError(_NO_HEADER.format(path))
    records = list(_records(path, lines))
    episodes = [episode_json.from_json(record["episode"]) for record in records]
    questions = {
        episode.question: Question(
            episode.question, record["dataset"], record["text"], tuple(record["golden_answers"])
        )
        for record, episode in zip(records, episodes, strict=True)
    }
    return header, questions, episodes


def _records(path: Path, lines: Iterator[bytes]) -> Iterator[dict]:
    """What the lines behind the header hold."""
    for number, line in enumerate(lines, start=2):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: damaged record ({error})") from error


def record_line(question: Question, episode: Episode) -> bytes:
    """One line: the episode, and what a reader needs of its question to judge it."""
    record = {
        "dataset": question.dataset,
        "text": question.text,
        "golden_answers": question.golden_answers,
        "episode": episode_json.to_json(episode),
    }
    return _json_line(record)


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def _json_line(value: Mapping) -> bytes:
    return json.dumps(value, allow_nan=False, sort_keys=True).encode() + b"\n"


def _header_line(plan: Plan) -> bytes:
    return _json_line(
        {
            "format": FORMAT,
            "team": plan.team,
            "num_runs": plan.num_runs,
            "num_questions": len(plan.questions),
            "questions": fingerprint(plan.questions),
            "settings": dict(plan.settings),
        }
    )


def _check_header(path: Path, line: bytes, plan: Plan) -> None:
    wanted_line = _header_line(plan)
    if line == wanted_line:
        return
    try:
        there = _flat(json.loads(line))
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(_NO_HEADER.format(path)) from error
    here = _flat(json.loads(wanted_line))
    differences = [
        f"{key} is {there.get(key)!r} there, {here.get(key)!r} here"
        for key in sorted({*here, *there})
        if there.get(key) != here.get(key)
    ]
    raise ValueError(
        f"{path} belongs to another evaluation: {'; '.join(differences)}. "
        "Write to another path, or delete the file to start again"
    )


def _flat(header: dict) -> dict:
    """The header with each setting beside the other fields, as "settings.name"."""
    settings = {f"settings.{key}": value for key, value in header["settings"].items()}
    return {**{key: value for key, value in header.items() if key != "settings"}, **settings}
