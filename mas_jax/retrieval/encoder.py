"""Texts to vectors with a BERT encoder: tokenized, cut, put in rows of like length, pooled.

Dimensions: N texts, B rows, T positions, E vector. Must not know: indexes, corpora, agents.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mas_jax.model import sharding
from mas_jax.retrieval import bert

LENGTHS = (*range(16, 257, 16), *range(288, 513, 32))  # of rows; a program each
BATCH_TOKENS = {"cpu": 1024}  # activations that stay in two cores' caches
ACCELERATOR_BATCH_TOKENS = 65_536
ROWS = (1, 4, 16)  # of a call of few texts, on each device; a program each
BLOCK_TEXTS = 16_384  # sorted by length and encoded together


@dataclass(frozen=True)
class EncoderConfig:
    """How texts become vectors.

    directory: a BERT in the Hugging Face layout, with its tokenizer. query_prefix, passage_prefix:
    put before every text. max_tokens: a longer text is cut, special tokens included. batch_tokens:
    places of one device call; 0: what the platform is fast at. dtype: of weights and
    activations; vectors are float32.
    """

    directory: str
    query_prefix: str = ""
    passage_prefix: str = ""
    max_tokens: int = 256
    batch_tokens: int = 0
    dtype: str = "float32"


def e5(directory: str, **changes) -> EncoderConfig:
    """E5-base-v2 as the field uses it. Source: https://hf.co/intfloat/e5-base-v2."""
    return EncoderConfig(directory, query_prefix="query: ", passage_prefix="passage: ", **changes)


class TextEncoder:
    """One encoder on all devices of a mesh (default: this process's), rows split over them.

    `fingerprint` names the weights, the tokenizer and everything in the config that vectors depend
    on. A text's vector depends on its neighbours by rounding alone (1e-6).
    Raises: as `bert.load`; ValueError for `max_tokens` beyond the encoder's positions.
    """

    def __init__(self, config: EncoderConfig, *, mesh: Mesh | None = None) -> None:
        directory = Path(config.directory)
        if mesh is None:
            mesh = sharding.make_mesh(data=len(jax.local_devices()), devices=jax.local_devices())
        self.config, self._mesh = config, mesh
        self._batch_tokens = config.batch_tokens or BATCH_TOKENS.get(
            jax.default_backend(), ACCELERATOR_BATCH_TOKENS
        )
        self._bert, self._params = bert.load(directory, dtype=jnp.dtype(config.dtype), mesh=mesh)
        if not 2 < config.max_tokens <= self._bert.max_positions:
            raise ValueError(
                f"max_tokens={config.max_tokens} must be in 3..{self._bert.max_positions}, the "
                f"positions of the encoder in {directory}"
            )
        from transformers import AutoTokenizer  # takes seconds to import, and only this needs it

        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._rows = NamedSharding(mesh, sharding.spec(("batch", "length")))
        self.dim = self._bert.model_dim
        self.fingerprint = _fingerprint(config)

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors [N, E] float32 of norm 1."""
        return self._encode([self.config.query_prefix + text for text in texts])

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors [N, E] float32 of norm 1."""
        return self._encode([self.config.passage_prefix + text for text in texts])

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        vectors_NE = np.empty((len(texts), self.dim), np.float32)
        for start in range(0, len(texts), BLOCK_TEXTS):
            block = texts[start : start + BLOCK_TEXTS]
            ids_N = self._tokenizer(
                list(block), truncation=True, max_length=self.config.max_tokens,
                return_attention_mask=False, return_token_type_ids=False,
            )["input_ids"]  # fmt: skip
            self._encode_block(ids_N, vectors_NE[start : start + len(block)])
        return vectors_NE

    def _encode_block(self, ids_N: Sequence[list[int]], vectors_NE: np.ndarray) -> None:
        """Writes the vectors of tokenized texts; calls are queued before any result is awaited."""
        longest = self.config.max_tokens
        lengths = [n for n in LENGTHS if n < longest] + [longest]
        bucket_N = np.searchsorted(lengths, [len(ids) for ids in ids_N])
        pending = []
        for bucket in np.unique(bucket_N):
            T = lengths[bucket]
            texts_N = np.flatnonzero(bucket_N == bucket)
            while len(texts_N):
                B = self._num_rows(T, len(texts_N))
                chosen_B, texts_N = texts_N[:B], texts_N[B:]
                tokens_BT = np.zeros((B, T), np.int32)
                count_B = np.zeros(B, np.int32)
                for row, index in enumerate(chosen_B):
                    count_B[row] = len(ids_N[index])
                    tokens_BT[row, : count_B[row]] = ids_N[index]
                pending.append((chosen_B, self._call(tokens_BT, count_B)))
        for chosen_B, rows_BE in pending:
            vectors_NE[chosen_B] = np.asarray(rows_BE)[: len(chosen_B)]

    def _num_rows(self, T: int, num_texts: int) -> int:
        """Rows of a call: the fewest of `ROWS` that hold the texts, at most about the batch's
        places; a multiple of what the mesh splits."""
        split = self._mesh.shape["data"] * self._mesh.shape["fsdp"]
        most = max(1, self._batch_tokens // (T * split))
        needed = -(-num_texts // split)
        return split * min(most, next((rows for rows in ROWS if rows >= needed), most))

    def _call(self, tokens_BT: np.ndarray, count_B: np.ndarray) -> jax.Array:
        is_token_BT = np.arange(tokens_BT.shape[1]) < count_B[:, None]
        with jax.set_mesh(self._mesh):
            return self._embed(self._params, tokens_BT, is_token_BT)

    @functools.cached_property
    def _embed(self):
        """Compiled for each shape of rows: the vectors [B, E]."""

        def _run(params, tokens_BT, is_token_BT):
            hidden_BTD = bert.hidden(params, self._bert, tokens_BT, is_token_BT)
            return bert.mean_pooled(hidden_BTD, is_token_BT)

        params_at = jax.tree.map(lambda x: x.sharding, self._params)
        out = NamedSharding(self._mesh, sharding.spec(("batch", "hidden")))
        return jax.jit(_run, in_shardings=(params_at, self._rows, self._rows), out_shardings=out)


def _fingerprint(config: EncoderConfig) -> str:
    """Digest of the files and settings that decide what a vector is."""
    digest = hashlib.blake2b(digest_size=8)
    directory = Path(config.directory)
    names = ("config.json", "tokenizer.json", "vocab.txt")
    files = [directory / name for name in names] + sorted(directory.glob("*.safetensors"))
    for path in files:
        if path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
    settings = (config.query_prefix, config.passage_prefix, config.max_tokens, config.dtype)
    digest.update(json.dumps(settings).encode())
    return f"bert-1-{digest.hexdigest()}"
