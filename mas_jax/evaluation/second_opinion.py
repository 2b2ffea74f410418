"""Where a second grader differs from the one whose verdicts the records hold.

Must not know: which graders these are, how episodes are played.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping

from mas_jax.records import Episode, Question
from mas_jax.rewards.math_sets import Agreement, Opinions, agreement


async def compare(
    episodes: Iterable[Episode],
    questions: Mapping[str, Question],
    second: Callable[[Question, str], Awaitable[bool]],
) -> Agreement:
    """Both graders on every answer that was given and graded, each of equal ones counted.

    questions: by uid. second: is asked once for equal answers to a question. An episode that the
    world failed was not graded, and "" is no answer to either.
    """
    given = [
        (episode.question, prediction, correct == 1.0)
        for episode in episodes
        if episode.failure is None
        for prediction, correct in zip(episode.predictions, episode.correct, strict=True)
        if prediction
    ]
    distinct = list(dict.fromkeys((uid, prediction) for uid, prediction, _ in given))
    asked = await asyncio.gather(*(second(questions[uid], text) for uid, text in distinct))
    verdicts = dict(zip(distinct, asked, strict=True))
    return agreement(
        Opinions(uid, questions[uid].golden_answers, text, first, verdicts[uid, text])
        for uid, text, first in given
    )
