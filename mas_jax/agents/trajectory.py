"""Raw trajectories of a teacher: what it looked for, asked, found and answered, as turns.

They come from a protocol's record, and a `sample` function takes them again. Passages are no part
of them: who takes the turns searches anew, so that what is imitated stands behind what the student
would be shown. Must not know: who wrote the record, training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mas_jax.agents.protocol_files import read
from mas_jax.data.tokenizer import Tokenizer
from mas_jax.records import Sample, SampleKey, StopReason

Trajectory = tuple[str, ...]  # what the agent says, turn by turn


def written_out(record: Mapping, form: str) -> Trajectory:
    """A record's work as one agent's turns: each query is one, and the answer is the last. In front
    of a subtask's first query, and of the answer, stands what was found before and is looked for.

    form: "toy" in the toy world's words and tokens, "full" for real models. No angle bracket of the
    teacher's is kept, so that it forges neither an action nor a control token.
    """
    turns, thoughts = [], []
    for finding in record["findings"]:
        thoughts.append(finding["objective"])
        for query in finding["queries"]:
            turns.append(_turn(thoughts, "search", query, form))
            thoughts = []
        thoughts.append(finding["summary"])
    return (*turns, _turn(thoughts, "answer", record["answer"], form))


def _turn(thoughts: Sequence[str], kind: str, text: str, form: str) -> str:
    said = [plain for thought in thoughts if (plain := _plain(thought))]
    if form == "toy":
        before = " ; ".join(said)
        return f"{' ' * bool(before)}{before}<{kind}> {_plain(text)}</{kind}>"
    return "\n".join([*said, f"<{kind}>{_plain(text)}</{kind}>"])


def _plain(text: str) -> str:
    return " ".join(text.replace("<", " ").replace(">", " ").split())


def read_trajectories(path: Path, form: str) -> dict[str, Trajectory]:
    """The trajectories of a file of `launch/build_protocols.py` that ended with a right answer, by
    question, whether or not its protocol passed.

    Raises: FileNotFoundError; ValueError for a record without findings, or if none was right.
    """
    if not path.exists():
        raise FileNotFoundError(f"no records at {path}; make them with launch/build_protocols.py")
    records = read(path)
    for record in records:
        if "findings" not in record:
            raise ValueError(
                f"{path}: the record of {record.get('question')!r} does not say what was searched; "
                "build the file again with launch/build_protocols.py"
            )
    found = {r["question"]: written_out(r, form) for r in records if r["is_correct"]}
    if not found:
        raise ValueError(f"{path}: none of {len(records)} records ended with a right answer")
    return found


@dataclass(frozen=True)
class Replay:
    """A `sample` function that says what a question's trajectory says; log-probs are 0."""

    trajectories: Mapping[str, Trajectory]
    tokenizer: Tokenizer

    async def sample(
        self, prompt: tuple[int, ...], *, key: SampleKey, n: int, **unused: object
    ) -> list[Sample]:
        """The turn that the key names, n times, ended by its closing tag."""
        text = self.trajectories[key.question][key.turn]
        ids = tuple(self.tokenizer.encode_template(text))
        return [Sample(ids, (0.0,) * len(ids), StopReason.STRING)] * n
