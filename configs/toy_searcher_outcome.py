"""Ablation in the toy world: the hierarchy's Searcher learns from the outcome.

python launch/train.py --config=configs/toy_searcher_outcome.py --workdir=runs/toy_searcher_outcome

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config


def get_config():
    """toy.py, but the Searcher's row of Stage I in Stage II: no distillation."""
    config = default_config()
    searcher, outcome = (config.stages[x].programme.searcher for x in ("student", "teacher"))
    for key in ("advantages", "behaviour", "entropy_coef"):
        searcher[key] = outcome[key]
    return config
