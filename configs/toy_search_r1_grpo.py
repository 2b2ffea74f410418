"""The toy world's single search agent by Search-R1: outcome GRPO.

python launch/train.py --config=configs/toy_search_r1_grpo.py --workdir=runs/toy_search_r1_grpo

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config, single_agent


def get_config():
    """METHODS 4.1; its v0.3, which also rewards the format, is outcome="format_tiers"."""
    # 4 searches, then the answer (max_turns 4 in every public script); exact match of the last
    # answer in the response; KL loss 0.001, k3, to the start
    config = single_agent(default_config(), turns=5)
    config.train.group_size = 5  # n of the v0.2 script
    return config
