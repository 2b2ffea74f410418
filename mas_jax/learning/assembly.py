"""Builds what a config describes: world, index, chat, teams, policy, engine.

The only place that knows all the parts; each is handed what it needs. Must not know: what is done
with them.
"""

import hashlib
import importlib.resources
import itertools
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from mas_jax.agents.chat import TEMPLATES, Chat, check_template, hf_render, make_chat
from mas_jax.agents.judge import Judge, api_judge, length_judge, oracle_judge, policy_judge
from mas_jax.agents.prompts import Prompts, load_judge_prompt, load_prompts, load_stepwise
from mas_jax.agents.setting import Budgets, Sampling, Team
from mas_jax.agents.setting import World as PlayWorld
from mas_jax.agents.topology import ACTOR, COLLABORATOR, TOPOLOGIES
from mas_jax.data import problems
from mas_jax.data.arithmetic import make_arithmetic
from mas_jax.data.questions import Mixture, read_jsonl
from mas_jax.data.tokenizer import HFTokenizer, Tokenizer, WordTokenizer
from mas_jax.data.world import World, make_world
from mas_jax.data.world_questions import FAMILIES
from mas_jax.learning import collaboration, hosts
from mas_jax.learning.collaboration import ACTOR_POLICY, Grading
from mas_jax.model import hf, packaged, qwen3, sharding
from mas_jax.model.hf_config import load_config
from mas_jax.records import Question
from mas_jax.retrieval.bm25_index import Bm25Config, Bm25Retriever
from mas_jax.retrieval.client import RetrieverClient
from mas_jax.retrieval.corpus import open_corpus
from mas_jax.retrieval.encoder import EncoderConfig, TextEncoder
from mas_jax.retrieval.hashed_ngrams import HashedNgrams
from mas_jax.retrieval.index import IndexConfig, Retriever, contents
from mas_jax.rewards.exact_match import exact_match
from mas_jax.sampling.api import Client, Endpoint
from mas_jax.sampling.engine import Engine
from mas_jax.sampling.engine_settings import EngineSettings
from mas_jax.sampling.policies import Policies
from mas_jax.sampling.replicas import Replicas


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


# a page of Orbax's for every save; a line for every request
TALKATIVE = ("absl", "httpx", "httpx2", "bm25s")


def start_process() -> None:
    """What every launch script does first: one log, an engine for each core of a CPU, and an end
    at SIGTERM, since what is not saved then is done again; `loop.train` saves first."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(hosts.interrupted_code()))
    logging.getLogger().setLevel(logging.INFO)
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    os.environ["LIBTPU_INIT_ARGS"] = sharding.tpu_flags(os.environ.get("LIBTPU_INIT_ARGS", ""))
    if "device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", min(2, os.cpu_count()))
    if not jax.config.jax_compilation_cache_dir:  # what one start compiled, the next one reads
        jax.config.update("jax_compilation_cache_dir", str(packaged.cache_directory() / "jax"))


def checkpoint_directory(config: ConfigDict) -> Path:
    """The policy's directory in the Hugging Face layout: the configured one, or the toy asset.

    Raises: FileNotFoundError if the asset is not part of this installation.
    """
    return _resolve(config.model.checkpoint or "asset:toy_policy")


def _resolve(checkpoint: str) -> Path:
    """The directory that a checkpoint's name in a config stands for."""
    kind, _, name = checkpoint.partition(":")
    return asset(name) if kind == "asset" else packaged.resolve(checkpoint)


def asset(name: str) -> Path:
    """The directory of a starting policy that comes with the package.

    Raises: FileNotFoundError if it is not part of this installation.
    """
    directory = Path(str(importlib.resources.files("mas_jax") / "assets" / name))
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(
            f"the starting policy {name} is not in {directory}; rebuild it with "
            f"`python launch/pretrain_toy.py --out={directory}` and its config, or set "
            "model.checkpoint"
        )
    return directory


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint: the toy's words, or a real model's."""
    if (directory / "tokenizer.model").is_file():
        return WordTokenizer.load(directory)
    return HFTokenizer(directory)


def check_chat(chat: Chat, directory: Path) -> None:
    """Compares the chat with the checkpoint's own template. Raises: ValueError at a difference."""
    # takes seconds to import, and only this needs it
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # whatever its files name, AutoTokenizer makes a Qwen2Tokenizer of all that has Qwen2's weights
    toy = isinstance(chat.tokenizer, WordTokenizer)
    theirs = (PreTrainedTokenizerFast if toy else AutoTokenizer).from_pretrained(str(directory))
    thinking = {"qwen3-thinking": True, "qwen3-not-thinking": False}.get(chat.template.name)
    render = hf_render(theirs, thinking=thinking)
    check_template(chat.tokenizer, chat.template, render)


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
        chat=policy_chat(config, tokenizer),
        prompts=load_prompts(config.model.prompts),
        world=None,
        reward=exact_match_reward,
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
        theirs = actor_chat(config, load_tokenizer(actor_directory(config)))
    return Scene(
        questions=questions,
        training=training,
        identity=identity,
        retriever=NoRetriever(),
        chat=policy_chat(config, tokenizer),
        prompts=load_prompts(config.model.prompts),
        world=None,
        reward=grading.reward,
        actor_chat=theirs,
        grading=grading,
    )


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


