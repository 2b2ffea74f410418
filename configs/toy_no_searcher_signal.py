"""Ablation in the toy world: nothing is learned from the Searcher's tokens.

python launch/train.py --config=configs/toy_no_searcher_signal.py \
    --workdir=runs/toy_no_searcher_signal

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config


def get_config():
    """toy.py, but for the Searcher's distillation."""
    config = default_config()
    config.stages.student.programme.searcher.advantages = ()
    return config
