"""MAPD with a real language model on a laptop: SmolLM2-135M on 50 real questions with protocols.

bash launch/smollm2_mapd.sh DATA     two cores; meant to take at most an hour

Trains on development questions, the only ones whose decompositions are there: no figure of theirs
may be compared with a published one.
"""

from mas_jax.config import default_config, smollm2
from mas_jax.config_systems import mapd


def get_config():
    """METHODS 2.1 at sizes for two cores: three updates. No accuracy is promised."""
    config, data = mapd(smollm2(default_config())), "runs/smollm2_mapd/data"
    sets = ("musique", "2wikimultihopqa")
    config.data.update(
        dict(
            train=tuple(f"{data}/train/{name}.jsonl" for name in sets),
            validation=(f"{data}/hotpotqa_train100.jsonl",),
            test=tuple(f"{data}/test/{name}.jsonl" for name in sets),
            corpus=f"{data}/corpus.jsonl", index=f"{data}/index",
        )
    )  # fmt: skip
    config.encoder.update(dict(directory="package:minilm", max_tokens=128))
    config.privileged.update(dict(protocols="runs/smollm2_mapd/protocols.jsonl", form="json"))
    config.stages.agent.steps = 3
    return config