def _read_questions(path: Path, split: str) -> tuple[Question, ...]:
    """A JSONL file of the dataset that it is named for, or a directory of ArrayRecord files."""
    if problems.dataset_of(path) is not None:
        return problems.read_jsonl(path, split=split)
    if not path.is_dir():
        return read_jsonl(path, dataset=path.stem, split=split)
    from mas_jax.data import tfds_questions  # takes seconds to import, and only this needs it

    return tuple(tfds_questions.read(path, split=split))


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
        chat=policy_chat(config, tokenizer),
        prompts=load_prompts(config.model.prompts),
        world=world,
        reward=exact_match_reward,
    )


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


def make_encoder(config: ConfigDict) -> HashedNgrams | TextEncoder:
    """The configured text encoder. Raises: as `TextEncoder`."""
    if config.encoder.directory == "hashed":
        return HashedNgrams()
    settings = config.encoder.to_dict()
    directory = packaged.resolve(settings.pop("directory"))
    return TextEncoder(EncoderConfig(directory=str(directory), **settings))


def _digest(questions: Mapping[str, tuple[Question, ...]]) -> str:
    """Digest of all questions with their answers, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for split, found in sorted(questions.items()):
        for q in found:
            digest.update(json.dumps([split, q.uid, q.text, q.golden_answers]).encode())
    return digest.hexdigest()


def policy_chat(config: ConfigDict, tokenizer: Tokenizer) -> Chat:
    """The configured template's pieces under a policy's tokenizer."""
    return make_chat(tokenizer, TEMPLATES[config.model.template])


def make_team(config: ConfigDict, name: str, scene: Scene, *, training: bool = False) -> Team:
    """A team with its budgets, all of whose roles are the configured policy.

    training: draws as `config.train` says, from the whole distribution, so that log-probs are those
    of what is trained; what the Collaborator says is under no control.
    """
    sampling = config.sampling.to_dict()
    if training:
        t = config.train
        sampling |= dict(temperature=t.temperature, top_p=1.0, top_k=0, candidates=t.candidates)
    if name in TOPOLOGIES:
        return collaboration.make_team(
            config, name, Sampling(**sampling),
            chats={COLLABORATOR: scene.chat, ACTOR: scene.actor_chat},
            prompts=scene.prompts, grading=scene.grading,
            others={
                uid: text
                for split in scene.questions.values()
                for uid, text in collaboration.next_problems(split).items()
            },
            training=training,
        )  # fmt: skip
    roles = ("leader", "searcher", "answerer")
    return Team(
        name=name,
        chat=scene.chat,
        prompts=scene.prompts,
        budgets=Budgets(**config.budgets[name]),
        sampling=Sampling(**sampling),
        policies=dict.fromkeys(roles, config.model.policy),
        stepwise=load_stepwise(config.model.prompts) if config.model.stepwise else None,
    )


def actor_directory(config: ConfigDict) -> Path:
    """The frozen Actor's checkpoint; the starting policy's where it names none."""
    given = config.actor.checkpoint
    return _resolve(given) if given else checkpoint_directory(config)


def load_params(config: ConfigDict, directory: Path) -> qwen3.Params:
    """A policy's weights in the sampler's dtype, on the first mesh of this host's engines."""
    model, mesh = load_config(directory), sampling_meshes(config)[0]
    shardings = qwen3.param_shardings(model, mesh)
    return hf.load(directory, dtype=jnp.dtype(config.model.dtype), shardings=shardings)[1]


def sampling_meshes(config: ConfigDict) -> list[jax.sharding.Mesh]:
    """A mesh for each engine: as many of `config.mesh` as this host's devices make, on the CPUs of
    a single host no more than cores: an engine keeps one busy and compiles programs of its own.

    Raises: ValueError if they do not make one.
    """
    sizes, devices = config.mesh.to_dict(), jax.local_devices()
    size = math.prod(sizes.values())
    if len(devices) < size:
        raise ValueError(f"mesh {sizes} needs {size} devices, this host has {len(devices)}")
    # several hosts hand weights over on device, from all devices to all
    if devices[0].platform == "cpu" and jax.process_count() == 1:
        devices = devices[: max(size, os.cpu_count())]
    return [
        sharding.make_mesh(**sizes, devices=devices[first : first + size])
        for first in range(0, len(devices) - size + 1, size)
    ]


def make_engines(config: ConfigDict, directory: Path, tokenizer: Tokenizer) -> Replicas:
    """The sampling engines of a checkpoint as the configured policy, one on each mesh of this host.

    Raises: ValueError if the tokenizer has more tokens than the model.
    """
    settings, meshes = EngineSettings(**config.engine), sampling_meshes(config)
    name, dtype = config.model.policy, config.model.dtype
    return _engines(directory, tokenizer, settings, meshes, policy=name, dtype=dtype)


