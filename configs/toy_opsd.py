"""The privileged branch alone in the toy world, without a reward.

python launch/train.py --config=configs/toy_opsd.py --workdir=runs/toy_opsd \
    --config.privileged.protocols=runs/protocols.jsonl

Two CPU cores; minutes and accuracy not measured. The file is made by launch/build_protocols.py
with --config=configs/toy.py --oracle=plain.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import opsd


def get_config():
    """METHODS 2.6, pure OPSD."""
    return opsd(default_config())
