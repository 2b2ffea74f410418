"""What MAPD is compared with, with Qwen3-4B, not thinking; NAME is one of SYSTEMS.

python launch/train.py --config=configs/mapd_compared.py:sdar --workdir=runs/sdar \
    --config.model.checkpoint=DIR --config.privileged.protocols=FILE
python launch/train.py --config=configs/mapd_compared.py:raw_trajectory_team --workdir=runs/raw \
    --config.model.checkpoint=DIR --config.trajectories=FILE
python launch/train.py --config=configs/mapd_compared.py:logit_matching --workdir=runs/logits \
    --config.model.checkpoint=DIR --config.teacher.checkpoint=TEACHER

DIR, TEACHER: checkpoints in the Hugging Face layout, of one vocabulary; FILE: of
launch/build_protocols.py, with --alone for protocol_one, raw_trajectory_one and sft_ppo.
One TPU v5p-32: 4 hosts of 4 chips. Hours and accuracy not measured.
Questions and passages are the toy world's, in the real prompts, unless config.data names others; so
no number of this run compares with a published one.
"""

from functools import partial

from mas_jax.config import pod_config
from mas_jax.config_systems import (
    ema_branch,
    grpo_opsd,
    logit_matching,
    opsd,
    protocol_grpo,
    protocol_one,
    raw_trajectory,
    sdar,
    sft_then_ppo,
)

SYSTEMS = {
    "protocol_grpo": protocol_grpo,
    "opsd": opsd,
    "sdpo": ema_branch,
    "sdar": sdar,
    "grpo_opsd": grpo_opsd,
    "protocol_one": protocol_one,
    "raw_trajectory_one": partial(raw_trajectory, records="runs/protocols_alone.jsonl"),
    "raw_trajectory_team": partial(raw_trajectory, records="runs/protocols.jsonl"),
    "sft_ppo": sft_then_ppo,
    "logit_matching": logit_matching,
}


def get_config(name: str = "protocol_grpo"):
    """As mapd.py but for the system; imitation has ten times the learning rate. WARNING: sdar and
    grpo_opsd are as published, see losses.gated_log_ratio."""
    config = SYSTEMS[name](pod_config("Qwen3-4B", template="qwen3-not-thinking"))
    config.privileged.form = "json"
    config.train.optimizer.warmup_steps = 20
    config.train.view_length = config.train.row_length + 2048
    rates = {"policy": 1e-6, "trajectories": 1e-5}
    config.train.learning_rates = tuple(
        rates[config.stages[stage].sampler] for stage in config.train.stages
    )
    return config
