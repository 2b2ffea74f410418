"""Recorded workloads of the rollout benchmark: what is kept, and in which order it is replayed."""

import asyncio

import pytest

from mas_jax.benchmarks import rollout, workload
from mas_jax.benchmarks.workload import Recorded
from mas_jax.model import qwen3
from mas_jax.records import Sample, SampleKey, StopReason


def key(question: str, turn: int) -> SampleKey:
    return SampleKey(0, "train", 0, question, 0, "searcher", turn)


async def two_tokens(prompt, *, key, n):
    await asyncio.sleep(0)
    return [Sample((1, 2), (0.0, 0.0), StopReason.LENGTH)] * n


def record() -> workload.Workload:
    """Two requests at once, then one that waited for both; another episode beside them."""
    recorder = workload.Recorder(two_tokens)

    async def _play():
        await asyncio.gather(
            recorder.sample((5,), key=key("a", 0), n=1), recorder.sample((6,), key=key("a", 1), n=3)
        )
        await recorder.sample((7, 8), key=key("a", 2), n=1)

    async def _both():
        await asyncio.gather(_play(), recorder.sample((9,), key=key("b", 0), n=1))

    asyncio.run(_both())
    return recorder.workload()


WANTED = [
    [
        Recorded((5,), (2,), ()),
        Recorded((6,), (2, 2, 2), ()),
        Recorded((7, 8), (2,), (0, 1)),
    ],
    [Recorded((9,), (2,), ())],
]


def test_prompts_lengths_and_order_are_kept(tmp_path):
    assert record() == WANTED
    workload.write(WANTED, tmp_path / "w.json")
    assert workload.read(tmp_path / "w.json") == WANTED
    assert workload.num_tokens(WANTED) == 12


def test_a_replayed_request_waits_for_what_it_waited_for():
    events = []

    async def _request(name, recorded):
        events.append(("start", name))
        for _ in range(3 if name == (0, 0) else 1):
            await asyncio.sleep(0)
        events.append(("end", name))

    asyncio.run(workload.replay(WANTED, _request))
    last = events.index(("start", (0, 2)))
    assert last > max(events.index(("end", (0, i))) for i in (0, 1))
    assert events.index(("start", (1, 0))) < events.index(("end", (0, 0)))  # episodes together
    assert len(events) == 8


def test_the_floor_by_hand():
    config = qwen3.ModelConfig(
        vocab_size=10, num_layers=1, model_dim=4, ffw_dim=4, num_heads=1, num_kv_heads=1,
        head_dim=4, rope_theta=1e4, max_positions=64,
    )  # fmt: skip
    layers = qwen3.param_count(config) - 40
    work = [[Recorded((1, 2, 3), (2,), ())]]
    counts = dict(
        prefill_tokens=3, decode_tokens=1, decode_places=8, decode_rows=8, prefill_calls=1
    )
    floor = rollout.floor_s(config, work, counts, dict(flops_per_s=1.0, bytes_per_s=1.0))
    # context 3 + 2/2 = 4; attention 4 x 4 wide x 4 tokens x half of 4
    assert floor["flops_s"] == pytest.approx(2 * layers * 4 + 2 * 40 * 2 + 4 * 4 * 4 * 2)
    # one decode step and one prefill call read the weights; one token reads 4 positions of 2 x 4
    assert floor["bytes_s"] == pytest.approx(4 * (2 * (layers + 40) + 8 * 4))
