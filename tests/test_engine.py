"""The sampling engine: against full forward passes, over schedules, at its limits."""

import asyncio
import dataclasses
import math

import jax
import numpy as np
import pytest
from engines import (
    CONFIG,
    SETTINGS,
    decode,
    full_forward,
    key,
    make_engine,
    make_params,
    make_prompts,
    run,
    sample,
)

from mas_jax.model import logprobs as lp
from mas_jax.model import qwen3, sharding
from mas_jax.records import FailureKind, Stop, StopReason, WorldError
from mas_jax.sampling.pages import PagePool

LENGTHS = (1, 3, 4, 5, 8, 15, 16, 17, 29, 40)
PROMPTS = make_prompts(LENGTHS)


RAGGED = dataclasses.replace(SETTINGS, calls="ragged")


@pytest.fixture(scope="module")
def engine():
    """Shared by tests that leave it idle; nothing a test does may change another's tokens."""
    return make_engine()


@pytest.fixture(scope="module")
def ragged_engine():
    """The same engine through the one mixed call of accelerators."""
    return make_engine(RAGGED)


def greedy_by_full_forward(prompt, num_tokens):
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(np.argmax(full_forward(tokens)[-1])))
    return tuple(tokens[len(prompt) :])


# (ii) independent reference


def test_greedy_through_the_cache_equals_greedy_by_full_forward(engine):
    results = run(*(sample(engine, p, temperature=0.0) for p in PROMPTS))
    for prompt, [result] in zip(PROMPTS, results, strict=True):
        assert result.tokens == greedy_by_full_forward(prompt, 12)
        assert result.logprobs == (0.0,) * 12  # the only token that could be drawn
        assert result.stop_reason is StopReason.LENGTH


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_those_of_the_scoring_kernel(engine, temperature):
    results = run(
        *(sample(engine, p, str(i), temperature=temperature) for i, p in enumerate(PROMPTS))
    )
    for prompt, [result] in zip(PROMPTS, results, strict=True):
        tokens_BT = np.zeros((1, SETTINGS.context), np.int32)
        length = len(prompt) + len(result.tokens)
        tokens_BT[0, :length] = prompt + result.tokens
        params = make_params()
        hidden_BTD = jax.jit(lambda p, t: qwen3.hidden(p, CONFIG, t))(params, tokens_BT)
        head = lp.Head(hidden_BTD, qwen3.unembedding(params, CONFIG), CONFIG.vocab_size)
        mask_BT = np.ones(tokens_BT.shape, bool)
        scored_BT = lp.token_logprobs(head, tokens_BT, mask_BT, temperature=temperature, chunk=64)
        want = np.asarray(scored_BT)[0, len(prompt) : length]
        np.testing.assert_allclose(result.logprobs, want, atol=1e-4)


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 3), (0.5, 0), (0.7, 4)])
def test_logprobs_under_a_cut_are_those_of_the_renormalised_distribution(engine, top_p, top_k):
    [[result]] = run(sample(engine, PROMPTS[5], temperature=0.8, top_p=top_p, top_k=top_k))
    log_TV = full_forward(PROMPTS[5] + result.tokens)[len(PROMPTS[5]) - 1 : -1]
    for log_V, token, got in zip(log_TV, result.tokens, result.logprobs, strict=True):
        p_V = np.exp(np.float64(log_V) / 0.8)
        order = np.argsort(-p_V)[: top_k or None]
        kept = p_V[order] / p_V[order].sum()
        order = order[np.cumsum(kept) - kept < top_p]
        assert token in order
        np.testing.assert_allclose(got, np.log(p_V[token] / p_V[order].sum()), atol=1e-4)


def test_draws_follow_the_distribution(engine):
    # 400 first tokens of one prompt against its distribution: chi-squared over the likely tokens
    results = run(*(sample(engine, PROMPTS[2], f"draw {i}", max_tokens=1) for i in range(400)))
    drawn = np.bincount([r.tokens[0] for [r] in results], minlength=CONFIG.vocab_size)
    expected = 400 * np.exp(full_forward(PROMPTS[2])[-1])
    likely = expected >= 5
    observed = np.append(drawn[likely], drawn[~likely].sum())
    expected = np.append(expected[likely], expected[~likely].sum())
    statistic = np.sum((observed - expected) ** 2 / np.maximum(expected, 1e-9))
    assert statistic < 2 * len(observed) + 10  # mean len - 1, standard deviation sqrt(2 len)


