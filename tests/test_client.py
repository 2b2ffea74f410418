"""The retrieval client: every dialect, and a visible failure for everything that can go wrong."""

import asyncio
import dataclasses
import json
import socket

import pytest
from http_stubs import DRIP, DROP, HANG, stub, thread_stub
from scripted_team import CharTokenizer, Script, make_team

from mas_jax.agents import rollout
from mas_jax.agents.rollout import Limits
from mas_jax.agents.setting import Run
from mas_jax.benchmarks import serving
from mas_jax.records import Passage, Question, SearchFailure
from mas_jax.retrieval.client import ClientConfig, RetrieverClient
from mas_jax.retrieval.dialects import DIALECTS, IDENTITY_HEADER

QUICK = ClientConfig(timeout_s=5.0, retries=2, backoff_s=0.001)
HASTY = dataclasses.replace(QUICK, timeout_s=0.05, retries=1)
ONCE = dataclasses.replace(QUICK, retries=0)


def ask(reply, queries, k=3, *, dialect="search-r1", config=QUICK, times=1):
    """The answers of the last of some equal searches at a scripted server, the client, the stub."""

    async def run():
        async with stub(reply) as server:
            client = RetrieverClient(server.url, dialect=dialect, config=config)
            for _ in range(times):
                answers = await client.search(queries, k)
            await client.close()
            return answers, client, server

    return asyncio.run(run())


def scored(*ids):
    """One query's documents as a Search-R1 server gives them."""
    return [{"document": {"id": i, "contents": f'"T{i}"\ntext {i}'}, "score": 0.5} for i in ids]


def echo(path, body):
    """A Search-R1 server that finds one document for each query, named for it."""
    return {"result": [scored(query) for query in body["queries"]]}


def passage(name):
    return Passage(name, f"T{name}", f"text {name}", 0.5)


# --- the dialects ---------------------------------------------------------------------------------

DUNE = {"id": "123", "contents": '"Dune (novel)"\nDune is a 1965 book.\nIt is long.'}
LIMA = {"id": 7, "contents": '"Peru"\nLima.'}
FOUND = [
    [Passage("123", "Dune (novel)", "Dune is a 1965 book.\nIt is long.", 0.83)],
    [Passage("7", "Peru", "Lima.", 1.0)],
]
QUERIES = ["who wrote dune?", "capital of peru"]


@pytest.mark.parametrize("dialect", ["search-r1", "verl"])
def test_a_list_of_queries_is_asked_and_read_as_search_r1_and_verl_do(dialect):
    response = {"result": [[{"document": DUNE, "score": 0.83}], [{"document": LIMA, "score": 1}]]}
    answers, _, server = ask(lambda path, body: response, QUERIES, dialect=dialect)
    assert answers == FOUND
    assert server.asked == [("/retrieve", {"queries": QUERIES, "topk": 3, "return_scores": True})]


def test_one_query_a_request_is_asked_as_skyrl_does():
    items = {
        QUERIES[0]: {"document": DUNE, "score": 0.83},
        QUERIES[1]: {"document": LIMA, "score": 1},
    }
    answers, _, server = ask(
        lambda path, body: {"result": [[items[body["query"]]]]}, QUERIES, dialect="skyrl"
    )
    assert answers == FOUND
    bodies = [{"query": query, "topk": 3, "return_scores": True} for query in QUERIES]
    assert sorted(server.asked, key=str) == sorted((("/retrieve", b) for b in bodies), key=str)


def test_questions_are_asked_as_m_ask_does():
    response = [
        {"question": QUERIES[0], "top_k_docs": ["Dune (novel)\nDune is a book.\nIt is long."]},
        {"question": QUERIES[1], "top_k_docs": ['"Peru"\nLima.', "Peru\nLima."]},
    ]
    (first, second), _, server = ask(lambda path, body: response, QUERIES, 10, dialect="m-ask")
    assert server.asked == [("/search", {"questions": QUERIES, "N": 10})]
    assert [(p.title, p.text, p.score) for p in first] == [
        ("Dune (novel)", "Dune is a book.\nIt is long.", None)
    ]
    assert [(p.title, p.text) for p in second] == [("Peru", "Lima.")] * 2
    assert second[0].id == second[1].id != first[0].id  # a digest of what the passage says


