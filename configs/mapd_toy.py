"""MAPD in the toy world: GRPO and the exact KL to the same policy that reads a protocol.

python launch/train.py --config=configs/mapd_toy.py --workdir=runs/mapd_toy \
    --config.privileged.protocols=runs/protocols.jsonl

Two CPU cores; minutes and accuracy not measured. The file is made by launch/build_protocols.py
with --config=configs/toy.py --oracle=plain.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import mapd


def get_config():
    """METHODS 2.1 and 2.5; the world, the group's questions and the learning rate are the toy's."""
    return mapd(default_config())
