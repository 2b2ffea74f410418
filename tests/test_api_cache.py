"""The cache of an endpoint's answers: what is kept, under which key, and damaged entries."""

import dataclasses
import json
import math

import pytest
from api_calls import ASK, REQUEST, ask, endpoint
from chat_server import ChatServer, answer, failure

from mas_jax.records import WorldError
from mas_jax.sampling import api_cache
from mas_jax.sampling.api import Client
from mas_jax.sampling.api_budget import Price


def test_a_repeated_request_is_answered_from_disk(tmp_path):
    with ChatServer([answer("first"), answer("second")]) as server:
        wanted = endpoint(server, prices={"m": Price(1, 10)})
        first = ask(Client(wanted, tmp_path))
        client = Client(wanted, tmp_path)
        again = ask(client)
        assert len(server.received) == 1
        assert client.estimate([REQUEST, dataclasses.replace(REQUEST, seed=1)]).calls == 1
    assert again == dataclasses.replace(first, is_cached=True, cost=0.0)
    counts = client.counts["m"]
    assert (counts.requests, counts.cached, counts.calls, counts.cost) == (1, 1, 0, 0.0)
    assert counts.input_tokens == 0


def test_an_entry_is_one_json_file_in_a_folder_of_two_characters(tmp_path):
    with ChatServer([answer("kept")]) as server:
        ask(Client(endpoint(server), tmp_path))
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    folder, name = path.relative_to(tmp_path).parts
    assert len(folder) == 2 and len(folder + name) == 40 + len(".json")
    entry = json.loads(path.read_text())
    assert entry["answer"]["text"] == "kept" and entry["request"]["messages"] == list(ASK)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"messages": ({"role": "system", "content": "Is it?"},)},
        {"messages": (*ASK, {"role": "assistant", "content": ""})},
        {"temperature": 0.5, "sample": 0},
        {"max_tokens": 101},
        {"seed": 0},
        {"stop": ("x",)},
        {"sample": 0},
    ],
)
def test_whatever_decides_the_answer_is_part_of_its_key(tmp_path, change):
    with ChatServer([answer("first"), answer("second")]) as server:
        client = Client(endpoint(server), tmp_path)
        ask(client)
        assert [ask(client, **change).text for _ in range(2)] == ["second", "second"]
        assert len(server.received) == 2


def test_another_endpoint_has_other_answers(tmp_path):
    with ChatServer([answer("a")]) as one, ChatServer([answer("b")]) as two:
        assert [ask(Client(endpoint(s), tmp_path)).text for s in (one, two)] == ["a", "b"]
        slashed = dataclasses.replace(endpoint(one), base_url=f"{one.url}/")
        assert ask(Client(slashed, tmp_path)).text == "a"


def test_only_a_request_that_names_its_draw_is_cached(tmp_path):
    with ChatServer(lambda body: answer(str(len(server.received)))) as server:
        client = Client(endpoint(server), tmp_path)
        drawn = [ask(client, temperature=1.0).text for _ in range(2)]
        assert not list(tmp_path.rglob("*.json"))
        seeded = [ask(client, temperature=1.0, seed=1).text for _ in range(2)]
        sampled = [ask(client, temperature=1.0, sample=n).text for n in (0, 1, 0, 1)]
    assert drawn == ["1", "2"] and seeded == ["3", "3"] and sampled == ["4", "5", "4", "5"]


def flip_a_letter(path):
    path.write_text(path.read_text().replace("kept", "kapt"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-10]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text('{"digest": "0"}'),
        flip_a_letter,
    ],
)
def test_a_damaged_entry_is_asked_for_again_and_replaced(tmp_path, damage):
    with ChatServer([answer("kept"), answer("new")]) as server:
        client = Client(endpoint(server), tmp_path)
        ask(client)
        (path,) = tmp_path.rglob("*.json")
        damage(path)
        assert [ask(client).text for _ in range(2)] == ["new", "new"]
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]


def test_an_entry_in_the_place_of_another_is_ignored(tmp_path):
    with ChatServer([answer("one"), answer("two"), answer("three")]) as server:
        client = Client(endpoint(server), tmp_path)
        ask(client)
        (first,) = tmp_path.rglob("*.json")
        ask(client, seed=1)
        (second,) = set(tmp_path.rglob("*.json")) - {first}
        second.write_bytes(first.read_bytes())
        assert ask(client, seed=1).text == "three"


def test_a_write_that_breaks_off_leaves_no_entry(tmp_path, monkeypatch):
    fields = {"a": 1}
    api_cache.write(tmp_path, fields, {"text": "old"})
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        api_cache.write(tmp_path, fields, {"text": "new"})
    assert api_cache.read(tmp_path, fields) == {"text": "old"}


def test_the_order_of_keys_does_not_change_a_hash_and_every_value_does():
    a = api_cache.hash_fields({"x": [1, "é"], "y": None})
    assert a == api_cache.hash_fields({"y": None, "x": [1, "é"]})
    others = [{"x": [1, "é"], "y": 0}, {"x": [1, "e"], "y": None}, {"x": ["1", "é"], "y": None}]
    assert len({a, *map(api_cache.hash_fields, others)}) == 4
    with pytest.raises(ValueError):
        api_cache.hash_fields({"x": math.nan})


def test_failures_are_not_cached(tmp_path):
    with ChatServer([failure(400), answer()]) as server:
        client = Client(endpoint(server), tmp_path)
        with pytest.raises(WorldError):
            ask(client)
        assert ask(client).text == "yes" and len(server.received) == 2


def test_odd_characters_survive_the_cache(tmp_path):
    text = "\ud800 \x00 \u2028 🦊"  # half a surrogate pair, as "\ud800" in JSON is read
    with ChatServer([answer(text)]) as server:
        client = Client(endpoint(server), tmp_path)
        assert [ask(client).text for _ in range(2)] == [text, text]
