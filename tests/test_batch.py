"""Packing: what stands where, what has weight, and that nothing is lost, doubled or cut."""

import functools
import logging
import random
from collections import Counter
from dataclasses import fields, replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_team import CharTokenizer
from test_credit import ROW, random_episode

from mas_jax.agents import chat
from mas_jax.agents.oracle import Flaws
from mas_jax.config import default_config
from mas_jax.data.tokenizer import make_toy_tokenizer
from mas_jax.learning import scenes
from mas_jax.learning.batch import agree_max, globalise, pack
from mas_jax.learning.credit import Credited, credit
from mas_jax.learning.toy_policy import scripted_episodes
from mas_jax.model import sharding
from mas_jax.records import ROLES, Sample, StopReason, Trace

PROGRAMME = dict.fromkeys(ROLES, ROW)
MICRO_ROWS = default_config().train.micro_rows


def make_credited(tokens, owners, *, role="searcher", advantage=0.0, reward=0.0, is_dropped=False):
    trace = Trace(
        tokens=tuple(tokens), owners=tuple(owners),
        logprobs=tuple(-0.5 * bool(owner) for owner in owners), question="q", rollout=0, role=role,
        path=role, policy="student", turns=(),
    )  # fmt: skip
    return Credited(trace, reward, advantage, is_dropped)


def sized(*sizes):
    """Traces of these lengths whose last token was sampled; trace x has tokens 100 x, 100 x + 1."""
    return [
        make_credited(range(100 * x, 100 * x + size), [0] * (size - 1) + [2], reward=1.0)
        for x, size in enumerate(sizes, start=1)
    ]


def pack_alone(credited, programme=PROGRAMME, *, micro_rows=2, length=8, agree=lambda rows: rows):
    return pack(credited, programme, micro_rows=micro_rows, length=length, agree=agree)


def packed_traces(batch):
    """(tokens, owners, log-probs, weights) of every segment of a batch."""
    found = []
    for m, b in np.ndindex(batch.tokens_MBT.shape[:2]):
        ids_T = batch.segment_ids_MBT[m, b]
        for segment in range(1, ids_T.max() + 1):
            (at,) = np.nonzero(ids_T == segment)
            assert at.tolist() == list(range(at[0], at[-1] + 1))  # a run
            found.append(
                tuple(
                    tuple(array[m, b, at].tolist())
                    for array in (
                        batch.tokens_MBT,
                        batch.owner_MBT,
                        batch.sampler_logprobs_MBT,
                        batch.weights_MBT,
                    )
                )
            )
    return found


# --- layout ---------------------------------------------------------------------------------------


