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
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.experimental import multihost_utils

from mas_jax.model import hf_config, qwen3, safetensors_io
from mas_jax.model.hf_config import load_config
from mas_jax.model.qwen3 import ModelConfig, Params, ParamSpec
from mas_jax.model.safetensors_io import Entry, Stored

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

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
    stored = _stored_tensors(directory)
    _check_tensors(config, stored, directory)
    specs = qwen3.flat_specs(config)
    flat_shardings = dict.fromkeys(specs)
    if shardings is not None:
        flat_shardings = traverse_util.flatten_dict(shardings, sep="/")
        _check_paths(flat_shardings.keys(), specs.keys(), what="shardings")
    flat = {}
    for path, spec in specs.items():
        tensors_L = [stored[name] for name in _hf_names(spec, config)]
        flat[path] = _place(spec, tensors_L, dtype=np.dtype(dtype), sharding=flat_shardings[path])
    return config, traverse_util.unflatten_dict(flat, sep="/")


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
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
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
    writer = jax.process_index() == 0
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


# --- reading --------------------------------------------------------------------------------------


def _stored_tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint; as in transformers, a single file goes before an index."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return safetensors_io.read_header(single)
    if not index.is_file():
        got = sorted(p.name for p in directory.iterdir() if p.suffix in (".safetensors", ".bin"))
        raise FileNotFoundError(
            f"{directory}: wanted {SINGLE_FILE} or {INDEX_FILE}, got {got}; convert the weights "
            "with transformers' save_pretrained, which writes safetensors"
        )
    content = hf_config.read_json(index)
    if "weight_map" not in content:
        raise ValueError(f"{index}: no weight_map (tensor name -> file); download it again")
    names_of_file = defaultdict(set)
    for name, file_name in content["weight_map"].items():
        names_of_file[file_name].add(name)
    stored = {}
    for file_name, names in sorted(names_of_file.items()):
        path = directory / file_name
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist, but {index.name} says that it holds {len(names)} tensors, "
                f"{min(names)!r} among them; download it"
            )
        header = safetensors_io.read_header(path)
        if header.keys() != names:
            raise ValueError(
                f"{path} and {index.name} disagree: only the index names "
                f"{_some(names - header.keys())}, only the file holds "
                f"{_some(header.keys() - names)}; download both again"
            )
        stored |= header
    return stored


def _check_tensors(config: ModelConfig, stored: dict[str, Stored], directory: Path) -> None:
    """Raises ValueError unless the checkpoint holds exactly the tensors that its config implies."""
    wanted = {
        name: spec.hf_shape
        for spec in qwen3.flat_specs(config).values()
        for name in _hf_names(spec, config)
    }
    if missing := wanted.keys() - stored.keys():
        raise ValueError(
            f"{directory}: {len(missing)} of {len(wanted)} tensors that config.json implies are "
            f"missing: {_some(missing)}; got {_some(stored)}; complete the checkpoint or correct "
            "config.json (tie_word_embeddings says whether lm_head.weight is needed)"
        )
    if config.tied and "lm_head.weight" in stored:
        wanted["lm_head.weight"] = wanted["model.embed_tokens.weight"]
    extra = {n for n in stored.keys() - wanted.keys() if not n.endswith("rotary_emb.inv_freq")}
    if extra:
        raise ValueError(
            f"{directory}: {len(extra)} tensors that config.json does not imply: {_some(extra)}; "
            "this is another architecture than config.json says, or num_hidden_layers is too small"
        )
    for name, shape in wanted.items():
        tensor = stored[name]
        if tensor.shape != shape:
            raise ValueError(
                f"{tensor.path}: tensor {name} has shape {tensor.shape}, wanted {shape} by "
                "config.json; correct it or use the weights that it belongs to"
            )
        if tensor.code not in safetensors_io.DTYPES:
            raise ValueError(
                f"{tensor.path}: tensor {name} is stored as {tensor.code}, wanted one of "
                f"{sorted(safetensors_io.DTYPES)}; dequantise the checkpoint first"
            )
    if "lm_head.weight" in stored and config.tied:
        _check_redundant_head(stored["lm_head.weight"], stored["model.embed_tokens.weight"])


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


