"""Early warning: named alarms where a run's metrics show that a policy or the programme goes wrong.

The state is a function of the metrics alone, so that a resumed run warns like an uninterrupted one.
Must not know: logs, files, who acts on an alarm.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

SEARCHES = "rollout/searches"
VALID_ACTIONS = "rollout/valid_action_frac"
FAILURES = "rollout/failure_frac"
COMPILATIONS = "engine/compilations"
# monitors.py
MARKERS_SAID, ANSWERS_TOLD = "leak/marker_frac", "leak/answer_frac"
STYLES = ("unigram", "bigram")


@dataclass(frozen=True)
class AlarmSettings:
    """window: so many first steps make a metric's norm, which is their mean, and may compile.

    searches, valid_actions, entropy: the metric has collapsed below this share of its norm.
    failure_frac: more than this share of the episodes failing in the world is too much.
    distilled: roles whose row has a distillation stream.
    privileged: roles whose teacher reads more than they do; the rest is watched where there are
    any. length: as searches, of what such an agent samples. growth: more than so many times the
    norm of searches or length is too much, too. kl_to_start: nats a token. style: nats of drift
    (`monitors.Style`). leak: share of episodes with a marker, and by which those that tell an
    answer may pass their norm (`monitors.tally_leaks`).
    """

    window: int
    searches: float
    valid_actions: float
    entropy: float
    failure_frac: float
    distilled: tuple[str, ...]
    privileged: tuple[str, ...] = ()
    length: float = 0.5
    growth: float = 1.5
    kl_to_start: float = 0.5
    style: float = 0.1
    leak: float = 0.05


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


@dataclass(frozen=True)
class _Bounds:
    """A metric goes bad below `share` of its norm, and above `growth` of it and `more`."""

    name: str
    share: float
    growth: float = math.inf
    more: float = 0.0

    def verdict(self, metric: str, value: float, norm: float, num: int) -> _Verdict:
        """num: steps that made the norm."""
        least, most, most_good = self.share * norm, math.inf, math.inf
        least_good = (1 + self.share) / 2 * norm if self.share else 0.0
        if math.isfinite(self.growth):
            most = self.growth * norm + self.more
            most_good = (1 + self.growth) / 2 * norm + self.more / 2
        of = f"of the {norm:.3g} of the run's first {num} steps"
        how = f"above {most:.3g}, which is {self.growth:g} {of}"
        how += f" and {self.more:g}" if self.more else ""
        if value < least:
            how = f"below {self.share:g} {of}"
        return _Verdict(
            self.name,
            bad=value < least or value > most,
            good=least_good <= value <= most_good,
            message=f"{metric} is {value:.3g}, {how}",
        )


class Alarms:
    """Watches the metrics of one run, step by step.

    An alarm is given once, when its metric goes bad, and again only after that had recovered: half
    of the way from the limit back to the norm (to half the limit for what has no norm).
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
        s = self._settings
        for metric, value in values.items():
            if (bounds := self._bounds(metric)) is None:
                continue
            num, total = self._norms.get(metric, (0, 0.0))
            if num < s.window:
                self._norms[metric] = num + 1, total + value
            else:
                yield bounds.verdict(metric, value, total / num, num)
        if COMPILATIONS in values:
            yield self._compiling(values[COMPILATIONS])
        if FAILURES in values:
            verdict = _above("world_failures", FAILURES, values[FAILURES], s.failure_frac)
            yield replace(verdict, message=f"{verdict.message}: see the kinds of failure")
        yield from _distilling(values, s.distilled)
        if s.privileged:
            yield from self._privileged(values)

    def _bounds(self, metric: str) -> "_Bounds | None":
        """Of a metric that has a norm; None for others."""
        s = self._settings
        growth = s.growth if s.privileged else math.inf
        match metric.split("/"):
            case _ if metric == SEARCHES:
                return _Bounds("searches", s.searches, growth)
            case _ if metric == VALID_ACTIONS:
                return _Bounds("valid_actions", s.valid_actions)
            case "update", role, "entropy":
                return _Bounds(f"entropy/{role}", s.entropy)
            case "rollout", role, "length" if role in s.privileged:
                return _Bounds(f"length/{role}", s.length, growth)
            case _ if metric == ANSWERS_TOLD and s.privileged:
                return _Bounds("leak/answers", 0.0, 1.0, s.leak)
        return None

    def _privileged(self, values: Mapping[str, float]) -> Iterator[_Verdict]:
        """What has no norm and is watched where a teacher reads more."""
        s = self._settings
        limits = {MARKERS_SAID: ("leak/markers", s.leak)}
        limits |= {f"style/{kind}_drift": (f"style/{kind}s", s.style) for kind in STYLES}
        limits |= {
            f"update/{role}/kl_to_start": (f"kl_to_start/{role}", s.kl_to_start)
            for role in s.privileged
        }
        for metric, (name, limit) in limits.items():
            if metric in values:
                yield _above(name, metric, values[metric], limit)

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


def _above(name: str, metric: str, value: float, limit: float) -> _Verdict:
    return _Verdict(
        name,
        bad=value > limit,
        good=value <= limit / 2,
        message=f"{metric} is {value:.3g}, above {limit:g}",
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
