"""Files from the hub, over a loopback server that speaks its routes, in processes of their own.

The hub's client reads its environment when it is imported, so each case is a new process.
"""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import COMMIT, jsonl, serve

from mas_jax.data import prepare
from mas_jax.data.questions import read_jsonl

FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
ROWS = [
    {"id": f"{i}", "question": f"who is {i}", "golden_answers": [f"n{i}"], "metadata": {}}
    for i in range(3)
]
READ = (
    "from mas_jax.data import hub\n"
    "for q in hub.read_flashrag('nq', 'test'): print(q.uid, q.text, q.golden_answers[0])"
)


def run(code, endpoint, home, **environment):
    """The finished process of a program that talks to the endpoint."""
    variables = {
        "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={**inherited, **variables, **environment},
    )  # fmt: skip


def test_a_set_of_flashrag_is_fetched_once_and_read_offline_after(tmp_path):
    with serve({f"{FLASHRAG}/nq/test.jsonl": jsonl(ROWS)}) as (endpoint, seen):
        first = run(READ, endpoint, tmp_path)
        assert first.stdout.splitlines() == [f"nq/test/{i} who is {i} n{i}" for i in range(3)]
        asked = len(seen)
        assert any(command == "GET" for command, _, _ in seen)
        offline = run(READ, endpoint, tmp_path, HF_HUB_OFFLINE="1")
        assert offline.stdout == first.stdout and len(seen) == asked


def test_the_token_comes_from_the_environment_and_reaches_no_error(tmp_path):
    files = {f"{FLASHRAG}/nq/test.jsonl": jsonl(ROWS)}
    with serve(files, token="hf_secret") as (endpoint, _):
        assert run(READ, endpoint, tmp_path / "a", HF_TOKEN="hf_secret").returncode == 0
        refused = run(READ, endpoint, tmp_path / "b", HF_TOKEN="hf_wrong")
        assert refused.returncode == 1
        last = refused.stderr.strip().splitlines()[-1]
        assert last.startswith("FileNotFoundError: nq/test.jsonl of dataset RUC-NLPIR")
        assert "HF_TOKEN" in last and endpoint in last
        assert "hf_wrong" not in refused.stderr


def test_a_missing_file_is_one_clear_error(tmp_path):
    with serve({}) as (endpoint, _):
        missing = run(READ, endpoint, tmp_path)
    assert "nq/test.jsonl of dataset" in missing.stderr.splitlines()[-1]


@pytest.mark.slow  # the hub's client tries for a while
def test_a_dead_endpoint_is_one_clear_error(tmp_path):
    dead = run(READ, "http://127.0.0.1:9", tmp_path)
    assert "could not be had from http://127.0.0.1:9" in dead.stderr.strip().splitlines()[-1]


def test_a_revision_is_asked_for(tmp_path):
    code = READ.replace("'test')", f"'test', revision='{COMMIT}')")
    with serve({f"{FLASHRAG}/nq/test.jsonl": jsonl(ROWS)}) as (endpoint, seen):
        assert run(code, endpoint, tmp_path).returncode == 0
        assert all(f"/resolve/{COMMIT}/" in path for _, path, _ in seen)
        assert run(code.replace(COMMIT, "v9"), endpoint, tmp_path).returncode == 1