@pytest.mark.parametrize(
    ("item", "wanted"),
    {
        "bare": (DUNE, dataclasses.replace(FOUND[0][0], score=None)),
        "null score": ({"document": LIMA, "score": None}, Passage("7", "Peru", "Lima.")),
        "bm25": (
            {
                "document": {"id": "1", "contents": '"A"\nb', "title": "A", "text": "b"},
                "score": 2.5,
            },
            Passage("1", "A", "b", 2.5),
        ),
        "title of two lines": (
            {"id": "1", "contents": '"A\nB"\nc', "title": "A\nB", "text": "c"},
            Passage("1", "A\nB", "c"),
        ),
        "no text": ({"id": "1", "contents": '"A"'}, Passage("1", "A", "")),
        "one quote": ({"id": "1", "contents": '"\nb'}, Passage("1", '"', "b")),
        "empty title": ({"id": "1", "contents": '""\nb'}, Passage("1", "", "b")),
        "quoted title": ({"id": "1", "contents": '""A""\nb'}, Passage("1", '"A"', "b")),
    }.values(),
)
def test_documents_are_read_scored_or_bare(item, wanted):
    assert ask(lambda path, body: {"result": [[item]]}, ["q"])[0] == [[wanted]]


def test_a_document_without_an_id_gets_one_of_what_it_says():
    items = [{"document": {"contents": text}} for text in ("a\nb", "a\nb", "a\nc")]
    ((first, second, third),), _, _ = ask(lambda path, body: {"result": [items]}, ["q"])
    assert first == second and first.id != third.id


def test_no_more_documents_are_taken_than_were_asked_for():
    answers, _, _ = ask(lambda path, body: {"result": [scored("a", "b", "c")]}, ["q"], 2)
    assert answers == [[passage("a"), passage("b")]]


def test_a_query_that_finds_nothing_has_an_empty_list():
    answers, client, _ = ask(lambda path, body: {"result": [[], scored("a")]}, ["p", "q"])
    assert answers == [[], [passage("a")]]
    assert client.counts["failed"] == 0


def test_the_url_may_hold_the_path():
    for url in ("http://h:1", "http://h:1/", "http://h:1/retrieve"):
        assert RetrieverClient(url).url == "http://h:1/retrieve"
    assert RetrieverClient("http://h/r", dialect="m-ask").url == "http://h/r/search"


# --- what is sent ---------------------------------------------------------------------------------


def test_many_queries_go_in_requests_of_a_batch_and_come_back_in_order():
    queries = [f"q{i}" for i in range(10)]
    config = dataclasses.replace(QUICK, batch=4)
    answers, client, server = ask(echo, queries, config=config)
    assert answers == [[passage(query)] for query in queries]
    assert sorted(len(body["queries"]) for _, body in server.asked) == [2, 4, 4]
    assert (client.counts["queries"], client.counts["requests"]) == (10, 3)


def test_equal_queries_are_sent_once_and_share_no_list():
    answers, _, server = ask(echo, ["a", " a\n", "b", "a"])
    assert [body["queries"] for _, body in server.asked] == [["a", "b"]]
    assert answers == [[passage("a")], [passage("a")], [passage("b")], [passage("a")]]
    answers[0].clear()
    assert answers[1] == [passage("a")]


def test_no_queries_are_no_request():
    answers, _, server = ask(echo, [])
    assert (answers, server.asked) == ([], [])


@pytest.mark.parametrize(
    ("query", "kind"), [("", "empty_query"), (" \n\u00a0", "empty_query"), ("\ud800", "bad_query")]
)
def test_a_query_that_no_server_can_answer_is_not_sent(query, kind):
    (before, failure, after), client, server = ask(echo, ["a", query, "b"])
    assert (before, after) == ([passage("a")], [passage("b")])
    assert isinstance(failure, SearchFailure) and failure.kind == kind
    assert [body["queries"] for _, body in server.asked] == [["a", "b"]]
    assert (client.counts["failed"], client.counts[f"failed/{kind}"]) == (1, 1)


