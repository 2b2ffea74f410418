"""Plans, traces and episodes for the tests of the evaluation."""

import random
from dataclasses import replace

from mas_jax.evaluation.records_file import Plan
from mas_jax.records import (
    ROLES,
    Episode,
    Failure,
    FailureKind,
    Question,
    StopReason,
    Trace,
    Turn,
)


def make_plan(
    num_questions: dict[str, int], num_runs: int, team: str = "cascade", **settings
) -> Plan:
    """A plan of questions named dataset and number, such as a0, a1, b0."""
    questions = tuple(
        Question(f"{dataset}{index}", dataset, f"who is {index}?", (f"answer {index}", "alias"))
        for dataset, number in num_questions.items()
        for index in range(number)
    )
    return Plan(team=team, questions=questions, num_runs=num_runs, settings=settings)


def make_trace(
    role: str, steps: list[tuple[int, int, str]], *, path: str = "", candidate: int = 0
) -> Trace:
    """A trace from (tokens of nobody, tokens sampled, action) for each turn."""
    owners, turns = [], []
    for num_given, num_sampled, action in steps:
        owners += [0] * num_given
        reason = "no tag" if action == "invalid" else ""
        end = len(owners) + num_sampled
        turns.append(Turn(len(owners), end, action, StopReason.TOKEN, reason))
        owners += [ROLES[role]] * num_sampled
    return Trace(
        tokens=tuple(100 + index % 7 for index in range(len(owners))),
        owners=tuple(owners),
        logprobs=tuple(-0.1 * (1 + index % 3) if o else 0.0 for index, o in enumerate(owners)),
        question="a0",
        rollout=0,
        role=role,
        path=path or role,
        policy="student",
        turns=tuple(turns),
        candidate=candidate,
    )


def make_episode(
    uid: str,
    rollout: int,
    *,
    team: str = "cascade",
    traces: tuple[Trace, ...] = (),
    correct: tuple[float, ...] = (0.0,),
    num_searches: int = 0,
    failed_searches: int = 0,
    turns_used: int = 0,
    failure: Failure | None = None,
    retrieved: tuple[tuple[str, str], ...] = (),
) -> Episode:
    """An episode that answered, or one that the world kept from it."""
    return Episode(
        question=uid,
        rollout=rollout,
        team=team,
        traces=traces,
        predictions=tuple("right" if c else "wrong" for c in correct),
        correct=correct,
        reward=None if failure else sum(correct) / max(len(correct), 1),
        num_searches=num_searches,
        failed_searches=failed_searches,
        turns_used=turns_used,
        outcome="failed" if failure else "answered",
        failure=failure,
        retrieved=retrieved,
    )


def random_episode(uid: str, rollout: int, team: str = "cascade") -> Episode:
    """An episode with every kind of field filled in, the same for the same arguments."""
    rng = random.Random(f"{uid}/{rollout}/{team}")
    actions = ("search", "report", "invalid")
    searchers = tuple(
        make_trace(
            "searcher",
            [
                (rng.randrange(1, 9), rng.randrange(5), rng.choice(actions))
                for _ in range(rng.randrange(1, 4))
            ],
            path=f"leader/w0.s{index}",
        )
        for index in range(rng.randrange(3))
    )
    answerers = tuple(make_trace("answerer", [(9, 2, "answer")], candidate=c) for c in range(3))
    kind = rng.choice([None, None, None, *FailureKind])
    return make_episode(
        uid,
        rollout,
        team=team,
        traces=tuple(
            replace(trace, question=uid, rollout=rollout) for trace in searchers + answerers
        ),
        correct=tuple(float(rng.random() < 0.4) for _ in range(3)),
        num_searches=rng.randrange(7),
        retrieved=tuple((f"p{i}", f"title {i}") for i in range(rng.randrange(4))),
        failed_searches=rng.randrange(2),
        turns_used=rng.randrange(12),
        failure=kind and Failure(kind, 'said "no"\n\u2028 line breaks and accents é'),
    )
