"""The toy world's cascade on the outcome by PPO with a critic.

python launch/train.py --config=configs/toy_ppo_cascade.py --workdir=runs/toy_ppo_cascade

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import ppo_cascade


def get_config():
    """ppo_cascade.py in the toy world."""
    return ppo_cascade(default_config())
