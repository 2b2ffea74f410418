"""SDAR in the toy world: GRPO and a gated log-ratio to the privileged branch.

python launch/train.py --config=configs/toy_sdar.py --workdir=runs/toy_sdar \
    --config.privileged.protocols=runs/protocols.jsonl

Two CPU cores; minutes and accuracy not measured. The file is made by launch/build_protocols.py
with --config=configs/toy.py --oracle=plain.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import sdar


def get_config():
    """METHODS 2.7. WARNING: its teacher only weighs the policy's own tokens, see
    losses.gated_log_ratio."""
    return sdar(default_config())
