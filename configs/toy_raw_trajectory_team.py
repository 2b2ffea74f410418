"""The toy world's single agent imitates the raw trajectories of the offline multi-agent system.

python launch/train.py --config=configs/toy_raw_trajectory_team.py \
    --workdir=runs/toy_raw_trajectory_team --config.trajectories=runs/protocols.jsonl

Two CPU cores; minutes and accuracy not measured. The file is made by launch/build_protocols.py
with --config=configs/toy.py --oracle=plain.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import raw_trajectory


def get_config():
    """METHODS 2.6, "raw trajectory (MAS)": two to six searches; the agent itself has three."""
    return raw_trajectory(default_config(), "runs/protocols.jsonl")
