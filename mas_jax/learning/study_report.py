"""What the study's records say, as tables: the grid and what of it was run, cells, claims, axes.

Must not know: how a cell is run.
"""

import functools
from pathlib import Path

from mas_jax.evaluation import study as records
from mas_jax.evaluation import study_collaborators
from mas_jax.evaluation.report import Grid, to_markdown
from mas_jax.learning import study_agentpo, study_freeze, study_mapd, study_opd
from mas_jax.learning.study_grid import CELLS
from mas_jax.learning.study_opd import AXES, TEACHER_CELL

BUDGETS = {"searches": 1.4, "tokens": 240.0}  # of a workflow, at which systems are compared
# (first, second): is the first better?
CLAIMS = (
    (TEACHER_CELL, "cascade_base"),
    ("hierarchy_base", "cascade_base"),
    ("opd", "hierarchy_base"),
    ("opd", TEACHER_CELL),
    ("opd", "teacher_in_hierarchy"),
    ("opd", "no_signal"),
    ("opd", "searcher_outcome"),
    ("opd", "untrained_teacher"),
    ("searcher_outcome", "no_signal"),
    ("searcher_outcome", "hierarchy_base"),
    ("outcome_without_bonus", "searcher_outcome"),
    ("opd", "outcome_without_bonus"),
    ("untrained_teacher", "hierarchy_base"),
    ("opd", "cascade_rl_long"),
    ("opd", "answerer_by_context"),
    ("outcome_and_opd", "opd"),
    ("outcome_and_opd", "searcher_outcome"),
    ("opd", "cascade_rl_compute"),
    *(
        ("opd", other)
        for other in (
            "opd_beta_0.003",
            "opd_beta_0.01",
            "opd_beta_0.03",
            "opd_group_4",
            "opd_group_16",
            "opd_exact",
            "opd_forward_kl",
            "opd_mixed_kl",
        )
    ),
    ("opd", "tree_grpo_long"),
    ("opd", "search_r1_grpo_long"),
    ("opd", "critic_100"),
    ("opd", "critic_length"),
    ("opd", "critic_90"),
    ("opd", "critic_80"),
    ("opd", "critic_60"),
    ("opd", "critic_50"),
    ("critic_100", "searcher_outcome"),
    ("opd", "tree_grpo"),
    ("opd", "search_r1_grpo"),
    ("tree_grpo", "search_r1_grpo"),
    ("gigpo", "search_r1_grpo"),
    ("search_r1_ppo", "search_r1_grpo"),
    ("stepsearch", "search_r1_ppo"),
    ("research", "search_r1_grpo"),
    ("search_r1_grpo", "single_base"),
)
AXIS_CLAIMS = tuple(
    (f"{first}@{axis.name}", f"{second}@{axis.name}")
    for axis in AXES
    for first, second in (
        ("opd", "searcher_outcome"),
        ("opd", "no_signal"),
        ("searcher_outcome", "no_signal"),
        ("opd", "teacher_in_hierarchy"),
    )
)

MAPD_CLAIMS = (
    ("told_right", "protocol_base"),
    ("told_wrong", "protocol_base"),
    ("told_shuffled", "protocol_base"),
    ("mapd_grpo", "protocol_base"),
    *(("mapd", other) for other in ("mapd_grpo", "mapd_sdar", "mapd_shuffled", "mapd_wrong")),
    ("mapd_sdar", "mapd_grpo"),
    ("mapd", "mapd_grpo_long"),
    ("mapd", "mapd_empty"),
    *(("mapd", other) for other in ("mapd_raw_team", "mapd_raw_one", "mapd_protocol_one")),
    ("mapd_raw_one", "mapd_raw_team"),
    ("mapd", "mapd_sft_ppo"),
    ("mapd_wrong", "mapd_grpo"),
    *(
        ("mapd", f"mapd_{other}")
        for other in (
            "without_plan",
            "without_facts",
            "without_answer",
            "without_findings",
            "three_fields",
            "talkative_raw",
            "0.01",
            "0.1",
            "0.5",
            "forward_kl",
            "opsd",
            "ema",
        )
    ),
)
AGENTPO_CLAIMS = (
    ("agentpo_collaborator", "agentpo_actor"),
    *((f"agentpo_{team}_base", "agentpo_actor") for team in study_agentpo.TEAMS),
    *((f"agentpo_{team}", f"agentpo_{team}_base") for team in study_agentpo.TEAMS),
    *((f"agentpo_{team}", "agentpo_actor") for team in study_agentpo.TEAMS),
    *(
        ("agentpo_hint", f"agentpo_{other}")
        for other in (
            "roles_base",
            "evoagent",
            "vote",
            "mad",
            "solver",
            "hint_other_problem",
            "hint_no_answer",
            "hint_100",
            "hint_300",
            "hint_paper",
            "hint_repeated",
            "hint_by_actor",
            "critic",
            "debate",
            "guided_debate",
            "roles",
        )
    ),
    ("agentpo_hint_other_problem", "agentpo_actor"),
    ("agentpo_hint_1000", "agentpo_hint"),
    ("agentpo_debate", "agentpo_mad"),
    ("agentpo_guided_debate", "agentpo_mad"),
    *((f"agentpo_hint_{size}", f"agentpo_solver_{size}") for size in (100, 300, 1000)),
    *(
        (f"agentpo_{name}@stronger", "agentpo_actor@stronger")
        for name in ("hint_base", "transfer", "hint")
    ),
    ("agentpo_hint@stronger", "agentpo_transfer@stronger"),
    *(
        (f"agentpo_{first.format(name)}", f"agentpo_{second.format(name)}")
        for name in study_agentpo.OTHER_STARTS
        for first, second in (
            ("collaborator_{}", "actor"),
            ("hint_{}_base", "actor"),
            ("hint_{}", "hint_{}_base"),
            ("hint_{}", "actor"),
            ("hint_{}", "hint"),
        )
    ),
)
# teachers of equal skill; is what their students learned the same?
SAME_TEACHING = (
    ("mapd", "mapd_other_words"),
    ("mapd", "mapd_talkative"),
    ("mapd_other_words", "mapd_talkative"),
    ("mapd", "mapd_talkative_raw"),
)
MARGIN = 0.02  # of avg@4


