"""The demo: both stages, a control without a Searcher signal, and six systems on held-out tests.

bash launch/demo.sh     two cores, about 15 minutes; see README for what it printed
"""

from mas_jax.config import default_config, hierarchy_programme, role

BETA = 0.1  # the paper's 0.01 is for a 4B model over 200 steps; configs/toy_paper_beta.py has it


def get_config():
    """Stage I, Stage II, and Stage II with Searcher tokens that nothing teaches."""
    config = default_config()
    config.stages.student.programme.searcher.beta = BETA
    with config.unlocked():
        control = config.stages.student.copy_and_resolve_references()
        control.programme = hierarchy_programme()
        control.programme.searcher = role(advantages=(), entropy_coef=0.0)
        config.stages.no_signal = control
    config.train.stages = ("teacher", "student", "no_signal")
    return config
