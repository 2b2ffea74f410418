"""Distillation in the toy world by the exact reverse KL over the vocabulary.

python launch/train.py --config=configs/toy_exact_kl.py --workdir=runs/toy_exact_kl

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config


def get_config():
    """toy.py, but the Searcher's loss is beta KL(student, teacher), not a sampled advantage."""
    config = default_config()
    searcher = config.stages.student.programme.searcher
    searcher.update(dict(advantages=(), divergence="reverse_kl", divergence_coef=searcher.beta))
    return config
