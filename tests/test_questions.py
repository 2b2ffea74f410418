"""Real questions: lines of JSONL, tensorflow-datasets, the order that training draws in."""

import dataclasses
import itertools
import json
from collections import Counter

import numpy as np
import pytest
from shared_data import lines, shared

from mas_jax.data import tfds_questions
from mas_jax.data.questions import (
    BLOCK,
    Mixture,
    check_disjoint,
    jsonl,
    of_step,
    parse,
    read,
    read_jsonl,
    rewritten,
    spread,
    write_jsonl,
)
from mas_jax.records import Question

LINE = {"id": "dev_7", "question": " who wrote dune ", "golden_answers": ["Frank Herbert"]}


def pool(count, name="q"):
    return tuple(Question(f"{name}{i}", name, f"{name} {i}?", (f"a{i}",)) for i in range(count))


POOL = pool(10)


def uids(step, *, count=4, host=0, num_hosts=1, seed=0, sources=(POOL,), weights=None):
    mixture = Mixture(sources, weights)
    found = of_step(mixture, seed=seed, step=step, count=count, host=host, num_hosts=num_hosts)
    return [question.uid for question in found]


# --- lines ----------------------------------------------------------------------------------------


def test_a_line_by_hand():
    metadata = {
        "hops": 2, "gold_passage_ids": ["3", 8],
        "question_decomposition": [{"question": "who?", "answer": "x"}, {"question": "when?"}],
    }  # fmt: skip
    line = LINE | {"golden_answers": ["Frank Herbert", " F. Herbert ", "", "Frank Herbert"]}
    assert parse(line | {"metadata": metadata}, dataset="nq", split="dev") == Question(
        uid="nq/dev/dev_7", dataset="nq", text="who wrote dune",
        golden_answers=("Frank Herbert", "F. Herbert"), hops=2,
        decomposition=("who?", "when?"), gold_passages=("3", "8"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("metadata", "passages", "titles"),
    [
        ({"gold_passage_ids": ["3"]}, ("3",), ()),
        ({"gold_passage_ids": ["3"], "gold_complete": True}, ("3",), ()),
        ({"gold_passage_ids": ["3"], "gold_complete": False}, (), ()),
        ({"gold_title_passage_ids": ["1", "2", "9"]}, (), ("A", "B")),
        ({"gold_title_passage_ids": ["1"], "gold_titles_complete": False}, (), ()),
    ],
)
def test_gold_is_passages_or_pages_and_nothing_if_it_is_not_known_whole(metadata, passages, titles):
    steps = [{"question": f"{i}?", "title": title} for i, title in enumerate("ABA")]
    line = LINE | {"metadata": {"question_decomposition": steps} | metadata}
    question = parse(line, dataset="nq", split="dev")
    assert (question.gold_passages, question.gold_titles) == (passages, titles)


@pytest.mark.parametrize("answers", ["Frank Herbert", ["Frank Herbert"]])
def test_a_lone_answer_may_be_a_string(answers):
    line = LINE | {"golden_answers": answers}
    assert parse(line, dataset="nq", split="dev").golden_answers == ("Frank Herbert",)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"id": None}, "'id'"), ({"question": 3}, "'question'"), ({"golden_answers": {}}, "answers"),
     ({"golden_answers": [1]}, "wanted strings"), ({"golden_answers": [" "]}, "is empty"),
     ({"question": " "}, "'question' is empty")],
)  # fmt: skip
def test_a_bad_line_is_one_error_that_names_file_line_and_field(tmp_path, change, message):
    path = tmp_path / "dev.jsonl"
    path.write_text(json.dumps(LINE) + "\n\n" + json.dumps(LINE | {"id": "b"} | change) + "\n")
    with pytest.raises(ValueError, match=rf"dev\.jsonl:3: not a question .*{message}"):
        read_jsonl(path, dataset="nq", split="dev")


