"""One program of a run, lowered and compiled in a process of its own, which ends when the text is
there: the compiler's threads cannot be stopped otherwise.

`python -m mas_jax.planning.worker` reads a pickled `Request` and writes an `Answer` as JSON into
the file that its argument names. Must not know: costs, tables.
"""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mas_jax.model import qwen3
from mas_jax.planning import chips, compiler, hlo, run_programs


@dataclass(frozen=True)
class Request:
    """Which program of which run: a name of `run_programs.Run.program_names`, and for "engine" how
    many layers."""

    config: dict[str, Any]
    model: qwen3.ModelConfig
    topology: str
    stage: str
    name: str
    layers: int


@dataclass(frozen=True)
class Answer:
    """The text, or what does not fit, as in `DoesNotFit`; or another error's words."""

    text: str = ""
    needed: float = 0.0
    available: float = 0.0
    with_arguments: bool = False
    error: str = ""


def optimised(run: run_programs.Run, name: str, layers: int = 0) -> tuple[hlo.Program, float]:
    """A program of a run after all passes, and seconds until it was there.

    Raises: DoesNotFit; RuntimeError with the last words of a process that failed.
    """
    request = Request(run.config.to_dict(), run.model, run.place.name, run.stage, name, layers)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mas_jax_plan_") as directory:
        path = Path(directory) / "answer"
        done = subprocess.run(
            [sys.executable, "-m", "mas_jax.planning.worker", str(path)],
            input=pickle.dumps(request), capture_output=True, check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )  # fmt: skip
        if not path.exists():
            words = done.stderr.decode(errors="replace").strip().splitlines()[-5:]
            raise RuntimeError(f"compiling {name!r} ended with code {done.returncode}: {words}")
        answer = Answer(**json.loads(path.read_text()))
    if answer.needed:
        raise compiler.DoesNotFit(
            answer.needed, answer.available, with_arguments=answer.with_arguments
        )
    if answer.error:
        raise RuntimeError(f"{name!r} could not be compiled: {answer.error}")
    return hlo.parse(answer.text), time.perf_counter() - start


def _answer(request: Request) -> Answer:
    place = chips.make_slice(request.topology)
    config = ConfigDict(request.config)
    run = run_programs.make_run(config, request.model, place, request.stage)
    try:
        if request.name == "engine":
            return Answer(compiler.program_text(run_programs.lower_engine(run, request.layers)))
        return Answer(compiler.program_text(run.lower[request.name]()))
    except compiler.DoesNotFit as error:
        return Answer(
            needed=error.needed, available=error.available, with_arguments=error.with_arguments
        )
    except (ValueError, RuntimeError) as error:
        return Answer(error=f"{type(error).__name__}: {str(error)[:2000]}")


def main() -> None:
    """Reads a request, writes the answer, and ends whatever the compiler still does."""
    compiler.start_compiler()
    answer = _answer(pickle.load(sys.stdin.buffer))
    Path(sys.argv[1]).write_text(json.dumps(dataclasses.asdict(answer)))
    compiler.leave(0)


if __name__ == "__main__":
    main()