def test_packing_by_hand():
    programme = {
        "searcher": ROW,
        "leader": replace(ROW, aggregation="sequence"),
        "answerer": replace(ROW, trained=False),
    }
    credited = [
        make_credited([1, 2, 3], [0, 2, 2], advantage=0.5, reward=0.25),
        make_credited([4, 5, 6, 7, 8], [0, 1, 0, 1, 0], role="leader", advantage=-2.0, reward=1.0,
                      is_dropped=True),
        make_credited([9, 9], [0, 3], role="answerer", advantage=7.0),
        make_credited([10, 11], [0, 2], advantage=1.5, reward=-1.0),
    ]  # fmt: skip
    batch, num_micro, stats = pack_alone(credited, programme, micro_rows=1, length=7)
    # longest first: 5 opens a row, 3 another, 2 fits behind the 5; the Answerer learns nothing;
    # rows stand in a shuffled order, which of two leaves them as they are
    want = dict(
        tokens_MBT=[[[4, 5, 6, 7, 8, 10, 11]], [[1, 2, 3, 0, 0, 0, 0]]],
        segment_ids_MBT=[[[1, 1, 1, 1, 1, 2, 2]], [[1, 1, 1, 0, 0, 0, 0]]],
        owner_MBT=[[[0, 1, 0, 1, 0, 0, 2]], [[0, 2, 2, 0, 0, 0, 0]]],
        weights_MBT=[[[0, 0.5, 0, 0.5, 0, 0, 1]], [[0, 1, 1, 0, 0, 0, 0]]],
        policy_weights_MBT=[[[0, 0, 0, 0, 0, 0, 1]], [[0, 1, 1, 0, 0, 0, 0]]],
        advantages_MBT=[[[0, -2, 0, -2, 0, 0, 1.5]], [[0, 0.5, 0.5, 0, 0, 0, 0]]],
        rewards_MBT=[[[0, 0, 0, 1, 0, 0, -1]], [[0, 0, 0.25, 0, 0, 0, 0]]],
        sampler_logprobs_MBT=[[[0, -0.5, 0, -0.5, 0, 0, -0.5]], [[0, -0.5, -0.5, 0, 0, 0, 0]]],
    )
    assert [field.name for field in fields(batch)] == [*want, "view"]
    assert batch.view is None
    for name, array in want.items():
        kind = np.int32 if name in ("tokens_MBT", "segment_ids_MBT", "owner_MBT") else np.float32
        got = getattr(batch, name)
        assert got.dtype == kind
        np.testing.assert_array_equal(got, np.asarray(array, kind), err_msg=name)
    assert num_micro == 2
    assert stats.padding_frac == pytest.approx(4 / 14)
    assert (stats.num_tokens, stats.num_traces, stats.merged_traces) == (10, 3, 0)
    assert (stats.too_long, stats.skipped_traces) == (0, 1)
    assert stats.role_tokens == {"leader": 5, "searcher": 5}


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_weights_of_equal_traces_add_up_as_if_each_stood_there_so_often(aggregation):
    programme = {"searcher": replace(ROW, aggregation=aggregation)}
    once = make_credited([1, 2, 3], [0, 2, 2], advantage=0.5)
    other = make_credited([4, 5], [0, 2], advantage=0.5)
    weighted = [replace(once, weight=2.0), replace(once, weight=1.0), replace(other, weight=4.0)]
    got, _, stats = pack_alone(weighted, programme)
    want, _, _ = pack_alone([once] * 3 + [other] * 4, programme)
    for field in fields(got):
        np.testing.assert_array_equal(getattr(got, field.name), getattr(want, field.name))
    assert (stats.num_traces, stats.merged_traces) == (2, 1)
    # a fraction is a weight as well; what is dropped keeps its own out of the policy loss alone
    part = [replace(once, weight=2 / 3), replace(other, weight=0.25, is_dropped=True)]
    got, _, _ = pack_alone(part, programme)
    share = 2 if aggregation == "sequence" else 1
    found = {tokens: weights for tokens, _, _, weights in packed_traces(got)}
    assert found[1, 2, 3] == pytest.approx((0, 2 / 3 / share, 2 / 3 / share))
    assert found[4, 5] == (0, 0.25)
    assert got.policy_weights_MBT.sum() == pytest.approx(4 / 3 / share)


def test_micro_batches_are_padded_to_a_power_of_two_and_the_used_ones_counted():
    shapes = {}
    for count in (1, 2, 4, 5, 10, 18):
        batch, num_micro, stats = pack_alone(sized(*[8] * count))  # two rows a micro-batch
        shapes[count] = (batch.tokens_MBT.shape, num_micro)
        assert not batch.segment_ids_MBT[num_micro:].any()
        assert stats.padding_frac == pytest.approx(1 - count / (2 * num_micro))
    assert shapes == {
        1: ((1, 2, 8), 1),
        2: ((1, 2, 8), 1),
        4: ((2, 2, 8), 2),
        5: ((4, 2, 8), 3),
        10: ((8, 2, 8), 5),
        18: ((16, 2, 8), 9),
    }


