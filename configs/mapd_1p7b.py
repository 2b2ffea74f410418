"""MAPD with Qwen3-1.7B, not thinking: GRPO and the KL to the same policy that reads a protocol.

python launch/train.py --config=configs/mapd_1p7b.py --workdir=runs/mapd_1p7b \
    --config.model.checkpoint=DIR --config.privileged.protocols=FILE

DIR: the checkpoint in the Hugging Face layout; FILE: of launch/build_protocols.py.
One TPU v6e-8: a host of 8 chips. Hours and accuracy not measured.
Questions and passages are the toy world's, in the real prompts, unless config.data names others; so
no number of this run compares with a published one.
"""

from mas_jax.config import pod_config
from mas_jax.config_systems import mapd


def get_config():
    """As mapd.py."""
    config = mapd(
        pod_config("Qwen3-1.7B", template="qwen3-not-thinking", fsdp=8, tensor=1, num_pages=6144)
    )
    config.privileged.form = "json"
    config.train.optimizer.warmup_steps = 20
    config.train.view_length = config.train.row_length + 2048
    return config