def test_search_r1s_mix_is_read_from_its_parquet_file(tmp_path):
    rows = [
        {"id": f"train_{i}", "question": f"who {i}?", "golden_answers": [f"n{i}", "m"],
         "data_source": ("nq", "hotpotqa")[i % 2], "prompt": [{"role": "user", "content": "x"}]}
        for i in range(5)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    content = (tmp_path / "train.parquet").read_bytes()
    code = (
        "from mas_jax.data import hub\n"
        "for q in hub.read_search_r1_mix(): print(q.uid, q.dataset, *q.golden_answers)"
    )
    with serve({"PeterJinGo/nq_hotpotqa_train/train.parquet": content}) as (endpoint, _):
        done = run(code, endpoint, tmp_path)
    assert done.stdout.splitlines()[:2] == [
        "nq/train/train_0 nq n0 m", "hotpotqa/train/train_1 hotpotqa n1 m"
    ]  # fmt: skip
    assert len(done.stdout.splitlines()) == 5


# --- the training mix and the panel ---------------------------------------------------------------


def sets(name, split):
    """Enough questions of a set for the panel; Bamboogle has its 125."""
    count = 125 if name == "bamboogle" else 900
    rows = [
        {"id": f"{split}_{i}", "question": f"{name} {split} {i}", "golden_answers": ["x"]}
        for i in range(count)
    ]
    if (name, split) == ("nq", "train"):
        rows[7]["question"] = "MuSiQue dev 3?"  # stands in the panel, in other signs
        rows[8]["question"] = "already asked?"
    return rows


def test_the_panel_has_5000_questions_and_the_manifest_their_digests(tmp_path):
    files = {
        f"{FLASHRAG}/{name}/{split}.jsonl": jsonl(sets(name, split))
        for name, split in (*prepare.PANEL.items(), *prepare.TRAINING.items())
    }
    script = os.path.join(os.path.dirname(__file__), "..", "launch", "prepare_data.py")
    code = f"import runpy, sys; sys.argv = ['p', '--out={tmp_path}/qa']; " + (
        f"runpy.run_path({script!r}, run_name='__main__')"
    )
    with serve(files) as (endpoint, _):
        done = run(code, endpoint, tmp_path / "home")
    assert "panel/bamboogle.jsonl: 125 questions" in done.stderr, done.stderr
    manifest = prepare.verify(tmp_path / "qa")
    counts = {name: entry["questions"] for name, entry in manifest["files"].items()}
    panel = {name: n for name, n in counts.items() if name.startswith("panel/")}
    assert sum(panel.values()) == 5000
    assert sorted(panel.values()) == [125, 812, 812, 812, 813, 813, 813]
    assert any("development split serves as the test" in fact for fact in manifest["facts"])
    training = read_jsonl(tmp_path / "qa/train/nq.jsonl", dataset="nq", split="train")
    chosen = read_jsonl(tmp_path / "qa/panel/musique.jsonl", dataset="musique", split="test")
    in_panel = "musique dev 3" in {q.text for q in chosen}
    assert len(training) == 900 - in_panel
    assert manifest["removed_from_training_because_in_the_panel"] == {
        "nq": int(in_panel), "hotpotqa": 0
    }  # fmt: skip
    assert all(q.text.endswith("?") and not q.text.endswith("??") for q in training)


def local(tmp_path, change=lambda name, split, rows: rows):
    """A fetch function over made-up sets."""
    from mas_jax.data.questions import parse

    def fetch(name, split):
        rows = change(name, split, sets(name, split))
        return tuple(parse(row, dataset=name, split=split) for row in rows)

    return fetch


def test_the_choice_depends_on_ids_alone(tmp_path):
    prepare.prepare(local(tmp_path), tmp_path / "a")
    prepare.prepare(local(tmp_path, lambda n, s, rows: rows[::-1]), tmp_path / "b")
    for name in prepare.PANEL:
        first, second = (
            {
                q.uid
                for q in read_jsonl(tmp_path / x / f"panel/{name}.jsonl", dataset=name, split="t")
            }
            for x in "ab"
        )
        assert first == second


def test_a_changed_file_is_noticed_and_nothing_is_overwritten(tmp_path):
    prepare.prepare(local(tmp_path), tmp_path / "a")
    with pytest.raises(FileExistsError, match="exists"):
        prepare.prepare(local(tmp_path), tmp_path / "a")
    (tmp_path / "a/panel/nq.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"\['panel/nq\.jsonl'\] differ from manifest\.json"):
        prepare.verify(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="manifest"):
        prepare.verify(tmp_path / "b")


def test_a_set_that_is_too_small_is_an_error_and_leaves_nothing(tmp_path):
    few = local(tmp_path, lambda name, split, rows: rows[:100])
    with pytest.raises(ValueError, match="nq has 100 questions, wanted 813"):
        prepare.prepare(few, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_corpora_are_joined_under_ids_that_do_not_meet(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("one", "two"):
        row = {
            "id": "0", "question": f"{name}?", "golden_answers": ["x"],
            "metadata": {"gold_passage_ids": ["1"], "hops": 2},
        }  # fmt: skip
        (data / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        passages = [{"id": str(i), "contents": f"T{i}\n{name} é {i}"} for i in range(2)]
        (data / f"{name}_corpus.jsonl").write_bytes(jsonl(passages))
    prepare.join(data, ["one", "two"], tmp_path / "out")
    lines = [json.loads(x) for x in (tmp_path / "out/corpus.jsonl").read_text().splitlines()]
    assert [(x["id"], x["contents"]) for x in lines] == [
        ("one/0", "T0\none é 0"), ("one/1", "T1\none é 1"),
        ("two/0", "T0\ntwo é 0"), ("two/1", "T1\ntwo é 1"),
    ]  # fmt: skip
    [question] = read_jsonl(tmp_path / "out/two.jsonl", dataset="two", split="test")
    assert question.gold_passages == ("two/1",) and question.hops == 2
