"""What a run was made with: versions, git revision, devices. Must not know: configs."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

import jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers", "scann")


def describe() -> dict:
    """Versions of Python and packages, git revision ("" outside a checkout), and the devices."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    return {
        "python": platform.python_version(),
        "packages": versions,
        "git": _git("rev-parse", "HEAD"),
        "changed_files": _git("status", "--porcelain").splitlines(),
        "devices": sorted({device.device_kind for device in jax.devices()}),
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
    }


def _git(*arguments: str) -> str:
    """Output of a git command in this checkout, "" where there is none."""
    place = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=place, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
