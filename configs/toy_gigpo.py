"""The toy world's single search agent by GiGPO: advantages of episodes and of turns.

python launch/train.py --config=configs/toy_gigpo.py --workdir=runs/toy_gigpo

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config, single_agent


def get_config():
    """METHODS 4.2: A = A_episode + w A_step, w 1, discount 0.95; anchor groups are observations of
    similarity 0.9 or more; group 5, max_steps 4; KL 0.001 to the start (verl-agent's script).

    Differs: the episodes' mean and deviation are over episodes, as in the paper; that code counts
    an episode once a turn. No penalty for invalid actions.
    """
    config = single_agent(
        default_config(),
        turns=4,
        advantages=("group", "step"),
        step_weight=1.0,
        step_discount=0.95,
        step_similarity=0.9,
    )
    config.train.group_size = 5
    return config
