"""What the study's records say, as tables: the grid and what of it was run, cells, claims, axes.

Must not know: how a cell is run.
"""

from pathlib import Path

from mas_jax.evaluation import study as records
from mas_jax.evaluation.report import Grid, to_markdown
from mas_jax.learning.study_grid import AXIS_CLAIMS, CELLS, CLAIMS


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
