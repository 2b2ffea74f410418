"""The retrieval server: exact responses of every dialect, limits, malformed requests, load."""

import asyncio
import dataclasses
import json
import re
import signal
import socket
import subprocess
import sys

import httpx2
import numpy as np
import pytest
from asgi import ask
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from mas_jax.benchmarks import serving
from mas_jax.data.world import make_world
from mas_jax.records import Passage, SearchFailure
from mas_jax.retrieval import dialects, server
from mas_jax.retrieval.bm25_index import Bm25Config, Bm25Retriever
from mas_jax.retrieval.client import ClientConfig, RetrieverClient
from mas_jax.retrieval.corpus import open_corpus
from mas_jax.retrieval.dialects import DIALECTS, IDENTITY_HEADER, Ask
from mas_jax.retrieval.hashed_ngrams import HashedNgrams
from mas_jax.retrieval.index import IndexConfig, Retriever
from mas_jax.retrieval.server import ServerLimits

EXACT = IndexConfig(backend="exact")
SMALL = ServerLimits(body_bytes=1000, queries=4, topk=5)


class Letters:
    """Counts of a, b, c and d; a text with "!" has no finite vector, one with "?" raises."""

    fingerprint = "letters"

    def encode_queries(self, texts):
        if any("?" in text for text in texts):
            raise OverflowError("the encoder is out of memory")
        rows = [[np.nan if "!" in t else t.count(letter) for letter in "abcd"] for t in texts]
        return np.array(rows, np.float32)

    encode_passages = encode_queries


PASSAGES = [
    Passage("p0", "One", "a"), Passage("p1", "Two", "bb"), Passage("p2", "T", "ccc"),
    Passage("p3", "", "dddd"),
]  # fmt: skip
ONE = {"id": "p0", "contents": '"One"\na'}
TWO = {"id": "p1", "contents": '"Two"\nbb'}
THREE = {"id": "p2", "contents": '"T"\nccc'}
FOUR = {"id": "p3", "contents": '""\ndddd'}


def serve(requests, limits=SMALL, *, retriever=None, identity="i"):
    """Responses of an app to (method, path, body) in turn; bytes are sent as they are."""
    retriever = retriever or Retriever.build(PASSAGES, Letters(), EXACT)
    return ask(server.make_app(retriever, identity, limits), *requests)


def post(path, body, **settings):
    """Status and JSON of one POST."""
    (response,) = serve([("POST", path, body)], **settings)
    assert response.headers["content-type"] == "application/json"
    return response.status_code, response.json()


# --- the dialects ---------------------------------------------------------------------------------


def test_search_r1_gets_scored_documents_for_each_query_in_order():
    # scores are counts of letters multiplied: "ab" has 1*1 with p0 and 1*2 with p1; p3 scores 0, as
    # p2 does, which comes first
    body = {"queries": ["ab", "dd"], "topk": 2, "return_scores": True}
    assert post("/retrieve", body) == (200, {
        "result": [
            [{"document": TWO, "score": 2.0}, {"document": ONE, "score": 1.0}],
            [{"document": FOUR, "score": 8.0}, {"document": ONE, "score": 0.0}],
        ]
    })  # fmt: skip


@pytest.mark.parametrize("num_queries", [1, 2, 3])
@pytest.mark.parametrize("scores", [{}, {"return_scores": False}, {"return_scores": None}])
def test_without_scores_documents_are_bare_for_any_number_of_queries(num_queries, scores):
    body = {"queries": ["a", "b", "c"][:num_queries], "topk": 1, **scores}
    wanted = [[ONE], [TWO], [THREE]][:num_queries]
    assert post("/retrieve", body) == (200, {"result": wanted})


@pytest.mark.parametrize("asked", [{"query": "b"}, {"query_list": ["b"], "queries": None}])
def test_skyrl_asks_one_query_and_verl_a_query_list(asked):
    answer = post("/retrieve", {**asked, "topk": 1, "return_scores": True})
    assert answer == (200, {"result": [[{"document": TWO, "score": 2.0}]]})


def test_m_ask_gets_titles_and_texts_for_each_question():
    assert post("/search", {"questions": ["b", "d"], "N": 1}) == (200, [
        {"question": "b", "top_k_docs": ["Two\nbb"]},
        {"question": "d", "top_k_docs": ["\ndddd"]},
    ])  # fmt: skip


