"""The update benchmark: its batch, our side's loss, and the check that all do the same work."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from mas_jax.benchmarks import update, update_peers, update_workload
from mas_jax.benchmarks.update_workers import CLIP, ours
from mas_jax.model import hf, qwen3

CONFIG = dataclasses.replace(update.config_of("toy-1m"), num_layers=1, vocab_size=64)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A checkpoint directory, its parameters, and a batch of 16 sequences around the policy."""
    directory = tmp_path_factory.mktemp("update") / "model"
    params = qwen3.init(CONFIG, jax.random.key(0), dtype=jnp.float32)
    hf.save(directory, CONFIG, params)
    batch = update_workload.make(CONFIG.vocab_size, 16, seed=0)
    return directory, params, update.around_policy(batch, CONFIG, params)


def test_batch_pads_prompts_left_and_completions_right_and_centres_groups():
    batch = update_workload.make(64, 16, seed=1)
    assert np.all(np.diff(batch.prompt_mask_NP, axis=1) >= 0)
    assert np.all(np.diff(batch.completion_mask_NC, axis=1) <= 0)
    for ids, mask in (
        (batch.prompt_ids_NP, batch.prompt_mask_NP),
        (batch.completion_ids_NC, batch.completion_mask_NC),
    ):
        np.testing.assert_array_equal(ids != update_workload.PAD, mask > 0)
    lengths = batch.prompt_mask_NP.sum(axis=1), batch.completion_mask_NC.sum(axis=1)
    assert batch.num_tokens == sum(x.sum() for x in lengths)
    assert batch.num_completion_tokens == lengths[1].sum()
    assert lengths[0].min() >= 30 and lengths[0].max() <= 120 == update_workload.PROMPT_TOKENS[1]
    groups_GK = batch.advantages_N.reshape(-1, update_workload.GROUP)
    np.testing.assert_allclose(groups_GK.sum(axis=1), 0.0, atol=1e-5)
    assert np.unique(groups_GK[0]).size == 2  # right and wrong answers


def test_a_stored_batch_comes_back(tmp_path):
    batch = update_workload.make(64, 8, seed=2)
    update_workload.write(batch, tmp_path / "batch.npz")
    for name, x in vars(update_workload.read(tmp_path / "batch.npz")).items():
        np.testing.assert_array_equal(x, getattr(batch, name))


@pytest.mark.slow
def test_our_update_starts_at_the_loss_of_a_loop_over_sequences(inputs):
    directory, params, batch = inputs
    width = batch.prompt_ids_NP.shape[1] + batch.completion_ids_NC.shape[1]
    tokens_NT, first_N = np.zeros((16, width), np.int32), batch.prompt_mask_NP.sum(axis=1)
    for n, first in enumerate(first_N):  # from the left: what follows changes no causal model
        tokens_NT[n, :first] = batch.prompt_ids_NP[n, -first:]
        tokens_NT[n, first : first + batch.completion_ids_NC.shape[1]] = batch.completion_ids_NC[n]
    logits_NTV = np.float64(qwen3.logits(params, CONFIG, tokens_NT))
    logprobs_NTV = logits_NTV - np.log(np.exp(logits_NTV).sum(axis=2, keepdims=True))
    total, clipped = 0.0, 0
    for n, advantage in enumerate(batch.advantages_N):
        for c in range(batch.completion_mask_NC[n].sum()):
            new = logprobs_NTV[n, first_N[n] + c - 1, batch.completion_ids_NC[n, c]]
            ratio = np.exp(new - batch.old_logprobs_NC[n, c])
            bounded = min(max(ratio, 1 - CLIP), 1 + CLIP)
            total -= min(ratio * advantage, bounded * advantage)
            clipped += bounded != ratio
    assert 0.05 < clipped / batch.num_completion_tokens < 0.4  # both branches take part
    result = ours(directory, batch, rows=2)()
    assert abs(result["loss"] - total / batch.num_completion_tokens) < 1e-5


@pytest.mark.slow
def test_micro_batches_of_another_size_change_no_update(inputs):
    directory, _, batch = inputs
    few, many = (ours(directory, batch, rows=rows) for rows in (2, 8))
    results = {"ours": [few() for _ in range(3)], "trl": [many() for _ in range(3)]}
    assert max(update.check_same_work(results).values()) < 1e-5
    losses = [result["loss"] for result in results["ours"]]
    assert losses[2] < losses[0]  # it learns


@pytest.mark.parametrize(
    ("at", "change"), [(0, {"grad_norm": 1.0002}), (1, {"loss": 0.1002}), (1, {"loss": np.nan})]
)
def test_other_work_is_refused(at, change):
    same = [{"loss": 0.1, "grad_norm": 1.0}] * 2
    other = [result | change if index == at else result for index, result in enumerate(same)]
    with pytest.raises(RuntimeError, match="do not do the same work"):
        update.check_same_work({"ours": same, "tunix": other})


def test_equal_work_is_accepted_from_a_peer_that_tells_no_norm():
    results = {"ours": [{"loss": 0.1, "grad_norm": 1.0}], "tunix": [{"loss": 0.10005}]}
    assert update.check_same_work(results).keys() == {"tunix_loss"}


@pytest.mark.slow
def test_all_three_sides_agree_on_a_small_batch():
    """Needs the peers' environments, which `launch/bench.py update` makes."""
    missing = [p for p in update.PEERS if not (update_peers.ENVIRONMENTS / p).is_dir()]
    if missing:
        pytest.skip(f"no environment of {missing}: run `python launch/bench.py update` once")
    rows = {"ours": (4,), "trl": (16,), "tunix": (16,)}
    result = update.run_case(update.Case("toy-1m", 16, 1, rows), Console())
    assert max(result["differences"].values()) < 1e-4
    assert result["differences"].keys() == {
        f"{peer}_{what}" for peer in update.PEERS for what in ("loss", "grad_norm")
    }
