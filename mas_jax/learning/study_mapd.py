"""The study's cells about MAPD: what its start reads, the method and what it is compared with.

All are single agents from a start that has seen protocols. Must not know: how a cell is run,
results.
"""

from collections.abc import Callable

from ml_collections import ConfigDict

from mas_jax.config_systems import (
    ema_branch,
    grpo_opsd,
    mapd,
    opsd,
    protocol_grpo,
    raw_trajectory,
    sdar,
    sft_then_ppo,
)
from mas_jax.learning.study_cells import STEPS, Cell, Change, both, steps

START = "protocol"
COEF = 0.05  # lambda, METHODS 2.1


def _cell(name: str, what: str, change: Change, *, seeds: int = 3, policy: str = "own",
          protocols: str = "plain") -> Cell:  # fmt: skip
    return Cell(name, what, "single", seeds, change, policy, start=START, protocols=protocols)


def _trained(system: Callable[..., ConfigDict], **row) -> Change:
    """A system of METHODS 2; row: what else is changed in the agent's."""

    def _change(config: ConfigDict) -> None:
        system(config)
        config.stages.agent.programme.searcher.update(row)

    return _change


def _imitates(system: Callable[..., ConfigDict], records: str) -> Change:
    """Imitation of what a build's records say."""

    def _change(config: ConfigDict) -> None:
        system(config, records)

    return _change


def _sft_then_ppo(config: ConfigDict) -> None:
    """Both stages together as many updates as the others, one a step."""
    sft_then_ppo(config)
    config.train.updates_per_batch = 1
    for stage in config.stages.values():
        stage.steps = STEPS // 2


def _privileged(**values) -> Change:
    """Other values of what the privileged branch reads."""
    return lambda config: config.privileged.update(values)


def _told(control: str) -> Change:
    """Untrained, with the text in the prompt."""

    def _change(config: ConfigDict) -> None:
        mapd(config)
        config.privileged.control = control
        config.evaluation.privileged = True

    return _change


def _without(*fields: str) -> Change:
    """MAPD with the other fields; the toy form shows no task_type."""
    every = ("task_type", "reasoning_plan", "grounding_facts", "answer", "partial_findings")
    return both(
        _trained(mapd), _privileged(fields=tuple(name for name in every if name not in fields))
    )


# what the start makes of a text in its own prompt; an empty one is no text, so `protocol_base`
READ = (
    _cell("protocol_base", "one agent that has seen protocols, untrained", protocol_grpo,
          policy="start", protocols=""),
    *(_cell(f"told_{name}", f"the same, {what} in its prompt", _told(control), policy="start")
      for name, control, what in (
          ("right", "none", "the question's protocol"),
          ("wrong", "wrong", "another question's protocol"),
          ("shuffled", "shuffled", "the protocol's words in a random order"))),
)  # fmt: skip

METHODS = (
    _cell("mapd_grpo", "GRPO alone", _trained(protocol_grpo), protocols=""),
    # MAPD's branch is one pass over the views beside three over the traces: at most half more
    _cell("mapd_grpo_long", "GRPO alone for 60 updates, no fewer FLOPs than MAPD",
          steps(_trained(protocol_grpo), 60), protocols=""),
    _cell("mapd", "MAPD", _trained(mapd)),
    _cell("mapd_sdar", "SDAR, as published", _trained(sdar)),
    _cell("mapd_raw_team", "the offline team's raw trajectories, imitated",
          _imitates(raw_trajectory, "runs/protocols.jsonl")),
    _cell("mapd_raw_one", "one model's raw trajectories, imitated",
          _imitates(raw_trajectory, "runs/protocols_alone.jsonl"), protocols="alone-plain"),
    _cell("mapd_shuffled", "MAPD, words in a random order",
          both(_trained(mapd), _privileged(control="shuffled"))),
    _cell("mapd_wrong", "MAPD, another question's protocol",
          both(_trained(mapd), _privileged(control="wrong"))),
    _cell("mapd_empty", "MAPD, empty protocols",
          both(_trained(mapd), _privileged(control="empty"))),
)  # fmt: skip

VARIANTS = (
    _cell("mapd_protocol_one", "MAPD, protocols by one model", _trained(mapd),
          protocols="alone-plain"),
    _cell("mapd_sft_ppo", "one model's trajectories imitated, then PPO, half of the updates each",
          _sft_then_ppo, protocols="alone-plain"),
    *(_cell(f"mapd_{coef}", f"MAPD, lambda {coef}", _trained(mapd, divergence_coef=coef))
      for coef in (0.01, 0.1, 0.5)),
    _cell("mapd_without_plan", "no reasoning_plan", _without("reasoning_plan")),
    _cell("mapd_without_facts", "no grounding_facts", _without("grounding_facts")),
    _cell("mapd_without_answer", "no answer", _without("answer")),
    _cell("mapd_without_findings", "no partial_findings", _without("partial_findings")),
    _cell("mapd_three_fields", "the seed's three fields", _without("answer", "partial_findings")),
    _cell("mapd_other_words", "a teacher that words its queries otherwise", _trained(mapd),
          protocols="other_words"),
    _cell("mapd_talkative", "a talkative teacher, normalised", _trained(mapd),
          protocols="talkative"),
    _cell("mapd_talkative_raw", "a talkative teacher, its style as it is", _trained(mapd),
          protocols="raw-talkative"),
    _cell("mapd_forward_kl", "MAPD, forward KL", _trained(mapd, divergence="forward_kl"), seeds=1),
    _cell("mapd_opsd", "the privileged branch alone", _trained(opsd)),
    _cell("mapd_grpo_opsd", "GRPO+OPSD, as published", _trained(grpo_opsd), seeds=1),
    _cell("mapd_ema", "MAPD, an average of the weights as teacher", _trained(ema_branch), seeds=1),
)  # fmt: skip

GROUPS = {"protocols": READ, "mapd_main": METHODS, "mapd_variants": VARIANTS}
