"""Distillation in the toy world by the generalised Jensen-Shannon divergence.

python launch/train.py --config=configs/toy_jsd.py --workdir=runs/toy_jsd

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config


def get_config():
    """toy.py, but the Searcher's loss is beta JSD(student, teacher) at 0.5, over the vocabulary."""
    config = default_config()
    searcher = config.stages.student.programme.searcher
    searcher.update(dict(advantages=(), divergence="jsd", divergence_coef=searcher.beta))
    return config