def make_policies(config: ConfigDict, directory: Path, tokenizer: Tokenizer) -> Replicas | Policies:
    """What is sampled from: the engines of the configured policy, and an Actor beside them if the
    config has one, in engines with pages of their own on the same devices.

    Raises: ValueError as `make_engines`, for a missing key, or for an Actor whose own chat template
    is another; FileNotFoundError without its checkpoint.
    """
    engines = make_engines(config, directory, tokenizer)
    if config.actor.kind == "none":
        return engines
    if config.actor.kind == "api":
        return collaboration.with_endpoint(config, engines)
    place = actor_directory(config)
    theirs = load_tokenizer(place)
    check_chat(actor_chat(config, theirs), place)
    settings, dtype = EngineSettings(**config.actor.engine), config.actor.dtype
    actor = make_actor_engines(config, place, theirs)
    identity = policy_identity(place, dtype=dtype, settings=settings)
    return collaboration.with_frozen(config, engines, actor, identity=identity)


def make_actor_engines(config: ConfigDict, directory: Path, tokenizer: Tokenizer) -> Replicas:
    """The frozen Actor's engines, one on each mesh of this host. Raises: as `make_engines`."""
    settings, meshes = EngineSettings(**config.actor.engine), sampling_meshes(config)
    dtype = config.actor.dtype
    return _engines(directory, tokenizer, settings, meshes, policy=ACTOR_POLICY, dtype=dtype)


def actor_chat(config: ConfigDict, tokenizer: Tokenizer) -> Chat:
    """The Actor's template under its tokenizer."""
    return make_chat(tokenizer, TEMPLATES[config.actor.template])


def weights_digest(directory: Path, *, size: int = 16) -> str:
    """Digest of a checkpoint's weights, in so many bytes."""
    return _files_digest(sorted(directory.glob("*.safetensors")), size=size)


def policy_identity(
    directory: Path, *, dtype: str, settings: EngineSettings
) -> dict[str, str | list[str]]:
    """What a policy's greedy choices depend on beside the prompt's tokens, as JSON values: weights,
    the model's config (rotary base, norms, head ties), precision of weights and of the engine."""
    return {
        "weights": weights_digest(directory),
        "config": _files_digest([directory / "config.json"]),
        "dtype": [dtype, settings.dtype],
        "stored": settings.weights,
    }


def _files_digest(paths: Sequence[Path], *, size: int = 16) -> str:
    digest = hashlib.blake2b(digest_size=size)
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def make_play_world(
    scene: Scene, policies: Replicas | Policies, judge: Judge | None = None
) -> PlayWorld:
    """What surrounds a team: the policies, what searches, what rewards."""
    return PlayWorld(
        policies.sample,
        scene.retriever.search,
        scene.reward,
        judge,
        complete=policies.complete if isinstance(policies, Policies) else None,
    )


def _engines(
    directory: Path, tokenizer: Tokenizer, settings: EngineSettings,
    meshes: Sequence[jax.sharding.Mesh], *, policy: str, dtype: str,
) -> Replicas:  # fmt: skip
    """An engine of a checkpoint on each mesh. Raises: as `make_engines`."""
    model = load_config(directory)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {model.vocab_size}; they "
            "are not of one checkpoint"
        )

    def _engine(mesh: jax.sharding.Mesh) -> Engine:
        shardings = qwen3.param_shardings(model, mesh)
        _, params = hf.load(directory, dtype=jnp.dtype(dtype), shardings=shardings)
        return Engine(model, params, settings, policy=policy, decode=tokenizer.decode, mesh=mesh)

    return Replicas([_engine(mesh) for mesh in meshes])


def make_judge(config: ConfigDict, scene: Scene, directory: Path) -> Judge:
    """The configured judge of subtasks. directory: the starting policy's, of which "policy" makes
    engines of its own, since those that train get other weights.

    Raises: ValueError for a prompt set without a judge's prompt, or a missing key.
    """
    j = config.judge
    if j.kind == "oracle":
        return oracle_judge(scene.world, accuracy=j.accuracy)
    if j.kind == "length":
        return length_judge(
            scene.world, accuracy=j.accuracy, bias=j.length_bias, full_words=j.full_words
        )
    prompt = load_judge_prompt(j.prompts)
    if j.kind == "policy":
        return policy_judge(
            make_engines(config, directory, scene.tokenizer).sample,
            chat=scene.chat, prompt=prompt, policy=config.model.policy,
            context=config.engine.context, max_tokens=j.max_tokens,
        )  # fmt: skip
    client = Client(Endpoint(j.base_url, j.key_variable), Path(j.cache) if j.cache else None)
    return api_judge(
        client.complete, prompt=prompt, model=j.model, max_chars=j.max_chars,
        max_tokens=j.max_tokens,
    )  # fmt: skip


async def exact_match_reward(question: Question, predictions: tuple[str, ...]) -> tuple[float, ...]:
    """1.0 for every prediction that matches a golden answer, else 0.0."""
    return tuple(exact_match(text, question.golden_answers) for text in predictions)


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
