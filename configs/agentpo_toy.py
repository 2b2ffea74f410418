"""AgentPO in toy mathematics: a Collaborator learns to write hints for a frozen Actor.

python launch/train.py --config=configs/agentpo_toy.py --workdir=runs/agentpo_toy
python launch/evaluate.py --config=configs/agentpo_toy.py \
    --config.model.checkpoint=runs/agentpo_toy/agentpo/policy

Another topology: --config=configs/agentpo_toy.py:critic (or roles, debate, guided_debate, solver).
Both starting policies are shipped; they are rebuilt, in about 15 minutes on a core, by
python launch/pretrain_toy.py --config=configs/agentpo_toy.py --out=NEW
README has what is measured.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import agentpo, toy_mathematics


def get_config(team="hint"):
    """Two policies of a million parameters, 60 updates."""
    config = toy_mathematics(agentpo(default_config(), team=team))
    config.evaluation.update(dict(num_questions=200, num_runs=1))
    config.stages.agentpo.steps = 60
    config.train.update(dict(validation_interval=10, validation_questions=100))
    return config
