"""AgentPO with a real language model on a laptop: SmolLM2-135M writes hints for itself, frozen.

bash launch/smollm2_agentpo.sh DATA     two cores; meant to take at most an hour

Trains on GSM8K's first 50 training problems, evaluates the Actor alone and with a hint on its first
16 test problems: far too few to compare with a published figure.
"""

from mas_jax.config import default_config, smollm2
from mas_jax.config_systems import agentpo

HINT, SOLUTION = 48, 160  # tokens; four of five of GSM8K's own solutions have at most 160
PROMPT = 272  # tokens of the longest problem in the prompt of a hint, or of a solution


def get_config():
    """METHODS 3.2 at sizes for two cores: three updates. No accuracy is promised."""
    config, data = agentpo(smollm2(default_config())), "runs/smollm2_agentpo/data"
    for split in ("train", "validation", "test"):
        config.data[split] = (f"{data}/{split}/gsm8k.jsonl",)
    hint, solution = PROMPT + HINT, PROMPT + HINT + SOLUTION
    config.engine.update(dict(decode_rows=8, num_pages=1024))
    config.actor.engine.update(config.engine.to_dict())
    for engine, context in ((config.engine, hint), (config.actor.engine, solution)):
        engine.update(dict(context=context, buckets=(context,)))
    config.collaboration.update(dict(prompts="math", context=hint, max_tokens=HINT))
    config.collaboration.reward_window = 300  # as the authors: so small a model boxes no answer
    config.actor.update(
        dict(
            kind="policy", checkpoint="package:smollm2", template="smollm2", context=solution,
            max_tokens=SOLUTION, remember="runs/smollm2_agentpo/solutions",
        )
    )  # fmt: skip
    config.train.row_length = 512
    config.stages.agentpo.steps = 3
    return config
