"""Tensors of a Hugging Face checkpoint -> parameters, driven by a table of `ParamSpec`.

Reading streams: one tensor of a file is mapped at a time, and the part of it that a device needs is
converted into that device's block. Must not know: any one model, config.json.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from flax import traverse_util

from mas_jax.model import hf_config, safetensors_io
from mas_jax.model.param_table import Params, ParamSpec
from mas_jax.model.safetensors_io import Stored

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def find(directory: Path) -> dict[str, Stored]:
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
                f"{some(names - header.keys())}, only the file holds "
                f"{some(header.keys() - names)}; download both again"
            )
        stored |= header
    return stored


def names(spec: ParamSpec, num_layers: int) -> list[str]:
    """Names of the tensors that make up one parameter: one a layer, one, or none."""
    if spec.hf_name is None:
        return []
    if spec.axes[0] != "layers":
        return [spec.hf_name]
    return [spec.hf_name.format(layer=layer) for layer in range(num_layers)]


def wanted(specs: Mapping[str, ParamSpec], num_layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes by name of the tensors that a flat table is made from."""
    return {name: s.hf_shape for s in specs.values() for name in names(s, num_layers)}


def check(
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, Stored],
    directory: Path,
    *,
    ignored: tuple[str, ...],
) -> None:
    """Raises: ValueError unless the checkpoint holds exactly the tensors of these shapes, and any
    whose names end in one of `ignored`."""
    if missing := shapes.keys() - stored.keys():
        raise ValueError(
            f"{directory}: {len(missing)} of {len(shapes)} tensors that config.json implies are "
            f"missing: {some(missing)}; got {some(stored)}; complete the checkpoint or correct "
            "config.json (tie_word_embeddings says whether lm_head.weight is needed)"
        )
    extra = {name for name in stored.keys() - shapes.keys() if not name.endswith(ignored)}
    if extra:
        raise ValueError(
            f"{directory}: {len(extra)} tensors that config.json does not imply: {some(extra)}; "
            "this is another architecture than config.json says, or num_hidden_layers is too small"
        )
    for name, shape in shapes.items():
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


def read(
    specs: Mapping[str, ParamSpec],
    num_layers: int,
    stored: Mapping[str, Stored],
    *,
    dtype: np.dtype,
    shardings: dict | None,
) -> Params:
    """The parameters of a flat table, converted to `dtype`, each in its sharding.

    shardings: a nested dict like the table, or None for JAX's default device; a process reads just
    what its own devices hold. Raises: ValueError if it is not like the table.
    """
    flat_shardings = dict.fromkeys(specs)
    if shardings is not None:
        flat_shardings = traverse_util.flatten_dict(shardings, sep="/")
        check_paths(flat_shardings.keys(), specs.keys(), what="shardings")
    flat = {}
    for path, spec in specs.items():
        tensors_L = [stored[name] for name in names(spec, num_layers)]
        flat[path] = _place(spec, tensors_L, dtype=np.dtype(dtype), sharding=flat_shardings[path])
    return traverse_util.unflatten_dict(flat, sep="/")


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


def check_paths(got: set[str], wanted: set[str], *, what: str) -> None:
    """Raises ValueError unless a pytree has the config's parameters; a value head may be extra."""
    missing, extra = wanted - got, got - wanted - {"value_head"}
    if missing or extra:
        raise ValueError(
            f"{what} do not fit the config: missing {some(missing)}, extra {some(extra)}; make "
            "them from the same ModelConfig"
        )


def some(names: set[str]) -> str:
    """At most three of the names, and how many there are."""
    shown = ", ".join(sorted(names)[:3]) or "nothing"
    return shown if len(names) <= 3 else f"{shown}, ... ({len(names)} in all)"