def test_text_of_every_script_arrives():
    query = '"Ünï" 日本 \U0001f600 \\u0041 \x00'
    _, _, server = ask(echo, [query])
    assert server.asked[0][1]["queries"] == [query]


def test_no_more_requests_are_on_their_way_than_allowed():
    config = dataclasses.replace(QUICK, batch=1, concurrent=3)
    answers, _, server = ask(echo, [str(i) for i in range(40)], config=config)
    assert len(answers) == len(server.asked) == 40
    assert server.most_in_flight == 3


def test_waiting_for_a_place_is_no_part_of_the_time_that_an_answer_may_take():
    async def slow(body):
        await asyncio.sleep(0.06)
        return echo("", body)

    config = ClientConfig(timeout_s=1.0, retries=0, batch=1, concurrent=1)
    queries = [str(i) for i in range(25)]
    answers, client, _ = ask(lambda path, body: slow(body), queries, config=config)
    assert answers == [[passage(query)] for query in queries]
    assert client.counts["request_s"] > 1.0


# --- the cache ------------------------------------------------------------------------------------


def test_an_answer_is_asked_for_once():
    answers, client, server = ask(echo, ["a", "b"], times=3)
    assert answers == [[passage("a")], [passage("b")]] and len(server.asked) == 1
    assert (client.counts["queries"], client.counts["cached"]) == (6, 4)


def test_without_room_nothing_is_kept():
    config = dataclasses.replace(QUICK, max_cached=0)
    _, client, server = ask(echo, ["a"], config=config, times=3)
    assert (len(server.asked), client.counts["cached"]) == (3, 0)


def test_the_oldest_answers_make_room():
    async def run():
        async with stub(echo) as server:
            client = RetrieverClient(server.url, config=dataclasses.replace(QUICK, max_cached=2))
            for query in ("a", "b", "c", "c", "b", "a"):
                await client.search([query], 3)
            await client.close()
            return [body["queries"] for _, body in server.asked]

    assert asyncio.run(run()) == [["a"], ["b"], ["c"], ["a"]]


def test_another_k_is_another_answer():
    async def run():
        async with stub(echo) as server:
            client = RetrieverClient(server.url, config=QUICK)
            for k in (1, 2, 1):
                await client.search(["a"], k)
            await client.close()
            return [body["topk"] for _, body in server.asked]

    assert asyncio.run(run()) == [1, 2]


def test_what_a_caller_does_to_its_list_changes_no_later_answer():
    async def run():
        async with stub(echo) as server:
            client = RetrieverClient(server.url, config=QUICK)
            for _ in range(2):
                (found,) = await client.search(["a"], 3)
                assert found == [passage("a")]
                found.clear()
            await client.close()
            return len(server.asked)

    assert asyncio.run(run()) == 1


def test_another_index_behind_the_server_makes_known_answers_unknown():
    index = ["one"]

    def reply(path, body):
        found = {"result": [scored(f"{query} of {index[0]}") for query in body["queries"]]}
        return 200, found, {IDENTITY_HEADER: index[0]}

    async def run():
        seen = []
        async with stub(reply) as server:
            client = RetrieverClient(server.url, config=QUICK)
            for query in ("a", "a", "b", "a"):
                if query == "b":
                    index[0] = "two"
                seen += [found[0].id for found in await client.search([query], 3)]
            await client.close()
            return seen, len(server.asked)

    assert asyncio.run(run()) == (["a of one", "a of one", "b of two", "a of two"], 3)


def test_a_failure_is_not_kept():
    replies = iter([(400, {}), {"result": [scored("a")]}])
    answers, _, server = ask(lambda path, body: next(replies), ["a"], times=2)
    assert answers == [[passage("a")]] and len(server.asked) == 2
    replies = iter([{"result": [[]], "errors": ["bad_vector: nan"]}, {"result": [scored("a")]}])
    assert ask(lambda path, body: next(replies), ["a"], times=2)[0] == [[passage("a")]]


