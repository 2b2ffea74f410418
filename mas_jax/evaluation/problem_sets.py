"""Mathematics set by set: pass@1, avg@k, their unweighted mean, and what each party spent.

Must not know: how episodes are played, how answers are graded.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from mas_jax.evaluation import bootstrap, ledger
from mas_jax.evaluation.records_file import Plan
from mas_jax.evaluation.report import Grid, interval_text
from mas_jax.evaluation.significance import Values
from mas_jax.evaluation.statistics import EpisodeScore
from mas_jax.records import Episode

# of 40 problems and of 83: published tables hold either, so a mean counts one of them
ALTERNATIVES = ("amc23", "amc83")


def describe(
    plan: Plan, scores: Sequence[EpisodeScore], read: Callable[[], Iterable[Episode]]
) -> dict[str, dict]:
    """By set, and by mean over sets, as JSON: num_problems, pass_at_1 (of the first run), avg (over
    all runs), each as an interval over problems, and `tokens` a workflow, by role: input and
    output.

    Failed and missing episodes are wrong; tokens are of those that were recorded. read: these, from
    the first each time it is called: they need not fit in memory at once.
    """
    first = dataclasses.replace(plan, num_runs=1)
    accuracies = {
        "pass_at_1": bootstrap.question_means(first, [s for s in scores if s.rollout == 0]),
        "avg": bootstrap.question_means(plan, scores),
    }
    set_of = {question.uid: question.dataset for question in plan.questions}
    sets, played = list(accuracies["avg"]), Counter(set_of[score.question] for score in scores)
    rows = {
        name: _row(accuracies, [name])
        | {"tokens": _tokens((e for e in read() if set_of[e.question] == name), played[name])}
        for name in sets
    }
    means = {
        label: _row(accuracies, members) | {"tokens": _mean([rows[n]["tokens"] for n in members])}
        for label, members in _means(sets).items()
    }
    return rows | means


def _means(sets: Sequence[str]) -> dict[str, list[str]]:
    """Whose unweighted means are shown: of all sets, or with one of two alternatives each."""
    if len(sets) < 2:
        return {}
    both = [name for name in ALTERNATIVES if name in sets]
    if len(both) < 2:
        return {f"mean of {len(sets)}": list(sets)}
    return {
        f"mean of {len(sets) - 1}, {kept}": [n for n in sets if n == kept or n not in both]
        for kept in both
    }


def _row(accuracies: Mapping[str, Values], members: Sequence[str]) -> dict:
    chosen = {
        name: {member: values[member] for member in members} for name, values in accuracies.items()
    }
    number = sum(len(values) for values in chosen["avg"].values())
    return {"num_problems": number} | {
        name: dataclasses.asdict(bootstrap.interval(values)) for name, values in chosen.items()
    }


def _tokens(episodes: Iterable[Episode], number: int) -> dict[str, dict[str, float]]:
    return {
        entry.role: {"input": entry.input_tokens / number, "output": entry.output_tokens / number}
        for entry in ledger.play_entries("", episodes, accelerator_s=0.0)
    }


def _mean(tokens: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """A role that does not act in a set spends nothing there."""
    roles = dict.fromkeys(role for found in tokens for role in found)
    return {
        role: {
            kind: sum(found[role][kind] for found in tokens if role in found) / len(tokens)
            for kind in ("input", "output")
        }
        for role in roles
    }


def grid(systems: Mapping[str, Mapping[str, Mapping]], *, num_runs: int) -> Grid:
    """A row for each set and mean of each system, in %, with tokens a problem of each party."""
    roles = sorted({r for sets in systems.values() for row in sets.values() for r in row["tokens"]})
    return Grid(
        "Each set in %, 95% intervals over problems; tokens a problem of each party",
        (
            "system", "set", "problems", "pass@1", "interval", f"avg@{num_runs}", "interval",
            *(f"{role} {kind}" for role in roles for kind in ("input", "output")),
        ),
        tuple(
            (
                system, name, f"{row['num_problems']:,}", *_cells(row["pass_at_1"]),
                *_cells(row["avg"]), *(cell for role in roles for cell in _spent(row, role)),
            )
            for system, sets in systems.items()
            for name, row in sets.items()
        ),
        num_text=2,
    )  # fmt: skip


def _cells(found: Mapping) -> tuple[str, str]:
    return f"{100 * found['difference']:.2f}", interval_text(bootstrap.Interval(**found))


def _spent(row: Mapping, role: str) -> tuple[str, str]:
    found = row["tokens"].get(role)
    return ("-", "-") if found is None else (f"{found['input']:,.0f}", f"{found['output']:,.0f}")
