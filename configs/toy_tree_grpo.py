"""Tree-GRPO (arXiv 2509.21240) in the toy world: one search agent learns from trees of episodes.

python launch/train.py --config=configs/toy_tree_grpo.py --workdir=runs/toy_tree_grpo

Two CPU cores; minutes and accuracy not measured.
"""

from mas_jax.config import default_config, single_agent


def get_config():
    """METHODS 4.2; names in comments: train_multihopqa_tree_search.sh of AMAP-ML/Tree-GRPO."""
    config = single_agent(
        default_config(), turns=4,  # max_turns=3, and then an answer
        advantages=("tree",), tree_form="sum",  # algorithm.adv_estimator=tree
        # structure_format_score=0.2, final_format_score=0.1
        behaviour="format", behaviour_weight=0.2,
        kl_coef=1e-3, kl_estimator="k3",  # kl_loss_coef=0.001, kl_loss_type=low_var_kl
    )  # fmt: skip
    config.train.tree.update(dict(trees=2, expansions=2, rounds=1))  # tree_search_m, _n, _l
    config.train.group_size = 6  # tree_search_k=3: all leaves of both trees
    return config
