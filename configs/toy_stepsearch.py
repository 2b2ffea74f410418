"""The toy world's single search agent by StepSearch: PPO with a reward for each search.

python launch/train.py --config=configs/toy_stepsearch.py --workdir=runs/toy_stepsearch

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import stepsearch


def get_config():
    """METHODS 4.2: a search earns its information gain less its redundancy, the end F1 + 0.618 F1
    of the search keys; PPO with GAE; otherwise as Search-R1, whose code it builds on.

    Differs: as toy_search_r1_ppo.py; key words are those of the question's own decomposition.
    """
    return stepsearch(default_config())
