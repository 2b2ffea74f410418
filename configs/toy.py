"""The toy world on a laptop: untrained teams on held-out questions, and the two stages.

python launch/evaluate.py --config=configs/toy.py
python launch/train.py --config=configs/toy.py --workdir=runs/toy

Two CPU cores: 2 minutes, 31.7 and 33.9 of 100; about 8 minutes, README has what the demo printed.
"""

from mas_jax.config import default_config


def get_config():
    """The defaults: the shipped 1M-parameter policy, 560 test questions, four runs of each."""
    return default_config()
