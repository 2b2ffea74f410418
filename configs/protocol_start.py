"""The starting policy of the MAPD study: the study's, which has also seen protocols.

python launch/pretrain_toy.py --config=configs/protocol_start.py --out=DIR

Minutes on one core; it is shipped as the asset protocol_policy.
"""

from mas_jax.config import default_config


def get_config():
    """500 more updates on single-agent traces, 15% of them with a protocol behind the question;
    of two right ones one is wrong and one empty. A reader whose protocol tells the answer gives it
    unsearched in 20%."""
    config = default_config()
    config.model.checkpoint = "asset:study_policy"
    p = config.pretrain
    p.update(dict(from_policy=True, teams=("single",)))
    p.settings.update(dict(steps=500, learning_rate=1e-3, warmup_steps=20, rows=12, length=512))
    p.flaws.shortcut = 0.2
    p.protocols.share = 0.15
    return config
