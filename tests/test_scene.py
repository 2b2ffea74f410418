"""What a config's questions and corpus become: the toy world, or files."""

import json

import pytest

from mas_jax.config import default_config
from mas_jax.config_rules import validate
from mas_jax.data.questions import write_jsonl
from mas_jax.learning import assembly, pipeline
from mas_jax.records import Question

QUESTIONS = [Question(f"d/test/{i}", "d", f"who is {i}?", (f"n{i}",)) for i in range(6)]


@pytest.fixture(scope="module")
def tokenizer():
    return assembly.load_tokenizer(assembly.checkpoint_directory(default_config()))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A config of six questions in three files, and a corpus of six passages."""
    monkeypatch.setenv("MAS_JAX_CACHE", str(tmp_path / "cache"))
    for name, questions in (("one", QUESTIONS[:2]), ("two", QUESTIONS[2:4]), ("d", QUESTIONS[4:])):
        write_jsonl(tmp_path / f"{name}.jsonl", questions)
    rows = [{"id": str(i), "contents": f"T{i}\nword{i} is the answer n{i}"} for i in range(6)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = default_config()
    config.data.train = (str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl"))
    config.data.test = (str(tmp_path / "d.jsonl"),)
    config.data.corpus = str(tmp_path / "corpus.jsonl")
    return config


def test_without_test_questions_the_toy_world_is_played(tokenizer):
    scene = assembly.make_scene(default_config(), tokenizer)
    assert scene.world is not None
    assert scene.questions == scene.world.questions
    assert scene.training.at(0, seed=0) in scene.world.questions["train"]
    assert set(scene.identity) == {"world", "encoder"}


def test_files_become_questions_a_mixture_and_a_searchable_corpus(files, tokenizer):
    files.data.weights = (3.0, 1.0)
    validate(files)
    scene = assembly.make_scene(files, tokenizer)
    assert scene.world is None
    assert [q.uid for q in scene.questions["test"]] == ["d/test/4", "d/test/5"]
    assert [q.dataset for q in scene.questions["train"]] == ["one", "one", "two", "two"]
    drawn = [scene.training.at(p, seed=0).dataset for p in range(1000)]
    assert (drawn.count("one"), drawn.count("two")) == (750, 250)
    [found] = scene.retriever.search_now(["word3"], 1)
    assert found[0].id == "3" and found[0].title == "T3"
    assert set(scene.identity) == {"questions", "corpus", "encoder"}


def test_another_question_or_passage_is_another_identity(files, tokenizer, tmp_path):
    first = assembly.make_scene(files, tokenizer).identity
    write_jsonl(tmp_path / "d.jsonl", QUESTIONS[3:])
    second = assembly.make_scene(files, tokenizer).identity
    assert second["questions"] != first["questions"] and second["corpus"] == first["corpus"]
    with (tmp_path / "corpus.jsonl").open("a") as corpus:
        corpus.write('{"id": "6", "contents": "T6\\nmore"}\n')
    assert assembly.make_scene(files, tokenizer).identity["corpus"] != first["corpus"]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"test": ()}, "need test files"), ({"server": "http://x"}, "a corpus or a server"),
     ({"corpus": ""}, "a corpus or a server"), ({"weights": (1.0,)}, "one for each of data.train"),
     ({"corpus": "", "server": "http://x", "dialect": "serch-r1"}, "did you mean 'search-r1'")],
)  # fmt: skip
def test_settings_that_contradict_are_one_clear_error(files, change, message):
    files.data.update(change)
    with pytest.raises(ValueError, match=message):
        validate(files)


@pytest.mark.parametrize("absent", ["train", "validation"])
def test_test_questions_are_never_trained_on(files, tokenizer, tmp_path, absent):
    files.data.validation = files.data.train
    files.data[absent] = ()
    assert (assembly.make_scene(files, tokenizer).training is None) == (absent == "train")
    with pytest.raises(ValueError, match=r"test questions are never trained on"):
        pipeline.prepare(files, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_script_of_the_toy_world_plays_no_real_questions(files):
    files.stages.teacher.sampler = "oracle"
    with pytest.raises(ValueError, match=r"sampler='oracle' knows the toy world only"):
        validate(files)


def test_an_absent_file_is_one_clear_error(files, tokenizer):
    files.data.test = ("nowhere/d.jsonl",)
    with pytest.raises(FileNotFoundError, match=r"nowhere/d\.jsonl does not exist"):
        assembly.make_scene(files, tokenizer)
