""""GRPO+OPSD" as SDAR publishes it, in the toy world.

python launch/train.py --config=configs/toy_grpo_opsd.py --workdir=runs/toy_grpo_opsd \
    --config.privileged.protocols=runs/protocols.jsonl

Two CPU cores; minutes and accuracy not measured. The file is made by launch/build_protocols.py
with --config=configs/toy.py --oracle=plain.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import grpo_opsd


def get_config():
    """METHODS 2.7, b = 0. WARNING: no teacher is in its gradient; the policy imitates itself."""
    return grpo_opsd(default_config())
