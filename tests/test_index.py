"""The retriever: right passages from every backend, defined answers, stale indices, batching."""

import asyncio
import dataclasses
import json
import logging
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from mas_jax.benchmarks import retrieval
from mas_jax.records import Passage, SearchFailure
from mas_jax.retrieval import exact_index, index, scann_index
from mas_jax.retrieval.hashed_ngrams import HashedNgrams
from mas_jax.retrieval.index import IndexConfig, Retriever
from mas_jax.retrieval.scann_index import TreeSizes

QA = ROOT.parent / "shared" / "data" / "qa"
needs_scann = pytest.mark.skipif(not scann_index.is_available(), reason="no scann wheel here")
BACKENDS = ["exact", pytest.param("scann", marks=needs_scann)]
ALL_BACKENDS = [*BACKENDS, "device"]
TREE = IndexConfig("scann", max_exact=100, leaves=40, leaves_to_search=12, reorder=100)


class Listed:
    """An encoder that reads a text as comma-separated numbers; records what it was asked."""

    fingerprint = "listed"

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def encode(self, texts):
        self.calls.append(list(texts))
        rows = [[float(x) for x in text.split("\n")[-1].split(",")] for text in texts if text]
        width = len(rows[0]) if rows else 2
        rows = iter(rows)
        return np.array([next(rows) if t else [0.0] * width for t in texts], np.float32)

    def encode_queries(self, texts):
        return self.encode(texts)

    encode_passages = encode_queries


def listed(vectors) -> list[Passage]:
    """Passages that `Listed` encodes as the given vectors."""
    texts = [",".join(repr(float(x)) for x in vector) for vector in vectors]
    return [Passage(f"p{i}", "", text) for i, text in enumerate(texts)]


def ids(answer) -> list[str]:
    return [passage.id for passage in answer]


