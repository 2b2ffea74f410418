"""Tree-GRPO (arXiv 2509.21240) in the toy world: one search agent learns from trees of episodes.

python launch/train.py --config=configs/toy_tree_grpo.py --workdir=runs/toy_tree_grpo

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import tree_grpo


def get_config():
    """METHODS 4.2; names in config_systems.py: train_multihopqa_tree_search.sh of AMAP-ML."""
    return tree_grpo(default_config())