def test_every_host_has_as_many_rows_as_the_fullest():
    credited = sized(8, 8, 8)
    alone, num_alone, _ = pack_alone(credited)
    heard = []
    batch, num_micro, stats = pack_alone(credited, agree=lambda rows: heard.append(rows) or 9)
    assert heard == [3]
    assert (num_alone, num_micro) == (2, 5)
    assert batch.tokens_MBT.shape == (8, 2, 8)
    for array, same in zip(jax.tree.leaves(batch), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(array[:2], same)
        assert not array[2:].any()
    assert Counter(packed_traces(batch)) == Counter(packed_traces(alone))
    assert stats.padding_frac == pytest.approx(1 - 3 / 10)


def test_no_traces_are_no_micro_batches_and_an_empty_one():
    batch, num_micro, stats = pack_alone([])
    assert num_micro == 0
    assert batch.tokens_MBT.shape == (1, 2, 8)
    assert not any(array.any() for array in jax.tree.leaves(batch))
    assert (stats.padding_frac, stats.num_tokens) == (0.0, 0)


def test_too_long_a_trace_is_counted_and_named_and_never_cut(caplog):
    short, long = sized(8, 9)
    long = replace(long, trace=replace(long.trace, question="nq/7", rollout=3, path="leader/w0.s1"))
    with caplog.at_level(logging.WARNING):
        batch, _, stats = pack_alone([long, short])
    assert (stats.too_long, stats.num_traces, stats.skipped_traces) == (1, 1, 0)
    assert [tokens for tokens, *_ in packed_traces(batch)] == [short.trace.tokens]
    assert "searcher leader/w0.s1 of 'nq/7' rollout 3 (9)" in caplog.text
    assert "longer than a row of 8 tokens" in caplog.text


def test_a_role_that_learns_nothing_is_skipped_however_long():
    credited = [make_credited([1] * 20, [0] * 19 + [3], role="answerer"), *sized(4)]
    for frozen in (
        replace(ROW, trained=False),
        replace(ROW, advantages=()),
        replace(ROW, weight=0),
    ):
        _, _, stats = pack_alone(credited, {"searcher": ROW, "answerer": frozen})
        assert (stats.skipped_traces, stats.too_long, stats.num_traces) == (1, 0, 1)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), max_size=40),
    micro_rows=st.integers(1, 5),
    extra=st.integers(0, 7),
)
def test_no_trace_is_lost_or_doubled(sizes, micro_rows, extra):
    rng = np.random.default_rng(len(sizes))
    credited = [
        make_credited(rng.integers(0, 9, size), rng.choice([0, 2], size), reward=1.0)
        for size in sizes
    ]
    batch, num_micro, stats = pack_alone(
        credited, micro_rows=micro_rows, length=10, agree=lambda rows: rows + extra
    )
    kept = [c.trace for c in credited if len(c.trace.tokens) <= 10]
    times = Counter((t.tokens, t.owners, t.logprobs) for t in kept)
    want = [
        (*key, tuple(float(n * (o > 0 and t > 0)) for t, o in enumerate(key[1])))
        for key, n in times.items()
    ]
    assert sorted(packed_traces(batch)) == sorted(want)
    assert (stats.num_traces, stats.merged_traces) == (len(times), len(kept) - len(times))
    assert stats.too_long == len(sizes) - len(kept)
    assert stats.num_tokens == np.count_nonzero(batch.segment_ids_MBT)
    assert not batch.segment_ids_MBT[num_micro:].any()
    padding = batch.segment_ids_MBT == 0
    assert all(not array[padding].any() for array in jax.tree.leaves(batch))


def test_the_order_of_episodes_changes_no_array():
    episodes = [random_episode(f"q{i}", j, "hierarchy") for i in range(4) for j in range(12)]

    def batch_of(episodes):
        return pack_alone(credit(episodes, PROGRAMME)[0], length=64)[0]

    want = batch_of(episodes)
    got = batch_of(random.Random(0).sample(episodes, len(episodes)))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_rows_stand_in_an_order_that_does_not_follow_the_lengths():
    """Filled longest first, the first micro-batches would hold the longest traces alone."""
    batch, num_micro, _ = pack_alone(sized(*range(33, 65)), micro_rows=4, length=64)
    sizes_MB = np.count_nonzero(batch.segment_ids_MBT[:num_micro], axis=-1)
    assert sorted(sizes_MB.ravel().tolist()) == list(range(33, 65))
    by_length = np.sort(sizes_MB.ravel())[::-1].reshape(sizes_MB.shape)
    assert np.ptp(sizes_MB.mean(axis=1)) < 0.6 * np.ptp(by_length.mean(axis=1))
    again, _, _ = pack_alone(sized(*range(33, 65)), micro_rows=4, length=64)
    jax.tree.map(np.testing.assert_array_equal, again, batch)


# --- equal traces ---------------------------------------------------------------------------------


def test_equal_traces_by_hand_are_one_with_their_number_as_weight():
    one = make_credited([1, 2, 3], [0, 2, 2], advantage=0.5, reward=0.25)
    other = make_credited([4, 5, 6, 7], [0, 1, 0, 1], role="leader", reward=1.0, is_dropped=True)
    elsewhere = replace(one, trace=replace(one.trace, question="r", rollout=3, path="x"))
    programme = {"searcher": ROW, "leader": replace(ROW, aggregation="sequence")}
    credited = [one, other, elsewhere, other, one]
    batch, _, stats = pack_alone(credited, programme, micro_rows=1, length=7)
    assert (stats.num_traces, stats.merged_traces, stats.num_tokens) == (2, 3, 7)
    # of the Leader's two sequences each token is half: 2 / 2
    np.testing.assert_array_equal(batch.tokens_MBT[0, 0], [4, 5, 6, 7, 1, 2, 3])
    np.testing.assert_array_equal(batch.weights_MBT[0, 0], [0, 1, 0, 1, 0, 3, 3])
    np.testing.assert_array_equal(batch.policy_weights_MBT[0, 0], [0, 0, 0, 0, 0, 3, 3])
    np.testing.assert_array_equal(batch.advantages_MBT[0, 0], [0, 0, 0, 0, 0, 0.5, 0.5])
    np.testing.assert_array_equal(batch.rewards_MBT[0, 0], [0, 0, 0, 1, 0, 0, 0.25])