def cloud(num: int, dim: int, seed: int) -> np.ndarray:
    """Unit vectors around overlapping topics, a power-law spectrum, with duplicates and a zero."""
    rng = np.random.default_rng(seed)
    topics = rng.normal(size=(num // 20 + 1, dim))
    vectors = topics[rng.integers(0, len(topics), num)] + 0.7 * rng.normal(size=(num, dim))
    vectors *= np.arange(1, dim + 1) ** -0.4
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors[num // 2 : num // 2 + 40] = vectors[3]
    vectors[num // 3] = 0
    return vectors.astype(np.float32)


def reference(vectors: np.ndarray, query: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and rows of all vectors sorted by (score descending, row), scores in f64."""
    scores = (vectors.astype(np.float64) * query.astype(np.float64)).sum(1).astype(np.float32)
    order = sorted(range(len(scores)), key=lambda row: (-scores[row], row))[:k]
    return scores[order], np.array(order)


def assert_reference(shard, vectors, queries, k) -> None:
    results = shard.search(queries, k)
    assert len(results) == len(queries)
    for query, (scores, rows) in zip(queries, results, strict=True):
        expected_scores, expected_rows = reference(vectors, query, k)
        np.testing.assert_array_equal(rows, expected_rows)
        np.testing.assert_array_equal(scores, expected_scores)


# --- what is found --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_query_gets_the_nearest_passages_with_scores(backend):
    # scores with query (1, 2): 1*3 + 2*0 = 3, 1*0 + 2*2 = 4, 1*1 - 2*1 = -1
    retriever = Retriever.build(
        listed([(3, 0), (0, 2), (1, -1)]), Listed(), IndexConfig(backend=backend)
    )
    (answer,) = asyncio.run(retriever.search(["1,2"], 2))
    assert [(p.id, p.score) for p in answer] == [("p1", 4.0), ("p0", 3.0)]
    assert answer[0].text == "0.0,2.0"
    assert retriever.passages[1].score is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_exact_scoring_equals_sorting_all_scores(backend):
    vectors, queries = cloud(3000, 24, seed=0), cloud(50, 24, seed=1)
    queries[0], queries[1] = vectors[3], -vectors[3]
    exact = backend == "exact"
    shard = exact_index.ExactShard(vectors) if exact else scann_index.ScannShard(vectors, None)
    for k in (1, 3, 20, 45, 2999, 3000, 5000):
        assert_reference(shard, vectors, queries[: 50 if k < 50 else 4], k)


@given(
    st.lists(st.tuples(*[st.integers(-2, 2)] * 3), min_size=1, max_size=200),
    st.lists(st.tuples(*[st.integers(-2, 2)] * 3), min_size=1, max_size=3),
    st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_small_integer_vectors_full_of_ties_are_ranked_by_score_then_row(vectors, queries, k):
    vectors, queries = np.array(vectors, np.float32), np.array(queries, np.float32)
    assert_reference(exact_index.ExactShard(vectors), vectors, queries, k)
    if scann_index.is_available():
        assert_reference(scann_index.ScannShard(vectors, None), vectors, queries, k)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_that_differ_by_rounding_alone_keep_their_order(backend, monkeypatch):
    # true scores spread over 1e-4 and f32 sums are off by 5e-5: their best rows are others
    rng = np.random.default_rng(5)
    vectors = np.repeat(rng.normal(size=(1, 2000)), 3000, axis=0).astype(np.float32)
    vectors += (1e-7 * rng.integers(-4, 5, vectors.shape)).astype(np.float32)
    query = rng.normal(size=(1, 2000)).astype(np.float32)
    shard = exact_index.ExactShard(vectors)
    if backend == "scann":
        shard = scann_index.ScannShard(vectors, None)
    in_f32 = np.argsort(-(vectors @ query[0]))[:13]
    assert not set(reference(vectors, query[0], 5)[1]) <= set(in_f32)
    assert_reference(shard, vectors, query, 5)
    monkeypatch.setattr(exact_index, "QUERY_BLOCK", 2)
    monkeypatch.setattr(exact_index, "ROW_BLOCK", 700)
    assert_reference(shard, vectors, np.repeat(query, 3, 0), 5)
    assert_reference(shard, vectors, query, 1000)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_tie_at_the_last_place_goes_to_the_earlier_passage(backend):
    vectors = np.zeros((500, 8), np.float32)
    vectors[:, 0] = 0.5
    vectors[[499, 250]] = np.eye(8, dtype=np.float32)[0]
    retriever = Retriever.build(listed(vectors), Listed(), IndexConfig(backend=backend))
    query = "1,0,0,0,0,0,0,0"
    assert ids(retriever.search_now([query], 5)[0]) == ["p250", "p499", "p0", "p1", "p2"]


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_shards_are_merged_into_the_answer_of_one(backend):
    vectors, queries = cloud(700, 16, seed=2), cloud(40, 16, seed=3)
    queries[0] = vectors[3]  # 41 equal vectors over several shards
    queries[13] = vectors[200]  # where the cloud is zero
    passages, texts = listed(vectors), [p.text for p in listed(queries)]
    whole = Retriever.build(passages, Listed(), IndexConfig(backend="exact"))
    parts = Retriever.build(passages, Listed(), IndexConfig(backend=backend, max_shard=150))
    assert len(parts._shards) == 5
    for k in (1, 3, 20, 200, 900):
        assert parts.search_now(texts, k) == whole.search_now(texts, k)


def test_rows_split_evenly_into_the_fewest_shards():
    assert index.split_rows(10, 4) == [(0, 3), (3, 6), (6, 10)]
    assert index.split_rows(8, 4) == [(0, 4), (4, 8)]
    assert index.split_rows(1, 1_000_000) == [(0, 1)]
    with pytest.raises(ValueError, match="max_shard=0"):
        index.split_rows(3, 0)


@needs_scann
@pytest.mark.parametrize("max_shard", [1_000_000, 2500])
def test_a_tree_finds_most_of_what_exact_search_finds(max_shard):
    vectors, queries = cloud(6000, 32, seed=4), cloud(6000, 32, seed=4)[::50]
    queries = queries[np.linalg.norm(queries, axis=1) > 0]
    passages, texts = listed(vectors), [p.text for p in listed(queries)]
    exact = Retriever.build(passages, Listed(), IndexConfig(backend="exact"))
    tree = Retriever.build(passages, Listed(), dataclasses.replace(TREE, max_shard=max_shard))
    shared, itself = 0, 0
    for a, b in zip(exact.search_now(texts, 3), tree.search_now(texts, 3), strict=True):
        assert [p.score for p in b] == sorted((p.score for p in b), reverse=True)
        itself += ids(b)[0] == ids(a)[0]  # the query is itself one of the vectors
        assert len(set(ids(b))) == 3  # once, though a vector lies in two leaves
        shared += len(set(ids(a)) & set(ids(b)))
    # ScaNN's k-means runs on threads: its leaves, and so what a tree misses, differ by build
    assert itself >= 0.97 * len(texts), itself / len(texts)
    assert shared >= 0.9 * 3 * len(texts), shared / (3 * len(texts))


@needs_scann
def test_a_tree_answers_a_query_alone_as_among_others():
    # ScaNN's own batches do not: their kernels change at 2 and at about 16 queries
    vectors, queries = cloud(5000, 32, seed=6), cloud(300, 32, seed=7)
    shard = scann_index.ScannShard(vectors, TreeSizes(100, 10, 30))
    together = shard.search(queries, 10)
    for size in (1, 2, 7, 16, 50):
        apart = [r for s in range(0, 300, size) for r in shard.search(queries[s : s + size], 10)]
        for (scores_a, rows_a), (scores_b, rows_b) in zip(together, apart, strict=True):
            np.testing.assert_array_equal(rows_a, rows_b)
            np.testing.assert_array_equal(scores_a, scores_b)


@needs_scann
def test_a_tree_gives_all_passages_when_more_are_asked_than_its_leaves_hold():
    vectors = cloud(1000, 16, seed=8)
    shard = scann_index.ScannShard(vectors, TreeSizes(30, 2, 20))
    assert_reference(shard, vectors, vectors[:3], 1000)
    assert_reference(shard, vectors, vectors[:3], 5000)


@needs_scann
def test_equal_vectors_in_a_tree_come_in_corpus_order():
    vectors = cloud(1000, 16, seed=9)  # rows 3 and 500 to 539 are equal
    shard = scann_index.ScannShard(vectors, TreeSizes(30, 5, 20))
    ((_, rows),) = shard.search(vectors[3:4], 5)
    assert rows.tolist() == [3, 500, 501, 502, 503]


@needs_scann
@pytest.mark.skipif(not QA.is_dir(), reason="the shared question sets are not here")
def test_scann_and_exact_search_agree_on_real_questions():
    lines = [
        json.loads(x) for x in (QA / "2wikimultihopqa_corpus.jsonl").read_text().split("\n") if x
    ]
    passages = [Passage(x["id"], *x["contents"].split("\n", 1)) for x in lines]
    questions = (QA / "2wikimultihopqa.jsonl").read_text().split("\n")[:200]
    questions = [json.loads(line)["question"] for line in questions]
    encoder = HashedNgrams()
    vectors = encoder.encode([index.contents(passage) for passage in passages])
    answers = [
        Retriever.build(passages, encoder, IndexConfig(backend=backend), vectors).search_now(
            questions, 3
        )
        for backend in ("exact", "scann")
    ]
    assert answers[0] == answers[1]
    assert all(len(answer) == 3 for answer in answers[0])


# --- queries of every kind ------------------------------------------------------------------------


@pytest.fixture(scope="module", params=BACKENDS)
def foxes(request):
    """A small searchable corpus of words."""
    texts = ["A red fox.", "A blue whale.", "A red whale."]
    passages = [Passage(str(i), f"T{i}", text) for i, text in enumerate(texts)]
    return Retriever.build(passages, HashedNgrams(), IndexConfig(backend=request.param))


@pytest.mark.parametrize("query", ["", "   ", "\n\t\u00a0", "?!", "..."])
def test_a_query_without_words_is_a_visible_failure(foxes, query):
    before, failure, after = foxes.search_now(["red", query, "blue"], 1)
    assert isinstance(failure, SearchFailure) and failure.kind == "empty_query"
    assert before[0].id in ("0", "2") and ids(after) == ["1"]


def test_an_encoder_that_gives_blank_text_a_vector_changes_nothing():
    class Ones(Listed):
        def encode(self, texts):
            return np.ones((len(texts), 2), np.float32)

    retriever = Retriever.build(listed([(1, 0)]), Ones(), IndexConfig(backend="exact"))
    assert retriever.search_now([" "], 1)[0].kind == "empty_query"


def test_only_the_start_of_a_huge_query_is_read(foxes):
    huge = "blue whale " * 50_000
    cut = huge[: index.MAX_QUERY_CHARS]
    assert foxes.search_now([huge + "red fox " * 90_000], 3) == foxes.search_now([cut], 3)
    assert ids(foxes.search_now([huge], 1)[0]) == ["1"]


def test_duplicate_queries_get_equal_answers_of_their_own(foxes):
    first, second, third = foxes.search_now(["red fox", " red fox\n", "red fox"], 2)
    assert first == second == third
    first.clear()
    assert second and foxes.search_now(["red fox"], 2) == [second]


def test_no_queries_have_no_answers(foxes):
    assert asyncio.run(foxes.search([], 3)) == []


def test_more_passages_than_there_are_means_all(foxes):
    assert sorted(ids(foxes.search_now(["red fox"], 50)[0])) == ["0", "1", "2"]


@pytest.mark.parametrize("k", [0, -1])
def test_fewer_than_one_passage_is_an_error(foxes, k):
    with pytest.raises(ValueError, match=f"k={k}"):
        asyncio.run(foxes.search(["red"], k))
    with pytest.raises(ValueError, match=f"k={k}"):
        foxes.search_now([], k)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_whose_vector_is_not_finite_fails_alone(backend):
    retriever = Retriever.build(listed([(1, 0), (0, 1)]), Listed(), IndexConfig(backend=backend))
    bad, inf, good = retriever.search_now(["nan,1", "inf,0", "0,1"], 1)
    assert bad.kind == inf.kind == "bad_vector"
    assert ids(good) == ["p1"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_passages_without_words_score_zero(backend):
    # scores of (1, 1): -1, 0, 2
    retriever = Retriever.build(
        listed([(-1, 0), (0, 0), (1, 1)]), Listed(), IndexConfig(backend=backend)
    )
    (answer,) = retriever.search_now(["1,1"], 3)
    assert [(p.id, p.score) for p in answer] == [("p2", 2.0), ("p1", 0.0), ("p0", -1.0)]


# --- building -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_a_passage_vector_that_is_not_finite_is_named(bad):
    passages = listed([(1, 0)] * 5)
    passages[3] = dataclasses.replace(passages[3], text=f"1,{bad}")
    with pytest.raises(ValueError, match=r"row 3 .*'p3'"):
        Retriever.build(passages, Listed(), IndexConfig(backend="exact"))


def test_an_empty_corpus_is_an_error():
    with pytest.raises(ValueError, match="empty"):
        Retriever.build([], Listed(), IndexConfig())


def test_vectors_must_be_as_many_as_passages():
    with pytest.raises(ValueError, match=r"\(2, 4\).*3 passages"):
        Retriever.build(listed([(1, 0)] * 3), Listed(), IndexConfig(), np.ones((2, 4)))


def test_unknown_backends_are_refused():
    with pytest.raises(ValueError, match="'faiss'"):
        Retriever.build(listed([(1, 0)]), Listed(), IndexConfig(backend="faiss"))


def test_without_a_scann_package_auto_means_exact(monkeypatch):
    monkeypatch.setitem(sys.modules, "scann", None)
    assert IndexConfig().resolve_backend() == "exact"
    with pytest.raises(ValueError, match="no scann package"):
        IndexConfig(backend="scann").resolve_backend()


def test_the_ram_needed_is_logged_before_building(caplog):
    with caplog.at_level(logging.INFO):
        Retriever.build(
            listed(np.ones((10, 8))), Listed(), IndexConfig(backend="exact", max_shard=4)
        )
    # 10 vectors of 8 f32 are 320 bytes: 0.00 GB
    assert "10 vectors of 8 dimensions with exact, 3 shard(s); needs about 0.00 GB" in caplog.text


def test_ram_counts_vectors_copies_codes_and_centres():
    config = IndexConfig(backend="exact")
    assert index.ram_bytes(1000, 64, config) == 1000 * 64 * 4
    # ScaNN: a copy; with a tree 16 bytes of codes and 4 of a row number, in two leaves a vector,
    # 10 centres, and the sample (all 1,000 vectors) twice
    assert scann_index.extra_ram_bytes(1000, 64, None) == 256_000
    tree = 256_000 + 2 * 1000 * (16 + 4) + 10 * 256 + 2 * 256_000
    assert scann_index.extra_ram_bytes(1000, 64, TreeSizes(10, 2, 100)) == tree


@needs_scann
def test_ram_of_shards_adds_up():
    config = dataclasses.replace(TREE, max_shard=500, leaves=10)
    shard = scann_index.extra_ram_bytes(500, 64, config.tree_sizes(500))
    assert index.ram_bytes(1000, 64, config) == 1000 * 64 * 4 + 2 * shard


def test_tree_sizes_follow_the_rule_unless_given():
    assert IndexConfig().tree_sizes(20_000) is None
    rule = IndexConfig().tree_sizes(1_000_000)
    assert rule == scann_index.choose_sizes(1_000_000)
    given_sizes = IndexConfig(leaves_to_search=7, reorder=11).tree_sizes(1_000_000)
    assert given_sizes == TreeSizes(rule.leaves, 7, 11)


def test_importing_and_exact_search_load_neither_scann_nor_jax():
    code = """
import asyncio, sys
from mas_jax.records import Passage
from mas_jax.retrieval.hashed_ngrams import HashedNgrams
from mas_jax.retrieval.index import IndexConfig, Retriever
r = Retriever.build([Passage("1", "a", "b")], HashedNgrams(), IndexConfig(backend="exact"))
loaded = {"scann", "jax", "tensorflow"} & set(sys.modules)
print(asyncio.run(r.search(["a"], 1))[0][0].id, sorted(loaded))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "1 []\n", done.stderr


# --- on disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        IndexConfig("exact", max_shard=300),
        IndexConfig("device", max_shard=600),
        pytest.param(IndexConfig("scann", max_shard=300), marks=needs_scann),
        pytest.param(TREE, marks=needs_scann),
        pytest.param(dataclasses.replace(TREE, max_shard=400), marks=needs_scann),
    ],
)
def test_a_saved_index_answers_the_same_after_it_was_moved(config, tmp_path):
    passages = listed(cloud(1000, 16, seed=10))
    texts = [p.text for p in listed(cloud(40, 16, seed=11)) if any(map(float, p.text.split(",")))]
    built = Retriever.build(passages, Listed(), config)
    expected = built.search_now(texts, 5)
    (tmp_path / "made").mkdir()
    built.save(tmp_path / "made" / "here")
    (tmp_path / "made").rename(tmp_path / "elsewhere")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["here"]
    loaded = Retriever.load(tmp_path / "elsewhere" / "here", passages, Listed(), config)
    assert loaded.search_now(texts, 5) == expected


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directory, passages and configuration of a saved exact index."""
    passages, config = listed([(1, 0), (0, 1), (2, 2)]), IndexConfig(backend="exact")
    directory = tmp_path_factory.mktemp("saved") / "index"
    Retriever.build(passages, Listed(), config).save(directory)
    return directory, passages, config


def other_encoder() -> Listed:
    encoder = Listed()
    encoder.fingerprint = "other"
    return encoder


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p, e, c: (p[::-1], e, c), "corpus"),
        (lambda p, e, c: (p[:2], e, c), "passages: saved 3, wanted 2"),
        (lambda p, e, c: ([dataclasses.replace(p[0], title="x"), *p[1:]], e, c), "corpus"),
        (lambda p, e, c: (p, other_encoder(), c), "encoder: saved 'listed', wanted 'other'"),
        (
            lambda p, e, c: (p, e, dataclasses.replace(c, max_shard=2)),
            "config.max_shard: saved 1000000, wanted 2",
        ),
        pytest.param(
            lambda p, e, c: (p, e, dataclasses.replace(c, backend="scann")),
            "backend: saved 'exact', wanted 'scann'",
            marks=needs_scann,
        ),
    ],
)
def test_a_stale_index_is_an_error_that_says_what_differs(saved, change, named):
    directory, passages, config = saved
    with pytest.raises(ValueError, match="is stale") as error:
        Retriever.load(directory, *change(passages, Listed(), config))
    assert named in str(error.value) and "rebuild" in str(error.value)


def test_an_unchanged_index_is_not_stale(saved):
    directory, passages, config = saved
    retriever = Retriever.load(directory, list(passages), Listed(), config)
    assert ids(retriever.search_now(["1,0"], 1)[0]) == ["p2"]


@pytest.mark.parametrize("built", ALL_BACKENDS)
def test_exact_search_on_host_and_devices_reads_the_vectors_of_every_index(tmp_path, built):
    passages = listed(cloud(100, 16, seed=12))
    texts = [passage.text for passage in passages[:5]]
    made = Retriever.build(passages, Listed(), IndexConfig(built))
    made.save(tmp_path / "index")
    expected = Retriever.build(passages, Listed(), IndexConfig("exact")).search_now(texts, 4)
    for backend in ("exact", "device"):
        loaded = Retriever.load(tmp_path / "index", passages, Listed(), IndexConfig(backend))
        assert loaded.search_now(texts, 4) == expected


def test_fields_that_run_together_make_another_corpus():
    a, b = Passage("1", "ab", "c"), Passage("1", "a", "bc")
    assert index.hash_corpus([a]) != index.hash_corpus([b])
    assert index.hash_corpus([a, b]) != index.hash_corpus([b, a])
    scored = dataclasses.replace(a, score=0.5)
    assert index.hash_corpus([a]) == index.hash_corpus([scored])


def test_a_missing_index_and_an_existing_directory_are_named(saved, tmp_path):
    directory, passages, config = saved
    with pytest.raises(FileNotFoundError, match="no index in"):
        Retriever.load(tmp_path, passages, Listed(), config)
    with pytest.raises(FileExistsError, match=str(directory)):
        Retriever.build(passages, Listed(), config).save(directory)


@needs_scann
def test_an_index_built_with_scann_serves_a_machine_without_it(tmp_path, monkeypatch):
    passages, config = listed(cloud(300, 16, seed=12)), IndexConfig()
    texts = [passage.text for passage in passages[:10]]
    built = Retriever.build(passages, Listed(), config)
    expected = built.search_now(texts, 3)
    built.save(tmp_path / "index")
    monkeypatch.setitem(sys.modules, "scann", None)
    loaded = Retriever.load(tmp_path / "index", passages, Listed(), config)
    assert isinstance(loaded._shards[0], exact_index.ExactShard)
    assert loaded.search_now(texts, 3) == expected


# --- batching -------------------------------------------------------------------------------------


def new_foxes(encoder) -> Retriever:
    return Retriever.build(listed([(1, 0), (0, 1), (2, 2)]), encoder, IndexConfig(backend="exact"))


def test_concurrent_queries_are_one_batch_without_duplicates():
    encoder = Listed()
    retriever = new_foxes(encoder)
    encoder.calls.clear()

    async def main():
        return await asyncio.gather(
            *(retriever.search([f"1,{i % 3}", "0,1"], 2) for i in range(50))
        )

    answers = asyncio.run(main())
    assert [sorted(call) for call in encoder.calls] == [["0,1", "1,0", "1,1", "1,2"]]
    for i, answer in enumerate(answers):
        assert answer == retriever.search_now([f"1,{i % 3}", "0,1"], 2)
    assert len(encoder.calls) == 1  # answers are remembered
    assert retriever.counts["queries"] == 200 and retriever.counts["searched"] == 4


def test_callers_with_different_k_get_what_each_asked_for():
    retriever = new_foxes(Listed())

    async def main():
        return await asyncio.gather(*(retriever.search(["1,0"], k) for k in (1, 3, 2, 3)))

    one, three, two, again = (answer[0] for answer in asyncio.run(main()))
    assert ids(three) == ids(again) == ["p2", "p0", "p1"]
    assert ids(two) == ["p2", "p0"] and ids(one) == ["p2"]


class Gated(Listed):
    """Encodes queries only after `gate` is set; `entered` says that it has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def encode(self, texts):
        self.entered.set()
        assert self.gate.wait(20), "the event loop was blocked while a batch was searched"
        return super().encode(texts)


def test_the_event_loop_runs_while_a_batch_is_searched_and_later_callers_join_the_next():
    encoder = Gated()
    retriever = new_foxes(encoder)
    encoder.gate.clear()
    encoder.entered.clear()
    encoder.calls.clear()

    async def main():
        first = asyncio.create_task(retriever.search(["1,0"], 1))
        while not encoder.entered.is_set():
            await asyncio.sleep(0.001)
        later = []
        for i in range(5):  # each in a turn of its own
            later.append(asyncio.create_task(retriever.search([f"{i},1"], 1)))
            await asyncio.sleep(0)
        encoder.gate.set()  # only a loop that runs can open it
        return await asyncio.gather(first, *later)

    answers = asyncio.run(main())
    assert encoder.calls == [["1,0"], [f"{i},1" for i in range(5)]]
    assert all(len(answer[0]) == 1 for answer in answers)


def test_a_cancelled_caller_leaves_the_others_answered():
    encoder = Gated()
    retriever = new_foxes(encoder)
    encoder.gate.clear()
    encoder.entered.clear()

    async def main():
        tasks = [asyncio.create_task(retriever.search([f"1,{i}"], 1)) for i in range(3)]
        while not encoder.entered.is_set():
            await asyncio.sleep(0.001)
        tasks[0].cancel()
        await asyncio.sleep(0)
        encoder.gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled, *answered = asyncio.run(main())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert [len(answer[0]) for answer in answered] == [1, 1]


def test_an_encoder_that_raises_raises_in_every_caller_and_the_next_batch_works():
    retriever = new_foxes(Listed())

    async def main():
        bad = await asyncio.gather(
            retriever.search(["not a number"], 1),
            retriever.search(["1,0"], 1),
            return_exceptions=True,
        )
        return bad, await retriever.search(["1,0"], 1)

    bad, good = asyncio.run(main())
    assert [type(error) for error in bad] == [ValueError, ValueError]
    assert ids(good[0]) == ["p2"]


def test_a_retriever_outlives_an_event_loop():
    encoder = Gated()
    retriever = new_foxes(encoder)
    encoder.gate.clear()
    encoder.entered.clear()

    async def give_up():
        task = asyncio.create_task(retriever.search(["1,0"], 1))
        while not encoder.entered.is_set():
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(retriever.search(["0,1"], 1))
        await asyncio.sleep(0)
        encoder.gate.set()
        return task, waiting  # the loop ends with both open

    asyncio.run(give_up())
    assert ids(asyncio.run(retriever.search(["0,1"], 1))[0]) == ["p2"]


def test_old_answers_are_forgotten_not_changed(monkeypatch):
    monkeypatch.setattr(index, "MAX_CACHED_ANSWERS", 3)
    encoder = Listed()
    retriever = new_foxes(encoder)
    texts = [f"1,{i}" for i in range(10)]
    first = retriever.search_now(texts, 2)
    assert len(retriever._answers) == 3
    assert retriever.search_now(texts, 2) == first


# --- what the benchmark says about its vectors ----------------------------------------------------


def test_neighbour_statistics_of_a_sphere_are_its_dimension_and_cosines():
    rng = np.random.default_rng(13)
    points = np.zeros((4000, 32), np.float32)
    points[:, :7] = rng.normal(size=(4000, 7))  # a sphere of 6 dimensions
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    found = retrieval.structure(points)
    cosines = np.sort(points[:256] @ points.T, axis=1)[:, ::-1]
    np.testing.assert_allclose(found["cosine_1"], cosines[:, 1].mean(), atol=1e-5)
    np.testing.assert_allclose(found["cosine_10"], cosines[:, 10].mean(), atol=1e-5)
    assert 5.4 < found["lid"] < 6.4


def test_the_benchmark_makes_unit_f32_vectors_that_the_seed_decides():
    # f64 queries would slow the exact index down and flatter ScaNN
    vectors, queries = retrieval.make_vectors(500, 20, seed=1)
    for made in (vectors, queries):
        assert made.dtype == np.float32 and made.flags.c_contiguous
        np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(vectors, retrieval.make_vectors(500, 20, seed=1)[0])
    assert (vectors != retrieval.make_vectors(500, 20, seed=2)[0]).any()


def test_recall_counts_the_wanted_rows_found():
    # 2 of 3 and 1 of 3
    def rows(*numbers):
        return (None, np.array(numbers))

    found, wanted = [rows(5, 1, 9), rows(0, 2, 4)], [rows(1, 2, 5), rows(4, 7, 8)]
    assert retrieval.recall(found, wanted) == 0.5
