"""Files of public datasets from the Hugging Face hub, and how each becomes lines of questions.

The hub's own client does the work, so HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and proxies
mean here what they mean everywhere. Must not know: training, evaluation.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

from mas_jax.data.questions import Source, jsonl

FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"  # DATASET/SPLIT.jsonl
SEARCH_R1_MIX = "PeterJinGo/nq_hotpotqa_train"  # train.parquet: Search-R1's own training mix
SEARCH_R1_SETS = ("nq", "hotpotqa")
_KEPT = ("id", "question", "golden_answers")


def fetch(repository: str, file: str, *, revision: str | None = None) -> Path:
    """Where a file of a dataset repository lies in the local cache, fetched if it is not there.

    Raises: FileNotFoundError that says what was asked of which endpoint, and why it failed.
    """
    import huggingface_hub  # reads its environment when it is imported
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.hf_hub_download(
                repository, file, repo_type="dataset", revision=revision
            )
        )
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise FileNotFoundError(
            f"{file} of dataset {repository} ({revision or 'main'}) could not be had from "
            f"{huggingface_hub.constants.ENDPOINT}: {first_line}; check the network, HF_ENDPOINT "
            "and HF_TOKEN, or give a directory with the files instead"
        ) from error


def _origin(path: Path, repository: str, file: str) -> dict[str, str]:
    """What a manifest says of a fetched file; in the hub's cache it lies under its commit."""
    parts = path.parts
    return {"repository": repository, "revision": parts[parts.index("snapshots") + 1], "file": file}


def flashrag(dataset: str, split: str, *, revision: str | None = None) -> Source:
    """A set of FlashRAG's collection, such as ("hotpotqa", "dev"). Raises: as `fetch`."""
    file = f"{dataset}/{split}.jsonl"
    path = fetch(FLASHRAG, file, revision=revision)
    return jsonl(path, dataset=dataset, split=split, origin=_origin(path, FLASHRAG, file))


def search_r1_mix(dataset: str, split: str, *, revision: str | None = None) -> Source:
    """What Search-R1's own mix has of one of its sets: of the prompts and rewards in its rows
    nothing is kept, nor of the metadata, which is FlashRAG's.

    Raises: as `fetch`; reading it, ValueError that names a row of no set or of another one.
    """
    file = f"{split}.parquet"
    path = fetch(SEARCH_R1_MIX, file, revision=revision)

    def _lines() -> Iterator[tuple[str, dict]]:
        import pyarrow.parquet

        rows = pyarrow.parquet.ParquetFile(path).iter_batches(columns=[*_KEPT, "data_source"])
        for number, row in enumerate(itertools.chain.from_iterable(r.to_pylist() for r in rows)):
            if row["data_source"] not in SEARCH_R1_SETS:
                raise ValueError(
                    f"{path}: row {number}: data_source {row['data_source']!r} is not one of "
                    f"{SEARCH_R1_SETS}"
                )
            if row["data_source"] == dataset:
                yield f"{path}: row {number}", {field: row[field] for field in _KEPT}

    return Source(dataset, split, _lines, _origin(path, SEARCH_R1_MIX, file))
