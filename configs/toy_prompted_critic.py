"""Baseline in the toy world: a judge scores the Searcher's subtasks (M-GRPO's supervision).

python launch/train.py --config=configs/toy_prompted_critic.py --workdir=runs/toy_prompted_critic

Two CPU cores; minutes and accuracy not measured. The judge knows the world; a worse one:
--config.judge.accuracy=0.8, or --config.judge.kind=length --config.judge.length_bias=0.5.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import prompted_critic


def get_config():
    """toy.py, but for the Searcher of Stage II."""
    return prompted_critic(default_config())
