"""Documents on disk: whole or not there, whoever else writes them and whenever a kill comes."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mas_jax.files import write_json


def test_a_document_is_replaced_by_another(tmp_path):
    write_json(tmp_path / "d.json", {"a": 1})
    write_json(tmp_path / "d.json", {"a": [2, "ü"]})
    assert json.loads((tmp_path / "d.json").read_text()) == {"a": [2, "ü"]}
    assert [path.name for path in tmp_path.iterdir()] == ["d.json"]


def test_a_write_that_breaks_off_leaves_what_was_there(tmp_path, monkeypatch):
    write_json(tmp_path / "d.json", {"a": 1})
    write = Path.write_text

    def full(path, text):
        write(path, text[: len(text) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        write_json(tmp_path / "d.json", {"a": 2})
    assert json.loads((tmp_path / "d.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["d.json"]


def test_writers_at_once_do_not_disturb_each_other(tmp_path):
    documents = [{"writer": number, "text": "x" * 10_000} for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda document: write_json(tmp_path / "d.json", document), documents))
    assert json.loads((tmp_path / "d.json").read_text()) in documents
