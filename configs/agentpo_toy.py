"""AgentPO in toy mathematics: a Collaborator learns to write hints for a frozen Actor.

python launch/pretrain_toy.py --config=configs/agentpo_toy.py --out=runs/math_policies
python launch/train.py --config=configs/agentpo_toy.py --workdir=runs/agentpo_toy
python launch/evaluate.py --config=configs/agentpo_toy.py \
    --config.model.checkpoint=runs/agentpo_toy/agentpo/policy

Another topology: --config=configs/agentpo_toy.py:critic (or roles, debate, guided_debate, solver).
README has what is measured.
"""

from mas_jax.config import default_config
from mas_jax.config_systems import agentpo


def get_config(team="hint"):
    """Two policies of a million parameters; 16 problems x 8 an update."""
    config = agentpo(default_config(), team=team)
    config.model.checkpoint = "runs/math_policies/collaborator"
    config.actor.update(dict(kind="policy", checkpoint="runs/math_policies/actor"))
    for engine in (config.engine, config.actor.engine):
        engine.update(dict(context=192, buckets=(96, 192), num_pages=4096, prefill_blocks=32))
    config.collaboration.update(dict(context=192, max_tokens=32))
    config.actor.update(dict(context=192, max_tokens=32))
    config.evaluation.update(dict(num_questions=200, num_runs=1))
    config.stages.agentpo.steps = 60
    config.train.update(
        dict(
            questions=16, group_size=8, row_length=192, micro_rows=8, validation_interval=10,
            validation_questions=100, role_gradient_interval=0,
        )
    )  # fmt: skip
    config.train.optimizer.learning_rate = 3e-4
    return config