def _place(
    spec: ParamSpec,
    tensors_L: list[Stored],
    *,
    dtype: np.dtype,
    sharding: jax.sharding.Sharding | None,
) -> jax.Array:
    """One parameter on its devices; one block at a time is on the host, and only until placed."""
    if sharding is None:
        whole = tuple((0, size) for size in spec.shape)
        return jax.block_until_ready(jax.device_put(_read_block(spec, tensors_L, whole, dtype)))
    devices_of_block = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
        bounds = tuple(s.indices(size)[:2] for s, size in zip(index, spec.shape, strict=True))
        devices_of_block[bounds].append(device)
    arrays = []
    for bounds, devices in devices_of_block.items():
        block = _read_block(spec, tensors_L, bounds, dtype)
        arrays += jax.block_until_ready([jax.device_put(block, device) for device in devices])
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, arrays)


def _read_block(
    spec: ParamSpec,
    tensors_L: list[Stored],
    bounds: tuple[tuple[int, int], ...],
    dtype: np.dtype,
) -> np.ndarray:
    """The part of one parameter within `bounds` (begin, end of each axis), in our layout."""
    block = np.empty([end - begin for begin, end in bounds], dtype)
    if spec.axes[0] != "layers":
        block[...] = _slice(spec.shape, spec, tensors_L[0], bounds)
        return block
    (first, last), inner = bounds[0], bounds[1:]
    for row, tensor in zip(block, tensors_L[first:last], strict=True):
        # converted in the file's order, then turned: three times faster than both in one go
        row[...] = _slice(spec.shape[1:], spec, tensor, inner).astype(dtype, copy=False)
    return block


def _slice(
    shape: tuple[int, ...], spec: ParamSpec, tensor: Stored, bounds: tuple[tuple[int, int], ...]
) -> np.ndarray:
    """View of a mapped tensor in our layout `shape`, cut to `bounds`; nothing is copied."""
    mapped = safetensors_io.map_tensor(tensor)
    ours = mapped.T if spec.transposed else mapped
    return ours.reshape(shape)[tuple(slice(begin, end) for begin, end in bounds)]


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
    _check_paths(flat.keys(), specs.keys(), what="params")
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
    """Tensors of each file in the order of writing: parameter by parameter, widest type first."""
    planned = []
    for path, spec in qwen3.flat_specs(config).items():
        stacked = spec.axes[0] == "layers"
        for i, name in enumerate(_hf_names(spec, config)):
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
    return jax.lax.dynamic_index_in_dim(stacked, layer, keepdims=False)


def _gather(param: jax.Array, tensor: _Planned) -> np.ndarray:
    """The tensor on this host in Hugging Face's layout; a collective if processes share `param`."""
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


# --- names ----------------------------------------------------------------------------------------


def _hf_names(spec: ParamSpec, config: ModelConfig) -> list[str]:
    """Names of the tensors that make up one parameter: one a layer, one, or none."""
    if spec.hf_name is None:
        return []
    if spec.axes[0] != "layers":
        return [spec.hf_name]
    return [spec.hf_name.format(layer=layer) for layer in range(config.num_layers)]


def _check_paths(got: set[str], wanted: set[str], *, what: str) -> None:
    """Raises ValueError unless a pytree has the config's parameters; a value head may be extra."""
    missing, extra = wanted - got, got - wanted - {"value_head"}
    if missing or extra:
        raise ValueError(
            f"{what} do not fit the config: missing {_some(missing)}, extra {_some(extra)}; make "
            "them from the same ModelConfig"
        )


def _some(names: set[str]) -> str:
    """At most three of the names, and how many there are."""
    shown = ", ".join(sorted(names)[:3]) or "nothing"
    return shown if len(names) <= 3 else f"{shown}, ... ({len(names)} in all)"
