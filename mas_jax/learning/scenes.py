"""What a config's teams play in: the toy world, questions from files, or mathematics.

Must not know: engines, teams, what is done with a scene.
"""

import hashlib
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ml_collections import ConfigDict

from mas_jax.agents.chat import Chat
from mas_jax.agents.prompts import Prompts, load_prompts
from mas_jax.data import problems
from mas_jax.data.arithmetic import make_arithmetic
from mas_jax.data.questions import Mixture, read_jsonl
from mas_jax.data.tokenizer import Tokenizer
from mas_jax.data.world import World, make_world
from mas_jax.data.world_questions import FAMILIES
from mas_jax.learning import collaboration, policy_files
from mas_jax.learning.collaboration import Grading
from mas_jax.model import packaged
from mas_jax.records import Question
from mas_jax.retrieval.bm25_index import Bm25Config, Bm25Retriever
from mas_jax.retrieval.client import RetrieverClient
from mas_jax.retrieval.corpus import open_corpus
from mas_jax.retrieval.encoder import EncoderConfig, TextEncoder
from mas_jax.retrieval.hashed_ngrams import HashedNgrams
from mas_jax.retrieval.index import IndexConfig, Retriever, contents
from mas_jax.rewards.exact_match import exact_match_reward


@dataclass(frozen=True)
class Scene:
    """What teams play in and speak through, beside the policy.

    questions: by split ("train", "validation", "test"); training: what steps draw from, None
    without training questions. identity: names questions, what searches and what grades in records.
    world: the toy's, None for real questions and for mathematics. reward: of predictions.
    actor_chat: the frozen Actor's, None without one that has token ids. grading: of mathematics.
    """

    questions: Mapping[str, tuple[Question, ...]]
    training: Mixture | None
    identity: Mapping[str, str]
    retriever: "Retriever | RetrieverClient | NoRetriever"
    chat: Chat
    prompts: Prompts
    world: World | None
    reward: Callable[..., Awaitable]
    actor_chat: Chat | None = None
    grading: Grading | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the chat."""
        return self.chat.tokenizer

    @property
    def graded(self) -> Mapping[str, int]:
        """What grading has counted so far; nothing where it counts nothing."""
        return {} if self.grading is None else self.grading.counts()


class NoRetriever:
    """Stands where nobody searches."""

    counts: Mapping[str, int] = {}

    async def search(self, queries: list[str], k: int) -> list:
        """Raises: ValueError; a team that searches plays what has nothing to search in."""
        raise ValueError(f"{queries} in mathematics, which has no corpus")


def make_scene(config: ConfigDict, tokenizer: Tokenizer) -> Scene:
    """The questions of the config, what searches their corpus, and the chat.

    Raises: FileNotFoundError for a missing file; ValueError for one that is not what it should be,
    an index of another corpus or encoder, or a server that does not answer.
    """
    d = config.data
    if d.subject == "mathematics":
        return _math_scene(config, tokenizer)
    if not d.test:
        return _toy_scene(config, tokenizer)
    questions, training = _questions(config)
    identity = {"questions": _digest(questions)}
    if d.server:
        retriever = RetrieverClient(d.server, dialect=d.dialect)
        identity |= {"server": d.server, "dialect": d.dialect, "index": retriever.identify()}
    else:
        retriever, names = _corpus_retriever(config)
        identity |= names
    return Scene(
        questions=questions,
        training=training,
        identity=identity,
        retriever=retriever,
        chat=policy_files.policy_chat(config, tokenizer),
        prompts=load_prompts(config.model.prompts),
        world=None,
        reward=exact_match_reward,
    )


def _toy_scene(config: ConfigDict, tokenizer: Tokenizer) -> Scene:
    """The world of the config and its index."""
    w = config.world
    world = make_world(w.seed, closed_share=w.closed_share, train=w.train, held_out=w.held_out)
    unknown = set(w.families) - set(FAMILIES)
    if unknown:
        raise ValueError(f"world.families={w.families}: {sorted(unknown)} are none of {FAMILIES}")
    questions = {
        split: tuple(q for q in found if q.dataset in (w.families or FAMILIES))
        for split, found in world.questions.items()
    }
    encoder, index = HashedNgrams(), IndexConfig(**config.retriever)
    return Scene(
        questions=questions,
        training=_mixture(config, (questions["train"],)),
        identity={"world": world.fingerprint, "encoder": encoder.fingerprint},
        retriever=Retriever.build(world.passages, encoder, index),
        chat=policy_files.policy_chat(config, tokenizer),
        prompts=load_prompts(config.model.prompts),
        world=world,
        reward=exact_match_reward,
    )


def _math_scene(config: ConfigDict, tokenizer: Tokenizer) -> Scene:
    """Problems of the config's files, graded by the rules of their sets, else toy ones, whose
    answers are integers; an Actor with token ids has its own chat."""
    if config.data.test:
        questions, training = _questions(config)
        identity = {"questions": _digest(questions), "grading": "by set"}
        grading = collaboration.grading_by_set()
    else:
        grading = collaboration.INTEGERS
        toy = make_arithmetic(**config.arithmetic)
        questions, training = toy.questions, _mixture(config, (toy.questions["train"],))
        identity = {"arithmetic": toy.fingerprint}
    theirs = None
    if config.actor.kind == "policy":
        place = policy_files.actor_directory(config)
        theirs = policy_files.actor_chat(config, policy_files.load_tokenizer(place))
    return Scene(
        questions=questions,
        training=training,
        identity=identity,
        retriever=NoRetriever(),
        chat=policy_files.policy_chat(config, tokenizer),
        prompts=load_prompts(config.model.prompts),
        world=None,
        reward=grading.reward,
        actor_chat=theirs,
        grading=grading,
    )


def _questions(config: ConfigDict) -> tuple[dict[str, tuple[Question, ...]], Mixture | None]:
    """The questions of the config's files by split, and what training draws from."""
    d = config.data
    sources = {
        split: tuple(_read_questions(Path(path), split) for path in d[split])
        for split in ("train", "validation", "test")
    }
    training = _mixture(config, sources["train"]) if sources["train"] else None
    return {split: tuple(itertools.chain(*found)) for split, found in sources.items()}, training


