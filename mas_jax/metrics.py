"""The numbers of a run: metrics.jsonl, TensorBoard and the console's progress.

A metric is named `stage/name`; its step is the optimizer's. Must not know: what a metric means.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

FILE = "metrics.jsonl"
_RESERVED = ("step", "nonfinite")  # keys of a line that are no metrics


class ProgressReport:
    """Progress of a long run with rate and time left: a bar on a terminal, plain lines elsewhere.

    A context manager that shows how many of `total` are done; `advance` counts one more.
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
        self.update(self._done + 1, note)

    def update(self, done: int, note: str = "") -> None:
        """So many are done in all."""
        self._done, self._note = done, note
        if self._bar is not None:
            self._bar.update(self._task, completed=done, s=self._status())
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


@contextmanager
def watch(
    total: int, *, label: str, console: Console, interval_s: float
) -> Iterator[Callable[[int], None]]:
    """A `ProgressReport` as a function of how many are done; give `build.build` a partial of it."""
    with ProgressReport(
        label, total=total, done=0, console=console, interval_s=interval_s
    ) as progress:
        yield progress.update


class Writer:
    """Writes a training run's metrics into `workdir` and its progress to the console.

    A context manager. Entering drops what the file and TensorBoard hold from start_step on, the
    first step that is to come, so that a resumed run has each step once. Steps count from 0, the
    console's label is the directory's name. active: False on processes other than the first:
    nothing is written or shown, and no file is touched.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        active: bool,
        console: Console,
        total_steps: int,
        start_step: int,
        log_interval_s: float,
    ) -> None:
        self._workdir, self._active = Path(workdir), active
        self._start_step = self._last_step = start_step
        self._total_steps = total_steps
        self._progress = ProgressReport(
            self._workdir.name,
            total=total_steps,
            done=start_step,
            console=console,
            interval_s=log_interval_s,
        )
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if not self._active:
            return self
        # here, since it imports torch where that is installed: seconds that others need not wait
        from tensorboardX import SummaryWriter

        self._workdir.mkdir(parents=True, exist_ok=True)
        cut_back(self._workdir, self._start_step)
        with self._stack as stack:
            path = self._workdir / FILE
            self._file = stack.enter_context(path.open("a", encoding="utf-8"))
            self._board = stack.enter_context(
                SummaryWriter(
                    str(self._workdir / "tensorboard"),
                    purge_step=self._start_step,
                    flush_secs=5,
                    # the name has whole seconds: a restart within one would truncate the file
                    filename_suffix=f".{time.time_ns()}",
                )
            )
            stack.enter_context(self._progress)
            self._stack = stack.pop_all()
        return self

    def write(self, step: int, values: Mapping[str, float], note: str = "") -> None:
        """Appends one line of the step's values; `note` is shown beside the progress.

        Raises: ValueError for a step before the last one, or a metric named step or nonfinite.
        """
        if not self._active:
            return
        if step < self._last_step:
            raise ValueError(f"step={step} after step {self._last_step}; steps never go back")
        self._last_step = step
        numbers = {name: float(value) for name, value in values.items()}
        self._file.write(_to_line(step, numbers))
        self._file.flush()
        for name, value in numbers.items():
            if math.isfinite(value):
                self._board.add_scalar(name, value, step)
        self._progress.update(min(step + 1, self._total_steps), note)

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)


def read(path: str | Path) -> list[dict]:
    """The lines of a metrics.jsonl as {"step": int, name: float}, in their order.

    A last line without its end, left by a killed process, is not there.
    Raises: ValueError that names the line for any other that is not valid.
    """
    lines = []
    for number, text in enumerate(_whole_lines(Path(path)), start=1):
        try:
            line = json.loads(text)
            nonfinite = {name: float(value) for name, value in line.pop("nonfinite", {}).items()}
            lines.append({"step": int(line.pop("step")), **line, **nonfinite})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{number} is no line of metrics: {error!r}") from error
    return lines


def cut_back(workdir: str | Path, step: int) -> None:
    """Drops from workdir's metrics.jsonl the lines of `step` and later, and a torn last line.

    The file is replaced at once or not at all; without one, nothing happens.
    """
    path = Path(workdir) / FILE
    if not path.exists():
        return
    pairs = zip(_whole_lines(path), read(path), strict=True)
    kept = [text for text, line in pairs if line["step"] < step]
    content = "".join(kept).encode()
    if len(content) == path.stat().st_size:
        return
    partial = path.with_suffix(".jsonl.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def short_note(values: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """A line for the console such as "reward 0.312, searches 2.1"; labels: metric -> its label.

    Metrics that are not among the values are left out.
    """
    shown = [f"{label} {_short(values[name])}" for name, label in labels.items() if name in values]
    return ", ".join(shown)


def _whole_lines(path: Path) -> list[str]:
    """Lines with their ends; bytes after the last end are dropped."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    return content[:end].decode().splitlines(keepends=True)


def _to_line(step: int, numbers: Mapping[str, float]) -> str:
    """Valid JSON in one line: numbers that JSON has no form for are null, and named with it."""
    for name in _RESERVED:
        if name in numbers:
            raise ValueError(f"a metric may not be named {name!r}; say stage/name")
    nonfinite = {name: str(x) for name, x in numbers.items() if not math.isfinite(x)}
    line = {"step": step, **numbers, **dict.fromkeys(nonfinite)}
    if nonfinite:
        line["nonfinite"] = nonfinite
    return json.dumps(line, allow_nan=False) + "\n"


def _short(value: float) -> str:
    """Three digits, and all that stand before the point."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
