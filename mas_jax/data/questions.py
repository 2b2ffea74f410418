"""Real questions as `Question`: FlashRAG's JSONL, and the order in which training draws them.

A question is addressed by its position in the training run, so that a run resumes from the number
of its step alone. Must not know: models, teams, where files come from.
"""

import bisect
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from mas_jax.records import Question

Kind = TypeVar("Kind", bound=Question)

BLOCK = 1000  # positions of a mixture in which each source has its exact share


def parse(line: Mapping, *, dataset: str, split: str) -> Question:
    """One FlashRAG line: `id`, `question`, `golden_answers` and, if known, `metadata`.

    `uid` is dataset/split/id. A lone answer may be a string. Answers are stripped; empty ones go.
    Raises: ValueError naming the field that is missing or of another kind.
    """
    for field, kinds in (("id", (str, int)), ("question", str), ("golden_answers", (str, list))):
        if not isinstance(line.get(field), kinds):
            raise ValueError(f"field {field!r} is {line.get(field)!r:.80}")
    answers = line["golden_answers"]
    answers = [answers] if isinstance(answers, str) else answers
    if not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"field 'golden_answers' is {answers!r:.80}, wanted strings")
    answers = tuple(dict.fromkeys(answer.strip() for answer in answers if answer.strip()))
    text = line["question"].strip()
    if not text or not answers:
        raise ValueError(f"field {'question' if not text else 'golden_answers'!r} is empty")
    metadata = line.get("metadata") or {}
    steps = metadata.get("question_decomposition") or ()
    gold_passages, gold_titles = _gold(metadata)
    return Question(
        uid=_uid(line, dataset=dataset, split=split),
        dataset=dataset,
        text=text,
        golden_answers=answers,
        hops=int(metadata.get("hops") or 0),
        decomposition=tuple(step["question"] for step in steps),
        gold_passages=gold_passages,
        gold_titles=gold_titles,
    )


def _uid(line: Mapping, *, dataset: str, split: str) -> str:
    return f"{dataset}/{split}/{line['id']}"


def _gold(metadata: Mapping) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Ids of the gold passages and titles of the gold pages: one of them, or none if incomplete.

    `gold_title_passage_ids` are all passages of the pages that the decomposition names; which of
    a page's passages holds the fact is not known, so that its title is what is gold.
    """
    if metadata.get("gold_passage_ids"):
        complete = metadata.get("gold_complete", True)
        return tuple(map(str, metadata["gold_passage_ids"] if complete else ())), ()
    if not (metadata.get("gold_title_passage_ids") and metadata.get("gold_titles_complete", True)):
        return (), ()
    titles = [step.get("title") for step in metadata.get("question_decomposition") or ()]
    return (), tuple(dict.fromkeys(titles)) if all(titles) else ()


@dataclass(frozen=True)
class Source:
    """A set of questions as it was published, in lines that `parse` reads.

    lines: reads them from the start at each call, each with its place, such as "dev.jsonl:3".
    origin: where they are from, for a manifest: "file" and what else tells which one.
    """

    dataset: str
    split: str
    lines: Callable[[], Iterator[tuple[str, dict]]]
    origin: Mapping[str, str]


def read(source: Source, parse: Callable[..., Kind] = parse) -> tuple[Kind, ...]:
    """The questions of a source, in order, as `parse` makes them of its lines.

    Raises: ValueError that names the place of a line that `parse` refuses and of the second of two
    of one id, and for a source without questions; whatever its `lines` raise.
    """
    found: dict[str, Kind] = {}
    for place, line in source.lines():
        try:
            question = parse(line, dataset=source.dataset, split=source.split)
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise ValueError(f"{place}: not a question ({error})") from error
        if question.uid in found:
            raise ValueError(f"{place}: a second question of id {question.uid!r}")
        found[question.uid] = question
    if not found:
        raise ValueError(f"{source.origin['file']} holds no question of {source.dataset}")
    return tuple(found.values())


def rewritten(source: Source, questions: Iterable[Question]) -> Iterator[dict]:
    """The lines of those questions of a source, in its order, each with its question's text and
    answers; all else that a line holds stays, whether `Question` has a place for it or not."""
    kept = {question.uid: question for question in questions}
    for _, line in source.lines():
        question = kept.get(_uid(line, dataset=source.dataset, split=source.split))
        if question is not None:
            answers = list(question.golden_answers)
            yield line | {"question": question.text, "golden_answers": answers}


def jsonl(
    path: Path, *, dataset: str, split: str, origin: Mapping[str, str] | None = None
) -> Source:
    """A JSONL file as a source; lines end with "\\n" alone. Its origin is its path if not given.

    Reading it raises FileNotFoundError, and ValueError for what is not JSON.
    """

    def _lines() -> Iterator[tuple[str, dict]]:
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist; launch/prepare_data.py writes such files"
            )
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                try:
                    line = json.loads(text)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: not a question ({error})") from error
                yield f"{path}:{number}", line

    return Source(dataset, split, _lines, {"file": str(path)} if origin is None else origin)


def read_jsonl(path: Path, *, dataset: str, split: str) -> tuple[Question, ...]:
    """The questions of a JSONL file, in order. Raises: as `jsonl` and `read`."""
    return read(jsonl(path, dataset=dataset, split=split))


def write_jsonl(path: Path, lines: Iterable[Mapping]) -> None:
    """Writes lines, such as those of `rewritten`, in order."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def words(text: str) -> str:
    """What is asked, whatever the letters' case and the signs between words."""
    return " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())


