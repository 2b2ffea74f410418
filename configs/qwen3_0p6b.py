"""Qwen3-0.6B in teams on real questions: smollm2_cpu.py's run for whoever has the weights.

python launch/train.py --config=configs/qwen3_0p6b.py --workdir=runs/qwen3_0p6b
Wants the Hugging Face directory Qwen3-0.6B (--config.model.checkpoint=DIR) and the data that
`bash launch/smollm2_cpu.sh DATA` writes first; one GPU or TPU chip, or patience.
"""

from mas_jax.config import TEAMS, default_config, real_slices


def get_config():
    """Larger contexts, observations and groups than on a laptop."""
    config = default_config()
    config.model.update(
        dict(checkpoint="Qwen3-0.6B", template="qwen3-not-thinking", prompts="full")
    )
    real_slices(config, "runs/smollm2/data")
    config.engine.update(
        dict(
            context=2048, buckets=(512, 1024, 2048), num_pages=4096, page_size=16,
            prefill_blocks=64, decode_rows=32, decode_steps=8,
        )
    )  # fmt: skip
    for team in TEAMS:
        config.budgets[team].update(dict(context=2048, observation=512))
    config.sampling.max_tokens.update(dict(leader=256, searcher=128, answerer=64))
    config.rollout.concurrent = 64
    config.evaluation.update(
        dict(teams=("cascade", "hierarchy", "single"), num_questions=100, num_runs=1)
    )
    config.certify.num_questions = 50
    config.train.update(
        dict(
            questions=8, group_size=8, candidates=1, micro_rows=2, row_length=2048, chunk=1024,
            remat="full", role_gradient_interval=0,
        )
    )  # fmt: skip
    config.train.optimizer.update(dict(learning_rate=1e-6, warmup_steps=5))
    return config