# --- what goes wrong ------------------------------------------------------------------------------


def failure_of(reply, config=QUICK):
    """The one kind and message with which both queries of a request failed; its client, stub."""
    (first, second), client, server = ask(reply, ["a", "b"], config=config)
    assert isinstance(first, SearchFailure) and first == second
    assert client.counts["failed"] == client.counts[f"failed/{first.kind}"] == 2
    return first, client, server


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_status_that_may_pass_is_tried_again(status):
    replies = iter([(status, {}), (status, b"busy")])
    answers, client, server = ask(lambda p, body: next(replies, None) or echo(p, body), ["a", "b"])
    assert answers == [[passage("a")], [passage("b")]]
    assert (len(server.asked), client.counts["retries"], client.counts["failed"]) == (3, 2, 0)


@pytest.mark.parametrize(
    ("status", "kind", "attempts"),
    [(400, "refused", 1), (404, "refused", 1), (413, "refused", 1), (429, "refused", 3),
     (500, "server_error", 3), (501, "server_error", 1), (503, "server_error", 3),
     (302, "bad_response", 1), (204, "bad_response", 1)],
)  # fmt: skip
def test_a_status_that_stays_is_a_failure_that_says_it(status, kind, attempts):
    body = b"" if status == 204 else b"the index is away"
    failure, client, server = failure_of(lambda path, _: (status, body))
    assert failure.kind == kind and f"status {status}" in failure.message
    assert body.decode() in failure.message and f"attempt {attempts}" in failure.message
    assert len(server.asked) == client.counts["requests"] == attempts
    assert client.counts["retries"] == attempts - 1


@pytest.mark.parametrize("slow", [HANG, DRIP])
def test_a_server_that_does_not_finish_is_a_timeout(slow):
    failure, _, server = failure_of(lambda path, body: slow, HASTY)
    assert failure.kind == "timeout" and len(server.asked) == 2


def test_a_server_that_breaks_off_is_unreachable():
    failure, _, server = failure_of(lambda path, body: DROP)
    assert failure.kind == "unreachable" and len(server.asked) == 3


def test_a_server_that_breaks_off_once_is_asked_again():
    replies = iter([DROP])
    answers, _, _ = ask(lambda path, body: next(replies, None) or echo(path, body), ["a"])
    assert answers == [[passage("a")]]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_dead_server_is_unreachable(dialect):
    async def run():
        client = RetrieverClient(
            f"http://127.0.0.1:{serving.free_port()}", dialect=dialect, config=QUICK
        )
        answers = await client.search(["a", "b"], 3)
        await client.close()
        return answers, client

    answers, client = asyncio.run(run())
    assert [answer.kind for answer in answers] == ["unreachable"] * 2
    assert client.counts["failed/unreachable"] == 2
    assert client.counts["retries"] == (4 if dialect == "skyrl" else 2)


def test_a_name_that_does_not_exist_is_unreachable():
    async def run():
        client = RetrieverClient("http://nowhere.invalid", config=ONCE)
        return await client.search(["a"], 3)

    ((failure),) = asyncio.run(run())
    assert failure.kind == "unreachable"


BAD = {
    "nothing": b"",
    "no json": b"<html>",
    "no utf-8": b'{"result": "\xff"}',
    "deep": b"[" * 100_000,
    "list": [],
    "null": None,
    "no result": {"results": [[], []]},
    "result of another kind": {"result": "two"},
    "too few": {"result": [[]]},
    "too many": {"result": [[], [], []]},
    "no list": {"result": [[], {"document": {}}]},
    "null for a list": {"result": [[], None]},
    "document of another kind": {"result": [[], ["text"]]},
    "no contents": {"result": [[], [{"document": {"id": "1"}, "score": 1}]]},
    "contents of another kind": {"result": [[], [{"id": "1", "contents": 3}]]},
    "score of another kind": {"result": [[], [{"document": DUNE, "score": "high"}]]},
    "score true": {"result": [[], [{"document": DUNE, "score": True}]]},
    "score nan": {"result": [[], [{"document": DUNE, "score": float("nan")}]]},
    "too few errors": {"result": [[], []], "errors": [None]},
    "errors of another kind": {"result": [[], []], "errors": "none"},
    "error of another kind": {"result": [[], []], "errors": [None, 3]},
}


