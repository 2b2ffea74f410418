"""The toy world's single search agent by Search-R1: outcome GRPO.

python launch/train.py --config=configs/toy_search_r1_grpo.py --workdir=runs/toy_search_r1_grpo

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import search_r1_grpo


def get_config():
    """METHODS 4.1; its v0.3, which also rewards the format, is outcome="format_tiers"."""
    return search_r1_grpo(default_config())
