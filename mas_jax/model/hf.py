"""Hugging Face checkpoints <-> the parameter pytree, driven by the table `qwen3.param_specs`.

Both directions stream. Reading maps one tensor of a file at a time and converts the part that a
device needs into that device's block; writing gathers one tensor at a time and appends it to its
file. Neither ever holds the model a second time.
`value_head` has no Hugging Face name: it is not exported, and loading never makes one.

Dimensions: L layers. Must not know: roles, training, tokenization.
"""

import json
import os
import shutil
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.experimental import multihost_utils

from mas_jax.model import hf_config, hf_tensors, qwen3, safetensors_io
from mas_jax.model.hf_config import load_config
from mas_jax.model.hf_tensors import INDEX_FILE, SINGLE_FILE
from mas_jax.model.qwen3 import ModelConfig, Params
from mas_jax.model.safetensors_io import Entry, Stored

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template*",
    "generation_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip


def load(
    directory: str | Path, *, dtype: jnp.dtype, shardings: dict | None = None
) -> tuple[ModelConfig, Params]:
    """Architecture and parameters of a Hugging Face checkpoint, converted to `dtype`.

    shardings: as `qwen3.param_shardings(load_config(directory), mesh)` gives; a process then reads
    just what its own devices hold, one device block at a time. None: JAX's default device.
    All names, shapes and file sizes are checked before anything is read. Beside the parameters a
    checkpoint may hold `rotary_emb.inv_freq` buffers (ignored) and, where the head is tied, an
    `lm_head.weight` that equals the embedding bit by bit.
    Raises: FileNotFoundError for a missing file; ValueError for an unsupported config.json, a
    damaged file, or tensors other than the ones that config.json implies.
    """
    directory = Path(directory)
    config = load_config(directory)
    stored = hf_tensors.find(directory)
    specs = qwen3.flat_specs(config)
    shapes = hf_tensors.wanted(specs, config.num_layers)
    has_copied_head = config.tied and "lm_head.weight" in stored
    if has_copied_head:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    hf_tensors.check(shapes, stored, directory, ignored=("rotary_emb.inv_freq",))
    if has_copied_head:
        _check_redundant_head(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    params = hf_tensors.read(specs, config.num_layers, stored, dtype=dtype, shardings=shardings)
    return config, params


def save(
    directory: str | Path,
    config: ModelConfig,
    params: Params,
    *,
    tokenizer_dir: str | Path | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes `params`, in their own dtype, as a checkpoint that transformers 4 and 5 read.

    tokenizer_dir: its tokenizer, chat template, generation_config.json and licence files are copied
    byte for byte, and config.json takes the bos, eos and pad ids from it.
    The files are written to a hidden directory beside `directory`, which gets its name last: a save
    that fails leaves nothing under `directory`. Every process must call this; process 0 writes.
    Raises: FileExistsError if `directory` exists and is not empty (nothing is ever replaced);
    FileNotFoundError if `tokenizer_dir` holds no tokenizer; ValueError if `params` do not fit
    `config` or no Hugging Face architecture does. All before anything is written.
    """
    directory = Path(directory)
    writer = jax.process_index() == 0  # who alone looks: a slow process would see what it wrote
    if writer and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists and is not empty; move it away or choose a name")
    flat = _checked_params(config, params)
    tokenizer_files, token_ids = [], {}
    if tokenizer_dir is not None:
        tokenizer_files = _tokenizer_files(Path(tokenizer_dir))
        token_ids = hf_config.find_token_ids(Path(tokenizer_dir), vocab_size=config.vocab_size)
    settings = hf_config.config_to_hf(
        config, dtype=np.dtype(flat["embed"].dtype).name, token_ids=token_ids
    )
    shards = _plan_shards(config, flat, max_shard_bytes=max_shard_bytes)
    partial = directory.parent / f".{directory.name}.partial-{uuid.uuid4().hex[:8]}"
    try:
        if writer:
            partial.mkdir(parents=True)
        for file_name, tensors in shards.items():
            arrays = (_gather(flat[t.param], t) for t in tensors)
            if writer:
                entries = [t.entry for t in tensors]
                safetensors_io.write(partial / file_name, entries, arrays)
            else:
                deque(arrays, maxlen=0)  # takes part in the gathering, keeps nothing
        if writer:
            if len(shards) > 1:
                _write_json(partial / INDEX_FILE, _index(shards))
            _write_json(partial / "config.json", settings)
            for source in tokenizer_files:
                shutil.copyfile(source, partial / source.name)
            os.rename(partial, directory)
    finally:
        if writer:
            shutil.rmtree(partial, ignore_errors=True)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"hf.save {directory.name}")


def _check_redundant_head(head: Stored, embedding: Stored) -> None:
    """A head beside a tied embedding must be its copy: if not, one of the two would be lost."""
    rows = 8192  # keeps what is mapped and compared at a time far below the whole tensor
    same = head.code == embedding.code and all(
        np.array_equal(
            safetensors_io.map_tensor(head)[start : start + rows].view(np.uint8),
            safetensors_io.map_tensor(embedding)[start : start + rows].view(np.uint8),
        )
        for start in range(0, head.shape[0], rows)
    )
    if not same:
        raise ValueError(
            f"{head.path}: lm_head.weight differs from model.embed_tokens.weight, but config.json "
            "says tie_word_embeddings=true; set it to false, or remove lm_head.weight"
        )


# --- writing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Planned:
    """A tensor to be written: a layer of the parameter at path `param`, or all of it."""

    entry: Entry
    param: str
    layer: int | None
    transposed: bool


def _checked_params(config: ModelConfig, params: Params) -> dict[str, jax.Array]:
    """Parameters by path, as far as they are exported. Raises: ValueError if they do not fit."""
    flat = traverse_util.flatten_dict(params, sep="/")
    specs = qwen3.flat_specs(config)
    hf_tensors.check_paths(flat.keys(), specs.keys(), what="params")
    for path, spec in specs.items():
        if flat[path].shape != spec.shape:
            raise ValueError(
                f"params[{path!r}] has shape {flat[path].shape}, config implies {spec.shape}; "
                "save parameters with the config that they were made with"
            )
        if np.dtype(flat[path].dtype) not in safetensors_io.DTYPES.values():
            raise ValueError(
                f"params[{path!r}] is {flat[path].dtype}, wanted a type of "
                f"{list(safetensors_io.DTYPES)}; convert it first"
            )
    return {path: flat[path] for path, spec in specs.items() if spec.hf_name is not None}


def _plan_shards(
    config: ModelConfig, flat: dict[str, jax.Array], *, max_shard_bytes: int
) -> dict[str, list[_Planned]]:
    """Tensors of each file in the order of writing: parameter by parameter, widest type first.

    flat: by path, a layer's parameter stacked as [L, ...].
    """
    planned = []
    for path, spec in qwen3.flat_specs(config).items():
        stacked = spec.axes[0] == "layers"
        for i, name in enumerate(hf_tensors.names(spec, config.num_layers)):
            entry = Entry(name, np.dtype(flat[path].dtype), spec.hf_shape)
            planned.append(_Planned(entry, path, i if stacked else None, spec.transposed))
    # widest type first: every tensor then starts at a multiple of its item size
    planned.sort(key=lambda t: -t.entry.dtype.itemsize)
    groups, group_bytes = [[]], 0
    for t in planned:
        if groups[-1] and group_bytes + t.entry.num_bytes > max_shard_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(t)
        group_bytes += t.entry.num_bytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    total = len(groups)
    return {f"model-{i:05}-of-{total:05}.safetensors": g for i, g in enumerate(groups, start=1)}


@jax.jit  # the layer keeps the sharding of the parameter, whatever that is
def _take_layer(stacked: jax.Array, layer: int) -> jax.Array:
    """One layer of a parameter [L, ...], without the first axis."""
    return jax.lax.dynamic_index_in_dim(stacked, layer, keepdims=False)


def _gather(param: jax.Array, tensor: _Planned) -> np.ndarray:
    """The tensor on this host in Hugging Face's layout; a collective if processes share `param`.

    param: [L, ...] for a tensor of a layer, else of the tensor's own shape, before transposing.
    """
    # never `param` itself: np.asarray leaves its result cached in the array that it is given
    ours = jnp.copy(param) if tensor.layer is None else _take_layer(param, tensor.layer)
    if ours.is_fully_addressable:
        host = np.asarray(ours)
    else:
        host = multihost_utils.process_allgather(ours, tiled=True)
    shape = tensor.entry.shape
    if tensor.transposed:
        return np.ascontiguousarray(host.reshape(shape[::-1]).T)
    return np.ascontiguousarray(host.reshape(shape))


def _index(shards: dict[str, list[_Planned]]) -> dict:
    """Content of the index file: which file holds each tensor, and their size in bytes."""
    weight_map = {t.entry.name: file for file, tensors in shards.items() for t in tensors}
    total_bytes = sum(t.entry.num_bytes for tensors in shards.values() for t in tensors)
    return {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _tokenizer_files(tokenizer_dir: Path) -> list[Path]:
    """Files to copy. Raises: FileNotFoundError if no tokenizer is among them."""
    files = sorted(
        {p for glob in _TOKENIZER_FILES for p in tokenizer_dir.glob(glob) if p.is_file()}
    )
    vocabularies = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any(p.name in vocabularies for p in files):
        raise FileNotFoundError(
            f"tokenizer_dir={tokenizer_dir} holds none of {vocabularies}; give the directory that "
            "the tokenizer was loaded from"
        )
    return files