@pytest.mark.parametrize("name", BAD)
def test_a_body_that_is_no_answer_is_a_bad_response_and_not_tried_again(name):
    failure, client, _ = failure_of(lambda path, body: (200, BAD[name]))
    assert failure.kind == "bad_response" and client.counts["requests"] == 1


BAD_ITEMS = {
    "object": {"result": []},
    "too few": [{"question": "a", "top_k_docs": []}],
    "other order": [{"question": q, "top_k_docs": []} for q in "ba"],
    "no documents": [{"question": "a", "top_k_docs": []}, {"question": "b"}],
    "document of another kind": [{"question": q, "top_k_docs": [{"id": 1}]} for q in "ab"],
    "no objects": ["a", "b"],
}


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_items_that_are_no_answer_are_a_bad_response(name):
    reply = BAD_ITEMS[name]
    (first, second), _, _ = ask(lambda path, body: (200, reply), ["a", "b"], dialect="m-ask")
    assert first.kind == second.kind == "bad_response"


def test_a_wrongly_packed_body_is_a_bad_response():
    failure, _, _ = failure_of(
        lambda path, body: (200, b"not packed", {"Content-Encoding": "gzip"})
    )
    assert failure.kind == "bad_response"


def test_one_request_of_several_fails_alone():
    def reply(path, body):
        return (400, {}) if "c" in body["queries"] else echo(path, body)

    config = dataclasses.replace(QUICK, batch=2)
    answers, client, _ = ask(reply, ["a", "b", "c", "d", "e"], config=config)
    assert answers[:2] + answers[4:] == [[passage(query)] for query in "abe"]
    assert [answer.kind for answer in answers[2:4]] == ["refused"] * 2
    assert client.counts["failed"] == 2


@pytest.mark.parametrize(
    ("errors", "wanted"),
    [
        ([None, "bad_vector: it is nan"], SearchFailure("bad_vector", "it is nan")),
        ([None, "it is nan"], SearchFailure("server", "it is nan")),
        ([None, None], []),
        (None, []),
    ],
)
def test_a_query_that_failed_in_the_server_fails_alone(errors, wanted):
    response = {"result": [scored("a"), []], "errors": errors}
    assert ask(lambda path, body: response, ["a", "b"])[0] == [[passage("a")], wanted]


def test_waits_are_drawn_from_zero_to_a_bound_that_doubles(monkeypatch):
    asked, sleep = [], asyncio.sleep

    async def note(seconds, *result):
        asked.append(seconds)
        await sleep(0)

    config = ClientConfig(retries=4, backoff_s=0.25, max_backoff_s=1.0)
    client = RetrieverClient(f"http://127.0.0.1:{serving.free_port()}", config=config)

    async def run():
        for number in range(100):
            await client.search([str(number)], 1)
        await client.close()

    monkeypatch.setattr(asyncio, "sleep", note)
    asyncio.run(run())
    drawn = [wait for wait in asked if wait]
    assert len(drawn) == 400
    for place, bound in enumerate([0.25, 0.5, 1.0, 1.0]):  # the third would be 1, the fourth 2
        waits = drawn[place::4]
        assert 0 < min(waits) < 0.2 * bound and 0.8 * bound < max(waits) <= bound
        # a mean of 100 even draws has a standard deviation of 0.03 bounds
        assert 0.35 * bound < sum(waits) / len(waits) < 0.65 * bound


