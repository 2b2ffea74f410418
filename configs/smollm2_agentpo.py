"""AgentPO with a real language model on a laptop: SmolLM2-135M writes hints for itself, frozen.

bash launch/smollm2_agentpo.sh DATA     two cores; meant to take at most an hour

Trains on GSM8K's first 50 training problems, evaluates the Actor alone and with a hint on its first
50 test problems: far too few to compare with a published figure.
"""

from mas_jax.config import default_config, smollm2
from mas_jax.config_systems import agentpo

HINT, SOLUTION = 64, 192  # tokens; nine in ten of GSM8K's own solutions have at most 200
CONTEXT = 384  # the longest problem has 194, a hint's prompt 70 more


def get_config():
    """METHODS 3.2 at sizes for two cores: three updates. No accuracy is promised."""
    config, data = agentpo(smollm2(default_config())), "runs/smollm2_agentpo/data"
    for split in ("train", "validation", "test"):
        config.data[split] = (f"{data}/{split}/gsm8k.jsonl",)
    # a solution's prompt is longer than a hint's by the hint and the way in which it is shown
    for engine, context in ((config.engine, CONTEXT), (config.actor.engine, CONTEXT + SOLUTION)):
        engine.update(config.engine.to_dict())
        engine.update(dict(context=context, buckets=(256, context), num_pages=1024))
    config.collaboration.update(dict(prompts="math", context=CONTEXT, max_tokens=HINT))
    config.actor.update(
        dict(
            kind="policy", checkpoint="package:smollm2", template="smollm2",
            context=CONTEXT + SOLUTION, max_tokens=SOLUTION,
            remember="runs/smollm2_agentpo/solutions",
        )
    )  # fmt: skip
    config.train.update(dict(questions=4, group_size=4, row_length=CONTEXT))
    config.stages.agentpo.steps = 3
    return config
