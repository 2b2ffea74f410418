"""The cascade on the outcome alone: MultiAgent-OPD's Stage I, its baseline C-MAS + RL.

python launch/train.py --config=configs/grpo_cascade.py --workdir=runs/grpo_cascade \
    --config.model.checkpoint=DIR

DIR: the checkpoint in the Hugging Face layout. One TPU v5p-32: 4 hosts of 4 chips.
Hours and accuracy not measured.
Questions and passages are the toy world's, in the real prompts, unless config.data names others; so
no number of this run compares with a published one.
"""

from mas_jax.config import pod_config
from mas_jax.config_systems import grpo_cascade


def get_config():
    """One stage of opd.py's sizes."""
    return grpo_cascade(pod_config())
