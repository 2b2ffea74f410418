"""Corpora on disk, their embeddings in pieces, and indexes that are built a shard at a time."""

import gzip
import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from shared_data import lines, shared

from mas_jax.records import Passage
from mas_jax.retrieval import build
from mas_jax.retrieval.corpus import open_corpus, parse
from mas_jax.retrieval.embeddings import Embeddings
from mas_jax.retrieval.hashed_ngrams import HashedNgrams
from mas_jax.retrieval.index import IndexConfig, Retriever, contents


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Each test has its own places of lines."""
    monkeypatch.setenv("MAS_JAX_CACHE", str(tmp_path / "cache"))


DIM = 256
EXACT = IndexConfig(backend="exact", max_shard=40)


@contextmanager
def unwatched(total):
    """Where nobody watches."""
    yield lambda done: None


def write_corpus(path: Path, count=100) -> Path:
    """Passages with one word of their own each."""
    rows = [{"id": str(i), "contents": f'"Title {i}"\nthe word{i} of é{i}'} for i in range(count)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def build_all(corpus, directory, config=EXACT, encoder=None, piece=16, share=None):
    return build.build(
        corpus, encoder or HashedNgrams(DIM), config, directory, dim=DIM, piece=piece,
        share=share or build.Share(), watch=unwatched,
    )  # fmt: skip


# --- corpora --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "passage"),
    [({"id": "1", "contents": "A b\nc d\ne"}, Passage("1", "A b", "c d\ne")),
     ({"id": 2, "contents": '"Dune (novel)"\nx'}, Passage("2", "Dune (novel)", "x")),
     ({"id": "3", "contents": '"\nx'}, Passage("3", '"', "x")),
     ({"id": "4", "contents": "no text"}, Passage("4", "no text", "")),
     ({"id": "5", "title": "T", "text": "x\ny"}, Passage("5", "T", "x\ny"))],
)  # fmt: skip
def test_lines_of_every_form(line, passage):
    assert parse(json.dumps(line).encode()) == passage


def test_passages_are_read_by_their_place_in_any_order(tmp_path):
    corpus = open_corpus(write_corpus(tmp_path / "c.jsonl"))
    assert len(corpus) == 100
    for row in (99, 0, 42, -1):
        number = row % 100
        assert corpus[row] == Passage(
            str(number), f"Title {number}", f"the word{number} of é{number}"
        )
    assert [p.id for p in corpus[97:]] == ["97", "98", "99"]
    with pytest.raises(IndexError):
        corpus[100]


@pytest.mark.parametrize("ending", ["", "\n"])
def test_a_last_line_may_lack_its_end_and_only_line_feeds_end_lines(tmp_path, ending):
    path = tmp_path / "c.jsonl"
    rows = [
        json.dumps({"id": str(i), "contents": "t\u2028\x85\nx"}, ensure_ascii=False) for i in "ab"
    ]
    path.write_text("\n".join(rows) + ending)
    corpus = open_corpus(path)
    assert [p.title for p in corpus] == ["t\u2028\x85"] * 2


def test_a_corpus_is_read_once_and_again_when_it_changed(tmp_path, caplog):
    caplog.set_level("INFO")
    path = write_corpus(tmp_path / "c.jsonl", 5)
    first = open_corpus(path).fingerprint
    assert "reading" in caplog.text
    caplog.clear()
    assert open_corpus(path).fingerprint == first
    assert "reading" not in caplog.text
    write_corpus(path, 6)
    again = open_corpus(path)
    assert len(again) == 6 and again.fingerprint != first


@pytest.mark.parametrize("name", ["c.jsonl.lines.json", "c.jsonl.lines.npy"])
@pytest.mark.parametrize("left", [b"", b"half", b"[1]", None])
def test_what_a_kill_left_of_the_places_of_lines_is_made_again(tmp_path, name, left):
    path, cache = write_corpus(tmp_path / "c.jsonl", 5), tmp_path / "cache"
    before = open_corpus(path, cache=cache)
    kept = cache / name
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2] if left is None else left)
    again = open_corpus(path, cache=cache)
    assert (list(again), again.fingerprint) == (list(before), before.fingerprint)
    assert kept.read_bytes() == whole


def test_places_of_another_file_of_that_name_are_not_used(tmp_path):
    path, cache = write_corpus(tmp_path / "c.jsonl", 6), tmp_path / "cache"
    open_corpus(path, cache=cache)
    longer = (cache / "c.jsonl.lines.npy").read_bytes()
    write_corpus(path, 5)
    open_corpus(path, cache=cache)
    (cache / "c.jsonl.lines.npy").write_bytes(longer)  # as of a kill between the two files
    assert len(open_corpus(path, cache=cache)) == 5


def test_hosts_that_share_a_cache_may_open_a_corpus_at_once(tmp_path, monkeypatch):
    path, both = write_corpus(tmp_path / "c.jsonl", 5), threading.Barrier(2)
    save = np.save

    def slow(file, array):
        save(file, array)
        both.wait(10)  # both are written before one is renamed; one process id, as in containers

    monkeypatch.setattr(np, "save", slow)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(open_corpus, [path] * 2))
    assert [len(corpus) for corpus in found] == [5, 5]


def test_a_packed_corpus_is_the_same_corpus(tmp_path):
    plain = write_corpus(tmp_path / "c.jsonl")
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    corpus = open_corpus(packed, cache=tmp_path / "cache")
    assert corpus.fingerprint == open_corpus(plain).fingerprint
    assert list(corpus) == list(open_corpus(plain))
    assert not list(tmp_path.glob("packed*lines*"))


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty"), ('{"id": "1", "contents": "a"}\n\n{"id": "2"}\n', "line 2 is blank")],
)
def test_a_file_that_is_no_corpus_is_an_error(tmp_path, text, message):
    (tmp_path / "c.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        open_corpus(tmp_path / "c.jsonl")


@pytest.mark.parametrize("line", ['{"id": "1"}', "[1, 2]", '{"contents": "a"}', "{broken"])
def test_a_line_that_is_no_passage_is_an_error_that_names_its_place(tmp_path, line):
    (tmp_path / "c.jsonl").write_text('{"id": "0", "contents": "a"}\n' + line + "\n")
    corpus = open_corpus(tmp_path / "c.jsonl")
    assert corpus[0].id == "0"
    with pytest.raises(ValueError, match=r"c\.jsonl: passage 1 \(byte 29\) is not a passage"):
        corpus[1]


def test_an_absent_corpus_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"wanted a \.jsonl or \.jsonl\.gz"):
        open_corpus(tmp_path / "c.jsonl")


@pytest.mark.parametrize("name", ["nq", "2wikimultihopqa", "musique", "bamboogle"])
def test_real_corpora_are_read_whole(tmp_path, name):
    path = shared(f"qa/{name}_corpus.jsonl")
    corpus = open_corpus(path, cache=tmp_path)
    expected = lines(f"qa/{name}_corpus.jsonl")
    assert [f"{p.title}\n{p.text}" for p in corpus] == [line["contents"] for line in expected]


# --- builds ---------------------------------------------------------------------------------------


def test_an_index_built_in_pieces_answers_as_one_built_at_once(tmp_path):
    corpus = open_corpus(write_corpus(tmp_path / "c.jsonl"))
    encoder = HashedNgrams(DIM)
    assert build_all(corpus, tmp_path / "index")
    loaded = Retriever.load(tmp_path / "index", corpus, encoder, EXACT)
    whole = Retriever.build(list(corpus), encoder, EXACT)
    queries = [f"word{i}" for i in range(0, 100, 7)]
    assert loaded.search_now(queries, 5) == whole.search_now(queries, 5)
    assert [found[0].id for found in loaded.search_now(queries, 1)] == [q[4:] for q in queries]
    assert not (tmp_path / "index.building").exists()
    with pytest.raises(FileExistsError, match="exists"):
        build_all(corpus, tmp_path / "index")


def test_a_scann_index_is_built_in_shards_too(tmp_path):
    pytest.importorskip("scann")
    corpus, config = open_corpus(write_corpus(tmp_path / "c.jsonl")), IndexConfig(max_shard=40)
    assert build_all(corpus, tmp_path / "index", config)
    loaded = Retriever.load(tmp_path / "index", corpus, HashedNgrams(DIM), config)
    assert [found[0].id for found in loaded.search_now(["word3", "word77"], 1)] == ["3", "77"]


def test_embeddings_are_the_encoders_whatever_the_pieces(tmp_path):
    corpus, encoder = open_corpus(write_corpus(tmp_path / "c.jsonl")), HashedNgrams(DIM)
    expected = encoder.encode_passages([contents(p) for p in corpus])
    for piece in (1, 7, 100, 1000):
        store = Embeddings(tmp_path / f"e{piece}", 100, DIM, piece=piece, settings={})
        with pytest.raises(RuntimeError, match="not written yet"):
            store.read(0, 100)
        counted = []
        store.write(
            corpus, contents, encoder.encode_passages, host=0, num_hosts=1, report=counted.append
        )
        assert counted[-1] == 100 and len(counted) == -(-100 // piece)
        np.testing.assert_array_equal(store.read(0, 100), expected)
        np.testing.assert_array_equal(store.read(33, 71), expected[33:71])


def test_hosts_share_the_pieces_and_host_0_waits_for_them(tmp_path):
    corpus = open_corpus(write_corpus(tmp_path / "c.jsonl"))
    with pytest.raises(RuntimeError, match=r"4 pieces .* number 1; let every host finish"):
        build_all(corpus, tmp_path / "index", share=build.Share(0, 3))
    assert not build_all(corpus, tmp_path / "index", share=build.Share(2, 3))
    assert not build_all(corpus, tmp_path / "index", share=build.Share(1, 3))
    assert build_all(corpus, tmp_path / "index", share=build.Share(0, 3))
    one = Retriever.load(tmp_path / "index", corpus, HashedNgrams(DIM), EXACT)
    assert one.search_now(["word50"], 1)[0][0].id == "50"


def test_a_build_of_other_settings_in_progress_is_an_error_that_names_them(tmp_path):
    corpus = open_corpus(write_corpus(tmp_path / "c.jsonl"))
    build_all(corpus, tmp_path / "index", share=build.Share(1, 2))
    with pytest.raises(ValueError, match=r"max_shard: has 40, wanted 50"):
        build_all(corpus, tmp_path / "index", IndexConfig(backend="exact", max_shard=50))
    with pytest.raises(ValueError, match=r"piece: has 16, wanted 8"):
        build_all(corpus, tmp_path / "index", piece=8)


@pytest.mark.parametrize("left", [b"", b'{"corpus": "ab', b"[]", None])
def test_damaged_notes_of_a_build_are_written_again_where_no_piece_is(tmp_path, left):
    corpus, building = open_corpus(write_corpus(tmp_path / "c.jsonl")), tmp_path / "index.building"
    notes = building / "embeddings" / "embeddings.json"
    notes.parent.mkdir(parents=True)
    if left is not None:
        notes.write_bytes(left)
    assert not build_all(corpus, tmp_path / "index", share=build.Share(1, 2))
    whole = notes.read_bytes()
    assert json.loads(whole)["corpus"] == corpus.fingerprint
    if left is None:
        notes.unlink()
    else:
        notes.write_bytes(left)
    with pytest.raises(ValueError, match=r"embeddings\.json is absent or damaged.*restore it"):
        build_all(corpus, tmp_path / "index")
    notes.write_bytes(whole)  # nothing was lost
    assert build_all(corpus, tmp_path / "index")


def test_a_build_for_devices_alone_is_refused(tmp_path):
    corpus = open_corpus(write_corpus(tmp_path / "c.jsonl"))
    with pytest.raises(ValueError, match=r"backend='device' .* build with 'exact'"):
        build_all(corpus, tmp_path / "index", IndexConfig(backend="device"))
    assert build_all(corpus, tmp_path / "index")
    device = IndexConfig(backend="device", max_shard=EXACT.max_shard)
    loaded = Retriever.load(tmp_path / "index", corpus, HashedNgrams(DIM), device)
    assert [found[0].id for found in loaded.search_now(["word3", "word77"], 1)] == ["3", "77"]


def test_a_vector_that_is_not_finite_stops_the_build_and_names_the_passage(tmp_path):
    class Broken(HashedNgrams):
        def encode_passages(self, texts):
            vectors = self.encode(texts)
            vectors[[i for i, text in enumerate(texts) if "word37 " in text]] = np.nan
            return vectors

    corpus = open_corpus(write_corpus(tmp_path / "c.jsonl"))
    with pytest.raises(ValueError, match=r"vector of passage 37 \('37'\) is not finite"):
        build_all(corpus, tmp_path / "index", encoder=Broken(DIM))


SLOW_BUILD = """
import sys, time
from contextlib import nullcontext
from pathlib import Path
from mas_jax.retrieval import build
from mas_jax.retrieval.corpus import open_corpus
from mas_jax.retrieval.hashed_ngrams import HashedNgrams
from mas_jax.retrieval.index import IndexConfig
class Slow(HashedNgrams):
    def encode_passages(self, texts):
        time.sleep(0.1)
        print("piece", flush=True)
        return self.encode(texts)