def listing(results: Path) -> str:
    """A line a cell: its name, which of its seeds have a record, and what it is."""
    runs = records.read(results)
    width = max(map(len, CELLS))
    lines = [f"{len(CELLS)} cells; x: a seed that has a record"]
    for cell in CELLS.values():
        own = runs.get(cell.name, {})
        done = "".join("x" if seed in own else "." for seed in range(cell.seeds))
        lines.append(f"{cell.name:{width}}  {done:5}  {cell.what}")
    return "\n".join(lines) + "\n"


# the cells whose training a cell's policy needed beside its own
SOURCES = {
    name: sorted({cell.teacher, cell.policy} - {"", "own", "start"}) for name, cell in CELLS.items()
}


def read(results: Path, frozen: Path) -> records.Runs:
    """The records. Raises: ValueError for one of a cell that was frozen otherwise or not at all."""
    runs, cells = records.read(results), study_freeze.read(frozen)["cells"]
    for name, seeds in runs.items():
        for seed, record in seeds.items():
            if name not in cells or record["frozen"] != study_freeze.digest(cells[name]):
                raise ValueError(
                    f"the record of {name}, seed {seed}, in {results} is of no cell of {frozen}; "
                    "move it elsewhere"
                )
    return runs


_LESS = "less second, points of avg@4; interval over seeds, or over questions where one ran"


def opd_grids(runs: records.Runs) -> list[Grid]:
    """About MultiAgent-OPD: every cell that was run, its families, claims, the axes."""
    own = [cell for group in study_opd.GROUPS.values() for cell in group]
    main = [cell.name for cell in own if not cell.axis]
    axes = [cell.name for cell in own if cell.axis]
    found = [
        records.cell_grid(
            runs, main, SOURCES, budgets=BUDGETS, title="Cells of the main world, means over seeds"
        ),
        records.family_grid(runs, main, title="avg@4 of the families"),
        records.comparison_grid(runs, CLAIMS, title=f"First {_LESS}"),
    ]
    for kind, budget in BUDGETS.items():
        found.append(
            records.comparison_grid(
                runs, CLAIMS, title=f"At {budget:g} {kind} a workflow: first {_LESS}",
                values=functools.partial(records.at_spend, kind=kind, budget=budget),
            )
        )  # fmt: skip
    return [
        *found,
        records.cell_grid(runs, axes, SOURCES, budgets=BUDGETS, title="Cells on the axes"),
        records.family_grid(runs, axes, title="avg@4 of the families on the axes"),
        records.comparison_grid(runs, AXIS_CLAIMS, title=f"On the axes: first {_LESS}"),
    ]


def mapd_grids(runs: records.Runs) -> list[Grid]:
    """About MAPD: every cell that was run, its families, claims, teachers of other styles."""
    own = [cell.name for group in study_mapd.GROUPS.values() for cell in group]
    return [
        records.cell_grid(runs, own, SOURCES, budgets=BUDGETS, title="Cells about MAPD"),
        records.family_grid(runs, own, title="MAPD: avg@4 of the families"),
        records.comparison_grid(runs, MAPD_CLAIMS, title=f"MAPD: first {_LESS}"),
        records.equivalence_grid(
            runs, SAME_TEACHING, margin=MARGIN, title="Teachers of another style: equal within 2?"
        ),
    ]


def agentpo_grids(runs: records.Runs) -> list[Grid]:
    """About AgentPO: every cell that was run with what each party spends, its problems, claims."""
    own = [cell.name for group in study_agentpo.GROUPS.values() for cell in group]
    less = "less second, points; interval over seeds, or over problems where one ran"
    return [
        study_collaborators.grid(runs, own, title="Cells about AgentPO, tokens a problem"),
        records.family_grid(runs, own, title="AgentPO: accuracy by number of steps"),
        records.comparison_grid(runs, AGENTPO_CLAIMS, title=f"AgentPO: first {less}"),
    ]


def tables(runs: records.Runs) -> str:
    """The grids as Markdown, empty ones left out, and what all runs took."""
    every = [record for seeds in runs.values() for record in seeds.values()]
    seconds = sum(r["train_s"] + r["evaluation_accelerator_s"] for r in every)
    grids = (*opd_grids(runs), *mapd_grids(runs), *agentpo_grids(runs))
    text = "\n".join(to_markdown(grid) for grid in grids if grid.rows)
    return f"{text}\n{len(every)} runs, {seconds / 3600:.1f} hours of one core\n"
