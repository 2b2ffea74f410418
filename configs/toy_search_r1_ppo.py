"""The toy world's single search agent by Search-R1: PPO with a critic.

python launch/train.py --config=configs/toy_search_r1_ppo.py --workdir=runs/toy_search_r1_ppo

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import search_r1_ppo


def get_config():
    """METHODS 4.1: GAE with discount and decay 1, KL 0.001 to the start.

    Differs: one backbone for policy and critic, at one rate (there a critic of its own, at 10 times
    the policy's); the KL is a loss, not part of each token's reward.
    """
    return search_r1_ppo(default_config())
