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
from dataclasses import dataclass
from pathlib import Path

from mas_jax.data.questions import Source, jsonl, read, rewritten, words, write_jsonl
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

FORMATS = ("jsonl", "tfds")  # a file DATASET.jsonl, or a directory DATASET of ArrayRecord files
MIXES = ("flashrag", "search-r1")
# ids of passages in a line's metadata
_PASSAGES = ("gold_passage_ids", "gold_title_passage_ids", "context_passage_ids")

Fetch = Callable[[str, str], Source]  # (dataset, split) -> where it is read from


@dataclass(frozen=True)
class Settings:
    """What is asked for, as the manifest says it.

    format: one of FORMATS. mix: one of MIXES, whose training sets are taken. source: a directory
    in place of FlashRAG's collection on the hub, "" for the hub. revision, mix_revision: of that
    collection and of Search-R1's mix, "" for the newest. validation: questions held out of each
    training set.
    """

    format: str = "jsonl"
    mix: str = "flashrag"
    source: str = ""
    revision: str = ""
    mix_revision: str = ""
    validation: int = 0


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


def prepare(panel: Fetch, training: Fetch, out: Path, settings: Settings) -> dict:
    """Writes the training mix, the panel and the manifest into a new directory `out`.

    A set of each part: train/DATASET, validation/DATASET if any is held out, and panel/DATASET.
    All that lines hold beside question and answers is kept. The directory appears when it is
    complete. Returns the manifest.
    Raises: FileExistsError; what the sources raise; ValueError for a set that is too small.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists; remove it or choose another directory")
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    manifest = {
        "facts": FACTS,
        "settings": dataclasses.asdict(settings),
        "splits": {"train": TRAINING, "panel": PANEL},
        "removed_from_training_because_in_the_panel": {},
        "files": {},
    }

    def _write(part: str, source: Source, questions: Sequence[Question]) -> None:
        name = _write_set(partial / part, source, questions, settings.format)
        manifest["files"][f"{part}/{name}"] = {
            "questions": len(questions),
            "sha256": _sha256(partial / part / name),
            "origin": dict(source.origin),
        }

    sizes, asked = panel_sizes(), set()
    for name, split in PANEL.items():
        source = panel(name, split)
        chosen = choose(read(source), sizes[name], name)
        asked |= {words(question.text) for question in chosen}
        _write("panel", source, chosen)
    for name, split in TRAINING.items():
        source = training(name, split)
        found = [with_question_mark(question) for question in read(source)]
        kept = [question for question in found if words(question.text) not in asked]
        manifest["removed_from_training_because_in_the_panel"][name] = len(found) - len(kept)
        held_out = choose(kept, settings.validation, name)
        asked_there = {words(question.text) for question in held_out}
        _write("train", source, [q for q in kept if words(q.text) not in asked_there])
        if held_out:
            _write("validation", source, held_out)
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    partial.rename(out)
    return manifest


def _write_set(part: Path, source: Source, questions: Sequence[Question], kind: str) -> str:
    """Writes these questions of a source; the name of the file, or directory, within the part."""
    part.mkdir(parents=True, exist_ok=True)
    lines = rewritten(source, questions)
    if kind == "jsonl":
        write_jsonl(part / f"{source.dataset}.jsonl", lines)
        return f"{source.dataset}.jsonl"
    from mas_jax.data import tfds_questions  # takes seconds to import, and only this needs it

    tfds_questions.write(part / source.dataset, source.dataset, {part.name: lines})
    return source.dataset


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
            source = jsonl(data / f"{name}.jsonl", dataset=name, split="any")
            lines = rewritten(source, read(source))
            write_jsonl(partial / f"{name}.jsonl", (_with_set(line, name) for line in lines))
            with (data / f"{name}_corpus.jsonl").open(encoding="utf-8", newline="\n") as passages:
                for text in passages:
                    passage = json.loads(text)
                    passage["id"] = f"{name}/{passage['id']}"
                    corpus.write(json.dumps(passage, ensure_ascii=False) + "\n")
    partial.rename(out)


def _with_set(line: dict, name: str) -> dict:
    """The line, with the name of its set before the ids of the passages that it names."""
    metadata = line.get("metadata") or {}
    ids = {k: [f"{name}/{i}" for i in metadata[k]] for k in _PASSAGES if metadata.get(k)}
    return line | {"metadata": metadata | ids}


def check_existing(out: Path, settings: Settings) -> dict:
    """The manifest of a prepared directory that is what the settings ask for.

    Raises: as `verify`; ValueError if it was prepared otherwise.
    """
    manifest, asked = verify(out), dataclasses.asdict(settings)
    there = manifest.get("settings", {})
    other = [key for key in asked if there.get(key) != asked[key]]
    if other:
        raise ValueError(
            f"{out} was prepared with { ({key: there.get(key) for key in other}) }, not "
            f"{ ({key: asked[key] for key in other}) }; choose another directory"
        )
    return manifest


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
        if not (directory / name).exists() or _sha256(directory / name) != entry["sha256"]
    ]
    if differ:
        raise ValueError(f"{directory}: {differ} differ from {MANIFEST}; prepare the data again")
    return manifest


def _sha256(path: Path) -> str:
    """Digest of a file, or of the names and digests of a directory's files."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    names = "".join(f"{file.name} {_sha256(file)}\n" for file in sorted(path.iterdir()))
    return hashlib.sha256(names.encode()).hexdigest()