def test_other_bad_files(tmp_path):
    path = tmp_path / "dev.jsonl"
    with pytest.raises(FileNotFoundError, match="prepare_data"):
        read_jsonl(path, dataset="nq", split="dev")
    for text, message in (
        (f"{json.dumps(LINE)}\n{json.dumps(LINE)}\n", ":2: a second question of id"),
        ("", "holds no question"), ("[1]\n", ":1: not a question"), ("{\n", ":1: not a question"),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_jsonl(path, dataset="nq", split="dev")


def test_only_line_feeds_end_lines(tmp_path):
    path = tmp_path / "dev.jsonl"
    line = {"question": "a\u2028b\x85c", "golden_answers": ["d\u2029"]}
    write_jsonl(path, [{"id": "1"} | line, {"id": "2"} | line])
    assert [q.text for q in read_jsonl(path, dataset="nq", split="dev")] == [line["question"]] * 2


@pytest.mark.parametrize(
    "name",
    ["nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"],
)
def test_real_sets_are_read_whole_and_rewritten_with_all_that_they_hold(tmp_path, name):
    source = jsonl(shared(f"qa/{name}.jsonl"), dataset=name, split="test")
    questions, rows = read(source), lines(f"qa/{name}.jsonl")
    assert len(questions) == len(rows)
    assert {q.dataset for q in questions} == {name}
    again = tmp_path / f"{name}.jsonl"
    write_jsonl(again, rewritten(source, questions))
    assert read_jsonl(again, dataset=name, split="test") == questions
    # 2Wiki's evidences and types, HotpotQA's sources: whatever is there stays
    written = [json.loads(text) for text in again.read_text().split("\n")[:-1]]
    assert [line["metadata"] for line in written] == [row["metadata"] for row in rows]
    if name == "musique":
        assert {q.hops for q in questions} == {2, 3, 4}
        assert all(len(q.decomposition) == q.hops for q in questions)


def test_a_question_is_rewritten_with_all_that_its_line_holds(tmp_path):
    known = {"type": "comparison", "evidences": [["a", "b", "c"]], "hops": 2}
    rows = [LINE | {"id": i, "metadata": known, "source": "x"} for i in range(3)]
    rows[0] |= {"golden_answers": " F. Herbert "}
    write_jsonl(tmp_path / "dev.jsonl", rows)
    source = jsonl(tmp_path / "dev.jsonl", dataset="nq", split="dev")
    first, _, last = read(source)
    kept = [dataclasses.replace(last, text="who wrote dune?"), first]
    assert list(rewritten(source, kept)) == [
        rows[0] | {"question": "who wrote dune", "golden_answers": ["F. Herbert"]},
        rows[2] | {"question": "who wrote dune?"},
    ]


def test_questions_of_two_splits_in_the_same_words_are_one_clear_error():
    one, other = pool(3, "a"), pool(2, "b")
    check_disjoint({"train": one, "validation": other, "test": ()})
    again = dataclasses.replace(one[1], uid="b9", text="A... 1")
    with pytest.raises(ValueError, match=r"1 questions of data\.test stand in data\.train.*'b9'"):
        check_disjoint({"train": one, "validation": other, "test": (again,)})


# --- tensorflow-datasets --------------------------------------------------------------------------


def test_a_set_of_tensorflow_datasets_gives_the_same_questions_in_the_same_order(tmp_path):
    rows = [LINE | {"id": i} for i in range(30)]
    rows += [{"id": "é", "question": "naïve — “x”?", "golden_answers": ["Ü", "x\u2028y"]}]
    questions = tuple(parse(row, dataset="nq", split="dev") for row in rows)
    directory = tmp_path / "set"
    tfds_questions.write(directory, "nq", {"dev": rows, "train": rows[:3]})
    assert list(tmp_path.iterdir()) == [directory]
    found = tfds_questions.read(directory, split="dev")
    assert tuple(found) == questions
    assert found[-1] == questions[-1] and list(found[2:5]) == list(questions[2:5])
    assert len(tfds_questions.read(directory, split="train")) == 3
    with pytest.raises(ValueError, match=r"\['dev', 'train'\], not 'test'"):
        tfds_questions.read(directory, split="test")
    with pytest.raises(FileExistsError, match="exists"):
        tfds_questions.write(directory, "nq", {"dev": rows})
    with pytest.raises(FileNotFoundError, match="holds no set"):
        tfds_questions.read(tmp_path, split="dev")
    mixture = Mixture((found,))
    assert {mixture.at(p, seed=0).uid for p in range(31)} == {q.uid for q in questions}


def test_the_only_split_of_a_set_serves_as_any_split(tmp_path):
    tfds_questions.write(tmp_path / "a", "nq", {"panel": [LINE]})
    assert tfds_questions.read(tmp_path / "a", split="test")[0].uid == "nq/test/dev_7"


def test_reading_a_set_of_tensorflow_datasets_loads_no_tensorflow(tmp_path):
    import subprocess
    import sys

    directory = tmp_path / "set"
    tfds_questions.write(directory, "nq", {"dev": [LINE | {"id": i} for i in range(3)]})
    code = (
        "import sys; from pathlib import Path; from mas_jax.data import tfds_questions as t\n"
        f"found = t.read(Path({str(directory)!r}), split='dev')\n"
        "print(len(found), found[1].text, 'tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "who", "wrote", "dune", "False"]


def test_an_unknown_stock_set_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'hotpot_qa'.*natural_questions_open.*trivia_qa"):
        tfds_questions.read_stock("hotpot_qa", split="train")


# --- the order of training ----------------------------------------------------------------------


def test_every_epoch_is_all_questions_once_in_an_order_of_its_own():
    drawn = [uid for step in range(8) for uid in uids(step, count=5)]  # 40: four epochs of 10
    epochs = [drawn[start : start + 10] for start in range(0, 40, 10)]
    for epoch in epochs:
        assert Counter(epoch) == Counter(q.uid for q in POOL)
    assert len(set(map(tuple, epochs))) == 4


def test_a_step_needs_no_steps_before_it_and_its_questions_are_its_own():
    alone = uids(7)
    assert [uids(step) for step in range(9)][7] == alone
    assert uids(7, seed=1) != alone


def test_a_step_in_which_an_epoch_ends_asks_no_question_twice():
    mixture, replaced = Mixture((POOL,)), 0
    for seed, step in itertools.product(range(5), range(10)):
        drawn = uids(step, count=7, seed=seed)
        plain = [mixture.at(7 * step + place, seed=seed).uid for place in range(7)]
        assert len(set(drawn)) == 7
        kept = list(dict.fromkeys(plain))
        assert drawn[: len(kept)] == kept
        replaced += 7 - len(kept)
    assert replaced > 20  # of 350: what is tested happens


def test_a_step_of_more_questions_than_there_are_is_an_error():
    assert sorted(uids(0, count=10)) == sorted(q.uid for q in POOL)
    with pytest.raises(ValueError, match=r"questions=25 of a step, and training draws from 10"):
        uids(0, count=25)


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_hosts_share_a_steps_questions_without_overlap(num_hosts):
    whole = uids(3, count=8)
    shares = [uids(3, count=8, host=host, num_hosts=num_hosts) for host in range(num_hosts)]
    assert [whole[host::num_hosts] for host in range(num_hosts)] == shares


def test_questions_that_hosts_cannot_share_are_an_error():
    with pytest.raises(ValueError, match=r"train\.questions=6 cannot be shared by 4 hosts"):
        uids(0, count=6, num_hosts=4)


def test_weights_share_every_block_of_positions_exactly():
    sources = (pool(7, "a"), pool(1000, "b"), pool(30, "c"))
    mixture = Mixture(sources, (1.0, 2.0, 0.0))
    for block in range(3):
        span = range(block * BLOCK, (block + 1) * BLOCK)
        drawn = Counter(mixture.at(p, seed=4).dataset for p in span)
        assert drawn == {"a": 333, "b": 667}  # 1000/3 and 2000/3 by largest remainder
    # each source runs through its own epochs
    first = [mixture.at(p, seed=4) for p in range(3 * BLOCK)]
    ofs_a = [q.uid for q in first if q.dataset == "a"]
    for start in range(0, 994, 7):
        assert len(set(ofs_a[start : start + 7])) == 7
    assert len({q.uid for q in first if q.dataset == "b"}) == 1000
    assert [q.uid for q in first] != [mixture.at(p, seed=5).uid for p in range(3 * BLOCK)]


def test_sources_without_weights_are_shuffled_together():
    mixture = Mixture((pool(3, "a"), pool(17, "b")))
    assert len(mixture) == 20
    drawn = Counter(mixture.at(p, seed=0).uid for p in range(40))
    assert set(drawn.values()) == {2} and len(drawn) == 20


@pytest.mark.parametrize(
    ("sources", "weights", "message"),
    [((), None, "every one needs some"), ((POOL, ()), None, r"\[10, 0\] questions"),
     ((POOL,), (1.0, 1.0), "for 1 sources"), ((POOL, POOL), (1.0, -1.0), ">= 0"),
     ((POOL,), (0.0,), "not all 0"), ((POOL,), (float("nan"),), "not all 0")],
)  # fmt: skip
def test_a_mixture_that_cannot_be_drawn_from_is_an_error(sources, weights, message):
    with pytest.raises(ValueError, match=message):
        Mixture(sources, weights)


def test_the_order_of_one_source_is_that_of_a_permutation_an_epoch():
    order = np.random.default_rng((3, 1)).permutation(10)  # seed 3, epoch 1
    assert [Mixture((POOL,)).at(10 + i, seed=3).uid for i in range(10)] == [
        f"q{index}" for index in order
    ]


def test_questions_are_spread_over_sets_as_evenly_as_they_allow():
    def _count(sizes, count):
        questions = tuple(
            Question(f"{name}{i}", name, "q", ("a",)) for name, n in sizes.items() for i in range(n)
        )
        chosen = spread(questions, count)
        kept = set(chosen)
        assert [q for q in questions if q in kept] == list(chosen)
        return [sum(q.dataset == name for q in chosen) for name in sizes]

    panel = dict(
        nq=813, triviaqa=813, popqa=813, hotpotqa=812, musique=812, wiki=812, bamboogle=125
    )
    assert _count(panel, 5000) == list(panel.values())
    assert _count(dict(a=5, b=5), 4) == [2, 2]
    assert sorted(_count(dict(a=5, b=5), 5)) == [2, 3]
    assert _count(dict(a=1, b=9, c=3), 9) == [1, 5, 3]
    assert _count(dict(a=5, b=5), 99) == [5, 5]
    assert _count(dict(a=5, b=5, c=5), 1) == [1, 1, 1]
