"""Ablation in the toy world: the Searcher is distilled from the untrained policy.

python launch/train.py --config=configs/toy_untrained_teacher.py \
    --workdir=runs/toy_untrained_teacher

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config


def get_config():
    """toy.py, but for the Searcher's teacher; the others stay near the trained one."""
    config = default_config()
    config.stages.student.programme.searcher.teacher = "initial"
    return config
