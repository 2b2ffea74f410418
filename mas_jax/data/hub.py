"""Files of public datasets from the Hugging Face hub, and how each becomes questions.

The hub's own client does the work, so HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and proxies
mean here what they mean everywhere. Must not know: training, evaluation.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from mas_jax.data.questions import parse, read_jsonl
from mas_jax.records import Question

FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"  # DATASET/SPLIT.jsonl
SEARCH_R1_MIX = "PeterJinGo/nq_hotpotqa_train"  # train.parquet: Search-R1's own training mix


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


def read_flashrag(dataset: str, split: str, *, revision: str | None = None) -> tuple[Question, ...]:
    """A set of FlashRAG's collection, such as ("hotpotqa", "dev").

    Raises: as `fetch` and `questions.read_jsonl`.
    """
    path = fetch(FLASHRAG, f"{dataset}/{split}.jsonl", revision=revision)
    return read_jsonl(path, dataset=dataset, split=split)


def _rows(path: Path) -> Iterator[dict]:
    import pyarrow.parquet

    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=4096):
        yield from batch.to_pylist()


def read_search_r1_mix(
    split: str = "train", *, revision: str | None = None
) -> tuple[Question, ...]:
    """Search-R1's mix of NQ and HotpotQA, whose rows name the set they are from.

    Raises: as `fetch`; ValueError that names the row that is not a question.
    """
    path = fetch(SEARCH_R1_MIX, f"{split}.parquet", revision=revision)
    found = []
    for number, row in enumerate(_rows(path)):
        dataset = row.get("data_source")
        if not isinstance(dataset, str):
            raise ValueError(f"{path}: row {number}: no data_source in {json.dumps(sorted(row))}")
        try:
            found.append(parse(row | {"metadata": None}, dataset=dataset, split=split))
        except ValueError as error:
            raise ValueError(f"{path}: row {number}: not a question ({error})") from error
    return tuple(found)
