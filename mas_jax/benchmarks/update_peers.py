"""Virtual environments of the peers, each with its own pinned packages, made when first needed."""

import logging
import subprocess
import sys
from pathlib import Path

ENVIRONMENTS = Path(__file__).parents[2] / ".cache" / "peers"
# TRL 1.16.0 takes 1.4 times as long here: without a GPU its head scores prompts and padding too
PACKAGES = {
    "trl": ("trl==0.29.1", "transformers==5.24.0", "torch==2.13.0", "requests==2.34.2"),
    "tunix": ("google-tunix==0.1.7", "jax==0.10.2", "flax==0.12.8", "optax==0.2.8"),
}


def interpreter(peer: str) -> str:
    """Path of the Python that has a peer's packages, made on the first call (1.5 GB each).

    Raises: subprocess.CalledProcessError if the environment or its packages cannot be had.
    """
    directory = ENVIRONMENTS / peer
    python, done = directory / "bin" / "python", directory / "packages.txt"
    wanted = "\n".join(PACKAGES[peer])
    if not done.is_file() or done.read_text() != wanted:
        logging.info("making %s for %s", directory, ", ".join(PACKAGES[peer]))
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[peer]], check=True)
        done.write_text(wanted)
    return str(python)
