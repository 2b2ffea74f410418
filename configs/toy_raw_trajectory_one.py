"""The toy world's single agent imitates the raw trajectories of one model.

python launch/train.py --config=configs/toy_raw_trajectory_one.py \
    --workdir=runs/toy_raw_trajectory_one --config.trajectories=runs/protocols_alone.jsonl

Two CPU cores; minutes and accuracy not measured. The file is made by launch/build_protocols.py
with --config=configs/toy.py --oracle=plain --alone.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import raw_trajectory


def get_config():
    """METHODS 2.6, "raw trajectory (one model)"; as many episodes a step as the others."""
    return raw_trajectory(default_config(), "runs/protocols_alone.jsonl")
