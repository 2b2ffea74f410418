"""How long a step's searches take, and how much of that the engines stand still.

Searches run in threads or on a server while the engines go on, so most of their time should cost
nothing. Must not know: what is searched, what computes.
"""

import time
from collections.abc import Awaitable, Callable


class SearchTime:
    """A search that is timed: equal and overlapping moments of several searches count once.

    device_s: seconds so far in which the engines computed, in the mean over them and the call under
    way included; None where nobody counts them. Of one event loop.
    """

    def __init__(
        self, search: Callable[..., Awaitable[list]], device_s: Callable[[], float | None]
    ) -> None:
        self._search, self._device_s = search, device_s
        self._num_open = 0
        self._began: tuple[float, float | None] = (0.0, None)
        self.seconds, self.idle_s = 0.0, 0.0

    async def search(self, queries: list[str], k: int) -> list:
        """The search's own answers."""
        if not self._num_open:
            self._began = time.perf_counter(), self._device_s()
        self._num_open += 1
        try:
            return await self._search(queries, k)
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._add()

    def _add(self) -> None:
        """Counts the stretch that ends now."""
        began, computed_s = self._began
        seconds = time.perf_counter() - began
        self.seconds += seconds
        if computed_s is not None:
            self.idle_s += max(0.0, seconds - (self._device_s() - computed_s))

    def metrics(self, step_s: float) -> dict[str, float]:
        """Shares of a step: search_frac, in which a search was under way, and search_idle_frac, of
        that what the engines did not compute, a part of host_frac. The second is the most that
        searching can have cost: an engine may have waited for something else as well. None of both
        where nobody counts what the engines compute."""
        if self._device_s() is None:
            return {}
        return {
            "time/search_frac": self.seconds / step_s,
            "time/search_idle_frac": self.idle_s / step_s,
        }