@pytest.mark.parametrize("topk", [{}, {"topk": None, "N": None}, {"topk": 0, "N": 0}])
def test_no_number_of_passages_means_three(topk):
    _, body = post("/retrieve", {"queries": ["a"], **topk})
    assert [document["id"] for document in body["result"][0]] == ["p0", "p1", "p2"]
    _, items = post("/search", {"questions": ["a"], **topk})
    assert items[0]["top_k_docs"] == ["One\na", "Two\nbb", "T\nccc"]


def test_more_passages_than_there_are_means_all():
    _, body = post("/retrieve", {"queries": ["a"], "topk": 5})
    assert len(body["result"][0]) == 4


def test_empty_lists_get_empty_lists():
    assert post("/retrieve", {"queries": []}) == (200, {"result": []})
    assert post("/retrieve", {"query_list": [], "return_scores": True}) == (200, {"result": []})
    assert post("/search", {"questions": [], "N": 3}) == (200, [])


def test_a_query_that_fails_has_an_empty_list_and_an_error_beside_it():
    status, body = post("/retrieve", {"queries": ["a", "", "a!", "b"], "topk": 1})
    assert (status, body["result"]) == (200, [[ONE], [], [], [TWO]])
    first, empty, bad, last = body["errors"]
    assert first is last is None
    assert empty.startswith("empty_query: ") and bad.startswith("bad_vector: ")
    _, items = post("/search", {"questions": ["a", ""], "N": 1})
    assert items[0] == {"question": "a", "top_k_docs": ["One\na"]}
    assert items[1] == {"question": "", "top_k_docs": [], "error": empty}


def test_a_title_of_several_lines_comes_in_a_field_of_its_own():
    retriever = Retriever.build([Passage("p", "One\nTwo", "a")], Letters(), EXACT)
    _, body = post("/retrieve", {"query": "a"}, retriever=retriever)
    document = {"id": "p", "contents": '"One\nTwo"\na', "title": "One\nTwo", "text": "a"}
    assert body["result"] == [[document]]


TEXT = st.text(st.characters(codec=None, categories=None), max_size=8)
FOUND = st.lists(
    st.builds(Passage, TEXT, TEXT, TEXT, st.floats(allow_nan=False, allow_infinity=False)),
    max_size=3,
)
FAILED = st.builds(SearchFailure, st.sampled_from(["empty_query", "bad_vector"]), TEXT)


