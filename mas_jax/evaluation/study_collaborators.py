"""The table of the study's teams of a Collaborator and an Actor: what each spends.

Must not know: which cells there are, how a run was made.
"""

import functools
from collections.abc import Mapping, Sequence
from statistics import fmean

from mas_jax.evaluation import study
from mas_jax.evaluation.report import Grid
from mas_jax.evaluation.study import Runs


def tokens_of(record: Mapping, party: str) -> float:
    """Tokens, prompts as sent and sampled, of one party a problem; 0 of one that does not act."""
    play = record["plays"]["free"]
    spent = play["tokens"].get(party, {"input": 0, "output": 0})
    return (spent["input"] + spent["output"]) / _num_episodes(play)


def told_share(record: Mapping) -> float | None:
    """Share of the episodes in which the Collaborator told the answer, of those where that can be
    seen; None without one."""
    answers = record["plays"]["free"]["answers"]
    return answers["told"] / answers["episodes"] if answers["episodes"] else None


def _num_episodes(play: Mapping) -> int:
    return play["num_runs"] * sum(map(len, play["right"].values()))


def grid(runs: Runs, cells: Sequence[str], *, title: str) -> Grid:
    """A row a cell that was run, means over its seeds: accuracy and its spread, tokens a problem of
    both parties, how often the answer was told, tokens of all updates, minutes."""
    columns = {
        "avg": study.average,
        "sd": study.deviation,
        "Collaborator": functools.partial(_tokens, parties=("collaborator",)),
        "Actor": functools.partial(_tokens, parties=("actor",)),
        "tokens": functools.partial(_tokens, parties=("collaborator", "actor")),
        "told": _told,
        "trained tokens": study.update_tokens,
        "minutes": study.minutes,
    }
    return study.column_grid(runs, cells, columns, title=title)


def _tokens(records: Sequence[Mapping], *, parties: Sequence[str]) -> str:
    spent = (fmean(tokens_of(record, party) for record in records) for party in parties)
    return f"{sum(spent):.0f}"


def _told(records: Sequence[Mapping]) -> str:
    told = [share for share in map(told_share, records) if share is not None]
    return f"{100 * fmean(told):.1f}%" if told else "-"
