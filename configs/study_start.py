"""The study's starting policies: the toy policy, taught the single agent's part as well.

python launch/pretrain_toy.py --config=configs/study_start.py:study --out=DIR
python launch/pretrain_toy.py --config=configs/study_start.py:wasteful --out=DIR

About 8 minutes each on one core; they are shipped as the assets study_policy and wasteful_policy.
"""

from mas_jax.config import default_config

FLAWS = {"study": {}, "wasteful": dict(waste_report=0.5, whole_question=0.6)}


def get_config(name: str = "study"):
    """400 more updates on traces of all three teams, with the flaws of the named start."""
    config = default_config()
    p = config.pretrain
    p.update(dict(from_policy=True, teams=("cascade", "hierarchy", "single"), num_questions=2240))
    p.settings.update(dict(steps=400, learning_rate=1e-3, warmup_steps=20))
    p.flaws.update(FLAWS[name])
    return config
