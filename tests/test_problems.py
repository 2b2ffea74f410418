"""Mathematical problems: their files, what is known of them, and writing them again."""

from pathlib import Path

import pytest
from shared_data import shared

from mas_jax.data import problems
from mas_jax.data.questions import write_jsonl
from mas_jax.learning import scenes
from mas_jax.records import Problem

LINE = {
    "id": "a/1",
    "question": "What is 1 + 1?",
    "golden_answers": ["2"],
    "metadata": {"level": "Level 3", "subject": "Algebra"},
}


def test_a_line_says_what_is_known_of_a_problem():
    assert problems.parse(LINE, dataset="math", split="train") == Problem(
        uid="math/train/a/1", dataset="math", text="What is 1 + 1?", golden_answers=("2",),
        level=3, subject="Algebra",
    )  # fmt: skip
    olympiad = LINE | {"metadata": {"error": "1e-1", "is_multiple_answer": True, "subfield": "x"}}
    found = problems.parse(olympiad, dataset="olympiadbench", split="test")
    assert (found.tolerance, found.is_multiple, found.subject, found.level) == (0.1, True, "x", 0)
    for level, expected in [(2, 2), ("Level ?", 0), (None, 0)]:
        line = LINE | {"metadata": {"level": level}}
        assert problems.parse(line, dataset="math", split="train").level == expected


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "math.jsonl"
    write_jsonl(path, [LINE, LINE | {"id": "a/2", "metadata": {"error": "about 1"}}])
    with pytest.raises(ValueError, match=r"math\.jsonl:2: not a question .*about 1"):
        problems.read_jsonl(path, split="train")


@pytest.mark.parametrize(
    ("name", "dataset"),
    [
        ("math_train", "math"), ("math", "math"), ("math500", "math500"), ("gsm8k", "gsm8k"),
        ("gsm8k_train2000", "gsm8k"), ("minerva_math", "minerva_math"), ("nq", None),
        ("aftermath", None),
    ],
)  # fmt: skip
def test_a_file_is_named_for_its_set(tmp_path, name, dataset):
    path = tmp_path / f"{name}.jsonl"
    assert problems.dataset_of(path) == dataset
    if dataset is None:
        with pytest.raises(ValueError, match="named for no set of problems"):
            problems.read_jsonl(path, split="test")


def test_what_was_written_is_read_again(tmp_path):
    first = problems.parse(LINE, dataset="math", split="train")
    second = Problem(
        "olympiadbench/test/7", "olympiadbench", "?", ("1,2",), level=0, subject="x",
        tolerance=0.1, is_multiple=True,
    )  # fmt: skip
    for problem, split in ((first, "train"), (second, "test")):
        path = tmp_path / "deep" / f"{problem.dataset}.jsonl"
        problems.write_jsonl(path, [problems.as_line(problem, {"actor_right": 3})])
        assert problems.read_jsonl(path, split=split) == (problem,)
        assert '"actor_right": 3' in path.read_text()


def test_a_config_reads_problems_where_it_reads_questions(tmp_path):
    path = tmp_path / "math_train.jsonl"
    write_jsonl(path, [LINE])
    (found,) = scenes._read_questions(path, "train")
    assert isinstance(found, Problem) and found.level == 3


SIZES = {
    "aime24": 30, "amc23": 40, "math500": 500, "minerva_math": 272, "olympiadbench": 675,
    "gsm8k": 1319, "math_train": 7498, "gsm8k_train2000": 2000,
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_the_published_sets_are_read_whole(name):
    found = problems.read_jsonl(shared(f"math/{name}.jsonl"), split="any")
    assert len(found) == SIZES[name]
    assert {problem.dataset for problem in found} == {name.split("_train")[0]}


def test_both_forms_of_amc_are_sets_of_their_own():
    assert [problems.dataset_of(Path(f"amc{n}.jsonl")) for n in (23, 83, 12)] == [
        "amc23", "amc83", None,
    ]  # fmt: skip


def test_levels_and_tolerances_of_the_published_sets_are_known():
    training = problems.read_jsonl(shared("math/math_train.jsonl"), split="train")
    # 1592 + 1690 + 2302
    assert sum(problem.level in (3, 4, 5) for problem in training) == 5584
    assert {problem.level for problem in training} == {0, 1, 2, 3, 4, 5}
    olympiad = problems.read_jsonl(shared("math/olympiadbench.jsonl"), split="test")
    assert [problem.tolerance for problem in olympiad if problem.tolerance] == [0.1]
    assert sum(problem.is_multiple for problem in olympiad) == 94
