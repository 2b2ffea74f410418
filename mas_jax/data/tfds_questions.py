"""Questions in tensorflow-datasets: our JSONL as ArrayRecord files, and two of its stock sets.

Reads through `tfds.data_source`, which opens records by index and needs no TensorFlow, so that a
pod reads its questions as it reads any other data. Must not know: training, evaluation.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex, overload

import tensorflow_datasets as tfds

from mas_jax.data.questions import parse
from mas_jax.records import Question

NAME = "mas_jax_questions"


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A set of questions, one split a key; a line that `questions.parse` reads is a record."""

    name = NAME
    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, splits: Mapping[str, Iterable[Mapping]], **settings: Any) -> None:
        self._splits = splits
        super().__init__(**settings)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"line": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, download_manager: Any) -> dict:
        return {split: self._generate_examples(lines) for split, lines in self._splits.items()}

    def _generate_examples(self, lines: Iterable[Mapping]):
        for index, line in enumerate(lines):
            yield index, {"line": json.dumps(line, ensure_ascii=False)}


class TfdsQuestions(Sequence[Question]):
    """Questions that are read when they are asked for; `read` turns (index, record) into one."""

    def __init__(self, source: Sequence, read: Callable[[int, dict], Question]) -> None:
        self._source, self._read = source, read

    def __len__(self) -> int:
        return len(self._source)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Question: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Question]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        return self._read(index, self._source[index])


def write(directory: Path, dataset: str, splits: Mapping[str, Iterable[Mapping]]) -> None:
    """Writes the lines of a set's splits, in order, as ArrayRecord files of a new directory.

    The directory appears when it is complete. Raises: FileExistsError if there is one.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists; remove it or write the set elsewhere")
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    config = tfds.core.BuilderConfig(name=dataset)
    builder = _Builder(splits, data_dir=str(partial), config=config, file_format="array_record")
    tfds.disable_progress_bar()
    builder.download_and_prepare()
    Path(builder.data_dir).rename(directory)
    shutil.rmtree(partial)


def read(directory: Path, *, split: str) -> TfdsQuestions:
    """A split of a set that `write` wrote; of its only split, whatever it is called.

    Raises: FileNotFoundError if there is none; ValueError for a split that it does not have.
    """
    if not (directory / "dataset_info.json").is_file():
        raise FileNotFoundError(f"{directory} holds no set of tensorflow-datasets; write one first")
    builder = tfds.builder_from_directory(str(directory))
    splits, dataset = sorted(builder.info.splits), builder.info.config_name
    name = splits[0] if len(splits) == 1 else split
    if name not in splits:
        raise ValueError(f"{directory} has splits {splits}, not {split!r}")

    def _read(index: int, record: dict) -> Question:
        return parse(json.loads(_text(record["line"])), dataset=dataset, split=split)

    return TfdsQuestions(builder.as_data_source(split=name), _read)


STOCK = {
    "natural_questions_open": lambda record: [_text(answer) for answer in record["answer"]],
    "trivia_qa": lambda record: [
        _text(record["answer"]["value"]), *map(_text, record["answer"]["aliases"])
    ],
}  # fmt: skip


def read_stock(name: str, *, split: str, data_dir: Path | None = None) -> TfdsQuestions:
    """A set that tensorflow-datasets carries: one of `STOCK`, by its name there (`trivia_qa` with
    a config, such as "trivia_qa/unfiltered.nocontext"). It is fetched and prepared if need be.

    Ids are indices. Raises: ValueError for another name.
    """
    base = name.partition("/")[0]
    if base not in STOCK:
        raise ValueError(f"{name!r} is not one of {sorted(STOCK)}; give a JSONL file instead")
    source = tfds.data_source(
        name, split=split, data_dir=None if data_dir is None else str(data_dir)
    )

    def _read(index: int, record: dict) -> Question:
        line = {
            "id": index, "question": _text(record["question"]),
            "golden_answers": STOCK[base](record),
        }  # fmt: skip
        return parse(line, dataset=base, split=split)

    return TfdsQuestions(source, _read)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
