"""BM25: scores against the formula, answers as the other indexes give them, quality measures."""

import math
import sys
from dataclasses import asdict

import pytest
from shared_data import lines

from mas_jax.benchmarks import retrieval_quality
from mas_jax.data.questions import parse
from mas_jax.evaluation.retrieval_quality import answer_rank, measure
from mas_jax.records import Passage, Question, SearchFailure
from mas_jax.retrieval.bm25_index import Bm25Config, Bm25Retriever

FOXES = [
    Passage("0", "Fox", "red fox jumps"), Passage("1", "Whale", "blue whale"),
    Passage("2", "Fox", "red fox jumps"), Passage("3", "Den", "fox den of fox and fox"),
]  # fmt: skip


def test_scores_are_those_of_the_formula():
    # words: 4, 3, 4, 5 (title first; "of" and "and" are no words), mean 4; "whale" is in one of 4
    retriever = Bm25Retriever(FOXES, Bm25Config(k1=1.2, b=0.5))
    [found] = retriever.search_now(["whale"], 3)
    idf = math.log(1 + (4 - 1 + 0.5) / (1 + 0.5))
    count, length, mean = 2, 3, 4  # "Whale" and "whale"
    expected = idf * count / (count + 1.2 * (1 - 0.5 + 0.5 * length / mean))
    assert [p.id for p in found] == ["1"]
    assert found[0].score == pytest.approx(expected, rel=1e-5)


def test_ties_go_to_the_earlier_passage_and_only_shared_words_are_results():
    retriever = Bm25Retriever(FOXES, Bm25Config())
    [found] = retriever.search_now(["jumps"], 1)
    assert [p.id for p in found] == ["0"]
    [found] = retriever.search_now(["Jumps RED zebra"], 4)
    assert [p.id for p in found] == ["0", "2"]
    unknown, empty, words = retriever.search_now(["zebra", "?! of the", "den"], 2)
    assert unknown == []
    assert isinstance(empty, SearchFailure) and empty.kind == "empty_query"
    assert [p.id for p in words] == ["3"]


def test_an_empty_corpus_is_an_error():
    with pytest.raises(ValueError, match="corpus is empty"):
        Bm25Retriever([], Bm25Config())


def test_without_its_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ValueError, match=r"pip install 'mas_jax\[bm25\]'"):
        Bm25Retriever(FOXES, Bm25Config())


# --- quality --------------------------------------------------------------------------------------


def question(*answers, gold=()):
    return Question("u", "d", "q?", answers, gold_passages=gold)


def test_answers_are_whole_words_after_normalisation():
    passages = [
        Passage("0", "Mars", "a planetary body"),
        Passage("1", "The Planet!", "is Netlike"),
    ]
    assert answer_rank(question("planet"), passages) == 1
    assert answer_rank(question("the planet"), passages) == 1
    assert answer_rank(question("net"), passages) is None  # "netlike"
    assert answer_rank(question("x", "planetary body"), passages) == 0
    assert answer_rank(question("?"), passages) is None


def test_quality_by_hand():
    a, b, c = (Passage(i, f"T{i}", f"word{i}") for i in "abc")
    questions = [
        question("worda", gold=("a", "c")), question("wordc"), question("yes", gold=("b",)),
        question("wordb"),
    ]  # fmt: skip
    found = [[a, b, c], [a, b, c], [a, b, c], SearchFailure("timeout", "")]
    quality = measure(questions, found)
    assert quality.num_answerable == 3  # the one with yes is left out
    assert quality.has_answer == {1: 1 / 3, 3: 2 / 3, 5: 2 / 3, 10: 2 / 3}
    assert quality.num_with_gold == 2
    assert quality.gold_recall == {1: 0.25, 3: 1.0, 5: 1.0, 10: 1.0}
    with pytest.raises(ValueError, match="3 results for 4 questions"):
        measure(questions, found[:3])


def test_a_gold_page_is_found_with_any_of_its_passages():
    by_title = Question("u", "d", "q?", ("x",), gold_titles=('"Mars"', "Dune"))
    mars, moon = (
        [Passage(i, title, "") for i in ids] for title, ids in (("Mars", "ab"), ("Moon", "c"))
    )
    dune = Passage("d", '"Dune"', "")
    found = [[mars[0], *moon, mars[1], dune], [*mars, *moon]]
    quality = measure([by_title] * 2, found)
    assert quality.gold_recall == {1: 0.5, 3: 0.5, 5: 0.75, 10: 0.75}
    assert quality.num_with_gold == 2


def test_real_gold_recall_is_about_the_questions_whose_gold_is_known_whole():
    def _measured(name):
        corpus = {}
        for line in lines(f"qa/{name}_corpus.jsonl"):
            corpus[line["id"]] = Passage(line["id"], *line["contents"].split("\n", 1))
        rows = lines(f"qa/{name}.jsonl")
        questions = [parse(line, dataset=name, split="test") for line in rows]
        first_of_each_page = []
        for line in rows:
            ids = line["metadata"].get("gold_title_passage_ids")
            ids = line["metadata"]["gold_passage_ids"] if ids is None else ids
            pages = {corpus[i].title: corpus[i] for i in reversed(ids)}
            first_of_each_page.append(list(pages.values()))
        return measure(questions, first_of_each_page)

    # by title: a passage of every page is all that can be asked for; 166 are not known whole
    musique = _measured("musique")
    assert musique.num_with_gold == 834 and musique.gold_recall[10] == 1.0
    # by passage: 234 are not known whole, 220 of which list some passages
    two = _measured("2wikimultihopqa")
    assert two.num_with_gold == 766 and two.gold_recall[10] == 1.0
    assert two.num_answerable > 766  # they count in has-answer


def test_the_table_says_how_many_questions_gold_recall_is_about():
    quality = measure([question("a", gold=("a",)), question("b")], [[], []])
    none = measure([question("b")], [[]])
    entry = {"questions": 2, "passages": 9}
    record = {"sets": {"x": entry | {"MiniLM": asdict(quality), "BM25": asdict(none)}}}
    table = retrieval_quality.markdown(record).splitlines()
    assert "gold recall@1/3/5/10 (questions)" in table[0]
    assert "| 0.00 / 0.00 / 0.00 / 0.00 (1) |" in table[2] and table[3].endswith("| - |")


def test_real_has_answer_rates_are_near_those_of_another_bm25():
    rows = [parse(line, dataset="bamboogle", split="test") for line in lines("qa/bamboogle.jsonl")]
    passages = []
    for line in lines("qa/bamboogle_corpus.jsonl"):
        title, _, text = line["contents"].partition("\n")
        passages.append(Passage(line["id"], title, text))
    found = Bm25Retriever(passages, Bm25Config()).search_now([q.text for q in rows], 10)
    # 0.23 by the data's README, with another tokenizer
    assert measure(rows, found).has_answer[5] == pytest.approx(0.23, abs=0.03)
