"""MAPD with Qwen3-4B, not thinking: GRPO and the KL to the same policy that reads a protocol.

python launch/train.py --config=configs/mapd.py --workdir=runs/mapd \
    --config.model.checkpoint=DIR --config.privileged.protocols=FILE

DIR: the checkpoint in the Hugging Face layout; FILE: of launch/build_protocols.py.
One TPU v5p-32: 4 hosts of 4 chips. Hours and accuracy not measured.
Questions and passages are the toy world's, in the real prompts, unless config.data names others; so
no number of this run compares with a published one.
"""

from mas_jax.config import pod_config
from mas_jax.config_systems import mapd


def get_config():
    """METHODS 2.5: 128 questions x 8, learning rate 1e-6 with a warm-up of a tenth, 200 updates."""
    config = mapd(pod_config("Qwen3-4B", template="qwen3-not-thinking"))
    config.privileged.form = "json"
    config.train.optimizer.warmup_steps = 20
    config.train.view_length = config.train.row_length + 2048
    return config
