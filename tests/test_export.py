"""A checkpoint as a Hugging Face directory: transformers loads it, with equal logits and chat."""

import os
import subprocess
import sys

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT
from small_runs import save_start, scene_of, small_config

from mas_jax.agents.chat import hf_render
from mas_jax.learning import pipeline, policy_files
from mas_jax.learning.checkpoint import Checkpointer
from mas_jax.learning.export import export
from mas_jax.model import hf, qwen3

VALUES = {10: 0.25, 20: 0.5, 30: None, 40: 0.375}  # what validation found at each step


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("start") / "policy")


def policy_of(start, step):
    """Random parameters of a step, with a critic's head."""
    model, _ = hf.load(start, dtype=jnp.float32)
    params = qwen3.init(model, jax.random.key(step), dtype=jnp.float32)
    return params | {"value_head": jnp.ones(model.model_dim)}


@pytest.fixture(scope="module")
def stage(start, tmp_path_factory):
    """A stage's directory with checkpoints of four steps. The optimizer's state is one that no
    optimizer of ours has: an export must not read it."""
    place = tmp_path_factory.mktemp("run") / "student"
    meta = {"config": pipeline.as_json(small_config(start, train__value_head=True))}
    with Checkpointer(place / "checkpoints", keep=9) as checkpoints:
        for step, value in VALUES.items():
            state = {"params": policy_of(start, step), "opt_state": {"unheard_of": jnp.ones(3)}}
            checkpoints.save(step, state, meta, value=value)
    return place


@pytest.fixture(scope="module")
def exported(stage, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "policy"
    assert export(stage, out, best=False) == 40
    return out


def test_transformers_computes_the_same_logits(exported, start):
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    config, _ = hf.load(start, dtype=jnp.float32)
    tokens_BT = np.random.default_rng(0).integers(0, config.vocab_size, (2, 24))
    ours_BTV = qwen3.logits(policy_of(start, 40), config, jnp.asarray(tokens_BT, jnp.int32))
    with torch.no_grad():
        theirs_BTV = model.eval()(torch.from_numpy(tokens_BT)).logits.numpy()
    assert np.abs(theirs_BTV).max() > 0.1
    np.testing.assert_allclose(ours_BTV, theirs_BTV, rtol=0, atol=1e-4)


def test_the_value_head_is_left_out_and_the_rest_is_bitwise_the_same(exported, start):
    params = {k: v for k, v in policy_of(start, 40).items() if k != "value_head"}
    hf_models.assert_same_params(hf.load(exported, dtype=jnp.float32)[1], params)
    assert not [name for name in hf_models.read_tensors(exported) if "value" in name]


def test_tokenizer_and_chat_template_go_with_it(exported, start):
    names = {path.name for path in start.iterdir()} - {"config.json", "model.safetensors"}
    assert {"tokenizer.json", "tokenizer_config.json"} <= names
    for name in names:
        assert (exported / name).read_bytes() == (start / name).read_bytes()
    scene = scene_of(start)
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    text = scene.world.questions["test"][0].text
    assert theirs.encode(text, add_special_tokens=False) == scene.tokenizer.encode(text)
    rendered = hf_render(theirs)([{"role": "user", "content": text}])
    assert scene.chat.message("user", text) + scene.chat.answer == tuple(rendered)
    policy_files.check_chat(scene.chat, exported)


def test_any_step_and_the_best_one_can_be_named(stage, start, tmp_path):
    assert export(stage / "checkpoints" / "10", tmp_path / "10", best=False) == 10
    assert export(stage, tmp_path / "20", best=True) == 20
    for step in (10, 20):
        params = {k: v for k, v in policy_of(start, step).items() if k != "value_head"}
        read = hf.load(tmp_path / str(step), dtype=jnp.float32)[1]
        hf_models.assert_same_params(read, params)


def test_the_dtype_of_the_master_weights_is_kept(start, tmp_path):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), policy_of(start, 1))
    meta = {"config": pipeline.as_json(small_config(start))}
    with Checkpointer(tmp_path / "run" / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, {"params": params}, meta, value=None)
    export(tmp_path / "run", tmp_path / "out", best=False)
    tensors = hf_models.read_tensors(tmp_path / "out")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


# --- what does not fit ----------------------------------------------------------------------------


def damage(checkpoint):
    """Changes one bit in the middle of the largest file."""
    files = [path for path in (checkpoint / "state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


@pytest.fixture
def copied(start, tmp_path):
    """A stage of two checkpoints that a test may damage; none was validated."""
    place = tmp_path / "run" / "student"
    meta = {"config": pipeline.as_json(small_config(start))}
    with Checkpointer(place / "checkpoints", keep=9) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"params": policy_of(start, step)}, meta, value=None)
    return place


def test_a_damaged_newest_checkpoint_gives_the_one_before_and_says_so(copied, tmp_path, caplog):
    damage(copied / "checkpoints/2")
    assert export(copied, tmp_path / "out", best=False) == 1
    assert "checkpoints/2 is damaged" in caplog.text and "taking step 1" in caplog.text


def test_a_damaged_checkpoint_that_was_named_is_an_error(copied, tmp_path):
    damage(copied / "checkpoints/1")
    damage(copied / "checkpoints/2")
    with pytest.raises(ValueError, match=r"checkpoints/1 is damaged"):
        export(copied / "checkpoints/1", tmp_path / "out", best=False)
    with pytest.raises(ValueError, match=r"checkpoints/2 is damaged.*checkpoints/1 is damaged"):
        export(copied, tmp_path / "out", best=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "best", "message"),
    [
        ("nowhere", False, r"nowhere: no checkpoint there; give a stage's directory"),
        ("run", False, r"give a stage's directory of a training workdir: .*run/student"),
        ("run/student/checkpoints/7", False, r"7: no checkpoint there"),
        ("run/student", True, r"no checkpoint was validated"),
        ("run/student/checkpoints/1", True, r"is one checkpoint; for the best one give"),
        ("empty", False, r"holds no complete checkpoint; train first"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_one_clear_error(copied, tmp_path, source, best, message):
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises((FileNotFoundError, ValueError), match=message) as caught:
        export(tmp_path / source, tmp_path / "out", best=best)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_starting_policy_that_is_gone_is_one_clear_error(tmp_path):
    start = save_start(tmp_path / "start")
    meta = {"config": pipeline.as_json(small_config(start))}
    with Checkpointer(tmp_path / "run" / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, {"params": policy_of(start, 1)}, meta, value=None)
    start.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=f"{start}/config.json does not exist"):
        export(tmp_path / "run", tmp_path / "out", best=False)


@pytest.mark.slow
def test_the_command_exports_and_never_overwrites(stage, tmp_path):
    command = [sys.executable, "launch/export_hf.py", "--best", str(stage), str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def _run():
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    done = _run()
    assert done.returncode == 0, done.stderr
    assert f"written to {tmp_path}/out: step 20 of {stage}" in done.stderr
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    again = _run()
    assert again.returncode != 0
    assert again.stderr == f"stopped: {tmp_path}/out exists; name a new directory\n"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