def test_the_mixed_ragged_call_draws_what_the_dense_calls_draw(engine, ragged_engine):
    stop = Stop(strings=(decode((7,)), decode((60,))))
    changes = [dict(n=2, stop=stop) if i % 2 else dict(top_k=9) for i in range(len(PROMPTS))]
    changes[3] |= dict(temperature=0.0, max_tokens=20)
    want, got = (
        run(*(sample(e, p, str(i), **changes[i]) for i, p in enumerate(PROMPTS)))
        for e in (engine, ragged_engine)
    )
    for dense, ragged in zip(want, got, strict=True):
        assert [s.tokens for s in dense] == [s.tokens for s in ragged]
        assert [s.stop_reason for s in dense] == [s.stop_reason for s in ragged]
        for d, r in zip(dense, ragged, strict=True):
            np.testing.assert_allclose(d.logprobs, r.logprobs, atol=1e-4)
    assert len(ragged_engine.device._programs) == 1


# (iii) schedules


def play_schedule(requests, order, settings=SETTINGS, *, waves=1, num_pages=None):
    """Samples of all requests, added in an order and in waves, from a fresh engine.

    num_pages: of which the scheduler may use so many, as if the pool were smaller.
    """
    engine = make_engine(settings)
    if num_pages is not None:
        engine.scheduler.pool = PagePool(num_pages)
    results = [None] * len(requests)

    async def _one(index):
        prompt, changes = requests[index]
        results[index] = await sample(engine, prompt, str(index), **changes)

    async def _all():
        tasks = []
        for wave in np.array_split(np.asarray(order), waves):
            tasks += [asyncio.ensure_future(_one(i)) for i in wave]
            if waves > 3:
                await asyncio.gather(*tasks)
            for _ in range(waves - 1):
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    asyncio.run(_all())
    return results, engine


def test_twenty_schedules_with_preemption_give_the_same_bits():
    rng = np.random.default_rng(5)
    shared = make_prompts([16])[0]
    requests = []
    for i in range(24):
        length = int(rng.integers(1, 40))
        prompt = make_prompts([length], seed=i)[0]
        if i % 3 == 0:
            prompt = (shared + prompt)[:40]
        changes = dict(max_tokens=int(rng.integers(1, 24)), n=int(rng.integers(1, 3)))
        if i % 5 == 0:
            changes |= dict(top_k=5, top_p=0.9)
        requests.append((prompt, changes))
    want, roomy = play_schedule(requests, range(24))
    assert roomy.scheduler.num_preemptions == 0
    num_preemptions = 0
    for trial in range(20):
        order, waves = rng.permutation(24), int(rng.integers(1, 6))
        num_pages = 24 if trial % 2 else None
        got, engine = play_schedule(requests, order, waves=waves, num_pages=num_pages)
        num_preemptions += engine.scheduler.num_preemptions
        assert got == want  # tokens and log-probs, to the bit
    assert num_preemptions > 20


def test_candidates_and_rollouts_differ_and_equal_keys_repeat(engine):
    [three] = run(sample(engine, PROMPTS[4], n=3))
    assert len({s.tokens for s in three}) == 3
    [again, other] = run(
        sample(engine, PROMPTS[4], n=2), sample(engine, PROMPTS[4], key=key(rollout=1))
    )
    assert again == three[:2]
    assert other[0].tokens not in {s.tokens for s in three}


def test_sharing_a_prefix_changes_no_token_and_saves_prefill():
    prompt = make_prompts([38])[0]
    alone, _ = play_schedule([(prompt, {})], [0])
    engine = make_engine()
    results = run(*(sample(engine, prompt, "0") for _ in range(4)))
    assert all(r == alone[0] for r in results)
    # 38 tokens: 9 full pages shared by the three others, 2 tokens and the draw are each one's own
    assert engine.scheduler.num_shared_tokens == 3 * 36
    assert engine.scheduler.num_prompt_tokens == 4 * 38
    assert engine.metrics.prefill_tokens == 38 + 3 * 2
    run(sample(engine, (*prompt[:20], 1, 2, 3), "later"))
    assert engine.scheduler.num_shared_tokens == 3 * 36 + 20


