"""MAPD in the toy world with protocols that one model wrote alone.

python launch/train.py --config=configs/toy_protocol_one.py --workdir=runs/toy_protocol_one \
    --config.privileged.protocols=runs/protocols_alone.jsonl

Two CPU cores; minutes and accuracy not measured. The file is made by launch/build_protocols.py
with --config=configs/toy.py --oracle=plain --alone.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import protocol_one


def get_config():
    """METHODS 2.6, "protocol (one model)": mapd_toy.py with another file."""
    return protocol_one(default_config())
