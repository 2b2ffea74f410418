"""Episodes that training played, kept in files, and how much of them two runs have in common.

STAGE/episodes/STEP.HOST-of-HOSTS.jsonl holds what a host played in a step, as lines of
`records_file.py`; a step that is played again, by however many hosts, replaces what it was.
Must not know: how episodes are played.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from mas_jax.evaluation import episode_json
from mas_jax.evaluation.records_file import record_line
from mas_jax.records import Episode, Question, Trace

FOLDER = "episodes"


def write(
    stage: Path, step: int, episodes: Iterable[Episode], questions: Mapping[str, Question],
    *, host: int, num_hosts: int,
) -> None:  # fmt: skip
    """Keeps a host's episodes of a step in the stage's directory. questions: by uid."""
    folder, name = stage / FOLDER, f"{step:06d}.{host}-of-{num_hosts}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{step:06d}.{host}-of-*"):  # of another number of hosts
        old.unlink(missing_ok=True)
    if host == 0:
        for old in folder.glob(f"{step:06d}.*"):
            if not old.name.endswith(f"-of-{num_hosts}.jsonl"):
                old.unlink(missing_ok=True)
    lines = (record_line(questions[episode.question], episode) for episode in episodes)
    (folder / name).write_bytes(b"".join(lines))


def read(stage: Path) -> dict[int, list[Episode]]:
    """All hosts' episodes by step. Raises: ValueError if there are none or a host's are missing."""
    found: dict[int, list[Path]] = {}
    for path in sorted((stage / FOLDER).glob("*.jsonl")):
        found.setdefault(int(path.name.partition(".")[0]), []).append(path)
    if not found:
        raise ValueError(f"no episodes in {stage / FOLDER}; train with --keep_episodes")
    for step, paths in found.items():
        hosts = paths[0].stem.rpartition("-")[2]
        if len(paths) != int(hosts):
            raise ValueError(
                f"{stage / FOLDER}: step {step} has the episodes of {len(paths)} hosts of {hosts}"
            )
    return {
        step: [
            episode_json.from_json(json.loads(line)["episode"])
            for path in paths
            for line in path.read_bytes().splitlines()
        ]
        for step, paths in found.items()
    }


def equal_tokens(ours: Sequence[Episode], theirs: Sequence[Episode]) -> tuple[int, int]:
    """How many sampled tokens two runs of a step have in common, and of how many.

    A token is common where all of its trace is equal up to it, since after a difference the two
    answer different contexts. Counted against the longer one of each pair of traces; a trace
    without its like shares nothing.
    """
    mine, other = _traces(ours), _traces(theirs)
    equal, count = 0, 0
    for key in mine.keys() | other.keys():
        pair = [run[key] for run in (mine, other) if key in run]
        count += max(sum(owner > 0 for owner in trace.owners) for trace in pair)
        if len(pair) == 2:
            places = zip(*(zip(t.tokens, t.owners, strict=True) for t in pair), strict=False)
            same = takewhile(lambda both: both[0] == both[1], places)
            equal += sum(owner > 0 for (_, owner), _ in same)
    return equal, count


def _traces(episodes: Sequence[Episode]) -> dict[tuple, Trace]:
    """Traces by agent, candidate, and which of the strands of its conversation they are."""
    found: dict[tuple, Trace] = {}
    for episode in episodes:
        strands: Counter[tuple] = Counter()
        for trace in episode.traces:
            agent = (trace.question, trace.rollout, trace.role, trace.path, trace.candidate)
            found[(*agent, strands[agent])] = trace
            strands[agent] += 1
    return found