@pytest.mark.parametrize(
    "shape", [pytest.param(dict(tensor=2), marks=pytest.mark.slow), dict(data=4, tensor=2)]
)
@pytest.mark.parametrize("settings", [SETTINGS, RAGGED], ids=["dense", "ragged"])
def test_a_mesh_gives_the_tokens_and_logprobs_of_one_device(shape, settings):
    results = {}
    many = sharding.make_mesh(**shape, devices=jax.devices()[: math.prod(shape.values())])
    for name, mesh in (("one", None), ("many", many)):
        engine = make_engine(settings, mesh=mesh)
        results[name] = run(*(sample(engine, p, str(i)) for i, p in enumerate(PROMPTS[:5])))
    for [one], [many] in zip(results["one"], results["many"], strict=True):
        assert one.tokens == many.tokens
        np.testing.assert_allclose(one.logprobs, many.logprobs, atol=1e-5)


# weights


def test_new_weights_make_old_pages_unusable():
    prompt = make_prompts([30])[0]
    engine = make_engine(seed=0)
    [[old]] = run(sample(engine, prompt))
    engine.set_params(make_params(1))
    [[new]] = run(sample(engine, prompt))
    assert engine.scheduler.num_shared_tokens == 0
    [[fresh]] = run(sample(make_engine(seed=1), prompt))
    assert new == fresh
    assert new.tokens != old.tokens
    log_TV = full_forward(prompt + new.tokens, seed=1)[len(prompt) - 1 : -1]
    want = log_TV[np.arange(len(new.tokens)), new.tokens]
    np.testing.assert_allclose(new.logprobs, want, atol=1e-4)


def test_good_weights_after_broken_ones_give_what_they_should():
    engine = make_engine()
    broken = jax.tree.map(lambda x: x * np.nan, make_params())
    engine.set_params(broken)
    results = run(*(sample(engine, p, str(i)) for i, p in enumerate(PROMPTS)))
    assert all(np.isnan(r.logprobs).all() for [r] in results)
    engine.set_params(make_params())
    want, _ = play_schedule([(p, {}) for p in PROMPTS], range(len(PROMPTS)))
    assert run(*(sample(engine, p, str(i)) for i, p in enumerate(PROMPTS))) == want


def test_new_weights_are_refused_while_generations_run(engine):
    async def _swap_too_early():
        task = asyncio.ensure_future(sample(engine, PROMPTS[0]))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match=r"'student': new weights while generations run"):
            engine.set_params(make_params(1))
        return await task

    asyncio.run(_swap_too_early())


# ends


def test_a_stop_token_is_kept_and_nothing_after_it(engine):
    [[free]] = run(sample(engine, PROMPTS[3]))
    stop_id = free.tokens[5]
    first = free.tokens.index(stop_id)
    [[stopped]] = run(sample(engine, PROMPTS[3], stop=Stop(token_ids=(stop_id,))))
    assert stopped.tokens == free.tokens[: first + 1]
    assert stopped.logprobs == free.logprobs[: first + 1]
    assert stopped.stop_reason is StopReason.TOKEN


@pytest.mark.parametrize("width", [1, 2, 3, 6])
def test_a_stop_string_may_straddle_tokens_and_calls(engine, width):
    [[free]] = run(sample(engine, PROMPTS[6]))
    for start in range(len(free.tokens) - width + 1):
        string = decode(free.tokens[start : start + width])
        end = decode(free.tokens).index(string) + width
        [[stopped]] = run(sample(engine, PROMPTS[6], stop=Stop(strings=("\x7f~~", string))))
        assert stopped.tokens == free.tokens[:end]
        assert stopped.stop_reason is StopReason.STRING


def test_a_stop_string_whose_last_character_is_common_does_not_stop_early(engine):
    [[free]] = run(sample(engine, PROMPTS[6]))
    never = "\x7f" + decode(free.tokens[2:3])  # every pause at this character is a false alarm
    [[result]] = run(sample(engine, PROMPTS[6], stop=Stop(strings=(never,))))
    assert result == free


def test_one_token_is_drawn_by_the_prefill_alone(engine):
    before = engine.metrics.decode_calls
    [[result]] = run(sample(engine, PROMPTS[7], max_tokens=1))
    assert len(result.tokens) == 1
    assert engine.metrics.decode_calls == before


def test_a_sequence_may_fill_the_context_to_the_last_position(engine):
    prompt = make_prompts([40])[0]
    [[result]] = run(sample(engine, prompt, max_tokens=24, temperature=0.0))
    assert result.tokens == greedy_by_full_forward(prompt, 24)


# limits


def test_a_pool_that_holds_one_sequence_plays_them_all():
    requests = [(p, {}) for p in PROMPTS]
    want, _ = play_schedule(requests, range(len(PROMPTS)))
    got, engine = play_schedule(requests, range(len(PROMPTS)), num_pages=17)
    assert got == want
    assert engine.scheduler.pool.num_available == 16  # every page came back


