"""What the study's records say, as tables: the grid and what of it was run, cells, claims, axes.

Must not know: how a cell is run.
"""

from pathlib import Path

from mas_jax.evaluation import study as records
from mas_jax.evaluation.report import Grid, to_markdown
from mas_jax.learning.study_grid import AXES, CELLS, TEACHER_CELL

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
    ("untrained_teacher", "hierarchy_base"),
    ("opd", "cascade_rl_long"),
    ("opd", "answerer_by_context"),
    ("outcome_and_opd", "opd"),
    ("outcome_and_opd", "searcher_outcome"),
    ("opd", "opd_beta_0.01"),
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


def grids(results: Path) -> list[Grid]:
    """Every cell that was run, the claims of the main world, the axes."""
    runs = records.read(results)
    main = [name for name, cell in CELLS.items() if not cell.axis]
    axes = [name for name, cell in CELLS.items() if cell.axis]
    title = "less, avg@4 in points; the interval is over seeds, or over questions where one ran"
    return [
        records.cell_grid(runs, main, title="Cells of the main world, means over seeds"),
        records.comparison_grid(runs, CLAIMS, title=f"First {title}"),
        records.comparison_grid(
            runs, CLAIMS, title=f"At equal searches: first {title}", play="searches"
        ),
        records.comparison_grid(
            runs, CLAIMS, title=f"At equal tokens: first {title}", play="tokens"
        ),
        records.cell_grid(runs, axes, title="Cells on the axes of the world"),
        records.comparison_grid(runs, AXIS_CLAIMS, title=f"On the axes: first {title}"),
    ]


def tables(results: Path) -> str:
    """The grids as Markdown, empty ones left out."""
    return "\n".join(to_markdown(grid) for grid in grids(results) if grid.rows)
