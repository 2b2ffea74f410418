"""Progress of a long run with rate and time left: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class ProgressReport:
    """Shows how many of `total` are done, as a context manager; `advance` counts one more.

    done: how many were done before; they count as progress, not as speed. Where the console is no
    terminal, a line at the start, at the end, and whenever work ends interval_s after the last.
    """

    def __init__(
        self,
        label: str,
        *,
        total: int,
        done: int,
        console: Console,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label, self._total, self._console = label, total, console
        self._done = self._done_before = done
        self._interval_s, self._clock = interval_s, clock
        self._note = ""
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        self._start_s = self._clock()
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[s]}"),
            )
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(
                self._label, total=self._total, completed=self._done, s=self._status()
            )
            self._bar.start()
        else:
            self._print_line()
        return self

    def advance(self, note: str = "") -> None:
        """One more is done; `note` is shown after the rate and the time left."""
        self._done += 1
        self._note = note
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, s=self._status())
        elif self._clock() - self._printed_s >= self._interval_s:
            self._print_line()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._printed_done < self._done:
            self._print_line()

    def _print_line(self) -> None:
        self._printed_s, self._printed_done = self._clock(), self._done
        line = f"{self._label} {self._status()}"
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _status(self) -> str:
        """Such as "120/500, 3.1/s, 0:02:03 left, avg 0.31"; no rate before anything is done."""
        parts = [f"{self._done}/{self._total}"]
        elapsed_s = self._clock() - self._start_s
        num_now = self._done - self._done_before
        if num_now > 0 and elapsed_s > 0:
            left_s = (self._total - self._done) * elapsed_s / num_now
            parts += [f"{num_now / elapsed_s:.3g}/s", f"{timedelta(seconds=round(left_s))} left"]
        return ", ".join([*parts, self._note] if self._note else parts)