@given(st.lists(FOUND | FAILED, max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_answers_pass_through_json_unchanged(answers):
    queries = tuple(f"q{i}" for i in range(len(answers)))
    body = dialects.write_retrieve(Ask(queries, 3, True), answers)
    assert DIALECTS["search-r1"].read(json.loads(json.dumps(body)), queries, 3) == answers
    bare = dialects.write_retrieve(Ask(queries, 3, False), answers)
    wanted = [
        [dataclasses.replace(p, score=None) for p in a] if isinstance(a, list) else a
        for a in answers
    ]
    assert DIALECTS["skyrl"].read(json.loads(json.dumps(bare)), queries, 3) == wanted


# --- requests that are not served -----------------------------------------------------------------

MALFORMED = {
    "nothing": (b"", "no JSON"),
    "no json": (b"{queries}", "no JSON"),
    "cut": (b'{"queries": ["a"', "no JSON"),
    "no utf-8": (b'{"queries": ["\xff"]}', "no JSON"),
    "deep": (b"[" * 900, "JSON"),
    "list": (["a"], r"\['a'\], wanted a JSON object"),
    "null": (None, "None, wanted a JSON object"),
    "no queries": ({}, "no queries, wanted exactly one of"),
    "null queries": ({"queries": None, "topk": 3}, "no queries"),
    "two lists": ({"queries": ["a"], "query": "b"}, "'queries', 'query'"),
    "text for a list": ({"queries": "a"}, "queries='a', wanted a list of strings"),
    "number in a list": ({"queries": ["a", 3]}, r"queries\[1\]=3, wanted a string"),
    "list for a text": ({"query": ["a"]}, r"query\[0\]=\['a'\], wanted a string"),
    "half a pair": (b'{"queries": ["a", "\\ud800"]}', r"queries\[1\].*surrogate"),
    "negative topk": ({"queries": ["a"], "topk": -1}, "topk=-1, wanted a positive integer"),
    "topk of text": ({"queries": ["a"], "topk": "3"}, "topk='3'"),
    "topk of a fraction": ({"queries": ["a"], "topk": 2.5}, "topk=2.5"),
    "topk true": ({"queries": ["a"], "topk": True}, "topk=True"),
    "topk nan": (b'{"queries": ["a"], "topk": NaN}', "topk=nan"),
    "topk false": ({"queries": ["a"], "topk": False}, "topk=False"),
    "topk beyond the limit": ({"queries": ["a"], "topk": 6}, "6 passages .* at most 5"),
    "huge topk": (b'{"queries": ["a"], "topk": 1' + b"0" * 900 + b"}", "at most 5"),
    "scores of text": ({"queries": ["a"], "return_scores": "no"}, "return_scores='no'"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_gets_one_clear_error(name):
    body, message = MALFORMED[name]
    error = _error(post("/retrieve", body), 400)
    assert re.search(message, error) and len(error) < 200


MALFORMED_SEARCH = {
    "no questions": ({"queries": ["a"], "N": 3}, "no questions"),
    "text for a list": ({"questions": "a"}, "questions='a'"),
    "N of text": ({"questions": ["a"], "N": "3"}, "N='3'"),
    "N beyond the limit": ({"questions": ["a"], "N": 6}, "at most 5"),
}


@pytest.mark.parametrize("name", MALFORMED_SEARCH)
def test_a_malformed_search_gets_one_clear_error(name):
    body, message = MALFORMED_SEARCH[name]
    error = _error(post("/search", body), 400)
    assert re.search(message, error) and len(error) < 200


def _error(answer, status):
    """The message of an error response of a status."""
    assert answer[0] == status and list(answer[1]) == ["error"]
    return answer[1]["error"]


def test_a_body_may_have_as_many_bytes_as_the_limit_and_no_more():
    body = json.dumps({"queries": ["a"], "topk": 1}).encode()
    assert post("/retrieve", body + b" " * (1000 - len(body))) == (200, {"result": [[ONE]]})
    assert "1000 bytes" in _error(post("/retrieve", body + b" " * (1001 - len(body))), 413)


def test_a_request_may_have_as_many_queries_as_the_limit_and_no_more():
    assert len(post("/retrieve", {"queries": ["a"] * 4})[1]["result"]) == 4
    assert "5 queries" in _error(post("/retrieve", {"queries": ["a"] * 5}), 413)
    assert "5 queries" in _error(post("/search", {"questions": ["a"] * 5}), 413)


def test_a_body_deeper_than_python_reads_is_malformed():
    answer = post("/retrieve", b"[" * 200_000, limits=ServerLimits())
    assert "nested too deep" in _error(answer, 400)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/retrieve", 405), ("POST", "/health", 405), ("POST", "/", 404)],
)
def test_a_wrong_route_names_the_right_ones(method, path, status):
    (response,) = serve([(method, path, {})])
    assert response.status_code == status
    assert f"{method} {path}" in response.json()["error"]
    assert "POST /search" in response.json()["error"]


def test_a_search_that_raises_is_a_status_500_and_the_next_one_is_served():
    asked = [("POST", "/retrieve", {"query": text, "topk": 1}) for text in ("a?", "a")]
    failed, served = serve(asked)
    assert failed.status_code == 500
    assert "OverflowError: the encoder is out of memory" in failed.json()["error"]
    assert served.json() == {"result": [[ONE]]}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab!\ud800", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["queries", "query", "topk"]), inner)
    ),
    max_leaves=6,
)
FIELDS = ("queries", "query", "query_list", "questions", "topk", "N", "return_scores")


@given(
    st.lists(
        st.binary(max_size=9) | VALUES | st.dictionaries(st.sampled_from(FIELDS), VALUES),
        min_size=20, max_size=20,
    )
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_no_body_makes_the_server_fail(bodies):
    paths = ("/retrieve", "/search")
    for response in serve([("POST", path, body) for body in bodies for path in paths]):
        assert response.status_code in (200, 400, 413)
        assert (response.status_code == 200) != ("error" in response.json())


# --- one index behind it --------------------------------------------------------------------------


def test_equal_queries_of_a_request_are_searched_once_and_requests_together_in_one_batch():
    retriever = Retriever.build(PASSAGES, Letters(), EXACT)
    bodies = [{"queries": ["a", "b", "a"], "topk": 1}] + [{"query": "c", "topk": 1}] * 9
    asked = [("POST", "/retrieve", body) for body in bodies]
    found = ask(server.make_app(retriever, "i"), *asked, at_once=True)
    assert [r.json()["result"] for r in found] == [[[ONE], [TWO], [ONE]]] + [[[THREE]]] * 9
    counts = retriever.counts
    assert (counts["queries"], counts["searched"], counts["batches"]) == (12, 3, 1)


def test_health_and_every_answer_name_the_index():
    asked = [("GET", "/health", b""), ("POST", "/retrieve", {"query": "a"})]
    asked += [("POST", "/search", {"questions": []}), ("POST", "/retrieve", {})]
    health, *answers, refused = serve(asked, identity="abc")
    assert health.json() == {"status": "ok", "passages": 4, "index": "abc"}
    assert [r.headers[IDENTITY_HEADER] for r in (health, *answers)] == ["abc"] * 3
    assert IDENTITY_HEADER not in refused.headers


def test_the_identity_is_of_everything_that_decides_an_answer():
    def of(passages=PASSAGES, fingerprint="f", **changes):
        return server.identify(passages, fingerprint, dataclasses.replace(EXACT, **changes))

    assert of() == of(list(PASSAGES))
    others = [of(PASSAGES[:3]), of(fingerprint="g"), of(max_shard=2), of(max_exact=5), of(leaves=9)]
    assert len({of(), *others}) == 6
    auto = IndexConfig()
    resolved = IndexConfig(backend=auto.resolve_backend())
    assert server.identify(PASSAGES, "f", auto) == server.identify(PASSAGES, "f", resolved)


def test_metrics_count_requests_by_path_and_status_and_queries():
    asked = [("GET", "/metrics", b""), ("POST", "/retrieve", {"queries": ["a", "b", ""]})]
    asked += [("POST", "/retrieve", b"x"), ("POST", "/search", {"questions": ["a"]})]
    asked += [("POST", "/retrieve", {"query": "a?"}), ("GET", "/metrics", b"")]
    first, *_, last = (response.json() for response in serve(asked))
    assert first["requests"] == {} and first["latency"] == {"requests": 0}
    wanted = {"/retrieve 200": 1, "/retrieve 400": 1, "/retrieve 500": 1, "/search 200": 1}
    assert last["requests"] == wanted
    assert (last["queries"], last["failed_queries"], last["in_flight"]) == (4, 1, 0)
    assert last["retriever"]["queries"] == 5
    assert last["latency"]["requests"] == 4
    assert 0 < last["latency"]["p50_s"] <= last["latency"]["p90_s"] <= last["latency"]["p99_s"]


# --- a process ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Passages of the toy world, their file, and questions about them."""
    world = make_world(0, passages=9000, train=20, held_out=10)
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    serving.write_corpus(world.passages, path)
    return world.passages, path, [q.text for split in world.questions.values() for q in split]


def test_sixty_four_clients_get_what_the_process_itself_finds(toy):
    passages, path, queries = toy
    own = Retriever.build(passages, HashedNgrams(), IndexConfig())
    wanted = own.search_now(queries, 3)
    with serving.serving(path, serving.free_port()) as url:

        async def run():
            clients = [
                RetrieverClient(url, dialect=name, config=ClientConfig(max_cached=0))
                for name in ("search-r1", "skyrl", "verl", "search-r1")
                for _ in range(16)
            ]
            answers, _, _ = await serving.ask_all([c.search for c in clients], queries, 3)
            batches = await asyncio.gather(*(c.search(queries[:10], 3) for c in clients))
            m_ask = RetrieverClient(url, dialect="m-ask")
            texts = await m_ask.search(queries, 3)
            for client in [*clients, m_ask]:
                assert client.counts["failed"] == client.counts["retries"] == 0
                await client.close()
            return answers, batches, texts

        answers, batches, texts = asyncio.run(run())
        served = httpx2.get(f"{url}/metrics", trust_env=False).json()
    assert all(isinstance(answer, list) and len(answer) == 3 for answer in wanted)
    assert answers == wanted
    assert all(batch == wanted[:10] for batch in batches)
    assert [[(p.title, p.text) for p in answer] for answer in texts] == [
        [(p.title, p.text) for p in answer] for answer in wanted
    ]
    assert served["requests"]["/retrieve 200"] >= len(queries) + 64
    assert set(served["requests"]) == {"/retrieve 200", "/search 200"}


def test_a_saved_index_is_served_until_sigterm(toy, tmp_path):
    passages, path, queries = toy
    config = IndexConfig(backend="exact")
    own = Retriever.build(open_corpus(path), HashedNgrams(), config)
    own.save(tmp_path / "index")
    port = serving.free_port()
    process = serving.start_server(path, port, f"--index={tmp_path / 'index'}", "--backend=exact")
    try:
        body = {"queries": queries[:2], "topk": 1}
        url = f"http://127.0.0.1:{port}"
        result = httpx2.post(f"{url}/retrieve", json=body, trust_env=False).json()["result"]
        health = httpx2.get(f"{url}/health", trust_env=False).json()
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.kill()
    found = own.search_now(queries[:2], 1)
    assert [[document["id"] for document in documents] for documents in result] == [
        [passage.id for passage in answer] for answer in found
    ]
    assert health["passages"] == len(passages)
    assert health["index"] == server.identify(own.passages, HashedNgrams().fingerprint, config)


def test_words_are_served_and_exact_search_on_devices(tmp_path):
    path = tmp_path / "corpus.jsonl"
    passages = [Passage(str(i), f"T{i}", f"word{i} and fox") for i in range(20)]
    serving.write_corpus(passages, path)
    corpus, exact = open_corpus(path), IndexConfig(backend="exact")
    words, vectors = Bm25Retriever(corpus, Bm25Config()), HashedNgrams()
    Retriever.build(corpus, vectors, exact).save(tmp_path / "index")
    device = IndexConfig(backend="device")
    found = {}
    for backend, index, identity in (
        ("bm25", (), server.identify(corpus, words.fingerprint, words.config)),
        ("device", (f"--index={tmp_path / 'index'}",),
         server.identify(corpus, vectors.fingerprint, device)),
    ):  # fmt: skip
        port = serving.free_port()
        process = serving.start_server(path, port, f"--backend={backend}", *index)
        try:
            client = RetrieverClient(f"http://127.0.0.1:{port}")
            assert client.identify() == identity
            found[backend] = asyncio.run(client.search(["word7", "fox of word12"], 2))
        finally:
            process.kill()
            process.wait()
    assert found["bm25"] == words.search_now(["word7", "fox of word12"], 2)
    assert found["device"] == Retriever.build(corpus, vectors, exact).search_now(
        ["word7", "fox of word12"], 2
    )


def test_what_cannot_be_served_ends_the_command_with_one_line(toy, tmp_path):
    port = f"--port={serving.free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for corpus, flag, message in (
            (tmp_path / "none.jsonl", port, "none.jsonl does not exist"),
            (toy[1], f"--index={tmp_path}", "no index in"),
            (toy[1], "--backend=bm25 --index=i", "leave both out"),
            (toy[1], "--backend=bm25 --encoder=package:minilm", "leave both out"),
            (toy[1], f"--port={taken.getsockname()[1]}", "cannot listen on 127.0.0.1 port"),
        ):
            command = [sys.executable, "launch/serve_retriever.py", f"--corpus={corpus}"]
            done = subprocess.run(
                [*command, port, *flag.split()], cwd=ROOT, capture_output=True, text=True,
                env={"PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            assert done.returncode == 1 and "Traceback" not in done.stderr
            last = done.stderr.splitlines()[-1]
            assert last.startswith("error: ") and message in last


@pytest.mark.parametrize("script", ["serve_retriever", "serve_policy"])
def test_without_a_servers_packages_the_command_says_what_to_install(script):
    code = (
        "import runpy, sys; sys.modules['uvicorn'] = None; "
        f"runpy.run_path('launch/{script}.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith("a server needs pip install 'mas_jax[serve]'")
