"""What of a step's searches the engines did not cover, with a clock that the test turns."""

import asyncio

import pytest

from mas_jax.learning import search_time
from mas_jax.learning.search_time import SearchTime


class Clock:
    """Seconds, and seconds in which engines computed; a search takes what it asks for."""

    def __init__(self) -> None:
        self.now, self.computed = 100.0, 40.0

    def perf_counter(self) -> float:
        return self.now

    def go(self, seconds: float, share: float) -> None:
        """Time passes, a share of it in the engines."""
        self.now += seconds
        self.computed += seconds * share


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(search_time, "time", made)
    return made


def test_what_the_engines_cover_costs_nothing_and_moments_count_once(clock):
    gates = {}

    async def _search(queries, k):
        gates[queries[0]] = asyncio.Event()
        await gates[queries[0]].wait()
        return [queries[0]] * k

    async def _play():
        timed = SearchTime(_search, lambda: clock.computed)
        first = asyncio.ensure_future(timed.search(["a"], 2))
        await asyncio.sleep(0)
        clock.go(3.0, 1.0)  # one search, the engines at work
        second = asyncio.ensure_future(timed.search(["b"], 1))
        await asyncio.sleep(0)
        clock.go(2.0, 0.5)  # two, and one of two engines waits
        gates["a"].set()
        assert await first == ["a", "a"]
        clock.go(1.0, 0.0)  # one, and both wait
        gates["b"].set()
        assert await second == ["b"]
        clock.go(4.0, 0.0)  # none
        return timed

    timed = asyncio.run(_play())
    # 3 + 2 + 1 s of ten, of which 0 + 1 + 1 in no engine
    assert timed.metrics(10.0) == pytest.approx(
        {"time/search_frac": 0.6, "time/search_idle_frac": 0.2}
    )


def test_a_search_that_fails_is_timed_too_and_still_fails(clock):
    async def _search(queries, k):
        clock.go(1.0, 0.25)
        raise ConnectionError("gone")

    timed = SearchTime(_search, lambda: clock.computed)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="gone"):
            asyncio.run(timed.search(["a"], 1))
    assert (timed.seconds, timed.idle_s) == (2.0, 1.5)


def test_where_nobody_counts_the_engines_nothing_is_said():
    async def _search(queries, k):
        return []

    timed = SearchTime(_search, lambda: None)
    asyncio.run(timed.search(["a"], 1))
    assert timed.metrics(10.0) == {}
