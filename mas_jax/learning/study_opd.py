"""The study's cells about MultiAgent-OPD: its systems, judges, single agents, sweeps, world axes.

Must not know: how a cell is run, results.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ml_collections import ConfigDict

from mas_jax.config import cascade_programme
from mas_jax.config_systems import (
    gigpo,
    only_stage,
    prompted_critic,
    research,
    search_r1_grpo,
    search_r1_ppo,
    stepsearch,
    tree_grpo,
)
from mas_jax.learning.study_cells import BETA, STEPS, Cell, Change, both, nothing, steps

TEACHER_CELL = "cascade_rl"


# --- what cells change ----------------------------------------------------------------------------


def _searcher(**values) -> Change:
    """Other values in the Searcher's row of Stage II."""
    return lambda config: config.stages.student.programme.searcher.update(values)


def _cascade_rl(config: ConfigDict) -> None:
    programme = cascade_programme()
    only_stage(config, "cascade", team="cascade", sampler="policy", programme=programme)


def _outcome(config: ConfigDict) -> None:
    """The Searcher's row of Stage I in Stage II."""
    searcher, outcome = (config.stages[x].programme.searcher for x in ("student", "teacher"))
    for key in ("advantages", "behaviour", "entropy_coef"):
        searcher[key] = outcome[key]


def _by_context(config: ConfigDict) -> None:
    config.stages.student.programme.answerer.group_by = "context"


def _groups(questions: int, group_size: int) -> Change:
    """As many episodes a step in other groups."""
    return lambda config: config.train.update(dict(questions=questions, group_size=group_size))


def _critic(accuracy: float, *, kind: str = "oracle", length_bias: float = 0.0) -> Change:
    """The Searcher learns from a judge that knows the truth and is right this often."""

    def _change(config: ConfigDict) -> None:
        prompted_critic(config)
        config.judge.update(dict(kind=kind, accuracy=accuracy, length_bias=length_bias))

    return _change


def _single(baseline: Callable[[ConfigDict], ConfigDict], questions: int = 0) -> Change:
    """A single-agent baseline, of one update a step as all cells are; questions: a step's, where
    groups are of another size than 8, so that its episodes are again about 96."""

    def _change(config: ConfigDict) -> None:
        baseline(config)
        config.train.updates_per_batch = 1
        if questions:
            config.train.questions = questions

    return _change


def _exact(divergence: str, *, coef: float = BETA) -> Change:
    return _searcher(advantages=(), divergence=divergence, divergence_coef=coef)


# --- axes of the world ----------------------------------------------------------------------------


def _families(*families: str, **world) -> Change:
    return lambda config: config.world.update(dict(families=families, **world))


_HALF_KNOWN = ("nq_like", "popqa_like")  # all of the first, none of the second


def _one_passage(config: ConfigDict) -> None:
    for team in ("cascade", "hierarchy"):
        config.budgets[team].passages = 1


def _search_cost(config: ConfigDict) -> None:
    """Searching is paid for: 0.15 for each of a Searcher's or a Leader's first two searches, where
    up to 0.1 was gained."""
    for stage in config.stages.values():
        for acting, row in stage.programme.items():
            if acting != "answerer":
                row.update(dict(behaviour="search_cost", behaviour_weight=0.3, behaviour_cap=2))


def _invalid_pressure(config: ConfigDict) -> None:
    """One invalid action makes the whole reward of its agent -1."""
    for stage in config.stages.values():
        for row in stage.programme.values():
            row.invalid = "reward"


@dataclass(frozen=True)
class Axis:
    """A setting of the world in which the diagnostics are run again."""

    name: str
    what: str
    change: Change
    start: str = "study"


AXES = (
    Axis("closed_book", "half of the questions known by heart, single hops",
         _families(*_HALF_KNOWN, closed_share=1.0, train=300, held_out=190)),
    Axis("wasteful", "a start that hands on whole questions and wastes good reports", nothing,
         start="wasteful"),
    Axis("together", "evidence of two Searchers is needed (comparisons)",
         _families("2wiki_like", held_out=190)),
    Axis("long_paths", "two and three hops only",
         _families("hotpotqa_like", "musique_like", held_out=190)),
    Axis("one_passage", "one passage a search: success is rarer", _one_passage),
    Axis("search_cost", "a search costs", _search_cost),
    Axis("invalid", "an invalid action costs everything", _invalid_pressure),
    Axis("closed_and_cost", "half of the questions known by heart, and a search costs",
         both(_families(*_HALF_KNOWN, closed_share=1.0, train=300, held_out=190), _search_cost)),
)  # fmt: skip


def _axis_cells() -> list[Cell]:
    """On each axis the teacher and the three ways of Stage II, one seed."""
    cells = []
    for axis in AXES:
        teacher = f"{TEACHER_CELL}@{axis.name}"
        for system, team, change, own_teacher in (
            ("hierarchy_base", "hierarchy", nothing, ""),
            (TEACHER_CELL, "cascade", _cascade_rl, ""),
            ("teacher_in_hierarchy", "hierarchy", nothing, ""),
            ("opd", "hierarchy", nothing, teacher),
            ("searcher_outcome", "hierarchy", _outcome, teacher),
            ("no_signal", "hierarchy", _searcher(advantages=()), teacher),
        ):
            # the axis last on stages that are there by then, so that it reaches new ones too
            policy = {"hierarchy_base": "start", "teacher_in_hierarchy": teacher}
            cells.append(
                Cell(f"{system}@{axis.name}", axis.what, team, 1, both(change, axis.change),
                     policy=policy.get(system, "own"), teacher=own_teacher, start=axis.start)
            )  # fmt: skip
    return cells


