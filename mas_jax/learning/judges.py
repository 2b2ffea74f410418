"""The judge of subtasks that a config names.

Must not know: who is judged, what a judgement is worth.
"""

from pathlib import Path

from ml_collections import ConfigDict

from mas_jax.agents.judge import Judge, api_judge, length_judge, oracle_judge, policy_judge
from mas_jax.agents.prompts import load_judge_prompt
from mas_jax.learning import samplers
from mas_jax.learning.scenes import Scene
from mas_jax.sampling.api import Client, Endpoint


def make_judge(config: ConfigDict, scene: Scene, directory: Path) -> Judge:
    """The configured judge of subtasks. directory: the starting policy's, of which "policy" makes
    engines of its own, since those that train get other weights.

    Raises: ValueError for a prompt set without a judge's prompt, or a missing key.
    """
    j = config.judge
    if j.kind == "oracle":
        return oracle_judge(scene.world, accuracy=j.accuracy)
    if j.kind == "length":
        return length_judge(
            scene.world, accuracy=j.accuracy, bias=j.length_bias, full_words=j.full_words
        )
    prompt = load_judge_prompt(j.prompts)
    if j.kind == "policy":
        return policy_judge(
            samplers.make_engines(config, directory, scene.tokenizer).sample,
            chat=scene.chat, prompt=prompt, policy=config.model.policy,
            context=config.engine.context, max_tokens=j.max_tokens,
        )  # fmt: skip
    client = Client(Endpoint(j.base_url, j.key_variable), Path(j.cache) if j.cache else None)
    return api_judge(
        client.complete, prompt=prompt, model=j.model, max_chars=j.max_chars,
        max_tokens=j.max_tokens,
    )  # fmt: skip