def test_the_ragged_call_plays_them_all_in_a_small_pool():
    requests = [(p, {}) for p in PROMPTS]
    want, _ = play_schedule(requests, range(len(PROMPTS)))
    got, engine = play_schedule(requests, range(len(PROMPTS)), RAGGED, num_pages=24)
    assert engine.scheduler.num_preemptions > 0
    for [w], [g] in zip(want, got, strict=True):
        assert w.tokens == g.tokens


def test_cancelled_requests_free_their_pages_and_disturb_nobody():
    engine = make_engine()
    free = engine.scheduler.pool.num_available

    async def _cancel_some():
        tasks = [asyncio.ensure_future(sample(engine, p, str(i))) for i, p in enumerate(PROMPTS)]
        for turn in range(12):
            await asyncio.sleep(0)
            if turn % 2 == 0:
                tasks[turn // 2].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(_cancel_some())
    assert sum(isinstance(r, asyncio.CancelledError) for r in results) == 6
    want, _ = play_schedule([(p, {}) for p in PROMPTS], range(len(PROMPTS)))
    for index in range(6, len(PROMPTS)):
        assert results[index] == want[index]
    assert engine.scheduler.pool.num_available == free
    assert not engine.scheduler.has_work


def test_a_failed_device_call_reaches_every_caller_and_the_engine_goes_on():
    engine = make_engine()
    run(sample(engine, PROMPTS[0]))

    def _broken(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    whole = engine.device._programs
    engine.device._programs = dict.fromkeys(whole, _broken)

    async def _both():
        tasks = [sample(engine, p) for p in PROMPTS[:2]]
        return await asyncio.gather(*tasks, return_exceptions=True)

    errors = asyncio.run(_both())
    assert [e.kind for e in errors] == [FailureKind.SAMPLER] * 2
    assert all(isinstance(e, WorldError) and "out of memory" in str(e) for e in errors)
    engine.device._programs = whole
    assert run(sample(engine, PROMPTS[0])) == run(sample(make_engine(), PROMPTS[0]))


def test_compilations_are_bounded_over_twenty_ragged_batches():
    engine = make_engine()
    engine.device._programs = {}
    rng = np.random.default_rng(0)
    for batch in range(20):
        lengths = rng.integers(1, 41, int(rng.integers(1, 30)))
        prompts = make_prompts(lengths, seed=batch)
        run(*(sample(engine, p, str(i), max_tokens=20) for i, p in enumerate(prompts)))
    assert engine.metrics.compilations <= 2 * len(SETTINGS.buckets)
    kinds = {kind for kind, _ in engine.device._programs}
    assert kinds == {"prefill", "decode"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(prompt=()), "the prompt is empty"),
        (dict(prompt=(1,) * 60), "60 prompt tokens and max_tokens=12 exceed the context of 64"),
        (dict(prompt=(1, 96)), r"a prompt token is outside 0\.\.95"),
        (dict(temperature=-0.1), r"temperature=-0\.1 is below 0"),
        (dict(temperature=float("nan")), "temperature=nan is below 0"),
        (dict(max_tokens=0), "max_tokens=0 is below 1"),
        (dict(n=0), "n=0 is below 1"),
        (dict(top_p=0.0), r"top_p=0\.0 is outside"),
        (dict(top_k=-1), "top_k=-1 is below 0"),
        (dict(policy="teacher"), "policy 'teacher' is not 'student'"),
        (dict(stop=Stop(token_ids=(1, 2, 3, 4, 5))), "5 stop tokens"),
        (dict(stop=Stop(strings=("",))), "non-empty and end in ASCII"),
    ],
)
def test_bad_requests_are_named_and_harm_nobody(engine, changes, message):
    prompt = changes.pop("prompt", PROMPTS[0])
    with pytest.raises(ValueError, match=message) as error:
        run(sample(engine, prompt, "the question", **changes))
    assert "question='the question'" in str(error.value)
    assert not engine.scheduler.has_work


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(buckets=(32,)), "must rise and end at context=64"),
        (dict(buckets=(64, 32)), "must rise and end"),
        (dict(buckets=(30, 64)), "multiples of page_size=4"),
        (dict(num_pages=16), "num_pages=16 cannot hold one sequence of context=64"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_engine(dataclasses.replace(SETTINGS, **changes))
