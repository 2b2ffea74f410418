"""metrics.jsonl, TensorBoard files and progress: what is written, cut back and shown."""

import io
import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto import event_pb2

from mas_jax import metrics
from mas_jax.metrics import ProgressReport, Writer


def open_writer(workdir: Path, *, start_step: int = 0, **options) -> Writer:
    settings = dict(
        active=True, console=Console(file=io.StringIO()), total_steps=10, log_interval_s=1e9
    )
    return Writer(workdir, start_step=start_step, **{**settings, **options})


def board_events(workdir: Path) -> list[event_pb2.Event]:
    """All events of a TensorBoard directory in the order in which TensorBoard reads its files.

    A record is length (8 bytes), a checksum (4), the event, a checksum (4).
    """
    events = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            events.append(event_pb2.Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return events


def shown_on_board(workdir: Path) -> dict[str, dict[int, float]]:
    """Scalars by name and step after TensorBoard's rule: a session's start hides later steps."""
    shown: dict[str, dict[int, float]] = {}
    for event in board_events(workdir):
        if event.HasField("session_log"):
            for name in shown:
                shown[name] = {s: x for s, x in shown[name].items() if s < event.step}
        for value in event.summary.value:
            assert event.step not in shown.setdefault(value.tag, {})
            shown[value.tag][event.step] = value.simple_value
    return shown


def test_a_step_is_one_line_and_one_scalar_a_metric(tmp_path):
    with open_writer(tmp_path / "run") as writer:
        writer.write(0, {"reward": 0.25, "rollout/searches": 2})
        # on disk before the writer is closed
        assert metrics.read(tmp_path / "run/metrics.jsonl") == [
            {"step": 0, "reward": 0.25, "rollout/searches": 2.0}
        ]
        writer.write(1, {"reward": np.float32(0.5)})
    text = (tmp_path / "run/metrics.jsonl").read_text()
    assert text == (
        '{"step": 0, "reward": 0.25, "rollout/searches": 2.0}\n{"step": 1, "reward": 0.5}\n'
    )
    assert shown_on_board(tmp_path / "run") == {
        "reward": {0: 0.25, 1: 0.5},
        "rollout/searches": {0: 2.0},
    }


def test_numbers_that_json_lacks_are_null_there_and_themselves_when_read(tmp_path):
    values = {"a": math.nan, "b": 1.5, "c": -math.inf, "d": math.inf}
    with open_writer(tmp_path) as writer:
        writer.write(3, values)

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=refuse)
    assert line == {
        **{"step": 3, "a": None, "b": 1.5, "c": None, "d": None},
        "nonfinite": {"a": "nan", "c": "-inf", "d": "inf"},
    }
    (got,) = metrics.read(tmp_path / "metrics.jsonl")
    assert math.isnan(got.pop("a"))
    assert got == {"step": 3, "b": 1.5, "c": -math.inf, "d": math.inf}


def test_a_resumed_run_has_each_step_once(tmp_path):
    def value(step: int, session: int) -> dict[str, float]:
        return {"reward": step + session / 4}

    with open_writer(tmp_path) as writer:
        for step in range(5):
            writer.write(step, value(step, 0))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # killed while writing
    with open_writer(tmp_path, start_step=3) as writer:
        for step in range(3, 7):
            writer.write(step, value(step, 1))
    expected = {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.25, 4: 4.25, 5: 5.25, 6: 6.25}
    lines = metrics.read(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["reward"]) for line in lines] == list(expected.items())
    assert shown_on_board(tmp_path) == {"reward": expected}
    # from the start in the same directory
    with open_writer(tmp_path) as writer:
        writer.write(0, value(0, 2))
    assert metrics.read(tmp_path / "metrics.jsonl") == [{"step": 0, "reward": 0.5}]
    assert shown_on_board(tmp_path) == {"reward": {0: 0.5}}


