"""The toy world's cascade on the outcome by GSPO: one ratio for a sequence.

python launch/train.py --config=configs/toy_gspo.py --workdir=runs/toy_gspo

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import grpo_cascade


def get_config():
    """Clip range and mean over sequences as published (arXiv 2507.18071)."""
    config = grpo_cascade(default_config())
    for row in config.stages.grpo.programme.values():
        row.update(dict(policy_loss="gspo", aggregation="sequence", clip_low=3e-4, clip_high=4e-4))
    config.train.updates_per_batch = 2  # in the first of a batch all ratios are 1
    return config
