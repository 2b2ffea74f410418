"""The cascade imitates scripted players.

python launch/train.py --config=configs/sft.py --workdir=runs/sft \
    --config.model.checkpoint=DIR

DIR: the checkpoint in the Hugging Face layout. One TPU v5p-32: 4 hosts of 4 chips.
Hours and accuracy not measured.
The script plays the toy world in the toy prompts; it has no other data to imitate.
"""

from mas_jax.config import pod_config
from mas_jax.config_systems import sft_cascade


def get_config():
    """Ten times the learning rate of the outcome's stages; validation is in the toy prompts too."""
    config = sft_cascade(pod_config())
    config.train.optimizer.learning_rate = 1e-5
    return config
