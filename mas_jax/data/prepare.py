"""The training mix and the fixed evaluation panel, written with a manifest of what they are.

The panel is 5,000 questions: all 125 of Bamboogle, 812 or 813 of each other set, chosen by a digest
of their ids, so that neither file order nor library versions change it. Source of the sizes: the
MultiAgent-OPD paper's panel. Must not know: training, evaluation.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from mas_jax.data.questions import read_jsonl, write_jsonl
from mas_jax.records import Question

MANIFEST = "manifest.json"
TRAINING = {"nq": "train", "hotpotqa": "train"}  # set -> split
PANEL = {
    "nq": "test", "triviaqa": "test", "popqa": "test", "hotpotqa": "dev", "2wikimultihopqa": "dev",
    "musique": "dev", "bamboogle": "test",
}  # fmt: skip
PANEL_SIZE = 5000
WHOLE = {"bamboogle": 125}
FACTS = (
    "hotpotqa, 2wikimultihopqa and musique: the development split serves as the test, since their "
    "test answers are not public",
    "popqa has a test split only: never train on it",
    "bamboogle has 125 questions: a 95% interval of about +-8 points",
    "musique and 2wikimultihopqa hold some wrong or incomplete golden answers (musique issue 13)",
    "hotpotqa has one golden answer a question; the others have aliases, all of which count",
    "yes/no questions are matched as words: 'Yes, both are' does not match 'yes'",
    "training questions end in '?', as Search-R1 has them",
)

Fetch = Callable[[str, str], Sequence[Question]]  # (dataset, split) -> questions


def panel_sizes() -> dict[str, int]:
    """Questions of each set in the panel."""
    others = [name for name in PANEL if name not in WHOLE]
    each, rest = divmod(PANEL_SIZE - sum(WHOLE.values()), len(others))
    return WHOLE | {name: each + (index < rest) for index, name in enumerate(others)}


def choose(questions: Sequence[Question], count: int, name: str) -> list[Question]:
    """`count` questions of the set called `name` by the digest of their uids, in their own order.

    Raises: ValueError if there are fewer.
    """
    if len(questions) < count:
        raise ValueError(
            f"{name} has {len(questions)} questions, wanted {count}; take the whole set"
        )
    ranked = sorted(questions, key=lambda q: hashlib.blake2b(q.uid.encode()).digest())
    chosen = {question.uid for question in ranked[:count]}
    return [question for question in questions if question.uid in chosen]


def with_question_mark(question: Question) -> Question:
    """The question as Search-R1 trains on it: with a "?" at its end."""
    text = question.text.rstrip()
    return question if text.endswith("?") else dataclasses.replace(question, text=text + "?")


def prepare(fetch: Fetch, out: Path) -> dict:
    """Writes train.jsonl's parts, the panel's parts and the manifest into a new directory `out`.

    One file a set and split, as `questions.read_jsonl` reads them: train/DATASET.jsonl and
    panel/DATASET.jsonl. The directory appears when it is complete. Returns the manifest.
    Raises: FileExistsError; whatever `fetch` raises; ValueError for a set that is too small, and
    for a training question that stands in the panel with the same words.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists; remove it or choose another directory")
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    sizes = panel_sizes()
    panel = {name: choose(fetch(name, split), sizes[name], name) for name, split in PANEL.items()}
    asked = {_words(q.text) for questions in panel.values() for q in questions}
    training, removed = {}, {}
    for name, split in TRAINING.items():
        found = [with_question_mark(question) for question in fetch(name, split)]
        training[name] = [q for q in found if _words(q.text) not in asked]
        removed[name] = len(found) - len(training[name])
    manifest = {
        "facts": FACTS,
        "splits": {"train": TRAINING, "panel": PANEL},
        "removed_from_training_because_in_the_panel": removed,
        "files": {},
    }
    for part, sets in (("train", training), ("panel", panel)):
        for name, questions in sets.items():
            path = partial / part / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_jsonl(path, questions)
            manifest["files"][f"{part}/{name}.jsonl"] = {
                "questions": len(questions),
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    partial.rename(out)
    return manifest


def join(data: Path, sets: Sequence[str], out: Path) -> None:
    """Writes the questions of several sets and one corpus of all their passages to a new directory.

    Reads data/SET.jsonl and data/SET_corpus.jsonl; writes out/SET.jsonl and out/corpus.jsonl, where
    a passage's id is SET/ID, so that those of two sets do not meet. A passage that stands in two
    corpora with the same words is kept once for each, since its id is what gold passages name.
    Raises: FileExistsError; FileNotFoundError; ValueError for a line that is not a question.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists; remove it or choose another directory")
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with (partial / "corpus.jsonl").open("w", encoding="utf-8", newline="\n") as corpus:
        for name in sets:
            questions = read_jsonl(data / f"{name}.jsonl", dataset=name, split="any")
            write_jsonl(
                partial / f"{name}.jsonl",
                (
                    dataclasses.replace(
                        q, gold_passages=tuple(f"{name}/{gold}" for gold in q.gold_passages)
                    )
                    for q in questions
                ),
            )
            with (data / f"{name}_corpus.jsonl").open(encoding="utf-8", newline="\n") as lines:
                for line in lines:
                    passage = json.loads(line)
                    passage["id"] = f"{name}/{passage['id']}"
                    corpus.write(json.dumps(passage, ensure_ascii=False) + "\n")
    partial.rename(out)


def verify(directory: Path) -> dict:
    """The manifest of a prepared directory, every file of which was compared with it.

    Raises: FileNotFoundError without a manifest; ValueError naming the files that differ.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; run launch/prepare_data.py")
    manifest = json.loads(path.read_text())
    differ = [
        name
        for name, entry in manifest["files"].items()
        if not (directory / name).is_file()
        or hashlib.sha256((directory / name).read_bytes()).hexdigest() != entry["sha256"]
    ]
    if differ:
        raise ValueError(f"{directory}: {differ} differ from {MANIFEST}; prepare the data again")
    return manifest


def _words(text: str) -> str:
    return " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())
