"""The toy world's single agent by outcome GRPO alone, as MAPD has it.

python launch/train.py --config=configs/toy_protocol_grpo.py --workdir=runs/toy_protocol_grpo \
    --config.privileged.protocols=runs/protocols.jsonl

Two CPU cores; minutes and accuracy not measured. The file is made by launch/build_protocols.py
with --config=configs/toy.py --oracle=plain.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import protocol_grpo


def get_config():
    """mapd_toy.py without its privileged branch; no protocols are read."""
    return protocol_grpo(default_config())
