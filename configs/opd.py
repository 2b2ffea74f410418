"""MultiAgent-OPD: a cascade on the outcome, then a hierarchy whose Searcher it teaches.

python launch/train.py --config=configs/opd.py --workdir=runs/opd \
    --config.model.checkpoint=DIR

DIR: the checkpoint in the Hugging Face layout. One TPU v5p-32: 4 hosts of 4 chips.
Hours and accuracy not measured.
Questions and passages are the toy world's, in the real prompts, unless config.data names others; so
no number of this run compares with a published one.
"""

from mas_jax.config import pod_config


def get_config():
    """METHODS 1.1 and 1.3: each stage is 200 updates of 128 questions x 8 from the checkpoint."""
    return pod_config()
