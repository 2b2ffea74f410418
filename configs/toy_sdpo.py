"""MAPD in the toy world with an average of the weights as privileged branch.

python launch/train.py --config=configs/toy_sdpo.py --workdir=runs/toy_sdpo \
    --config.privileged.protocols=runs/protocols.jsonl

Two CPU cores; minutes and accuracy not measured. The file is made by launch/build_protocols.py
with --config=configs/toy.py --oracle=plain.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import ema_branch


def get_config():
    """As SDPO: teacher.ema_decay is the average's."""
    return ema_branch(default_config())
