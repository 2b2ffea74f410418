"""Exact match and token F1: hand-computed pairs, an independent reference, recorded real pairs."""

import json
import string

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from mas_jax.rewards.exact_match import (
    exact_match,
    normalize_answer,
    normalize_triviaqa,
    token_f1,
)

CASES = ROOT.parent / "shared" / "data" / "cases"

needs_cases = pytest.mark.skipif(not CASES.is_dir(), reason=f"no recorded pairs at {CASES}")


def recorded(name: str) -> list[dict]:
    return [json.loads(line) for line in (CASES / name).read_text().split("\n") if line]


# prediction, golden answers, exact match, F1 as a fraction of integers where it is neither 0 nor 1
PAIRS = [
    # case, space and ends
    ("Paris", ["paris"], 1, 1),
    ("PARIS", ["Paris"], 1, 1),
    ("  Paris \n", ["Paris"], 1, 1),
    ("New\tYork   City", ["new york city"], 1, 1),
    ("New\u00a0York", ["New York"], 1, 1),
    ("NewYork", ["New York"], 0, 0),
    ("Straße", ["STRASSE"], 0, 0),  # lower-casing is not case folding
    ("İstanbul", ["istanbul"], 0, 0),  # its lower case keeps a combining dot
    # articles
    ("the Beatles", ["Beatles"], 1, 1),
    ("Beatles", ["The Beatles"], 1, 1),
    ("A Tale of Two Cities", ["Tale of two cities"], 1, 1),
    ("an apple a day", ["apple day"], 1, 1),
    ("theatre", ["atre"], 0, 0),
    ("another", ["other"], 0, 0),
    ("Vitamin A", ["Vitamin"], 1, 1),
    ("Lord of the Rings", ["Lord of Rings"], 1, 1),
    ("le monde", ["monde"], 0, 2 / 3),  # 1/2, 1/1
    ("a-ha", ["aha"], 1, 1),  # the hyphen goes before the article could be seen
    ("a ha", ["ha"], 1, 1),
    ("the-who", ["thewho"], 1, 1),
    ("the-who", ["who"], 0, 0),
    # ASCII punctuation is deleted
    ("Jay-Z", ["jayz"], 1, 1),
    ("Jay Z", ["Jay-Z"], 0, 0),
    ("U.S.", ["US"], 1, 1),
    ("U. S.", ["US"], 0, 0),
    ("1,000", ["1000"], 1, 1),
    ("1 000", ["1,000"], 0, 0),
    ("and/or", ["andor"], 1, 1),
    ("AC/DC", ["acdc"], 1, 1),
    ("O'Neill", ["ONeill"], 1, 1),
    ("rock'n'roll!", ["RocknRoll"], 1, 1),
    ('"Hamlet"', ["Hamlet"], 1, 1),
    ("(Hamlet)", ["Hamlet"], 1, 1),
    ("snake_case", ["snakecase"], 1, 1),
    ("50%", ["50"], 1, 1),
    ("$5", ["5"], 1, 1),
    ("3.14", ["314"], 1, 1),
    ("-5", ["5"], 1, 1),
    ("C++", ["C"], 1, 1),
    ("Paris.", ["Paris"], 1, 1),
    ("Paris, France", ["Paris"], 0, 2 / 3),  # 1/2, 1/1
    # what is not ASCII stays
    ("Beyoncé", ["Beyonce"], 0, 0),
    ("Beyoncé", ["BEYONCÉ"], 1, 1),
    ("Beyonce\u0301", ["Beyoncé"], 0, 0),  # decomposed
    ("O\u2019Neill", ["O'Neill"], 0, 0),
    ("1914\u20131918", ["1914-1918"], 0, 0),
    ("\u201cHamlet\u201d", ["Hamlet"], 0, 0),
    ("東京", ["東京"], 1, 1),
    ("東京。", ["東京"], 0, 0),
    ("💻", ["💻"], 1, 1),
    ("π", ["Π"], 1, 1),
    # aliases
    ("JFK", ["John F. Kennedy", "J.F.K."], 1, 1),
    ("John Kennedy", ["John F. Kennedy", "JFK"], 0, 4 / 5),  # 2/2, 2/3
    ("b", ["a", "b"], 1, 1),
    ("x", ["y", "z"], 0, 0),
    ("John Smith", ["Smith", "John Smith Jr"], 0, 4 / 5),  # the better of 2/3 and 4/5
    # nothing never matches
    ("", ["Paris"], 0, 0),
    ("", [""], 0, 0),
    ("The", ["the"], 0, 0),
    ("a", ["A"], 0, 0),
    ("?!", ["..."], 0, 0),
    ("*", ["*"], 0, 0),
    (" \n", ["   "], 0, 0),
    ("Paris", ["", "The", "Paris"], 1, 1),
    ("Paris", [""], 0, 0),
    ("Paris", [], 0, 0),
    # yes, no and noanswer
    ("yes", ["Yes"], 1, 1),
    ("Yes.", ["yes"], 1, 1),
    ("no", ["yes"], 0, 0),
    ("Yes, both are", ["yes"], 0, 0),
    ("yes", ["yes they are"], 0, 0),
    ("noanswer", ["no answer"], 0, 0),
    ("no answer", ["no answer here"], 0, 4 / 5),  # 2/2, 2/3: a word no is not the answer no
    ("no", ["no", "No way"], 1, 1),
    ("yes indeed", ["yes", "yes sir"], 0, 1 / 2),  # the closed gold gives 0, the other 1/2
    # words as bags
    ("Obama Barack", ["Barack Obama"], 0, 1),
    ("New York New York", ["New York"], 0, 2 / 3),  # 2/4, 2/2
    ("New York", ["New York New York"], 0, 2 / 3),
    ("the the the", ["the cat"], 0, 0),
    ("12 May 1999", ["May 12, 1999"], 0, 1),
    ("1999", ["May 12, 1999"], 0, 1 / 2),  # 1/1, 1/3
    ("Paris is the capital of France", ["Paris"], 0, 1 / 3),  # 1/5, 1/1
]


