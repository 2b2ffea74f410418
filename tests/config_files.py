"""The files in configs/, loaded as the flags do."""

import importlib.util

from conftest import ROOT

CONFIGS = {path.stem: path for path in sorted((ROOT / "configs").glob("*.py"))}


def load(name):
    """A config file as a module."""
    spec = importlib.util.spec_from_file_location(name, CONFIGS[name])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
