"""The paper's weight of the Searcher's distillation, 0.01, in the toy world, where 0.1 is usual.

python launch/train.py --config=configs/toy_paper_beta.py --workdir=runs/toy_paper_beta

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config


def get_config():
    """toy.py, but for beta."""
    config = default_config()
    config.stages.student.programme.searcher.beta = 0.01
    return config