def test_the_table_is_large_and_has_no_pair_twice():
    assert len(PAIRS) >= 60
    assert len({(p, tuple(g)) for p, g, _, _ in PAIRS}) == len(PAIRS)


@pytest.mark.parametrize(("prediction", "golds", "em", "f1"), PAIRS)
def test_pairs_scored_by_hand(prediction, golds, em, f1):
    assert exact_match(prediction, golds) == em
    assert token_f1(prediction, golds) == pytest.approx(f1, abs=1e-12)


def test_normalisation_step_by_step():
    # lower case, then "a-b" -> "ab", so that no article is left of it; then articles, then spaces
    assert normalize_answer("The  A-B of\ta  'THEORY', (an) end.") == "ab of theory end"
    assert normalize_answer("A") == normalize_answer("") == normalize_answer("-- the --") == ""


def test_the_triviaqa_normaliser_puts_a_space_for_punctuation():
    assert normalize_triviaqa("Jay-Z") == "jay z" and normalize_answer("Jay-Z") == "jayz"
    assert exact_match("Jay Z", ["Jay-Z"], normalize=normalize_triviaqa) == 1.0
    assert token_f1("jay", ["Jay-Z"], normalize=normalize_triviaqa) == pytest.approx(2 / 3)


def test_one_string_as_golden_answers_is_an_error():
    for score in (exact_match, token_f1):
        with pytest.raises(TypeError, match="'Paris' is one string"):
            score("Paris", "Paris")


def squad_by_characters(text: str) -> str:
    """The normalisation again, by a scanner instead of expressions."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    words, word = [], ""
    for character in kept + " ":
        if character.isalnum() or character == "_":
            word += character
        else:
            words += [" " if word in ("a", "an", "the") else word, character]
            word = ""
    return " ".join("".join(words).split())


# article-like and punctuated text is rare among arbitrary strings
TEXTS = st.one_of(
    st.text(max_size=20),
    st.lists(
        st.sampled_from(["a", "the", "An", "b", " ", "-", "'", "é", "\u2019", "1,0", "\t"])
    ).map("".join),
)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_normalisation_equals_a_scanner_and_ignores_case_and_outer_space(text):
    once = normalize_answer(text)
    assert once == squad_by_characters(text)
    assert normalize_answer(f" {text}\n") == once


@settings(max_examples=200, deadline=None)
@given(prediction=TEXTS, golds=st.lists(TEXTS, max_size=4), more=TEXTS)
def test_scores_are_ordered_and_never_fall_with_one_more_alias(prediction, golds, more):
    for score in (exact_match, token_f1):
        value = score(prediction, golds)
        assert 0.0 <= value <= 1.0
        assert score(prediction, golds[::-1]) == value
        assert score(prediction, [*golds, more]) == max(value, score(prediction, [more]))
    assert token_f1(prediction, golds) >= exact_match(prediction, golds)


@needs_cases
def test_every_recorded_prediction_gets_its_recorded_scores():
    cases = recorded("em_cases.jsonl")
    assert len(cases) > 3000
    wrong = [
        case
        for case in cases
        if exact_match(case["pred"], case["golden_answers"]) != case["em"]
        or abs(token_f1(case["pred"], case["golden_answers"]) - case["f1"]) > 1e-12
    ]
    assert not wrong
    # each verdict occurs, or agreement would say little
    assert {case["em"] for case in cases} == {0.0, 1.0}
    assert any(0 < case["f1"] < 1 for case in cases)


@needs_cases
def test_every_recorded_unit_case_holds():
    normalizers = {"normalize_squad": normalize_answer, "normalize_trivia_qa": normalize_triviaqa}
    kinds = set()
    for case in recorded("em_unit_cases.jsonl"):
        kinds.add(case["kind"])
        if case["kind"] in normalizers:
            assert normalizers[case["kind"]](case["input"]) == case["expected"]
            continue
        pairs = list(zip(case["predictions"], case["targets"], strict=True))
        # the peer's function receives words that are normalised already: "a" counts in them
        for score, name in ((exact_match, "em"), (token_f1, "f1")):
            total = sum(score(prediction, golds, normalize=str) for prediction, golds in pairs)
            assert 100 * total / len(pairs) == pytest.approx(case["expected"][name])
    assert kinds == {*normalizers, "qa_metrics"}
