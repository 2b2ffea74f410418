"""What a launch script's process is set to before it does anything.

Must not know: configs, what the process is for.
"""

import logging
import os
import signal
import sys

import jax

from mas_jax.learning import hosts
from mas_jax.model import packaged, sharding

# a page of Orbax's for every save; a line for every request
TALKATIVE = ("absl", "httpx", "httpx2", "bm25s")


def start() -> None:
    """What every launch script does first: one log, an engine for each core of a CPU, and an end
    at SIGTERM, since what is not saved then is done again; `loop.train` saves first."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(hosts.interrupted_code()))
    logging.getLogger().setLevel(logging.INFO)
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    os.environ["LIBTPU_INIT_ARGS"] = sharding.tpu_flags(os.environ.get("LIBTPU_INIT_ARGS", ""))
    if "device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", min(2, os.cpu_count()))
    if not jax.config.jax_compilation_cache_dir:  # what one start compiled, the next one reads
        jax.config.update("jax_compilation_cache_dir", str(packaged.cache_directory() / "jax"))
