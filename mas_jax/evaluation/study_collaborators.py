"""The table of the study's teams of a Collaborator and an Actor: what each spends.

Must not know: which cells there are, how a run was made.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from mas_jax.evaluation.report import Grid
from mas_jax.evaluation.study import Runs, accuracy

PARTIES = ("collaborator", "actor")


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
    header = (
        "cell", "seeds", "avg", "sd", "Collaborator", "Actor", "tokens", "told", "trained tokens",
        "minutes",
    )  # fmt: skip
    rows = []
    for cell in cells:
        records = list(runs.get(cell, {}).values())
        if not records:
            continue
        averages = [100 * accuracy(record) for record in records]
        spent = [fmean(tokens_of(record, party) for record in records) for party in PARTIES]
        told = [share for share in map(told_share, records) if share is not None]
        seconds = [r["train_s"] + r["evaluation_accelerator_s"] for r in records]
        rows.append(
            (
                cell,
                str(len(records)),
                f"{fmean(averages):.1f}",
                f"{np.std(averages, ddof=1):.1f}" if len(records) > 1 else "-",
                *(f"{tokens:.0f}" for tokens in (*spent, sum(spent))),
                f"{100 * fmean(told):.1f}%" if told else "-",
                f"{fmean(r['training']['training_tokens'] for r in records):,.0f}",
                f"{fmean(seconds) / 60:.1f}",
            )
        )
    return Grid(title, header, tuple(rows), num_text=1)
