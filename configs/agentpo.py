"""AgentPO: Qwen2.5-3B-Instruct learns to write hints for a frozen Llama-3.1-8B-Instruct.

python launch/train.py --config=configs/agentpo.py --workdir=runs/agentpo \
    --config.model.checkpoint=DIR --config.actor.base_url=http://HOST:8000/v1

DIR: the checkpoint in the Hugging Face layout; HOST: any chat-completions server of the Actor, its
greedy answers are kept in runs/agentpo_answers for good. An argument names another team, the
paper's formula in place of the authors' script, another Actor or Collaborator, with commas between:
--config=configs/agentpo.py:critic, :debate,paper, :llama-3.2-3b, :qwen2.5-7b,qwen-plus.
Actors: llama-3.1-8b and llama-3.2-3b behind a server, since agents/chat.py speaks the ChatML family
of templates and Llama-3's is another; qwen2.5-math-7b, played here (actor.checkpoint=DIR), whose
context of 4,096 leaves 1,024 tokens for a solution in teams that read solutions; qwen-plus, a black
box that costs money: the key in DASHSCOPE_API_KEY, actor.price and actor.max_cost as of the day.
Collaborators: qwen2.5-3b, qwen2.5-7b (a v6e-16), qwen2.5-1.5b, smollm2-1.7b, which is of another
family than all Actors. :solver,qwen2.5-math-7b fine-tunes that Actor itself. Gemma, Mistral and
mixtures of experts do not load (model/hf_config.py).
The authors' reward reads the last 300 characters: --config.collaboration.reward_window=300; their
500 problems are the first ones: --config.data.first=500 (of 1,000 here).
Toy problems unless config.data names files, each graded by the rule of its set. All problems of the
split are evaluated. One TPU v6e-8; hours and accuracy not measured.
"""

from mas_jax.config import pod_config
from mas_jax.config_systems import agentpo, agentpo_variant

PROBLEM = 256  # tokens of a prompt without what others said
SOLUTION = 2048  # tokens of an Actor's words
READ = SOLUTION * 5 // 4  # tokens of a solution to the Collaborator, whose tokenizer is another
WRITES = dict(solver=SOLUTION, debate=1024)  # solutions; hints and critiques are up to 768

# chips that train one, and of an engine, whose pages hold 16 tokens each
COLLABORATORS = {
    "qwen2.5-3b": dict(checkpoint="Qwen2.5-3B-Instruct", fsdp=8, tensor=1, num_pages=6144),
    "qwen2.5-1.5b": dict(checkpoint="Qwen2.5-1.5B-Instruct", fsdp=8, tensor=1, num_pages=6144),
    "qwen2.5-7b": dict(checkpoint="Qwen2.5-7B-Instruct", fsdp=16, tensor=4, num_pages=12288),
    # five times the keys and values of qwen2.5-3b
    "smollm2-1.7b": dict(checkpoint="SmolLM2-1.7B-Instruct", fsdp=8, tensor=1, num_pages=2048,
                         template="smollm2"),
}  # fmt: skip
SERVED = dict(
    kind="api", base_url="http://localhost:8000/v1", context=8192, template="qwen2.5-instruct"
)
ACTORS = {
    "llama-3.1-8b": dict(SERVED, model="meta-llama/Llama-3.1-8B-Instruct"),
    "llama-3.2-3b": dict(SERVED, model="meta-llama/Llama-3.2-3B-Instruct"),
    "qwen2.5-math-7b": dict(
        kind="policy", checkpoint="Qwen2.5-Math-7B", template="qwen2.5-math", context=4096,
        remember="runs/agentpo_continuations",
    ),
    "qwen-plus": dict(
        SERVED, model="qwen-plus", key_variable="DASHSCOPE_API_KEY",
        base_url="https://dashscope-intl.aliyuncs.com/compatible-mode/v1",
    ),
}  # fmt: skip


def get_config(variant=""):
    """METHODS 3.2, but for this: the authors draw 12 questions a step and update three times, on 4
    each; here each update draws its own 4, so that it is of the policy that played: 125 updates for
    500 questions in place of 41 x 3."""
    named = agentpo_variant(variant, collaborator=tuple(COLLABORATORS), actor=tuple(ACTORS))
    team, actor = named["team"], ACTORS[named["actor"]]
    pod = dict(template="qwen2.5-instruct") | COLLABORATORS[named["collaborator"]]
    is_here = actor["kind"] == "policy"
    if team == "solver" and is_here:  # the Actor itself is trained
        pod = COLLABORATORS["qwen2.5-7b"] | {key: actor[key] for key in ("checkpoint", "template")}
    if is_here:  # beside the Collaborator, on the same chips
        pod["tensor"] = max(2, pod["tensor"])
    config = agentpo(pod_config(**pod), team=team, loss=named["loss"])
    config.stages.agentpo.steps = 125
    writes = WRITES.get(team, 768)
    # a draft; two other debaters' solutions behind an own one
    context = PROBLEM + writes + {"critic": READ, "debate": writes + 2 * READ}.get(team, 0)
    config.collaboration.update(dict(prompts="math", context=context, max_tokens=writes, votes=8))
    solution = SOLUTION if not is_here or team in ("hint", "solver") else SOLUTION // 2
    config.actor.update(
        dict(actor, cache="runs/agentpo_answers", dtype="bfloat16", max_tokens=solution)
    )
    config.actor.engine.update(config.engine.to_dict())
    if is_here:
        buckets = tuple(size for size in config.engine.buckets if size <= actor["context"])
        for engine in (config.actor.engine, *([config.engine] if team == "solver" else [])):
            engine.update(dict(context=actor["context"], buckets=buckets))
    config.evaluation.update(
        dict(teams=tuple(dict.fromkeys(("actor", "vote", team))), num_questions=10_000, num_runs=1)
    )
    config.train.update(
        dict(questions=4, group_size=16, row_length=context, micro_rows=pod["fsdp"],
             validation_interval=25)
    )  # fmt: skip
    config.train.optimizer.update(dict(learning_rate=1e-6, warmup_steps=10, weight_decay=0.1))
    return config
