"""The toy world's single agent imitates a teacher's trajectories, then goes on by PPO.

python launch/train.py --config=configs/toy_sft_ppo.py --workdir=runs/toy_sft_ppo \
    --config.trajectories=runs/protocols_alone.jsonl

Two CPU cores; minutes and accuracy not measured. The file is made by launch/build_protocols.py
with --config=configs/toy.py --oracle=plain --alone.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import sft_then_ppo


def get_config():
    """METHODS 2.6: two stages, each as long as those of the others; one learning rate for both."""
    return sft_then_ppo(default_config())