DIFFERENT = {
    "token": make_credited([1, 2, 9], [0, 2, 2], advantage=0.5, reward=1.0),
    "owner": make_credited([1, 2, 3], [0, 0, 2], advantage=0.5, reward=1.0),
    "role": make_credited([1, 2, 3], [0, 2, 2], role="leader", advantage=0.5, reward=1.0),
    "advantage": make_credited([1, 2, 3], [0, 2, 2], advantage=0.4, reward=1.0),
    "dropped": make_credited([1, 2, 3], [0, 2, 2], advantage=0.5, reward=1.0, is_dropped=True),
    "reward": make_credited([1, 2, 3], [0, 2, 2], advantage=0.5, reward=0.0),
}


@pytest.mark.parametrize("what", [*DIFFERENT, "log-prob"])
def test_traces_that_differ_in_what_the_update_reads_stay_apart(what):
    one = make_credited([1, 2, 3], [0, 2, 2], advantage=0.5, reward=1.0)
    other = DIFFERENT.get(what) or replace(one, trace=replace(one.trace, logprobs=(0, -0.5, -0.4)))
    critic = {**PROGRAMME, "searcher": replace(ROW, advantages=("gae",))}
    assert pack_alone([one, other], critic)[2].merged_traces == 0
    # only a critic reads the reward itself
    assert pack_alone([one, other])[2].merged_traces == (what == "reward")


# --- weights --------------------------------------------------------------------------------------


def test_weights_sum_to_the_owned_tokens_or_to_one_for_each_sequence():
    episodes = [random_episode(f"q{i}", 0, "hierarchy") for i in range(30)]
    credited, _ = credit(episodes, PROGRAMME)
    credited.append(make_credited([7, 7, 7], [0, 0, 0]))  # an agent may have sampled nothing
    num_owned = {"searcher": [], "answerer": []}
    for c in credited:
        num_owned[c.trace.role].append(sum(owner > 0 for owner in c.trace.owners))
    for aggregation in ("token", "all_tokens", "sequence"):
        programme = {**PROGRAMME, "searcher": replace(ROW, aggregation=aggregation)}
        batch, _, _ = pack_alone(credited, programme, length=64)
        for role, counts in num_owned.items():
            is_mean = (role, aggregation) == ("searcher", "sequence")
            want = np.count_nonzero(counts) if is_mean else sum(counts)
            got = batch.weights_MBT[batch.owner_MBT == ROLES[role]].sum(dtype=np.float64)
            np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_one_token_response_keeps_its_weight_advantage_and_reward():
    batch, _, _ = pack_alone([make_credited([5, 6], [0, 2], advantage=0.5, reward=1.0)], length=2)
    for array, want in (
        (batch.weights_MBT, 1.0), (batch.policy_weights_MBT, 1.0), (batch.advantages_MBT, 0.5),
        (batch.rewards_MBT, 1.0), (batch.sampler_logprobs_MBT, -0.5),
    ):  # fmt: skip
        np.testing.assert_array_equal(array[0, 0], np.float32([0.0, want]))


def test_a_sampled_first_token_has_no_weight_since_nothing_predicts_it():
    programme = {"searcher": replace(ROW, aggregation="sequence")}
    credited = [
        make_credited([5, 6, 7], [2, 2, 2], reward=1.0),
        make_credited([8], [2], reward=1.0),
    ]
    batch, _, _ = pack_alone(credited, programme, length=4)
    np.testing.assert_array_equal(batch.weights_MBT[0, 0], [0, 0.5, 0.5, 0])
    np.testing.assert_array_equal(batch.rewards_MBT[0, 0], [0, 0, 1, 0])


