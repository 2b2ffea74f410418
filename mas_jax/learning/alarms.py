"""Early warning: named alarms where a run's metrics show that a policy or the programme goes wrong.

The state is a function of the metrics alone, so that a resumed run warns like an uninterrupted one.
Must not know: logs, files, who acts on an alarm.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

SEARCHES = "rollout/searches"
VALID_ACTIONS = "rollout/valid_action_frac"
FAILURES = "rollout/failure_frac"
COMPILATIONS = "engine/compilations"


@dataclass(frozen=True)
class AlarmSettings:
    """window: so many first steps make a metric's norm, which is their mean, and may compile.

    searches, valid_actions, entropy: the metric has collapsed below this share of its norm.
    failure_frac: more than this share of the episodes failing in the world is too much.
    distilled: roles whose row has a distillation stream.
    """

    window: int
    searches: float
    valid_actions: float
    entropy: float
    failure_frac: float
    distilled: tuple[str, ...]


@dataclass(frozen=True)
class Alarm:
    """name: as in the metric `alarm/<name>`; a role's ends in it, such as entropy/searcher."""

    name: str
    step: int
    message: str


@dataclass(frozen=True)
class _Verdict:
    """bad raises the alarm, good arms it again; between them an alarm stays as it is."""

    name: str
    bad: bool
    good: bool
    message: str


class Alarms:
    """Watches the metrics of one run, step by step.

    An alarm is given once, when its metric goes bad, and again only after that had recovered: half
    of the way from the limit back to the norm (to half the limit for failures of the world).
    Metrics that a step lacks or that are not finite are not judged and leave the norm alone.
    """

    def __init__(self, settings: AlarmSettings) -> None:
        self._settings = settings
        self._norms: dict[str, tuple[int, float]] = {}  # metric -> how many, their sum
        self._compilations, self._steps_compiling = 0.0, 0
        self._raised: set[str] = set()

    @classmethod
    def from_history(cls, settings: AlarmSettings, history: Iterable[Mapping[str, float]]) -> Self:
        """In the state after the lines of a metrics.jsonl (`metrics.read`); they warn no more."""
        alarms = cls(settings)
        for line in history:
            alarms.check(int(line["step"]), line)
        return alarms

    def check(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """The alarms that this step's metrics raise; steps come in order, each once."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        found = []
        for verdict in self._verdicts(finite):
            if verdict.bad and verdict.name not in self._raised:
                self._raised.add(verdict.name)
                found.append(Alarm(verdict.name, step, verdict.message))
            elif verdict.good:
                self._raised.discard(verdict.name)
        return found

    def _verdicts(self, values: Mapping[str, float]) -> Iterator[_Verdict]:
        yield from self._collapses(values)
        if COMPILATIONS in values:
            yield self._compiling(values[COMPILATIONS])
        if FAILURES in values:
            yield _failing(values[FAILURES], self._settings.failure_frac)
        yield from _distilling(values, self._settings.distilled)

    def _collapses(self, values: Mapping[str, float]) -> Iterator[_Verdict]:
        for metric, value in values.items():
            match metric.split("/"):
                case _ if metric == SEARCHES:
                    name, share = "searches", self._settings.searches
                case _ if metric == VALID_ACTIONS:
                    name, share = "valid_actions", self._settings.valid_actions
                case "update", role, "entropy":
                    name, share = f"entropy/{role}", self._settings.entropy
                case _:
                    continue
            num, total = self._norms.get(metric, (0, 0.0))
            if num < self._settings.window:
                self._norms[metric] = num + 1, total + value
                continue
            norm = total / num
            yield _Verdict(
                name,
                bad=value < share * norm,
                good=value >= (1 + share) / 2 * norm,
                message=f"{metric} is {value:.3g}, below {share:g} of the {norm:.3g} of the run's "
                f"first {num} steps",
            )

    def _compiling(self, compilations: float) -> _Verdict:
        """Programs compiled so far by this process; fewer than before means a new process."""
        before, self._compilations = self._compilations, compilations
        self._steps_compiling = 1 if compilations < before else self._steps_compiling + 1
        grew = compilations > before and self._steps_compiling > self._settings.window
        return _Verdict(
            "compilations",
            bad=grew,
            good=not grew,
            message=f"{COMPILATIONS} went from {before:.0f} to {compilations:.0f} in step "
            f"{self._steps_compiling} of the process: shapes outside the fixed set cost a "
            "compilation each",
        )


def _failing(failure_frac: float, limit: float) -> _Verdict:
    return _Verdict(
        "world_failures",
        bad=failure_frac > limit,
        good=failure_frac <= limit / 2,
        message=f"{FAILURES} is {failure_frac:.3g}, above {limit:g}: see the kinds of failure",
    )


def _distilling(values: Mapping[str, float], roles: Sequence[str]) -> Iterator[_Verdict]:
    """Of a step with an update: a stream that the programme has and that no token went through.

    Source: PITFALLS 94, a distillation path that never ran and that no number showed.
    """
    if not any(metric.startswith("update/") for metric in values):
        return
    for role in roles:
        metric = f"update/{role}/distillation_tokens"
        num_tokens = values.get(metric, 0.0)
        yield _Verdict(
            f"distillation/{role}",
            bad=num_tokens == 0,
            good=num_tokens > 0,
            message=f"{metric} is 0 although programme.{role} distils: it learns nothing from its "
            "teacher",
        )
