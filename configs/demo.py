"""The demo: both stages, a control without a Searcher signal, and six systems on held-out tests.

bash launch/demo.sh     two cores, about 15 minutes; see README for what it printed
"""

from mas_jax.config import default_config


def get_config():
    """toy.py, and a third stage like the second in which nothing teaches the Searcher's tokens."""
    config = default_config()
    control = config.stages.student.copy_and_resolve_references()
    control.programme.searcher.advantages = ()
    with config.unlocked():
        config.stages.no_signal = control
    config.train.stages = ("teacher", "student", "no_signal")
    config.train.role_gradient_interval = 0  # a pass for each role, for a metric not shown here
    return config
