"""The cascade on the outcome by PPO with a critic.

python launch/train.py --config=configs/ppo_cascade.py --workdir=runs/ppo_cascade \
    --config.model.checkpoint=DIR

DIR: the checkpoint in the Hugging Face layout. One TPU v5p-32: 4 hosts of 4 chips.
Hours and accuracy not measured.
Questions and passages are the toy world's, in the real prompts, unless config.data names others; so
no number of this run compares with a published one.
"""

from mas_jax.config import pod_config
from mas_jax.config_systems import ppo_cascade


def get_config():
    """The critic is a value head on the policy's backbone and learns at the policy's rate."""
    return ppo_cascade(pod_config())