# --- the grid -------------------------------------------------------------------------------------

_T = TEACHER_CELL
MAIN = (
    Cell("cascade_base", "C-MAS, untrained", "cascade", 5, nothing, policy="start"),
    Cell("hierarchy_base", "H-MAS, untrained", "hierarchy", 5, nothing, policy="start"),
    Cell(_T, "C-MAS + RL, the teacher", "cascade", 5, _cascade_rl),
    Cell("teacher_in_hierarchy", "the teacher's weights in the hierarchy, no Stage II",
         "hierarchy", 5, nothing, policy=_T),
    Cell("opd", "MultiAgent-OPD", "hierarchy", 5, nothing, teacher=_T),
    Cell("searcher_outcome", "Searcher on the outcome", "hierarchy", 5, _outcome, teacher=_T),
    Cell("untrained_teacher", "Searcher distilled from the start", "hierarchy", 5,
         _searcher(teacher="initial"), teacher=_T),
    Cell("no_signal", "no Searcher signal", "hierarchy", 5, _searcher(advantages=()), teacher=_T),
)  # fmt: skip


def _student(name: str, what: str, seeds: int, change: Change) -> Cell:
    """Stage II in another form, from the same teacher."""
    return Cell(name, what, "hierarchy", seeds, change, teacher=_T)


OTHERS = (
    Cell("cascade_rl_long", "C-MAS + RL for as many updates as teacher and student together",
         "cascade", 3, steps(_cascade_rl, 2 * STEPS)),
    # 2N (played + scored) + 6N trained of 40 + 40 updates of seed 0, over that of a cascade's one
    Cell("cascade_rl_compute", "C-MAS + RL for the FLOPs of teacher and student together",
         "cascade", 3, steps(_cascade_rl, 108)),
    _student("answerer_by_context", "OPD, the Answerer's groups by context", 3, _by_context),
    _student("outcome_and_opd", "Searcher on the outcome and OPD", 3,
             both(_outcome, _searcher(advantages=("group", "distillation")))),
    _student("opd_beta_0.01", "OPD, beta 0.01 as in the paper", 3, _searcher(beta=0.01)),
    # added after two seeds of searcher_outcome, whose Searchers came to search twice for everything
    _student("outcome_without_bonus", "Searcher on exact match alone, no reward for searching", 3,
             both(_outcome, _searcher(behaviour="none"))),
)  # fmt: skip

CRITICS = (
    _student("critic_100", "Prompted Critic, a judge that is always right", 3, _critic(1.0)),
    _student("critic_length", "Prompted Critic, a judge that is half a liking for length", 3,
             _critic(1.0, kind="length", length_bias=0.5)),
    *(_student(f"critic_{round(100 * accuracy)}", f"Prompted Critic, a judge right with {accuracy}",
               1, _critic(accuracy)) for accuracy in (0.9, 0.8, 0.6, 0.5)),
)  # fmt: skip

SINGLES = (
    Cell("single_base", "one agent, untrained", "single", 3, search_r1_grpo, policy="start"),
    Cell("search_r1_grpo", "Search-R1, GRPO", "single", 3, _single(search_r1_grpo, 19)),
    Cell("search_r1_ppo", "Search-R1, PPO with a critic", "single", 3, _single(search_r1_ppo)),
    Cell("research", "ReSearch", "single", 3, _single(research)),
    Cell("stepsearch", "StepSearch", "single", 3, _single(stepsearch)),
    Cell("gigpo", "GiGPO", "single", 3, _single(gigpo, 19)),
    Cell("tree_grpo", "Tree-GRPO", "single", 3, _single(tree_grpo, 16)),
    Cell(
        "search_r1_grpo_long",
        "Search-R1, GRPO, for the updates of teacher and student",
        "single",
        3,
        steps(_single(search_r1_grpo, 19), 2 * STEPS),
    ),
    Cell(
        "tree_grpo_long",
        "Tree-GRPO, for the updates of teacher and student",
        "single",
        3,
        steps(_single(tree_grpo, 16), 2 * STEPS),
    ),
)

SWEEPS = (
    *(_student(f"opd_beta_{beta}", f"OPD, beta {beta}", 1, _searcher(beta=beta))
      for beta in (0.003, 0.03)),
    _student("opd_group_4", "OPD, 24 questions x 4", 1, _groups(24, 4)),
    _student("opd_group_16", "OPD, 6 questions x 16", 1, _groups(6, 16)),
    _student("opd_exact", "exact reverse KL, not sampled", 1, _exact("reverse_kl")),
    _student("opd_forward_kl", "exact forward KL", 1, _exact("forward_kl")),
    # near its minimum JSD at 0.5 is a quarter of the KL
    _student("opd_mixed_kl", "exact Jensen-Shannon divergence, 4 beta", 1,
             _exact("jsd", coef=4 * BETA)),
)  # fmt: skip

GROUPS = {
    "main": MAIN,
    "critics": CRITICS,
    "singles": SINGLES,
    "others": OTHERS,
    "sweeps": SWEEPS,
    "axes": tuple(_axis_cells()),
}
