"""The loop benchmark: the script, static batching, padding and packing, and what is compared."""

import asyncio
import copy

import numpy as np
import pytest
from rich.console import Console

from mas_jax.benchmarks import loop, loop_workers, loop_workload, update_peers
from mas_jax.config import default_config
from mas_jax.learning.credit import Credited
from mas_jax.learning.programme import make_programme
from mas_jax.records import ROLES, Sample, SampleKey, StopReason, Trace


def key(question: str, turn: int) -> SampleKey:
    return SampleKey(0, "train", 0, question, 0, "searcher", turn)


def sample_of(count: int) -> Sample:
    return Sample((7,) * count, (-0.5,) * count, StopReason.LENGTH)


def trace(prompt: int, *parts: tuple[int, bool], role: str = "searcher", rollout: int = 0) -> Trace:
    """A trace of `prompt` tokens, then (tokens, whether its role sampled them); ids count up."""
    lengths = [(prompt, False), *parts]
    owners = tuple(ROLES[role] if own else 0 for n, own in lengths for _ in range(n))
    return Trace(
        tokens=tuple(range(1, len(owners) + 1)), owners=owners,
        logprobs=tuple(-1.0 if owner else 0.0 for owner in owners), question="q", rollout=rollout,
        role=role, path=role, policy="p", turns=(),
    )  # fmt: skip


# two turns with an observation between them; one turn
LONG = trace(2, (3, True), (1, False), (2, True))
SHORT = trace(4, (1, True), role="answerer")


def test_a_script_comes_back_and_answers_after_its_tokens_were_made(tmp_path):
    script = {loop_workload.name(key("a", 0)): [sample_of(2), sample_of(3)]}
    loop_workload.write(script, tmp_path / "script.json")
    assert loop_workload.read(tmp_path / "script.json") == script
    asked = []

    async def _generate(request):
        asked.append(request)

    answer = asyncio.run(
        loop_workload.scripted(script, _generate)((1, 2), key=key("a", 0), policy="p", n=2)
    )
    assert answer == [sample_of(2), sample_of(3)]
    assert asked == [((1, 2), key("a", 0), answer)]


def test_waves_hold_every_request_until_nobody_can_go_on():
    waves_seen = []

    async def _run(requests):
        waves_seen.append(sorted(k.question + str(k.turn) for _, k, _ in requests))
        await asyncio.sleep(0)

    async def _search(queries, k):
        await asyncio.sleep(0.02)  # longer than many turns of the loop
        return [[]]

    async def _agent(waves, search, name, turns):
        for turn in range(turns):
            await waves.generate(((1,), key(name, turn), [sample_of(1)]))
            if name == "b":
                await search(["?"], 1)

    async def _all():
        waves = loop_workload.Waves(_run)
        search = waves.watched(_search)
        await asyncio.gather(*(_agent(waves, search, n, t) for n, t in (("a", 2), ("b", 2))))

    asyncio.run(_all())
    assert waves_seen == [["a0", "b0"], ["a1", "b1"]]


def test_a_wave_that_fails_fails_its_agents():
    async def _run(requests):
        raise RuntimeError("no room")

    async def _one():
        await loop_workload.Waves(_run).generate(((1,), key("a", 0), [sample_of(1)]))

    with pytest.raises(RuntimeError, match="no room"):
        asyncio.run(_one())


