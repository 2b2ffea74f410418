"""The toy world's cascade on the outcome alone, by GRPO.

python launch/train.py --config=configs/toy_grpo_cascade.py --workdir=runs/toy_grpo_cascade

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import grpo_cascade


def get_config():
    """Stage I of toy.py."""
    return grpo_cascade(default_config())
