"""MultiAgent-OPD with Qwen3-1.7B, not thinking.

python launch/train.py --config=configs/opd_1p7b.py --workdir=runs/opd_1p7b \
    --config.model.checkpoint=DIR

DIR: the checkpoint in the Hugging Face layout. One TPU v6e-8: a host of 8 chips.
Hours and accuracy not measured.
Questions and passages are the toy world's, in the real prompts, unless config.data names others; so
no number of this run compares with a published one.
"""

from mas_jax.config import pod_config


def get_config():
    """As opd.py; a page is 1.8 MB, so that each chip's engine has a pool of 11 GB."""
    return pod_config("Qwen3-1.7B", template="qwen3-not-thinking", fsdp=8, tensor=1, num_pages=6144)
