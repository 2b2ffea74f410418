"""Rewards of single search agents: every published case by hand, TF-IDF among them."""

import math
import random

import numpy as np
import pytest
from test_terms import trace

from mas_jax.rewards import search

# --- the whole episode ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actions", "wanted"),
    [
        (["search", "answer"], True),
        (["answer"], True),
        (["search", "search"], False),
        (["invalid", "answer"], False),
        (["search", "invalid"], False),
        ([], False),
    ],
)
def test_an_agent_is_well_formed_if_all_it_did_was_valid_and_it_answered(actions, wanted):
    assert search.is_well_formed(trace(*actions)) is wanted


def test_the_tiers_of_search_r1():
    for correct, is_valid, wanted in [
        (1.0, True, 1.0), (1.0, False, 0.8), (0.0, True, 0.2), (0.0, False, 0.1),
    ]:  # fmt: skip
        assert search.format_tiers(correct, is_valid, True) == pytest.approx(wanted, abs=1e-12)
    assert search.format_tiers(0.0, False, False) == 0.0


def test_the_cases_of_research():
    for f1, is_valid, wanted in [
        (0.4, True, 0.4), (0.05, False, 0.05), (0.0, True, 0.1), (0.0, False, 0.0),
    ]:  # fmt: skip
        assert search.f1_or_format(f1, is_valid) == wanted


def test_stepsearchs_outcome():
    assert search.f1_and_keys(0.5, 0.25, weight=0.618) == pytest.approx(0.5 + 0.1545)


# --- search keys ----------------------------------------------------------------------------------


def test_key_words_are_without_function_words_articles_and_references():
    assert search.key_words("Which country is #1 in?") == ["country"]
    assert search.key_words("where was the Marnox eskow born") == ["marnox", "eskow", "born"]
    assert search.key_words("#1 >> #2") == []


def test_search_key_f1_by_hand():
    parts = ("where was marnox eskow born", "which country is #1 in")
    # 2 of 3 words each way, so 2/3; the second has nothing: mean 1/3
    one = ["marnox eskow birthplace"]
    assert search.search_key_f1(one, parts) == pytest.approx(1 / 3)
    # "country tushistan" shares 1 of its 2 words with the one of the second part: F1 2/3
    two = [*one, "the country of tushistan"]
    assert search.search_key_f1(two, parts) == pytest.approx(2 / 3)
    assert search.search_key_f1(two[::-1], parts) == search.search_key_f1(two, parts)
    # a part that is all references is left out
    assert search.search_key_f1(two, (*parts, "#1 >> #2")) == search.search_key_f1(two, parts)
    assert search.search_key_f1([], parts) == search.search_key_f1(one, ()) == 0.0


# --- each search ----------------------------------------------------------------------------------

GOLD = ["red blue", "green"]
TEXTS = {"p1": "Red blue.", "p2": "green green", "p3": "red green yellow", "p4": "other words"}


def test_progress_by_hand():
    found = [["p1"], ["p1"], ["p2", "p1"], [], ["p4"]]
    # p1 is the first gold passage: its match rises from 0 to 1, of 2 passages: 1/2
    # p1 again: nothing rises, all of it was seen: -1
    # p2 is the second gold passage: 1/2, less 1 of 2 passages seen; nothing; nothing new of use
    wanted = [0.5, -1.0, 0.0, 0.0, 0.0]
    assert search.search_progress(found, GOLD, TEXTS) == pytest.approx(wanted, abs=1e-12)


def test_a_partial_match_by_hand():
    # each gold word is in 1 of 2 passages: ln(3/2) + 1; yellow in none: ln(3) + 1
    known, unknown = math.log(1.5) + 1, math.log(3) + 1
    norm = math.sqrt(2 * known**2 + unknown**2)
    first, second = known / norm / math.sqrt(2), known / norm
    got = search.search_progress([["p3"], ["p1"]], GOLD, TEXTS)
    assert got == pytest.approx([(first + second) / 2, (1 - first) / 2])


def test_without_gold_passages_only_redundancy_counts():
    assert search.search_progress([["p1", "p2"], ["p2", "p3"]], [], TEXTS) == [0.0, -0.5]


def test_gains_add_up_to_the_best_match_in_any_order():
    names, rng = list(TEXTS), random.Random(0)
    everything = search.search_progress([names], GOLD, TEXTS)[0]
    for _ in range(20):
        rng.shuffle(names)
        cut = rng.randrange(1, 4)
        parts = [names[:cut], names[cut:]]
        assert sum(search.search_progress(parts, GOLD, TEXTS)) == pytest.approx(everything)
        turned = [part[::-1] for part in parts]
        want = search.search_progress(parts, GOLD, TEXTS)
        assert search.search_progress(turned, GOLD, TEXTS) == pytest.approx(want)


def test_the_cosine_is_that_of_vectors_over_the_whole_vocabulary():
    gold = ["the red fox runs", "blue fox", "a red red sun"]
    text = "red fox fox moon"
    words = sorted({word for t in [*gold, text] for word in t.split()} - {"a", "the"})
    counts = np.array([[t.split().count(word) for word in words] for t in [*gold, text]], float)
    df = (counts[:3] > 0).sum(axis=0)
    vectors = counts * (np.log((1 + 3) / (1 + df)) + 1)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    want = float((vectors[:3] @ vectors[3]).mean())
    assert search.search_progress([["x"]], gold, {"x": text}) == pytest.approx([want])
