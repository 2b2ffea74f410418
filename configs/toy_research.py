"""The toy world's single search agent by ReSearch: GRPO on F1 and the format.

python launch/train.py --config=configs/toy_research.py --workdir=runs/toy_research

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import research


def get_config():
    """METHODS 4.2: F1 if above 0, else 0.1 if the format is valid, else 0; KL 0.001 to the start.

    Differs: no box inside the answer's tags. The group's size is the toy's.
    """
    return research(default_config())
