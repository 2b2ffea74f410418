"""The toy world's single search agent by GiGPO: advantages of episodes and of turns.

python launch/train.py --config=configs/toy_gigpo.py --workdir=runs/toy_gigpo

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import gigpo


def get_config():
    """METHODS 4.2: A = A_episode + w A_step, w 1, discount 0.95; anchor groups are observations of
    similarity 0.9 or more; group 5, max_steps 4; KL 0.001 to the start (verl-agent's script).

    Differs: the episodes' mean and deviation are over episodes, as in the paper; that code counts
    an episode once a turn. No penalty for invalid actions.
    """
    return gigpo(default_config())
