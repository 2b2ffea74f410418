"""What a config's questions and corpus become: the toy world, or files."""

import json
from pathlib import Path

import pytest
from http_stubs import thread_stub
from shared_data import shared

from mas_jax.config import default_config, real_slices
from mas_jax.config_rules import validate
from mas_jax.data import tfds_questions
from mas_jax.data.questions import check_disjoint, read_jsonl, write_jsonl
from mas_jax.learning import evaluate, pipeline, policy_files, scenes
from mas_jax.retrieval.dialects import IDENTITY_HEADER

LINES = [{"id": i, "question": f"who is {i}?", "golden_answers": [f"n{i}"]} for i in range(6)]


@pytest.fixture(scope="module")
def tokenizer():
    return policy_files.load_tokenizer(policy_files.checkpoint_directory(default_config()))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A config of six questions in three files, and a corpus of six passages."""
    monkeypatch.setenv("MAS_JAX_CACHE", str(tmp_path / "cache"))
    for name, lines in (("one", LINES[:2]), ("two", LINES[2:4]), ("d", LINES[4:])):
        write_jsonl(tmp_path / f"{name}.jsonl", lines)
    rows = [{"id": str(i), "contents": f"T{i}\nword{i} is the answer n{i}"} for i in range(6)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = default_config()
    config.data.train = (str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl"))
    config.data.test = (str(tmp_path / "d.jsonl"),)
    config.data.corpus = str(tmp_path / "corpus.jsonl")
    return config


def test_without_test_questions_the_toy_world_is_played(tokenizer):
    scene = scenes.make_scene(default_config(), tokenizer)
    assert scene.world is not None
    assert scene.questions == scene.world.questions
    assert scene.training.at(0, seed=0) in scene.world.questions["train"]
    assert set(scene.identity) == {"world", "encoder"}
    gold = scenes.gold_texts(scene)
    question = scene.questions["train"][0]
    assert all(name in gold for name in question.gold_passages)
    assert len(gold) < len(scene.world.passages) / 2


def test_the_toy_world_may_ask_questions_of_some_families_only(tokenizer):
    config = default_config()
    config.world.update(dict(families=("nq_like",), closed_share=1.0, train=300, held_out=20))
    scene = scenes.make_scene(config, tokenizer)
    for split, count in (("train", 300), ("validation", 20), ("test", 20)):
        assert {q.dataset for q in scene.questions[split]} == {"nq_like"}
        assert len(scene.questions[split]) == count
    assert scene.training.at(0, seed=0).dataset == "nq_like"
    config.world.families = ("nq",)
    with pytest.raises(ValueError, match=r"world\.families=.*\['nq'\] are none of"):
        scenes.make_scene(config, tokenizer)


def test_questions_without_gold_passages_have_no_rewards_of_turns(files, tokenizer):
    with pytest.raises(ValueError, match=r"training questions name 0, in a corpus.*data\.corpus"):
        scenes.gold_texts(scenes.make_scene(files, tokenizer))


def test_files_become_questions_a_mixture_and_a_searchable_corpus(files, tokenizer):
    files.data.weights = (3.0, 1.0)
    validate(files)
    scene = scenes.make_scene(files, tokenizer)
    assert scene.world is None
    assert [q.uid for q in scene.questions["test"]] == ["d/test/4", "d/test/5"]
    assert [q.dataset for q in scene.questions["train"]] == ["one", "one", "two", "two"]
    drawn = [scene.training.at(p, seed=0).dataset for p in range(1000)]
    assert (drawn.count("one"), drawn.count("two")) == (750, 250)
    [found] = scene.retriever.search_now(["word3"], 1)
    assert found[0].id == "3" and found[0].title == "T3"
    assert set(scene.identity) == {"questions", "corpus", "encoder"}


def test_another_question_or_passage_is_another_identity(files, tokenizer, tmp_path):
    first = scenes.make_scene(files, tokenizer).identity
    write_jsonl(tmp_path / "d.jsonl", LINES[3:])
    second = scenes.make_scene(files, tokenizer).identity
    assert second["questions"] != first["questions"] and second["corpus"] == first["corpus"]
    with (tmp_path / "corpus.jsonl").open("a") as corpus:
        corpus.write('{"id": "6", "contents": "T6\\nmore"}\n')
    assert scenes.make_scene(files, tokenizer).identity["corpus"] != first["corpus"]


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


# --- what searches --------------------------------------------------------------------------------


def test_a_corpus_is_searched_by_its_words_or_on_devices(files, tokenizer):
    names = {}
    for backend in ("bm25", "device", "exact"):
        files.retriever.backend = backend
        validate(files)
        scene = scenes.make_scene(files, tokenizer)
        [found] = scene.retriever.search_now(["word3"], 1)
        assert found[0].id == "3"
        names[backend] = dict(scene.identity)
    assert set(names["bm25"]) == {"questions", "corpus", "bm25"}
    assert names["bm25"]["bm25"].startswith("bm25s-")
    assert names["device"] == names["exact"]  # the backend stands beside them in records


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"retriever.backend": "divice"}, "did you mean 'device'"),
     ({"retriever.backend": "bm25", "data.index": "i"}, r"data\.index='i'.*without vectors"),
     ({"retriever.backend": "bm25", "encoder.directory": "package:minilm"}, "'package:minilm'"),
     ({"retriever.backend": "exact", "data.server": "http://x", "data.corpus": ""},
      "as it was started to")],
)  # fmt: skip
def test_what_searches_nothing_is_one_clear_error(files, changes, message):
    files.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        validate(files)


def test_the_toy_world_has_no_words_of_a_corpus(files):
    config = default_config()
    config.retriever.backend = "bm25"
    with pytest.raises(ValueError, match=r"data\.corpus=''.*set data\.corpus"):
        validate(config)


def test_records_name_the_index_and_the_dialect_of_a_server(files, tokenizer):
    files.data.corpus = ""
    files.data.dialect = "m-ask"
    with thread_stub((200, {IDENTITY_HEADER: "one"}), (404, {})) as server:
        files.data.server = server.url
        validate(files)
        ours, foreign = (scenes.make_scene(files, tokenizer).identity for _ in range(2))
    assert ours["questions"] == foreign["questions"]
    assert {key: ours[key] for key in ours if key != "questions"} == {
        "server": server.url, "dialect": "m-ask", "index": "one",
    }  # fmt: skip
    assert foreign["index"] == ""


def test_a_server_that_is_not_there_ends_the_start(files, tokenizer, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    files.data.update(dict(corpus="", server="http://127.0.0.1:9"))
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:9 does not answer, attempt 5"):
        scenes.make_scene(files, tokenizer)


@pytest.mark.parametrize("corpus", ["", "c.jsonl"])
@pytest.mark.parametrize("url", ["http://user:hush@host", "http://host?token=hush"])
def test_a_servers_password_is_refused_before_anything_is_written(files, tmp_path, corpus, url):
    files.data.update(dict(corpus=corpus, server=url))
    for prepare in (pipeline.prepare, evaluate.prepare):
        with pytest.raises(ValueError, match=r"^data\.server holds") as error:
            prepare(files, tmp_path / "run")
        assert "hush" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("absent", ["train", "validation"])
def test_test_questions_are_never_trained_on(files, tokenizer, tmp_path, absent):
    files.data.validation = files.data.train
    files.data[absent] = ()
    assert (scenes.make_scene(files, tokenizer).training is None) == (absent == "train")
    with pytest.raises(ValueError, match=r"test questions are never trained on"):
        pipeline.prepare(files, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("split", "other"), [("validation", "train"), ("test", "train")])
def test_a_question_of_another_split_is_never_trained_on(files, tokenizer, tmp_path, split, other):
    write_jsonl(tmp_path / "v.jsonl", [{"id": 9, "question": "who?", "golden_answers": ["x"]}])
    files.data.validation = (str(tmp_path / "v.jsonl"),)
    same = {"id": 8, "question": "Who is 3", "golden_answers": ["x"]}
    write_jsonl(tmp_path / {"validation": "v.jsonl", "test": "d.jsonl"}[split], [same])
    message = (
        rf"1 questions of data\.{split} stand in data\.{other} with the same words.*'Who is 3'"
    )
    with pytest.raises(ValueError, match=message):
        pipeline.prepare(files, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert len(scenes.make_scene(files, tokenizer).questions[split]) == 1  # to evaluate on


def test_real_slices_train_validate_and_test_on_questions_of_their_own():
    config = default_config()
    real_slices(config, str(shared("qa")))
    questions = {
        split: [
            question
            for path in config.data[split]
            for question in read_jsonl(Path(path), dataset=Path(path).stem, split=split)
        ]
        for split in ("train", "validation", "test")
    }
    assert all(questions.values())
    check_disjoint(questions)


def test_directories_of_array_records_are_the_same_scene_as_their_files(files, tokenizer, tmp_path):
    from_files = scenes.make_scene(files, tokenizer)
    for name, lines in (("one", LINES[:2]), ("d", LINES[4:])):
        tfds_questions.write(tmp_path / f"{name}-records", name, {"any": lines})
    files.data.train = (str(tmp_path / "one-records"), files.data.train[1])
    files.data.test = (str(tmp_path / "d-records"),)
    validate(files)
    scene = scenes.make_scene(files, tokenizer)
    assert scene.questions == from_files.questions and scene.identity == from_files.identity
    assert scene.training.at(3, seed=0) == from_files.training.at(3, seed=0)


def test_another_directory_of_questions_is_one_clear_error(files, tmp_path):
    files.data.test = (str(tmp_path),)
    with pytest.raises(ValueError, match=r"without dataset_info\.json.*--format=tfds"):
        validate(files)


def test_the_script_of_the_toy_world_plays_no_real_questions(files):
    files.stages.teacher.sampler = "oracle"
    with pytest.raises(ValueError, match=r"sampler='oracle' knows the toy world only"):
        validate(files)


def test_an_absent_file_is_one_clear_error(files, tokenizer):
    files.data.test = ("nowhere/d.jsonl",)
    with pytest.raises(FileNotFoundError, match=r"nowhere/d\.jsonl does not exist"):
        scenes.make_scene(files, tokenizer)
