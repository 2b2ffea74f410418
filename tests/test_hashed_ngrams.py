"""The hashed n-gram encoder: what a vector is made of, does not depend on, and finds."""

import hashlib
import json
import math
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from mas_jax.retrieval import hashed_ngrams
from mas_jax.retrieval.hashed_ngrams import FUNCTION_WORDS, HashedNgrams

QA = ROOT.parent / "shared" / "data" / "qa"


def signs(key: str, dim: int) -> np.ndarray:
    """Sign vector of a key, bit by bit: the most significant bit of each byte comes first."""
    digest = hashlib.shake_128(key.encode()).digest(dim // 8)
    return np.array(
        [1.0 if digest[i // 8] & (1 << (7 - i % 8)) else -1.0 for i in range(dim)], np.float64
    )


def word_vector(word: str, dim: int) -> np.ndarray:
    """A word's vector, by its definition."""
    if word in FUNCTION_WORDS:
        return 0.1 * signs(word, dim) / math.sqrt(dim)
    padded, total = f"<{word}>", signs(word, dim)
    for start in range(len(padded) - 3):
        total = total + 0.5 * signs("<" + padded[start : start + 4], dim)
    return total / np.linalg.norm(total)


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def test_a_text_is_the_weighted_sum_of_its_words():
    # "ox" has one 4-gram, "<ox>", of weight 0.5; it occurs three times: 1 + ln 3; "the" weighs 0.1
    ox = signs("ox", 64) + 0.5 * signs("<<ox>", 64)
    expected = unit((1 + math.log(3)) * unit(ox) + 0.1 * signs("the", 64) / 8)
    np.testing.assert_allclose(HashedNgrams(64).encode(["Ox, OX: the ox!"])[0], expected, atol=1e-6)


def test_a_function_word_alone_still_has_norm_one():
    np.testing.assert_allclose(HashedNgrams(64).encode(["the"])[0], signs("the", 64) / 8, atol=1e-7)


@given(st.lists(st.text(st.sampled_from("abthe ïß.\n7"), max_size=30), max_size=6))
@settings(max_examples=60, deadline=None)
def test_vectors_equal_a_plain_loop_over_words(texts):
    vectors = HashedNgrams(32).encode(texts)
    assert vectors.shape == (len(texts), 32) and vectors.dtype == np.float32
    for text, vector in zip(texts, vectors, strict=True):
        words = hashed_ngrams._WORD.findall(text.casefold())
        expected = np.zeros(32)
        for word in set(words):
            expected += (1 + math.log(words.count(word))) * word_vector(word, 32)
        if words:
            expected = unit(expected)
        np.testing.assert_allclose(vector, expected, atol=1e-5)


@pytest.mark.parametrize("text", ["", " \n\t", "?!... --"])
def test_a_text_without_words_is_the_zero_vector(text):
    vectors = HashedNgrams().encode(["a word", text, "another"])
    assert not vectors[1].any() and vectors[0].any() and vectors[2].any()


def test_no_texts_give_no_vectors():
    assert HashedNgrams(64).encode([]).shape == (0, 64)


def test_a_vector_does_not_depend_on_the_texts_beside_it():
    texts = [f"the {'word ' * (i % 5)} number{i % 37} and {i}" for i in range(600)]
    texts[100] = texts[599] = ""
    together = HashedNgrams().encode(texts)
    encoder = HashedNgrams()
    alone = np.concatenate([encoder.encode([text]) for text in reversed(texts)])[::-1]
    np.testing.assert_array_equal(together, alone)


def test_forgotten_words_come_back_the_same(monkeypatch):
    texts = [f"passage {i} of author{i}" for i in range(700)]
    expected = HashedNgrams().encode(texts)
    monkeypatch.setattr(hashed_ngrams, "MAX_CACHED_WORDS", 50)
    encoder = HashedNgrams()
    for _ in range(2):
        np.testing.assert_array_equal(encoder.encode(texts), expected)
    assert len(encoder._rows) < 700  # two blocks' words at most, of 1,402


def test_order_and_case_of_words_do_not_count():
    a, b = HashedNgrams().encode(["Red fox in Ostrava", "OSTRAVA fox; red (in)"])
    np.testing.assert_allclose(a, b, atol=1e-7)


def test_other_processes_make_the_same_vectors():
    code = (
        "from mas_jax.retrieval.hashed_ngrams import HashedNgrams\nimport hashlib, sys\n"
        "e = HashedNgrams()\n"
        "v = e.encode(['Who wrote the red book of Ostrava?', 'naïve Größe'])\n"
        "assert not {'jax', 'scann', 'tensorflow'} & sys.modules.keys()\n"
        "print(e.fingerprint, hashlib.sha256(v.tobytes()).hexdigest())"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert outputs[0] == outputs[1] and HashedNgrams().fingerprint in outputs[0]


def test_threads_share_one_encoder():
    encoder, texts = HashedNgrams(64), [f"word{i} is here" for i in range(2000)]
    expected, results = HashedNgrams(64).encode(texts), []
    threads = [
        threading.Thread(target=lambda: results.append(encoder.encode(texts))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for vectors in results:
        np.testing.assert_array_equal(vectors, expected)


def test_strange_texts_have_unit_vectors():
    texts = ["\ud800 lone", "a\0b", "x" * 10_000, "東京タワー", "word " * 50_000, "<|im_end|>"]
    np.testing.assert_allclose(np.linalg.norm(HashedNgrams().encode(texts), axis=1), 1, atol=1e-5)


def test_the_fingerprint_names_what_vectors_depend_on(monkeypatch):
    first = HashedNgrams(256).fingerprint
    assert first == HashedNgrams().fingerprint != HashedNgrams(128).fingerprint
    monkeypatch.setattr(hashed_ngrams, "NGRAM_WEIGHT", 0.4)
    assert HashedNgrams(256).fingerprint != first


@pytest.mark.parametrize("dim", [0, -8, 12])
def test_a_dimension_must_be_a_multiple_of_eight(dim):
    with pytest.raises(ValueError, match=f"dim={dim}"):
        HashedNgrams(dim)


def test_related_forms_are_nearer_than_other_words():
    directed, director, painter = HashedNgrams().encode(["directed", "director", "painter"])
    assert directed @ director > 0.15 > abs(directed @ painter) + 0.02


def test_the_passage_of_the_entity_and_relation_beats_near_misses():
    passages = [
        "Mira Tolvan\nMira Tolvan was born in the city of Keshar.",
        "Mira Tolvan\nMira Tolvan works for the company Ustrel.",
        "Dane Tolvan\nDane Tolvan was born in the city of Orlim.",
        "Mira Sebbek\nMira Sebbek was born in the city of Vantu.",
        "Keshar\nKeshar is a city in the country of Paldor.",
    ]
    queries = [
        "Where was Mira Tolvan born?",
        "company that Mira Tolvan works for",
        "Keshar country",
    ]
    encoder = HashedNgrams()
    best = np.argmax(encoder.encode(queries) @ encoder.encode(passages).T, axis=1)
    assert best.tolist() == [0, 1, 4]


@pytest.mark.skipif(not QA.is_dir(), reason="the shared question sets are not here")
def test_real_questions_find_their_passages():
    def lines(name: str) -> list[dict]:
        return [json.loads(x) for x in (QA / name).read_text().split("\n") if x]

    corpus = lines("hotpotqa_train100_corpus.jsonl")
    questions = lines("hotpotqa_train100.jsonl")
    encoder = HashedNgrams()
    passages = encoder.encode([line["contents"] for line in corpus])
    scores = encoder.encode([line["question"] for line in questions]) @ passages.T
    hits = 0
    for line, row in zip(questions, scores, strict=True):
        found = {corpus[i]["id"] for i in np.argsort(-row)[:5]}
        hits += bool(found & set(line["metadata"]["gold_passage_ids"]))
    assert hits >= 90, hits  # of 100; chance finds one