@pytest.mark.parametrize("num_bytes", [0, 1, 10, 11, 12, 13, 24, 25, 30, 35, 36])
def test_cutting_back_keeps_the_whole_lines_before_the_step(tmp_path, num_bytes):
    # three lines of 12 bytes, and a kill after any number of them
    content = b"".join(b'{"step": %d}\n' % step for step in range(3))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content[:num_bytes])
    whole = num_bytes // 12
    assert [line["step"] for line in metrics.read(path)] == list(range(whole))
    metrics.cut_back(tmp_path, 2)
    assert path.read_bytes() == content[: 12 * min(whole, 2)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_cutting_back_without_a_file_does_nothing(tmp_path):
    metrics.cut_back(tmp_path, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bad", ['{"reward": 1}', "[]", "5", '{"step": 1', "0x"])
def test_a_damaged_line_in_the_middle_is_named_and_nothing_is_cut(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{bad}\n{{"step": 2}}\n')
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is no line of metrics"):
        metrics.read(path)
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        metrics.cut_back(tmp_path, 1)
    assert path.read_bytes() == before


def test_steps_that_go_back_and_reserved_names_are_refused(tmp_path):
    with open_writer(tmp_path, start_step=4) as writer:
        with pytest.raises(ValueError, match="step=3 after step 4"):
            writer.write(3, {})
        with pytest.raises(ValueError, match="'step'"):
            writer.write(4, {"step": 1.0})
        writer.write(5, {"a": 1.0})
        with pytest.raises(ValueError, match="step=4 after step 5"):
            writer.write(4, {"a": 1.0})
        writer.write(5, {"b": 2.0})
    assert metrics.read(tmp_path / "metrics.jsonl") == [
        {"step": 5, "a": 1.0},
        {"step": 5, "b": 2.0},
    ]


def test_an_inactive_writer_leaves_no_trace(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    console = Console(file=io.StringIO())
    with open_writer(tmp_path, active=False, console=console) as writer:
        writer.write(0, {"reward": 1.0}, "reward 1")
    with open_writer(tmp_path / "other", active=False, console=console) as writer:
        writer.write(0, {"reward": 1.0})
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 7}\n'
    assert console.file.getvalue() == ""


def test_the_console_has_the_run_its_steps_and_the_note(tmp_path):
    console = Console(file=io.StringIO())
    options = dict(console=console, start_step=8, log_interval_s=0)
    with pytest.raises(KeyboardInterrupt), open_writer(tmp_path / "stage_1", **options) as writer:
        writer.write(8, {}, "reward 0.3")
        writer.write(9, {}, "reward 0.4")
        writer.write(10, {}, "held out")  # after the last update: no eleventh step of ten
        raise KeyboardInterrupt
    parts = [line.split(", ") for line in console.file.getvalue().splitlines()]
    assert [(line[0], line[-1]) for line in parts] == [
        ("stage_1 8/10", "stage_1 8/10"),
        ("stage_1 9/10", "reward 0.3"),
        ("stage_1 10/10", "reward 0.4"),
        ("stage_1 10/10", "held out"),
    ]


def test_a_note_shows_the_chosen_metrics_that_are_there():
    values = {"rollout/reward": 0.31249, "tokens_per_s": 12345.0, "other": 1.0}
    labels = {"rollout/reward": "reward", "em": "em", "tokens_per_s": "tokens/s"}
    assert metrics.short_note(values, labels) == "reward 0.312, tokens/s 12345"
    assert metrics.short_note({}, labels) == ""


def test_progress_in_a_log_file_by_hand():
    console = Console(file=io.StringIO(), width=20)
    now = [100.0]
    report = ProgressReport(
        "cascade", total=1010, done=10, console=console, interval_s=30, clock=lambda: now[0]
    )
    with report as progress:
        for now[0] in (110.0, 129.9, 130.0, 159.9, 161.0, 162.0):
            progress.advance(f"[b]at {now[0]}")
    assert console.file.getvalue().split("\n") == [
        "cascade 10/1010",
        # 3 in 30 s, 997 to go at 10 s each; the ten before are no speed
        "cascade 13/1010, 0.1/s, 2:46:10 left, [b]at 130.0",
        # 5 in 61 s, 995 to go at 12.2 s each
        "cascade 15/1010, 0.082/s, 3:22:19 left, [b]at 161.0",
        # 6 in 62 s, 994 to go at 10.33 s each
        "cascade 16/1010, 0.0968/s, 2:51:11 left, [b]at 162.0",
        "",
    ]


def test_progress_prints_no_line_twice_and_survives_an_error():
    console = Console(file=io.StringIO())
    options = dict(total=2, done=0, console=console, interval_s=0)
    with ProgressReport("a", **options) as progress:
        progress.advance()
        progress.advance()
    with pytest.raises(ZeroDivisionError), ProgressReport("b", **options) as progress:
        progress.advance()
        raise ZeroDivisionError
    lines = console.file.getvalue().split("\n")
    assert [line.split(",")[0] for line in lines] == [
        "a 0/2",
        "a 1/2",
        "a 2/2",
        "b 0/2",
        "b 1/2",
        "",
    ]


def test_progress_on_a_terminal_is_one_bar():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with ProgressReport("cascade", total=4, done=1, console=console, interval_s=0) as progress:
        progress.advance("avg 0.5")
        progress.advance("avg 0.6")
    shown = console.file.getvalue()
    assert "3/4" in shown and "avg 0.6" in shown and "━" in shown
    assert shown.count("\n") <= 2
