"""The toy world's single agent follows a better one's whole distribution on its own rollouts.

python launch/train.py --config=configs/toy_logit_matching.py --workdir=runs/toy_logit_matching \
    --config.teacher.checkpoint=DIR

Two CPU cores; minutes and accuracy not measured. DIR: another toy agent in the Hugging Face layout,
such as runs/toy_protocol_grpo/agent/policy of configs/toy_protocol_grpo.py.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import logit_matching


def get_config():
    """Distillation from an open teacher of the same vocabulary; nothing is privileged."""
    return logit_matching(default_config())
