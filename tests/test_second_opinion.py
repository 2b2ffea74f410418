"""Two graders side by side on recorded answers."""

import asyncio
import dataclasses

from evaluation_episodes import make_episode, make_plan

from mas_jax.evaluation import second_opinion
from mas_jax.records import Failure, FailureKind


def test_each_recorded_answer_counts_and_equal_ones_are_asked_once():
    """The second grader takes "0.5" only: right 0.5 twice agrees, 1/2 and a wrong 0.5 differ."""
    questions = {q.uid: q for q in make_plan({"a": 3}, 1).questions}
    said = [("a0", 0, "0.5", 1.0), ("a0", 1, "0.5", 1.0), ("a1", 0, "1/2", 1.0),
            ("a2", 0, "0.5", 0.0), ("a2", 1, "7", 0.0), ("a2", 2, "", 0.0)]  # fmt: skip
    episodes = [
        dataclasses.replace(make_episode(uid, rollout, correct=(right,)), predictions=(text,))
        for uid, rollout, text, right in said
    ]
    failed = make_episode("a1", 1, failure=Failure(FailureKind.API, "gone"))
    asked = []

    async def second(question, prediction):
        asked.append((question.uid, prediction))
        return prediction == "0.5"

    found = asyncio.run(second_opinion.compare([*episodes, failed], questions, second))
    assert (found.both, found.neither) == (2, 1)
    assert [(o.question, o.prediction) for o in found.only_first] == [("a1", "1/2")]
    assert [(o.question, o.prediction) for o in found.only_second] == [("a2", "0.5")]
    assert found.only_first[0].golds == questions["a1"].golden_answers
    assert sorted(asked) == [("a0", "0.5"), ("a1", "1/2"), ("a2", "0.5"), ("a2", "7")]
