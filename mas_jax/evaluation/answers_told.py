"""How often a Collaborator's words hold the answer: leaking it as a rate.

Must not know: how episodes are played, what was made of the words before they were read.
"""

from collections.abc import Iterable, Mapping

from mas_jax.agents.collaboration import without
from mas_jax.agents.speaker import aloud
from mas_jax.agents.topology import COLLABORATOR
from mas_jax.data.tokenizer import Tokenizer
from mas_jax.records import Episode, Question, Trace


def count(
    episodes: Iterable[Episode], questions: Mapping[str, Question], tokenizer: Tokenizer
) -> dict[str, int]:
    """ "episodes" of problems that do not hold their own answer, since "2 apples" in a hint is no
    leak where the problem has them, and those that "told" it: in which a golden answer stands in
    what the Collaborator said aloud, as it is written. An answer in other words is not seen.

    questions: by uid. tokenizer: the Collaborator's.
    """
    found = {"episodes": 0, "told": 0}
    for episode in episodes:
        question = questions[episode.question]
        said = [t for t in episode.traces if t.role == COLLABORATOR]
        if not said or _holds(question.text, question):
            continue
        found["episodes"] += 1
        found["told"] += any(
            _holds(text, question) for trace in said for text in _words(trace, tokenizer)
        )
    return found


def _words(trace: Trace, tokenizer: Tokenizer) -> list[str]:
    return [aloud(tokenizer.decode(trace.tokens[turn.start : turn.end])) for turn in trace.turns]


def _holds(text: str, question: Question) -> bool:
    return without(text, question.golden_answers) != text
