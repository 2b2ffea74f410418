"""The policies that a config names, as files: where they lie, their tokenizers and chats, and the
digests that tell them apart.

Directories in the Hugging Face layout. Must not know: engines, teams, scenes.
"""

import hashlib
import importlib.resources
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from mas_jax.agents.chat import TEMPLATES, Chat, check_template, hf_render, make_chat
from mas_jax.data.tokenizer import HFTokenizer, Tokenizer, WordTokenizer
from mas_jax.model import packaged
from mas_jax.sampling.engine_settings import EngineSettings


def checkpoint_directory(config: ConfigDict) -> Path:
    """The policy's directory in the Hugging Face layout: the configured one, or the toy asset.

    Raises: FileNotFoundError if the asset is not part of this installation.
    """
    return _resolve(config.model.checkpoint or "asset:toy_policy")


def actor_directory(config: ConfigDict) -> Path:
    """The frozen Actor's checkpoint; the starting policy's where it names none."""
    given = config.actor.checkpoint
    return _resolve(given) if given else checkpoint_directory(config)


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


def policy_chat(config: ConfigDict, tokenizer: Tokenizer) -> Chat:
    """The configured template's pieces under a policy's tokenizer."""
    return make_chat(tokenizer, TEMPLATES[config.model.template])


def actor_chat(config: ConfigDict, tokenizer: Tokenizer) -> Chat:
    """The Actor's template under its tokenizer."""
    return make_chat(tokenizer, TEMPLATES[config.actor.template])


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
