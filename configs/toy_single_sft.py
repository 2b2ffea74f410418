"""The toy world's script teaches one search agent, which the shipped policy has never been.

python launch/train.py --config=configs/toy_single_sft.py --workdir=runs/toy_single_sft

Two CPU cores, about 7 minutes; after it all actions are valid and a fifth of the answers right
(48 episodes of 8 training questions).
"""

from mas_jax.config import default_config, single_agent


def get_config():
    """A start for toy_tree_grpo.py: few steps, so that something is left to learn."""
    config = default_config()
    single_agent(config, "sft", advantages=(), policy_loss="sft", kl_coef=0.0)
    config.stages.sft.update(dict(sampler="oracle", steps=20))
    # group, candidates and drift as in sft_cascade
    config.train.update(dict(questions=64, group_size=1, candidates=1, drift_frac=0.0))
    config.train.optimizer.learning_rate = 1e-3
    return config
