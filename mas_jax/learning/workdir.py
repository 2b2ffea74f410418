"""A run's directory: one run at a time writes there. Must not know: what it writes."""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

LOCK_FILE = ".lock"

logger = logging.getLogger(__name__)


class InUse(Exception):
    """Another run writes to this directory."""


@contextmanager
def only_run(workdir: Path) -> Iterator[None]:
    """Keeps other runs out of `workdir`, which it makes; the kernel lets go of a killed run's lock.

    Of several processes the first one locks. A file system without locks is a warning.
    Raises: InUse.
    """
    if jax.process_index() != 0:
        yield
        return
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InUse(
                f"another run is writing to {workdir}; wait for it, stop it, or name another "
                "directory"
            ) from error
        except OSError as error:
            logger.warning("%s: no locks here (%s); start no second run in it", workdir, error)
        yield
