"""The scheduler alone, its device calls played by hand: nothing is lost and everything ends."""

import numpy as np
import pytest

from mas_jax.records import SampleKey, Stop, StopReason
from mas_jax.sampling.pages import PagePool
from mas_jax.sampling.scheduler import Limits, Request, Scheduler, Sequence, State

KEY = SampleKey(0, "eval", 0, "q", 0, "searcher", 0)


def make_sequence(length: int, max_tokens: int, first: int = 0) -> Sequence:
    prompt = tuple(range(first, first + length))
    return Sequence(Request(prompt, KEY, max_tokens, 1.0, 1.0, 0, Stop()), 0, (0, 0))


def make_scheduler(num_pages: int, *, steps=4, page_size=4, buckets=(16, 64)) -> Scheduler:
    limits = Limits(
        page_size=page_size, prefill_blocks=4, decode_rows=4, decode_steps=steps, buckets=buckets
    )
    return Scheduler(PagePool(num_pages), limits)


def make_call(scheduler: Scheduler) -> str:
    """One device call whose every token is 7."""
    kind, bucket, work = scheduler.next_call()
    if kind == "prefill":
        for sequence in scheduler.prefilled(work):
            if not sequence.tokens:
                append(scheduler, sequence, 1)
        return kind
    for sequence in work:
        steps = scheduler.steps_left(sequence, bucket)
        assert 1 <= steps <= len(sequence.pages) * scheduler.limits.page_size - sequence.num_cached
        assert sequence.num_cached + steps <= bucket
        known = sequence.num_prompt + len(sequence.tokens) - sequence.num_cached - 1
        sequence.num_cached += steps
        append(scheduler, sequence, steps - min(known, steps))
    return kind


def append(scheduler, sequence, count):
    sequence.tokens += [7] * count
    if len(sequence.tokens) >= sequence.request.max_tokens:
        assert len(sequence.tokens) == sequence.request.max_tokens
        scheduler.finish(sequence, StopReason.LENGTH)


def play(scheduler, sequences, most_calls=2000) -> int:
    for sequence in sequences:
        scheduler.add(sequence)
    calls = 0
    while scheduler.has_work:
        make_call(scheduler)
        calls += 1
        assert calls < most_calls
    assert all(s.state is State.DONE for s in sequences)
    assert scheduler.pool.num_available == scheduler.pool.num_pages - 1
    return calls


def test_the_calls_of_two_sequences_by_hand():
    # prompts of 5 and 2 tokens: pages 2 and 1, three blocks in one prefill; 3 tokens each: the
    # first from the prefill, two more in one decode call
    scheduler = make_scheduler(40)
    for sequence in (make_sequence(5, 3), make_sequence(2, 3, first=50)):
        scheduler.add(sequence)
    kind, bucket, blocks = scheduler.next_call()
    assert (kind, bucket) == ("prefill", 16)
    assert [b.tokens for b in blocks] == [(0, 1, 2, 3), (4,), (50, 51)]
    assert blocks[0].sequence is None
    for sequence in scheduler.prefilled(blocks):
        append(scheduler, sequence, 1)
    assert make_call(scheduler) == "decode"
    assert not scheduler.has_work


@pytest.mark.parametrize("steps", [1, 4, 16])
def test_every_sequence_ends_in_a_pool_that_holds_one(steps):
    # three times the pages of a call's steps: the older one must not starve, nor all give way
    sequences = [make_sequence(50, 10), make_sequence(3, 12, 60), make_sequence(3, 12, 70)]
    scheduler = make_scheduler(17, steps=steps)
    play(scheduler, sequences)


def test_random_work_in_small_pools_ends_and_returns_every_page():
    rng = np.random.default_rng(0)
    for trial in range(150):
        steps, page_size = int(rng.choice([1, 3, 8, 20])), int(rng.choice([2, 4, 8]))
        scheduler = make_scheduler(
            64 // page_size + 1 + int(rng.integers(0, 12)), steps=steps, page_size=page_size
        )
        sequences = []
        for _ in range(int(rng.integers(1, 14))):
            length = int(rng.integers(1, 50))
            first = int(rng.choice([0, 0, rng.integers(100)]))  # many begin alike
            sequences.append(make_sequence(length, int(rng.integers(1, 64 - length)), first))
        calls = play(scheduler, sequences)
        assert calls > 0, trial


def test_cancelling_the_one_who_queued_a_shared_prefix_leaves_it_to_the_others():
    scheduler = make_scheduler(60)
    first, second = make_sequence(30, 4), make_sequence(30, 4)
    scheduler.add(first)
    scheduler.add(second)
    make_call(scheduler)  # four of the eight blocks of the first
    scheduler.cancel(first)
    assert second.state is State.PREFILLING
    play(scheduler, [])
    assert second.state is State.DONE
    assert scheduler.num_shared_tokens == 28


def test_cancelling_all_who_want_a_queued_page_takes_it_back():
    scheduler = make_scheduler(60)
    only = make_sequence(30, 4)
    scheduler.add(only)
    make_call(scheduler)
    scheduler.cancel(only)
    assert not scheduler.has_work
    assert scheduler.pool.num_available == 59
    again = make_sequence(30, 4)
    play(scheduler, [again])
    assert scheduler.num_shared_tokens == 16  # the four pages that had been filled


def test_prompts_come_first_while_a_decode_call_has_rows_to_fill():
    scheduler = make_scheduler(60)
    for first in (0, 10, 20):
        scheduler.add(make_sequence(2, 30, first))
    assert make_call(scheduler) == "prefill"
    scheduler.add(make_sequence(2, 30, 40))
    assert make_call(scheduler) == "prefill"  # three of four rows are ready
    scheduler.add(make_sequence(10, 30, 50))
    assert make_call(scheduler) == "decode"  # four


def test_others_are_what_could_take_a_rows_place():
    scheduler = make_scheduler(200)
    for first in range(0, 60, 10):
        scheduler.add(make_sequence(2, 30, first))
    scheduler.add(make_sequence(40, 20, 70))  # of the larger bucket
    scheduler.admit()
    while scheduler._blocks:
        for sequence in scheduler.prefilled(scheduler._prefill_candidates()[1]):
            sequence.tokens.append(7)
    _, bucket, work = scheduler.next_call()
    assert (bucket, len(work)) == (16, 4)
    assert scheduler.num_others(bucket, work) == 2
    scheduler.add(make_sequence(2, 30, 200))
    scheduler.admit()
    assert scheduler.num_others(bucket, work) == 3