def unwatched(total):
    return nullcontext(lambda done: None)
corpus = open_corpus(Path(sys.argv[1]) / "c.jsonl")
config = IndexConfig(backend="exact", max_shard=40)
build.build(corpus, Slow(256), config, Path(sys.argv[1]) / "index",
            dim=256, piece=4, share=build.Share(), watch=unwatched)
"""


def test_a_killed_build_goes_on_where_it_stopped(tmp_path):
    corpus = open_corpus(write_corpus(tmp_path / "c.jsonl"))
    command = [sys.executable, "-c", SLOW_BUILD, str(tmp_path)]
    pieces = 0
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for _ in range(7):
        pieces += process.stdout.readline() == "piece\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert pieces == 7
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 25 - 7 <= done.stdout.count("piece") <= 25 - 6  # the seventh may not have been written
    loaded = Retriever.load(tmp_path / "index", corpus, HashedNgrams(DIM), EXACT)
    whole = Retriever.build(list(corpus), HashedNgrams(DIM), EXACT)
    queries = [f"word{i}" for i in range(100)]
    assert loaded.search_now(queries, 3) == whole.search_now(queries, 3)


def test_the_estimate_by_hand():
    # 21M vectors of 768 f32: 64.5 GB; a shard of 1M: 3.07 GB
    sizes = build.estimate_bytes(21_000_000, 768, IndexConfig(backend="exact"))
    assert sizes["disk"] == sizes["ram"] == 21_000_000 * 768 * 4
    assert sizes["disk_building"] == 2 * sizes["disk"]
    assert sizes["ram_building"] == 2 * 1_000_000 * 768 * 4
