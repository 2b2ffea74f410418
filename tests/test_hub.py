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
from hub_server import COMMIT, serve
from hub_server import jsonl as jsonl_bytes

from mas_jax.data import prepare, tfds_questions
from mas_jax.data.questions import check_disjoint, jsonl, read_jsonl, words

FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
ROWS = [
    {"id": f"{i}", "question": f"who is {i}", "golden_answers": [f"n{i}"], "metadata": {}}
    for i in range(3)
]
READ = (
    "from mas_jax.data import hub, questions\n"
    "source = hub.flashrag('nq', 'test')\n"
    "for q in questions.read(source): print(q.uid, q.text, q.golden_answers[0])"
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
    with serve({f"{FLASHRAG}/nq/test.jsonl": jsonl_bytes(ROWS)}) as (endpoint, seen):
        first = run(READ, endpoint, tmp_path)
        assert first.stdout.splitlines() == [f"nq/test/{i} who is {i} n{i}" for i in range(3)]
        asked = len(seen)
        assert any(command == "GET" for command, _, _ in seen)
        offline = run(READ, endpoint, tmp_path, HF_HUB_OFFLINE="1")
        assert offline.stdout == first.stdout and len(seen) == asked


def test_the_token_comes_from_the_environment_and_reaches_no_error(tmp_path):
    files = {f"{FLASHRAG}/nq/test.jsonl": jsonl_bytes(ROWS)}
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
    with serve({f"{FLASHRAG}/nq/test.jsonl": jsonl_bytes(ROWS)}) as (endpoint, seen):
        assert run(code, endpoint, tmp_path).returncode == 0
        assert all(f"/resolve/{COMMIT}/" in path for _, path, _ in seen)
        assert run(code.replace(COMMIT, "v9"), endpoint, tmp_path).returncode == 1


def test_search_r1s_mix_is_read_from_its_parquet_file(tmp_path):
    files = {"PeterJinGo/nq_hotpotqa_train/train.parquet": mix(tmp_path, 5)}
    code = (
        "from mas_jax.data import hub, questions\n"
        "for name in ('nq', 'hotpotqa'):\n"
        "    source = hub.search_r1_mix(name, 'train')\n"
        "    for q in questions.read(source): print(q.uid, q.dataset, *q.golden_answers)\n"
        "print(source.origin)"
    )
    with serve(files) as (endpoint, _):
        done = run(code, endpoint, tmp_path)
    assert done.stdout.splitlines() == [
        "nq/train/train_0 nq n0 m", "nq/train/train_2 nq n2 m", "nq/train/train_4 nq n4 m",
        "hotpotqa/train/train_1 hotpotqa n1 m", "hotpotqa/train/train_3 hotpotqa n3 m",
        str({"repository": "PeterJinGo/nq_hotpotqa_train", "revision": COMMIT,
             "file": "train.parquet"}),
    ], done.stderr  # fmt: skip


def test_a_row_of_another_set_in_search_r1s_mix_is_one_clear_error(tmp_path):
    files = {"PeterJinGo/nq_hotpotqa_train/train.parquet": mix(tmp_path, 3, ("nq", "musique"))}
    code = "from mas_jax.data import hub\nlist(hub.search_r1_mix('nq', 'train').lines())"
    with serve(files) as (endpoint, _):
        done = run(code, endpoint, tmp_path)
    assert "row 1: data_source 'musique' is not one of ('nq', 'hotpotqa')" in done.stderr


def mix(tmp_path, count, names=("nq", "hotpotqa")):
    """The bytes of a parquet file such as Search-R1's."""
    rows = [
        {"id": f"train_{i}", "question": f"who {i}?", "golden_answers": [f"n{i}", "m"],
         "data_source": names[i % 2], "prompt": [{"role": "user", "content": "x"}]}
        for i in range(count)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mix.parquet")
    return (tmp_path / "mix.parquet").read_bytes()


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


def on_the_hub():
    """Every file that preparing asks FlashRAG's collection for."""
    return {
        f"{FLASHRAG}/{name}/{split}.jsonl": jsonl_bytes(sets(name, split))
        for name, split in (*prepare.PANEL.items(), *prepare.TRAINING.items())
    }


def run_script(endpoint, home, *arguments):
    """The finished process of launch/prepare_data.py."""
    script = os.path.join(os.path.dirname(__file__), "..", "launch", "prepare_data.py")
    code = f"import runpy, sys; sys.argv = {['p', *arguments]}; " + (
        f"runpy.run_path({script!r}, run_name='__main__')"
    )
    return run(code, endpoint, home)


def test_the_panel_has_5000_questions_and_the_manifest_their_digests(tmp_path):
    with serve(on_the_hub()) as (endpoint, seen):
        done = run_script(endpoint, tmp_path / "home", f"--out={tmp_path}/qa")
        assert "panel/bamboogle.jsonl: 125 questions" in done.stderr, done.stderr
        # what is there is verified, and nothing asked for again
        asked = len(seen)
        again = run_script(endpoint, tmp_path / "home", f"--out={tmp_path}/qa")
        assert "qa exists: every file is as its manifest says" in again.stderr
        assert again.returncode == 0 and len(seen) == asked
        other = run_script(endpoint, tmp_path / "home", f"--out={tmp_path}/qa", "--validation=9")
        assert "was prepared with {'validation': 0}, not {'validation': 9}" in other.stderr
        assert other.returncode == 1
    manifest = prepare.verify(tmp_path / "qa")
    counts = {name: entry["questions"] for name, entry in manifest["files"].items()}
    panel = {name: n for name, n in counts.items() if name.startswith("panel/")}
    assert sum(panel.values()) == 5000
    assert sorted(panel.values()) == [125, 812, 812, 812, 813, 813, 813]
    assert manifest["files"]["panel/musique.jsonl"]["origin"] == {
        "repository": FLASHRAG, "revision": COMMIT, "file": "musique/dev.jsonl"
    }  # fmt: skip
    assert any("development split serves as the test" in fact for fact in manifest["facts"])
    training = read_jsonl(tmp_path / "qa/train/nq.jsonl", dataset="nq", split="train")
    chosen = read_jsonl(tmp_path / "qa/panel/musique.jsonl", dataset="musique", split="test")
    in_panel = "musique dev 3" in {q.text for q in chosen}
    assert len(training) == 900 - in_panel
    assert manifest["removed_from_training_because_in_the_panel"] == {
        "nq": int(in_panel), "hotpotqa": 0
    }  # fmt: skip
    assert all(q.text.endswith("?") and not q.text.endswith("??") for q in training)
    (tmp_path / "qa/train/nq.jsonl").write_text("{}")
    changed = run_script(endpoint, tmp_path / "home", f"--out={tmp_path}/qa")
    assert "['train/nq.jsonl'] differ from manifest.json" in changed.stderr
    assert changed.returncode == 1


def test_the_same_as_array_records_with_search_r1s_mix(tmp_path):
    files = on_the_hub() | {"PeterJinGo/nq_hotpotqa_train/train.parquet": mix(tmp_path, 20)}
    arguments = (f"--out={tmp_path}/qa", "--format=tfds", "--mix=search-r1", "--validation=4")
    with serve(files) as (endpoint, _):
        done = run_script(endpoint, tmp_path / "home", *arguments)
        again = run_script(endpoint, tmp_path / "home", *arguments)
    assert "train/hotpotqa: 6 questions" in done.stderr, done.stderr
    assert "qa exists: every file is as its manifest says" in again.stderr
    manifest = prepare.verify(tmp_path / "qa")
    assert manifest["settings"]["mix"] == "search-r1"
    assert manifest["files"]["validation/nq"]["origin"]["file"] == "train.parquet"
    prepare.prepare(local(tmp_path), local(tmp_path), tmp_path / "b", prepare.Settings())
    panel = tfds_questions.read(tmp_path / "qa/panel/musique", split="dev")
    lines = read_jsonl(tmp_path / "b/panel/musique.jsonl", dataset="musique", split="dev")
    assert tuple(panel) == lines
    parts = {
        part: [
            q for name in ("nq", "hotpotqa")
            for q in tfds_questions.read(tmp_path / "qa" / part / name, split=part)
        ]
        for part in ("train", "validation")
    }  # fmt: skip
    assert [len(found) for found in parts.values()] == [12, 8]
    check_disjoint(parts)
    records = sorted((tmp_path / "qa/train/nq").glob("*.array_record*"))
    records[0].write_bytes(records[0].read_bytes() + b"x")
    with pytest.raises(ValueError, match=r"\['train/nq'\] differ"):
        prepare.verify(tmp_path / "qa")


def test_what_a_line_knows_is_kept_and_held_out_questions_are_not_trained_on(tmp_path):
    known = {"type": "comparison", "evidences": [["a", "b", "c"]], "gold_passage_ids": ["3"]}

    def _know(name, split, rows):
        return [row | {"metadata": known | {"n": i}, "more": i} for i, row in enumerate(rows)]

    fetch = local(tmp_path, _know)
    settings = prepare.Settings(validation=100)
    manifest = prepare.prepare(fetch, fetch, tmp_path / "a", settings)
    [path] = {entry["origin"]["file"] for entry in manifest["files"].values()
              if entry["questions"] == 125}  # fmt: skip
    assert path.endswith("bamboogle-test.jsonl")
    texts = {}
    for part in ("train", "validation"):
        rows = (tmp_path / "a" / part / "hotpotqa.jsonl").read_text().splitlines()
        for row in map(json.loads, rows):
            assert row["metadata"] == known | {"n": row["more"]}
        texts[part] = {words(json.loads(row)["question"]) for row in rows}
    assert (len(texts["train"]), len(texts["validation"])) == (800, 100)
    assert not texts["train"] & texts["validation"]


def local(tmp_path, change=lambda name, split, rows: rows):
    """A fetch function over files of made-up sets."""

    def fetch(name, split):
        path = tmp_path / f"{name}-{split}.jsonl"
        path.write_bytes(jsonl_bytes(change(name, split, sets(name, split))))
        return jsonl(path, dataset=name, split=split)

    return fetch


def test_the_choice_depends_on_ids_alone(tmp_path):
    turned = local(tmp_path, lambda n, s, rows: rows[::-1])
    prepare.prepare(local(tmp_path), local(tmp_path), tmp_path / "a", prepare.Settings())
    prepare.prepare(turned, turned, tmp_path / "b", prepare.Settings())
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
    fetch = local(tmp_path)
    prepare.prepare(fetch, fetch, tmp_path / "a", prepare.Settings())
    with pytest.raises(FileExistsError, match="exists"):
        prepare.prepare(fetch, fetch, tmp_path / "a", prepare.Settings())
    (tmp_path / "a/panel/nq.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"\['panel/nq\.jsonl'\] differ from manifest\.json"):
        prepare.verify(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="manifest"):
        prepare.verify(tmp_path / "b")


def test_a_set_that_is_too_small_is_an_error_and_leaves_nothing(tmp_path):
    few = local(tmp_path, lambda name, split, rows: rows[:100])
    with pytest.raises(ValueError, match="nq has 100 questions, wanted 813"):
        prepare.prepare(few, few, tmp_path / "a", prepare.Settings())
    assert not (tmp_path / "a").exists()


def test_corpora_are_joined_under_ids_that_do_not_meet(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("one", "two"):
        row = {
            "id": "0", "question": f"{name}?", "golden_answers": ["x"],
            "metadata": {
                "gold_passage_ids": ["1"], "context_passage_ids": ["0", "1"], "hops": 2,
                "evidences": [["a", "b", "c"]], "type": "comparison",
            },
        }  # fmt: skip
        (data / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        passages = [{"id": str(i), "contents": f"T{i}\n{name} é {i}"} for i in range(2)]
        (data / f"{name}_corpus.jsonl").write_bytes(jsonl_bytes(passages))
    prepare.join(data, ["one", "two"], tmp_path / "out")
    lines = [json.loads(x) for x in (tmp_path / "out/corpus.jsonl").read_text().splitlines()]
    assert [(x["id"], x["contents"]) for x in lines] == [
        ("one/0", "T0\none é 0"), ("one/1", "T1\none é 1"),
        ("two/0", "T0\ntwo é 0"), ("two/1", "T1\ntwo é 1"),
    ]  # fmt: skip
    [question] = read_jsonl(tmp_path / "out/two.jsonl", dataset="two", split="test")
    assert question.gold_passages == ("two/1",) and question.hops == 2
    assert json.loads((tmp_path / "out/two.jsonl").read_text())["metadata"] == {
        "gold_passage_ids": ["two/1"], "context_passage_ids": ["two/0", "two/1"], "hops": 2,
        "evidences": [["a", "b", "c"]], "type": "comparison",
    }  # fmt: skip
