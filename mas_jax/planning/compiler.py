"""Compiles for TPUs that this machine has not got, and reads what came out.

libtpu writes the program as text into a directory when it is told so before it is loaded, so a
process that plans calls `start_compiler` first of all. The text is there after a tenth of the
compiler's work: the rest makes machine code of it (95% of all samples of a layer's compilation),
which a plan does not need. Must not know: models, configs.
"""

import atexit
import os
import re
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import jax

from mas_jax.model import sharding
from mas_jax.planning import hlo

POLL_S = 0.3


class DoesNotFit(Exception):
    """The compiler found no way to run the program in a device's memory. needed: bytes, those of
    the arguments included or not."""

    def __init__(self, needed: float, available: float, *, with_arguments: bool) -> None:
        super().__init__(f"needs {needed / 2**30:.1f} of {available / 2**30:.1f} GiB")
        self.needed, self.available, self.with_arguments = needed, available, with_arguments


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
    # what it would ask for; slices are named, so that any answer does, and without one it complains
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # there are no chips to keep others from
    # the label that no pass has: of all that can be dumped, the optimised program alone
    os.environ["LIBTPU_INIT_ARGS"] = sharding.tpu_flags(
        f"--xla_jf_dump_to={_directory} --xla_jf_dump_llo_text=false "
        "--xla_jf_dump_llo_pass_label_regex=^$"
    )
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")


def program_text(lowered: jax.stages.Lowered) -> str:
    """The text of the program after all passes, when the compiler begins with machine code.

    That goes on in a thread that nothing stops, so the process should end by `leave` soon.
    Raises: DoesNotFit; RuntimeError without `start_compiler`.
    """
    directory, raised = _empty_directory(), []

    def _compile() -> None:
        try:
            lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=_compile, daemon=True)
    thread.start()
    text, known = "", None
    while thread.is_alive() and not (text and text == known):
        time.sleep(POLL_S)
        known, text = text, _largest(directory)
    thread.join(POLL_S)  # what does not fit is found out here
    text = _largest(directory)
    if raised:
        error = _named(raised[0])
        # with the text there it is only machine code that failed: for some of a slice's devices,
        # as an engine's are, libtpu makes none
        if not text or isinstance(error, DoesNotFit):
            raise error from raised[0]
    return text


def leave(code: int) -> None:
    """Ends the process at once, whatever its threads do."""
    if _directory is not None:
        shutil.rmtree(_directory, ignore_errors=True)
    os._exit(code)


def compile_for_tpu(lowered: jax.stages.Lowered) -> Compiled:
    """The program compiled to its end for the devices that it was lowered for, with the compiler's
    own account of memory. Raises: DoesNotFit; RuntimeError without `start_compiler`.
    """
    directory, start = _empty_directory(), time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise _named(error) from error
    m = compiled.memory_analysis()
    return Compiled(
        program=hlo.parse(_largest(directory)),
        memory=Memory(
            arguments=m.argument_size_in_bytes,
            results=m.output_size_in_bytes - m.alias_size_in_bytes,
            temporaries=m.temp_size_in_bytes,
            code=m.generated_code_size_in_bytes,
        ),
        seconds=time.perf_counter() - start,
    )


def _empty_directory() -> Path:
    if _directory is None:
        raise RuntimeError("call compiler.start_compiler() before anything else of jax")
    for old in _directory.iterdir():
        old.unlink()
    return _directory


def _largest(directory: Path) -> str:
    """The largest whole text: of the program, not of a small one on its way; "" for none."""
    texts = [path.read_text() for path in directory.glob("*-hlo.txt")]
    whole = [text for text in texts if "\nENTRY " in text and text.rstrip().endswith("}")]
    return max(whole, key=len, default="")


def _named(error: jax.errors.JaxRuntimeError) -> Exception:
    """`DoesNotFit` where the compiler says so, else the error."""
    unit = {"G": 2**30, "M": 2**20}
    for pattern, with_arguments in (
        (r"Used ([\d.]+)([GM]) of ([\d.]+)([GM]) hbm", True),
        (r"temporaries \(([\d.]+)([GM])\) exceeds available HBM \(([\d.]+)([GM])\)", False),
    ):
        if found := re.search(pattern, str(error)):
            needed, available = (float(found[i]) * unit[found[i + 1]] for i in (1, 3))
            return DoesNotFit(needed, available, with_arguments=with_arguments)
    return error
