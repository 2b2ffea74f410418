"""A real language model on a laptop: SmolLM2-135M in teams on real questions, both stages.

bash launch/smollm2_cpu.sh DATA     two cores; meant to take at most an hour
"""

from mas_jax.config import TEAMS, default_config, real_slices


def get_config():
    """The pipeline of opd.py at sizes for two cores. No accuracy is promised."""
    config = default_config()
    config.model.update(dict(checkpoint="package:smollm2", template="smollm2", prompts="small"))
    real_slices(config, "runs/smollm2/data")
    config.engine.update(
        dict(
            context=1024, buckets=(512, 768, 1024), num_pages=3072, page_size=16, prefill_blocks=16,
            decode_rows=16, decode_steps=8,
        )
    )  # fmt: skip
    for team in TEAMS:
        config.budgets[team].update(dict(context=1024, observation=128, passages=1))
    config.sampling.max_tokens.update(dict(leader=48, searcher=48, answerer=48))
    config.rollout.concurrent = 32
    config.evaluation.update(
        dict(teams=("cascade", "hierarchy", "single"), num_questions=50, num_runs=1)
    )
    for stage in config.stages.values():
        stage.steps = 2
    # two updates make no teacher that is better for certain: the certificate is read, not asked for
    config.certify.update(dict(num_questions=4, num_runs=1, ignore=True))
    config.train.update(
        dict(
            questions=2, group_size=4, candidates=1, micro_rows=1, row_length=1024, chunk=256,
            remat="dots", checkpoint_interval=1, validation_questions=4, role_gradient_interval=0,
        )
    )  # fmt: skip
    config.train.optimizer.update(dict(learning_rate=1e-6, warmup_steps=1))
    return config
