"""The study's grid: all cells, in the order in which they are run.

`study_freeze.py` keeps what a cell was before its first run. Must not know: what cells change, how
one is run, results.
"""

from collections.abc import Sequence
from difflib import get_close_matches

from mas_jax.learning import study_agentpo, study_mapd, study_opd
from mas_jax.learning.study_cells import Cell

# caps of an episode, each of which a system plays under as well; CAPPED_RUNS of each question
CAPS = {"searches": (1, 2), "tokens": (120, 200)}
CAPPED_RUNS = 1
PROTOCOL_SKILL = 0.8  # of the script that writes protocols: some questions get partial findings

GROUPS: dict[str, tuple[Cell, ...]] = study_opd.GROUPS | study_mapd.GROUPS | study_agentpo.GROUPS
CELLS = {cell.name: cell for group in GROUPS.values() for cell in group}


def jobs(names: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    """(cell, seed) in the order in which to run them: group by group, in each seed by seed.

    names: cells, groups, or "all". seeds: none stands for all that the grid gives a cell.
    Raises: ValueError for another name, with the nearest one.
    """
    chosen: set[str] = set()
    for name in names:
        if name in GROUPS or name == "all":
            wanted = GROUPS.values() if name == "all" else [GROUPS[name]]
            chosen |= {cell.name for group in wanted for cell in group}
        elif name in CELLS:
            chosen.add(name)
        else:
            near = get_close_matches(name, [*CELLS, *GROUPS], n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"--run={name}: no such cell; {hint}--list shows them")
    most = max(CELLS[name].seeds for name in chosen)
    if not set(seeds) <= set(range(most)):
        raise ValueError(
            f"--seed={list(seeds)}: these cells have the seeds {list(range(most))}; the grid says "
            "how many runs there are before they are run"
        )
    found = []
    for group in GROUPS.values():
        asked = [
            (cell.name, seed)
            for cell in group if cell.name in chosen
            for seed in range(cell.seeds) if not seeds or seed in seeds
        ]  # fmt: skip
        found += sorted(asked, key=lambda job: job[1])  # stable: cells stay in order
    return found