def check_disjoint(questions: Mapping[str, Sequence[Question]]) -> None:
    """Raises: ValueError naming the first two of questions, by split, that ask the same words in
    two splits, and how many there are."""
    for (one, first), (other, second) in itertools.combinations(questions.items(), 2):
        asked = {words(q.text): q for q in first}
        same = [(asked[words(q.text)], q) for q in second if words(q.text) in asked]
        if same:
            raise ValueError(
                f"{len(same)} questions of data.{other} stand in data.{one} with the same words, "
                f"the first as {same[0][1].uid!r} and {same[0][0].uid!r}: {same[0][1].text!r}; "
                "give each split questions of its own, remove them from one"
            )


def spread(questions: tuple[Question, ...], count: int) -> tuple[Question, ...]:
    """`count` questions, of each dataset as many as of the others or all it has: its first ones.

    Numbers of datasets that have enough differ by at most one. All questions where there are no
    more than `count`; at least one of each dataset.
    """
    by_dataset: dict[str, list[Question]] = {}
    for question in questions:
        by_dataset.setdefault(question.dataset, []).append(question)
    shares, left = {}, count
    smallest_first = sorted(by_dataset, key=lambda name: len(by_dataset[name]))
    for number, name in enumerate(smallest_first):
        even = -(-left // (len(by_dataset) - number))
        shares[name] = max(1, min(len(by_dataset[name]), even))
        left -= shares[name]
    return tuple(q for name, group in by_dataset.items() for q in group[: shares[name]])


@functools.lru_cache(maxsize=8)
def _order(seed: tuple[int, ...], size: int) -> np.ndarray:
    """A permutation of `size` that depends on the seed alone."""
    return np.random.default_rng(seed).permutation(size)


@functools.lru_cache(maxsize=8)
def _block(seed: int, block: int, shares: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The source of each of a block's positions, and how many before it in the block it has."""
    source_P = np.repeat(np.arange(len(shares)), shares)
    source_P = source_P[np.random.default_rng((seed, block, BLOCK)).permutation(BLOCK)]
    earlier_P = np.zeros(BLOCK, np.int64)
    for source, count in enumerate(shares):
        earlier_P[source_P == source] = np.arange(count)
    return source_P, earlier_P


@dataclass(frozen=True)
class Mixture:
    """Training questions from several sources. weights: of each source; None: their sizes.

    Without weights all questions are shuffled together, epoch by epoch. With them every source has
    its share, to the nearest whole number, of each `BLOCK` of positions, and its own epochs.
    Raises: ValueError for no or an empty source, and weights that do not fit.
    """

    sources: tuple[Sequence[Question], ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        sizes = [len(source) for source in self.sources]
        if not sizes or not all(sizes):
            raise ValueError(f"sources of {sizes} questions: every one needs some")
        w = self.weights
        if w is not None and (len(w) != len(sizes) or min(w) < 0 or not sum(w) > 0):
            raise ValueError(f"weights {w} for {len(sizes)} sources: one each, >= 0, not all 0")

    @functools.cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(len(source) for source in self.sources))

    @functools.cached_property
    def _shares(self) -> tuple[int, ...]:
        """Positions of a block that each source has: by largest remainder, BLOCK in all."""
        exact = [BLOCK * w / sum(self.weights) for w in self.weights]
        shares = [int(x) for x in exact]
        most = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
        for i in most[: BLOCK - sum(shares)]:
            shares[i] += 1
        return tuple(shares)

    def __len__(self) -> int:
        """Questions of all sources."""
        return self._ends[-1]

    def at(self, position: int, *, seed: int) -> Question:
        """The question at a position of the run, counted from 0 without end."""
        if self.weights is None:
            epoch, index = divmod(position, len(self))
            index = int(_order((seed, epoch), len(self))[index])
            source = bisect.bisect_right(self._ends, index)
            return self.sources[source][index - self._ends[source] + len(self.sources[source])]
        block, offset = divmod(position, BLOCK)
        source_P, earlier_P = _block(seed, block, self._shares)
        source = int(source_P[offset])
        drawn = block * self._shares[source] + int(earlier_P[offset])
        epoch, index = divmod(drawn, len(self.sources[source]))
        order = _order((seed, epoch, source), len(self.sources[source]))
        return self.sources[source][int(order[index])]


def of_step(
    mixture: Mixture, *, seed: int, step: int, count: int, host: int, num_hosts: int
) -> list[Question]:
    """This host's questions of a step: `count` over all hosts, of which it has every num_hosts-th.

    No question comes twice: where an epoch ends inside the step and the next one begins with a
    question of it, the first of later positions takes its place.
    Raises: ValueError if the hosts cannot share `count` evenly, or there are fewer questions.
    """
    if count % num_hosts:
        raise ValueError(
            f"train.questions={count} cannot be shared by {num_hosts} hosts; set a multiple"
        )
    first = step * count
    found: dict[str, Question] = {}
    for position in range(first, first + count + 2 * (BLOCK + len(mixture))):
        if len(found) == count:
            return list(found.values())[host::num_hosts]
        question = mixture.at(position, seed=seed)
        found.setdefault(question.uid, question)
    raise ValueError(
        f"train.questions={count} of a step, and training draws from {len(found)}; ask fewer"
    )
