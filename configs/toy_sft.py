"""The toy world's cascade imitates its scripted players.

python launch/train.py --config=configs/toy_sft.py --workdir=runs/toy_sft

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import sft_cascade


def get_config():
    """sft.py in the toy world."""
    return sft_cascade(default_config())