def test_cancelling_a_search_ends_its_request_and_harms_no_other():
    async def run():
        async with stub(
            lambda path, body: HANG if body["queries"] == ["a"] else echo(path, body)
        ) as s:
            client = RetrieverClient(s.url, config=dataclasses.replace(QUICK, concurrent=1))
            task = asyncio.create_task(client.search(["a"], 3))
            while not s.asked:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            answers = await client.search(["b"], 3)
            while not s.left:
                await asyncio.sleep(0.001)
            await client.close()
            return answers

    assert asyncio.run(run()) == [[passage("b")]]


def test_a_client_serves_one_event_loop_after_another():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    client = RetrieverClient(f"http://127.0.0.1:{port}", config=ONCE)

    async def run(query):
        async def reply(reader, writer):
            await reader.readuntil(b"}")
            body = json.dumps({"result": [scored(query)]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

        server = await asyncio.start_server(reply, "127.0.0.1", port)
        answers = await client.search([query], 3)
        server.close()
        return answers

    for query in "abc":
        assert asyncio.run(run(query)) == [[passage(query)]]


@pytest.mark.parametrize("k", [0, -1, 101])
def test_a_number_of_passages_out_of_range_is_an_error(k):
    with pytest.raises(ValueError, match=rf"k={k}, wanted 1\.\.100"):
        asyncio.run(RetrieverClient("http://127.0.0.1:1").search(["a"], k))


@pytest.mark.parametrize(
    ("url", "changes", "message"),
    [
        ("127.0.0.1:8000", {}, "'127.0.0.1:8000'"),
        ("ftp://host", {}, "'ftp://host'"),
        ("http://", {}, "'http://'"),
        ("http://host:x", {}, "'http://host:x'"),
        ("http://host", dict(dialect="soap"), "dialect='soap'.*m-ask"),
        ("http://host", dict(config=ClientConfig(retries=-1)), "retries=-1"),
        ("http://host", dict(config=ClientConfig(timeout_s=0.0)), "timeout_s=0"),
        ("http://host", dict(config=ClientConfig(concurrent=0)), "concurrent=0"),
        ("http://host", dict(config=ClientConfig(batch=0)), "batch=0"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(url, changes, message):
    with pytest.raises(ValueError, match=message):
        RetrieverClient(url, **changes)


@pytest.mark.parametrize(
    "url",
    ["http://user:hush@host", "http://hush@host/retrieve", "http://host/?key=hush",
     "http://host#hush", "http://user:hu#sh@host", "user:hush@host", "http://u:hush@host:x"],
)  # fmt: skip
def test_a_url_with_a_secret_is_refused_and_not_shown(url):
    with pytest.raises(ValueError, match="perhaps a password") as error:
        RetrieverClient(url)
    assert "hu" not in str(error.value)
    assert error.value.__cause__ is error.value.__context__ is None


# --- the start ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "/", "/retrieve"])
def test_a_server_says_which_index_it_serves(path):
    with thread_stub((200, {IDENTITY_HEADER: "abc"})) as server:
        assert RetrieverClient(server.url + path).identify() == "abc"
    assert server.asked == [("/health", None)]


@pytest.mark.parametrize("status", [200, 404, 405, 500])
def test_a_server_that_names_no_index_has_none(status):
    with thread_stub((status, {})) as server:
        assert RetrieverClient(server.url, config=QUICK).identify() == ""


def test_a_server_that_is_about_to_start_is_waited_for():
    with thread_stub((503, {}), (502, {}), (200, {IDENTITY_HEADER: "abc"})) as server:
        assert RetrieverClient(server.url, config=QUICK).identify() == "abc"
    assert len(server.asked) == 3


def test_a_server_that_does_not_answer_is_one_clear_error():
    nobody = f"http://127.0.0.1:{serving.free_port()}"
    with pytest.raises(ValueError, match=rf"{nobody} does not answer, attempt 3: .*start it"):
        RetrieverClient(nobody, config=QUICK).identify()
    with thread_stub((503, {})) as server, pytest.raises(ValueError, match="attempt 3: status 503"):
        RetrieverClient(server.url, config=QUICK).identify()


# --- what is logged -------------------------------------------------------------------------------


def test_the_first_failure_of_each_kind_is_logged(caplog):
    def reply(path, body):
        (query,) = body["queries"]
        return {"n": (400, b"no\nsuch" + b" index" * 1000), "b": {"result": 3}}.get(query[0], DROP)

    async def run():
        async with stub(reply) as server:
            client = RetrieverClient(server.url, config=dataclasses.replace(ONCE, batch=1))
            await client.search(["n1", "n2", "b1"], 3)
            for _ in range(3):
                await client.search(["n3", "b2", "x"], 3)
            await client.close()
            return client

    client = asyncio.run(run())
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    kinds = [line.split("a search failed, ")[1].split(":")[0] for line in lines]
    assert kinds == ["refused", "bad_response", "unreachable"]
    assert f"{client.url}, attempt 1: status 400: no\\nsuch index" in lines[0]
    assert max(map(len, lines)) < 600 and not any("\n" in line for line in lines)
    assert (client.counts["failed"], client.counts["failed/refused"]) == (12, 5)


# --- the server dies in the middle of a rollout ---------------------------------------------------


def said(episode):
    """Everything that the agents of an episode read and wrote."""
    return "".join(CharTokenizer().decode(trace.tokens) for trace in episode.traces)


def test_a_rollout_outlives_a_server_that_is_killed_and_started_again(tmp_path):
    corpus, port = tmp_path / "corpus.jsonl", serving.free_port()
    serving.write_corpus([Passage("1", "river", "the river is long")], corpus)
    processes = [serving.start_server(corpus, port)]
    script = Script(
        {("searcher", 1): "<report> x</report>", ("answerer", 0): "<answer> ada</answer>"}
    )
    questions = [Question(f"q{i}", "toy", f"who {i}", ("ada",)) for i in range(60)]
    config = ClientConfig(timeout_s=5.0, retries=1, backoff_s=0.01)
    client = RetrieverClient(f"http://127.0.0.1:{port}", config=config)
    life, seen = [0], {}  # 1 from the kill to the restart, then 2; by question, before and after

    async def sample(prompt, **request):
        key = request["key"]
        if (key.path, key.turn) != ("searcher", 0):
            return await script.sample(prompt, **request)
        if key.question == "q20":  # seven others are anywhere in their episodes
            life[0] = 1
            processes[-1].kill()
            processes[-1].wait()
        if key.question == "q40":  # holds the loop until the server answers
            processes.append(serving.start_server(corpus, port))
            life[0] = 2
        script.says["searcher", 0] = f"<search> river {key.question}</search>"
        return await script.sample(prompt, **request)

    async def search(queries, k):
        before = life[0]
        answers = await client.search(queries, k)
        seen[queries[0].split()[-1]] = (before, life[0])
        return answers

    async def play():
        world = dataclasses.replace(script.world, sample=sample, search=search)
        jobs, limits = [(question, 0) for question in questions], Limits(8, 1.0, 1)
        stream = rollout.play(
            jobs, make_team("cascade"), world=world, run=Run(0, "train", 0), limits=limits
        )
        episodes = [episode async for episode in stream]
        await client.close()
        return episodes

    try:
        episodes = asyncio.run(play())
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert len(episodes) == len(seen) == 60
    assert all((e.reward, e.failure, e.outcome) == (1.0, None, "answered") for e in episodes)
    without = [e for e in episodes if seen[e.question] == (1, 1)]
    assert len(without) >= 10
    for episode in without:
        assert episode.failed_searches == 1
    for episode in episodes:
        text, failed = said(episode), episode.failed_searches == 1
        assert (" failed" in text, "the river is long" in text) == (failed, not failed)
        assert " nothing" not in text
        if seen[episode.question] in ((0, 0), (2, 2)):
            assert not failed
    num_failed = sum(episode.failed_searches for episode in episodes)
    assert client.counts["failed"] == client.counts["failed/unreachable"] == num_failed
    assert client.counts["queries"] == 60
