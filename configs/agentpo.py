"""AgentPO: Qwen2.5-3B-Instruct learns to write hints for a frozen Llama-3.1-8B-Instruct.

python launch/train.py --config=configs/agentpo.py --workdir=runs/agentpo \
    --config.model.checkpoint=DIR --config.actor.base_url=http://HOST:8000/v1

DIR: the checkpoint in the Hugging Face layout; HOST: any chat-completions server of the Actor, its
greedy answers are kept in runs/agentpo_answers for good. The paper's formula in place of the
authors' script: --config=configs/agentpo.py:paper.
The Actor may also be played here: --config.actor.kind=policy --config.actor.checkpoint=DIR
--config.actor.template=qwen2.5-instruct for Qwen2.5 and Qwen2.5-Math. Weights of Llama-3 load, but
their chat template is not of the ChatML family that agents/chat.py speaks, so they play behind a
server. Gemma, Mistral and mixtures of experts do not load at all (model/hf_config.py FAMILIES).
Toy problems unless config.data names others. One TPU v6e-8; hours and accuracy not measured.
"""

from mas_jax.config import pod_config
from mas_jax.config_systems import agentpo


def get_config(loss="script"):
    """METHODS 3.2, but for this: the authors draw 12 questions a step and update three times, on 4
    each; here each update draws its own 4, so that it is of the policy that played: 125 updates for
    500 questions in place of 41 x 3."""
    config = agentpo(
        pod_config("Qwen2.5-3B-Instruct", template="qwen2.5-instruct", fsdp=8, tensor=1,
                   num_pages=6144),
        loss=loss,
    )  # fmt: skip
    config.stages.agentpo.steps = 125
    config.collaboration.update(dict(prompts="math", context=256 + 768, max_tokens=768, votes=8))
    config.actor.update(
        dict(
            kind="api", model="meta-llama/Llama-3.1-8B-Instruct", base_url="http://localhost:8000/v1",
            cache="runs/agentpo_answers", dtype="bfloat16", context=4096, max_tokens=2048,
            template="qwen2.5-instruct",
        )
    )  # fmt: skip
    config.actor.engine.update(config.engine.to_dict())
    config.evaluation.teams = ("actor", "vote", "hint")
    config.train.update(
        dict(questions=4, group_size=16, row_length=1024, micro_rows=8, validation_interval=25)
    )
    config.train.optimizer.update(dict(learning_rate=1e-6, warmup_steps=10, weight_decay=0.1))
    return config