def test_words_of_another_role_in_a_trace_have_no_weight():
    batch, _, _ = pack_alone([make_credited([5, 6, 7], [0, 1, 2], advantage=1.0)], length=4)
    np.testing.assert_array_equal(batch.owner_MBT[0, 0], [0, 1, 2, 0])
    np.testing.assert_array_equal(batch.weights_MBT[0, 0], [0, 0, 1, 0])
    np.testing.assert_array_equal(batch.advantages_MBT[0, 0], [0, 0, 1, 0])


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_sampled_end_of_turn_is_trained_and_one_of_the_template_never(is_cut):
    tokenizer = CharTokenizer()
    (end,) = tokenizer.stop_ids
    said = tokenizer.encode("no") + ([] if is_cut else [end])
    reason = StopReason.LENGTH if is_cut else StopReason.TOKEN
    talk = chat.Conversation(chat.make_chat(tokenizer, chat.INSTRUCT), "ask")
    sample = Sample(tuple(said), (-0.5,) * len(said), reason)
    talk.append(sample, owner=ROLES["searcher"], action="invalid", reason="no tag")
    talk.extend("again")
    (strand,) = talk.strands
    batch, _, _ = pack_alone(
        [make_credited(strand.tokens, strand.owners)], length=len(strand.tokens) + 3
    )
    (tokens_T,), (weights_T,) = batch.tokens_MBT[0, :1], batch.weights_MBT[0, :1]
    (trained,) = np.nonzero(weights_T)
    assert tokens_T[trained].tolist() == said
    assert tokens_T[trained[-1] : trained[-1] + 2].tolist().count(end) == 1  # the turn is ended
    assert np.count_nonzero(tokens_T == end) == 3  # and so are both of the user's


# --- the toy workload -----------------------------------------------------------------------------


@functools.cache
def toy_episodes(team):
    """14 questions, 8 times each, 5 candidates, with the starting policy's flaws."""
    config = default_config()
    config.sampling.candidates = 5
    scene = scenes.make_scene(config, make_toy_tokenizer())
    return scripted_episodes(
        config, team, scene, split="train", count=14, runs=8,
        flaws=Flaws(**config.pretrain.flaws),
    )  # fmt: skip


def told_apart(credited):
    """As many traces, none equal to another: what a policy that never repeats itself would say."""
    rng = np.random.default_rng(0)
    return [
        replace(c, trace=replace(c.trace, logprobs=tuple(-rng.random(len(c.trace.tokens)))))
        for c in credited
    ]


@pytest.mark.parametrize("length", [256, 384])
@pytest.mark.parametrize("team", ["cascade", "hierarchy"])
def test_padding_of_the_toy_workload_is_below_a_tenth(team, length):
    credited, _ = credit(toy_episodes(team), PROGRAMME)
    batch, num_micro, stats = pack_alone(told_apart(credited), micro_rows=MICRO_ROWS, length=length)
    assert stats.num_traces == len(credited) > 600
    assert (stats.too_long, stats.skipped_traces, stats.merged_traces) == (0, 0, 0)
    assert stats.padding_frac < 0.1
    num_positions = num_micro * MICRO_ROWS * length
    assert stats.padding_frac == 1 - np.count_nonzero(batch.segment_ids_MBT) / num_positions
    assert num_micro <= batch.tokens_MBT.shape[0] < 2 * num_micro


@pytest.mark.parametrize("team", ["cascade", "hierarchy"])
def test_merging_the_toy_workload_leaves_less_than_half_and_full_rows(team):
    credited, _ = credit(toy_episodes(team), PROGRAMME)
    batch, num_micro, stats = pack_alone(credited, micro_rows=MICRO_ROWS, length=256)
    assert stats.num_traces + stats.merged_traces == len(credited)
    assert stats.num_tokens < 0.5 * sum(len(c.trace.tokens) for c in credited)
    num_rows = np.count_nonzero(batch.segment_ids_MBT.any(axis=-1))
    assert num_micro == -(-num_rows // MICRO_ROWS)
    assert stats.num_tokens > 0.95 * num_rows * 256  # the rest: rows to fill the last micro-batch
    t = default_config().train
    _, _, stats = pack_alone(credited, micro_rows=t.micro_rows, length=t.row_length)
    assert stats.padding_frac < 0.1
    num_owned = sum(sum(o > 0 for o in c.trace.owners[1:]) for c in credited)
    assert batch.weights_MBT.sum(dtype=np.float64) == num_owned


# --- onto the mesh --------------------------------------------------------------------------------


def test_one_process_agrees_with_itself():
    assert agree_max(5) == 5


def test_global_arrays_hold_the_same_values_with_rows_split_over_the_batch_axes():
    batch, _, _ = pack_alone(sized(8, 7, 6, 5, 8, 8, 8), micro_rows=4)
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    spread = globalise(batch, mesh)
    jax.tree.map(np.testing.assert_array_equal, spread, batch)
    for array in jax.tree.leaves(spread):
        assert {shard.data.shape for shard in array.addressable_shards} == {(2, 1, 8)}


def test_rows_that_do_not_divide_over_the_mesh_are_an_error():
    batch, _, _ = pack_alone(sized(8), micro_rows=6)
    with pytest.raises(ValueError, match="rows of a micro-batch: dimension 'batch' of size 6"):
        globalise(batch, sharding.make_mesh(data=4, fsdp=1, tensor=2))
