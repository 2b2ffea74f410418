"""Ablation in the toy world: the hierarchy's Searcher learns from the outcome.

python launch/train.py --config=configs/toy_searcher_outcome.py --workdir=runs/toy_searcher_outcome

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config, role


def get_config():
    """toy.py, but the Searcher's row of Stage I in Stage II: no distillation."""
    config = default_config()
    config.stages.student.programme.searcher = role(behaviour="search_activity")
    return config
