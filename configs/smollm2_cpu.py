"""A real language model on a laptop: SmolLM2-135M in teams on real questions, both stages.

bash launch/smollm2_cpu.sh DATA     two cores; meant to take at most an hour
"""

from mas_jax.config import default_config, real_slices, smollm2


def get_config():
    """The pipeline of opd.py at sizes for two cores. No accuracy is promised."""
    config = smollm2(default_config())
    real_slices(config, "runs/smollm2/data")
    config.evaluation.teams = ("cascade", "hierarchy", "single")
    # two updates make no teacher that is better for certain: the certificate is read, not asked for
    config.certify.update(dict(num_questions=4, num_runs=1, ignore=True))
    return config
