"""Ablation in the toy world: the Answerer's candidates are compared within one context.

python launch/train.py --config=configs/toy_answerer_by_context.py \
    --workdir=runs/toy_answerer_by_context

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config


def get_config():
    """toy.py, where they are compared over all contexts of a question, but in both stages so."""
    config = default_config()
    for stage in config.stages.values():
        stage.programme.answerer.group_by = "context"
    return config