def _read_questions(path: Path, split: str) -> tuple[Question, ...]:
    """A JSONL file of the dataset that it is named for, or a directory of ArrayRecord files."""
    if problems.dataset_of(path) is not None:
        return problems.read_jsonl(path, split=split)
    if not path.is_dir():
        return read_jsonl(path, dataset=path.stem, split=split)
    from mas_jax.data import tfds_questions  # takes seconds to import, and only this needs it

    return tuple(tfds_questions.read(path, split=split))


def _mixture(config: ConfigDict, sources: Sequence[tuple[Question, ...]]) -> Mixture:
    """What training draws from: the first `data.first` questions of each source, or all.

    Raises: ValueError for a source with fewer.
    """
    d = config.data
    if d.first and min(map(len, sources)) < d.first:
        raise ValueError(
            f"data.first={d.first}, and the sources of training questions have "
            f"{[len(source) for source in sources]}; lower it, or set 0 for all"
        )
    return Mixture(tuple(source[: d.first or None] for source in sources), d.weights or None)


def _digest(questions: Mapping[str, tuple[Question, ...]]) -> str:
    """Digest of all questions with their answers, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for split, found in sorted(questions.items()):
        for q in found:
            digest.update(json.dumps([split, q.uid, q.text, q.golden_answers]).encode())
    return digest.hexdigest()


def _corpus_retriever(config: ConfigDict) -> tuple[Retriever, dict[str, str]]:
    """What searches the config's corpus in this process, and what names both in records."""
    corpus = open_corpus(Path(config.data.corpus))
    if config.retriever.backend == "bm25":
        words = Bm25Retriever(corpus, Bm25Config())
        return words, {"corpus": corpus.fingerprint, "bm25": words.fingerprint}
    encoder, index = make_encoder(config), IndexConfig(**config.retriever)
    if config.data.index:
        retriever = Retriever.load(Path(config.data.index), corpus, encoder, index)
    else:
        retriever = Retriever.build(corpus, encoder, index)
    return retriever, {"corpus": corpus.fingerprint, "encoder": encoder.fingerprint}


def make_encoder(config: ConfigDict) -> HashedNgrams | TextEncoder:
    """The configured text encoder. Raises: as `TextEncoder`."""
    if config.encoder.directory == "hashed":
        return HashedNgrams()
    settings = config.encoder.to_dict()
    directory = packaged.resolve(settings.pop("directory"))
    return TextEncoder(EncoderConfig(directory=str(directory), **settings))


def gold_texts(scene: Scene) -> dict[str, str]:
    """Texts by id of the passages that hold the training questions' facts.

    Raises: ValueError if no question says which, or what searches keeps its passages to itself.
    """
    wanted = {name for q in scene.questions["train"] for name in q.gold_passages}
    if not wanted or isinstance(scene.retriever, RetrieverClient):
        raise ValueError(
            f"a turn_reward reads gold passages, of which the training questions name "
            f"{len(wanted)}, in a corpus of this process; give data.train with gold_passage_ids "
            "and data.corpus, or set turn_reward='none'"
        )
    found = {p.id: contents(p) for p in scene.retriever.passages if p.id in wanted}
    if not found:
        raise ValueError(f"none of the {len(wanted)} gold passages is in the corpus")
    return found