def test_sequences_are_padded_to_the_widest_prompt_and_completion(tmp_path):
    found = loop_workload.pad([LONG, SHORT], [0.5, -1.0], distilled="searcher")
    b = found.batch
    np.testing.assert_array_equal(b.prompt_ids_NP, [[0, 0, 1, 2], [1, 2, 3, 4]])
    np.testing.assert_array_equal(b.prompt_mask_NP, [[0, 0, 1, 1], [1, 1, 1, 1]])
    np.testing.assert_array_equal(b.completion_ids_NC, [[3, 4, 5, 6, 7, 8], [5, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(b.completion_mask_NC, [[1] * 6, [1, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(found.sampled_NC, [[1, 1, 1, 0, 1, 1], [1, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(b.old_logprobs_NC, -found.sampled_NC.astype(float))
    np.testing.assert_array_equal(found.is_distilled_N, [True, False])
    np.testing.assert_array_equal(b.advantages_N, np.float32([0.5, -1.0]))
    loop_workload.write_sequences(found, tmp_path)
    again = loop_workload.read_sequences(tmp_path)
    np.testing.assert_array_equal(again.sampled_NC, found.sampled_NC)
    np.testing.assert_array_equal(again.batch.completion_ids_NC, b.completion_ids_NC)


def test_micro_batches_hold_the_same_tokens_and_trimmed_ones_fewer_places():
    traces = [LONG, SHORT, trace(1, (1, True)), trace(2, (2, True))]
    found = loop_workload.pad(traces, [0.0] * 4, distilled="searcher")
    whole, narrow = loop_workload.cut(found, 2), loop_workload.trimmed(found, 2)
    # cut: 4 rows of 4 + 6; trimmed: the two shortest of 2 + 2, then 4 + 6
    assert loop_workload.positions(whole) == 40
    assert loop_workload.positions(narrow) == 2 * 4 + 2 * 10
    for parts in (whole, narrow):
        tokens = sum(p.batch.num_tokens for p in parts)
        assert tokens == sum(len(t.tokens) for t in traces)
        assert sum(p.sampled_NC.sum() for p in parts) == 5 + 1 + 1 + 2


PROGRAMME = make_programme(default_config().stages.student.programme.to_dict())


@pytest.mark.parametrize("variant", ["all", "unmerged", "unpacked"])
def test_variants_of_packing_train_on_the_same_tokens(variant):
    credited = [
        Credited(trace(3, (n, True), role="answerer", rollout=r), 1.0, 0.25, False)
        for r, n in enumerate((2, 2, 2, 5))
    ]
    batch, num_micro, places = loop_workers._packed(
        credited, PROGRAMME, variant, micro_rows=2, length=64
    )
    # equal traces are one with weight 3, unless they are kept apart: 5 + 8 or 3 x 5 + 8 tokens
    tokens = {"all": 13, "unmerged": 23, "unpacked": 23}[variant]
    rows = {"all": 1, "unmerged": 1, "unpacked": 4}[variant]
    assert int((batch.segment_ids_MBT > 0).sum()) == tokens
    assert int(np.any(batch.segment_ids_MBT > 0, axis=2).sum()) == rows
    assert num_micro == -(-rows // 2)
    assert places == num_micro * 2 * (32 if variant == "unpacked" else 64)
    assert batch.weights_MBT.sum() == 2 + 2 + 2 + 5
    assert (batch.weights_MBT * batch.advantages_MBT).sum() == pytest.approx(0.25 * 11)


# --- what is compared -----------------------------------------------------------------------------


def ours(**seconds) -> dict:
    parts = dict(publish=0.0, play=4.0, pack=1.0, score=1.0, update=4.0) | seconds
    counts = dict(
        prefill_s=2.0, decode_s=4.0, prefill_places=10, decode_places=20, prompt_tokens=30,
        shared_tokens=20,
    )  # fmt: skip
    return dict(
        seconds=parts, counts=counts, engines=2, train_places=100, tokens=7.0, teacher_sum=-3.0
    )


def trl(update: float, places: int) -> dict:
    seconds = dict(pack=0.0, score=2.0, update=update)
    return dict(seconds=seconds, train_places=places, tokens=7, teacher_sum=-3.0)


PLAY = dict(
    seconds=dict(play=28.0), counts=dict(generate_s=27.0, prefill_places=40, decode_places=50)
)
RUNS = {
    "ours": [ours(), ours(play=14.0)], "play": [PLAY, PLAY], "cut": [trl(20.0, 300)] * 2,
    "trimmed": [trl(10.0, 200)] * 2,
}  # fmt: skip
SWITCHED = {variant: [{"on": ours(), "off": ours(play=9.0)}] for variant in loop.SWITCHES} | {
    "host": [dict(seconds=dict(publish=0.0, play=0.5))]
}


def test_ratios_and_causes_by_hand():
    found = loop.compare(RUNS, SWITCHED)
    # ours 10 and 20 s; torch 28 + 22 and 28 + 12
    assert found["seconds"] == {"ours": [10, 20], "cut": [50, 50], "trimmed": [40, 40]}
    assert found["ratios"]["cut"] == {"median": 3.75, "least": 2.5, "largest": 5.0}
    assert found["ratios"]["trimmed"]["median"] == 3.0
    assert found["gains"]["unshared"]["median"] == 1.5
    # two engines: 3 s of device calls each, of 4 and 14 s
    assert found["host_s"] == {"alone": 0.5, "torch": 1.0, "ours": 6.0}
    assert found["work"]["train"] == (100, 300, 200)
    case = dict(size="toy-1m", episodes=10) | found
    assert "| toy-1m | 10 | 2,400 / 720 / 900 | 3.75 (2.50 to 5.00) |" in loop.markdown([case])
    assert [table.row_count for table in loop.tables([case])] == [1, 1]


@pytest.mark.parametrize(
    "change", [{"tokens": 6}, {"teacher_sum": -3.001}, {"teacher_sum": np.nan}]
)
def test_other_work_is_refused(change):
    results = {side: copy.deepcopy(RUNS[side][0]) for side in ("ours", "cut", "trimmed")}
    loop.check_same_work(results)
    results["trimmed"] |= change
    with pytest.raises(RuntimeError, match="do not do the same work"):
        loop.check_same_work(results)


@pytest.mark.slow
def test_both_loops_do_the_same_work_on_a_few_episodes():
    """Needs TRL's environment, which `launch/bench.py update` makes."""
    if not (update_peers.ENVIRONMENTS / "trl").is_dir():
        pytest.skip("no environment of TRL: run `python launch/bench.py update` once")
    case = loop.Case("toy-1m", 1, 4, 1, 1, (64,), (8,))
    found = loop.run_case(case, Console(quiet=True))
    assert found["episodes"] == 4 and found["work"]["shared_tokens"] > 0
    off = {name: pairs[0]["off"] for name, pairs in found["switched"].items() if name != "host"}
    on = found["runs_of"]["ours"][0]
    assert off["unshared"]["counts"]["shared_tokens"] == 0
    assert off["unshared"]["counts"]["prefill_tokens"] > on["counts"]["prefill_tokens"]
    assert off["unpacked"]["train_places"] > on["train_places"]
    for other in off.values():  # the same episodes and tokens, whatever is switched off
        assert other["tokens"] == on["tokens"]
        assert other["teacher_sum"] == pytest.approx(on["teacher_sum"], rel=1e-5)
