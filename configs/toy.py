"""The toy world on a laptop: untrained cascade and hierarchy on held-out questions.

python launch/evaluate.py --config=configs/toy.py
"""

from mas_jax.config import default_config


def get_config():
    """The defaults: the shipped 1M-parameter policy, 560 test questions, four runs of each."""
    return default_config()
