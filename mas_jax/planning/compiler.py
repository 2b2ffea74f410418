"""Compiles for TPUs that this machine has not got, and reads what came out.

libtpu writes the program as text into a directory when it is told so before it is loaded, so a
process that plans calls `start_compiler` first of all. Must not know: models, configs.
"""

import atexit
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax

from mas_jax.planning import hlo


class DoesNotFit(Exception):
    """The compiler found no way to run the program in a device's memory."""

    def __init__(self, needed: float, available: float) -> None:
        super().__init__(f"needs {needed / 2**30:.1f} of {available / 2**30:.1f} GiB")
        self.needed, self.available = needed, available


@dataclass(frozen=True)
class Memory:
    """Bytes on one device: arguments, results (those in an argument's place apart), temporaries,
    and the program itself."""

    arguments: int
    results: int
    temporaries: int
    code: int


@dataclass(frozen=True)
class Compiled:
    """A program after all passes, its memory, and how long the compiler took."""

    program: hlo.Program
    memory: Memory
    seconds: float


_directory: Path | None = None


def start_compiler() -> None:
    """Makes libtpu write its programs and jax compute on the CPU; before either is used."""
    global _directory
    if _directory is not None:
        return
    _directory = Path(tempfile.mkdtemp(prefix="mas_jax_plan_"))
    atexit.register(shutil.rmtree, _directory, ignore_errors=True)
    jax.config.update("jax_platforms", "cpu")
    # without it libtpu asks the cloud what machine this is, for minutes
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # there are no chips to keep others from
    # the label that no pass has: of all that can be dumped, the optimised program alone
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={_directory} --xla_jf_dump_llo_text=false "
        "--xla_jf_dump_llo_pass_label_regex=^$"
    )
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")


def compile_for_tpu(lowered: jax.stages.Lowered) -> Compiled:
    """The program compiled for the devices that it was lowered for.

    Raises: DoesNotFit; RuntimeError without `start_compiler`.
    """
    if _directory is None:
        raise RuntimeError("call compiler.start_compiler() before anything else of jax")
    for old in _directory.iterdir():
        old.unlink()
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        found = re.search(r"Used ([\d.]+)([GM]) of ([\d.]+)([GM]) hbm", str(error))
        if found is None:
            raise
        unit = {"G": 2**30, "M": 2**20}
        needed, available = (float(found[i]) * unit[found[i + 1]] for i in (1, 3))
        raise DoesNotFit(needed, available) from error
    seconds = time.perf_counter() - start
    texts = sorted(_directory.glob("*-hlo.txt"), key=lambda path: path.stat().st_size)
    m = compiled.memory_analysis()
    return Compiled(
        program=hlo.parse(texts[-1].read_text()),
        memory=Memory(
            arguments=m.argument_size_in_bytes,
            results=m.output_size_in_bytes - m.alias_size_in_bytes,
            temporaries=m.temp_size_in_bytes,
            code=m.generated_code_size_in_bytes,
        ),
        seconds=seconds,
    )
