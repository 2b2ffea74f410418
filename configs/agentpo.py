"""AgentPO: Qwen2.5-3B-Instruct learns to write hints for a frozen Llama-3.1-8B-Instruct.

python launch/train.py --config=configs/agentpo.py --workdir=runs/agentpo \
    --config.model.checkpoint=DIR --config.actor.base_url=http://HOST:8000/v1

DIR: the checkpoint in the Hugging Face layout; HOST: any chat-completions server of the Actor, its
greedy answers are kept in runs/agentpo_answers for good. Another team, the paper's formula in place
of the authors' script, or both: --config=configs/agentpo.py:critic, :paper, :debate,paper.
The Actor may also be played here: --config.actor.kind=policy --config.actor.checkpoint=DIR
--config.actor.template=qwen2.5-instruct for Qwen2.5 and Qwen2.5-Math. Weights of Llama-3 load, but
their chat template is not of the ChatML family that agents/chat.py speaks, so they play behind a
server. Gemma, Mistral and mixtures of experts do not load at all (model/hf_config.py FAMILIES).
The authors' reward reads the last 300 characters: --config.collaboration.reward_window=300; their
500 problems are the first ones: --config.data.first=500 (of 1,000 here).
Toy problems unless config.data names files, each graded by the rule of its set. All problems of the
split are evaluated. One TPU v6e-8; hours and accuracy not measured.
"""

from mas_jax.config import pod_config
from mas_jax.config_systems import agentpo, agentpo_variant

PROBLEM, SOLUTION = (
    256,
    2048,
)  # tokens of a prompt without what others said, and of an Actor's words
READ = SOLUTION * 5 // 4  # tokens of a solution to the Collaborator, whose tokenizer is another
WRITES = dict(solver=SOLUTION, debate=1024)  # solutions; hints and critiques are up to 768


def get_config(variant=""):
    """METHODS 3.2, but for this: the authors draw 12 questions a step and update three times, on 4
    each; here each update draws its own 4, so that it is of the policy that played: 125 updates for
    500 questions in place of 41 x 3."""
    team, loss = agentpo_variant(variant)
    config = agentpo(
        pod_config("Qwen2.5-3B-Instruct", template="qwen2.5-instruct", fsdp=8, tensor=1,
                   num_pages=6144),
        team=team, loss=loss,
    )  # fmt: skip
    config.stages.agentpo.steps = 125
    writes = WRITES.get(team, 768)
    # a draft; two other debaters' solutions behind an own one
    context = PROBLEM + writes + {"critic": READ, "debate": writes + 2 * READ}.get(team, 0)
    config.collaboration.update(dict(prompts="math", context=context, max_tokens=writes, votes=8))
    config.actor.update(
        dict(
            kind="api", model="meta-llama/Llama-3.1-8B-Instruct", base_url="http://localhost:8000/v1",
            cache="runs/agentpo_answers", dtype="bfloat16", context=8192, max_tokens=SOLUTION,
            template="qwen2.5-instruct",
        )
    )  # fmt: skip
    config.actor.engine.update(config.engine.to_dict())
    config.evaluation.update(
        dict(teams=tuple(dict.fromkeys(("actor", "vote", team))), num_questions=10_000, num_runs=1)
    )
    config.train.update(
        dict(questions=4, group_size=16, row_length=context, micro_rows=8, validation_interval=25)
    )
    config.train.optimizer.update(dict(learning_rate=1e-6, warmup_steps=10, weight_decay=0.1))
    return config
