"""The toy world's cascade on the outcome by CISPO: clipped weights, no clipped gradients.

python launch/train.py --config=configs/toy_cispo.py --workdir=runs/toy_cispo

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import grpo_cascade


def get_config():
    """No lower bound (arXiv 2506.13585); the upper one, twice as likely, is our own choice."""
    config = grpo_cascade(default_config())
    for row in config.stages.grpo.programme.values():
        row.update(dict(policy_loss="cispo", clip_low=0.0, clip_high=1.0))
    config.train.updates_per_batch = 2  # in the first of a batch all ratios are 1
    return config
