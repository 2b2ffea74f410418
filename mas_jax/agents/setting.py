"""What a team is made of and plays in: fixed for a run, shared by all its episodes.

Must not know: what the roles do, engines, devices.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mas_jax.agents.chat import Chat
from mas_jax.agents.prompts import Prompts, Stepwise

if TYPE_CHECKING:
    from mas_jax.agents.collaboration import Collaboration

UNCAPPED = 10**9  # more than any episode can use


@dataclass(frozen=True)
class Budgets:
    """Limits of one episode; 0 means none at all, never unlimited.

    turns: generations of Leader and Searchers together, forced reports and repeats after an invalid
    action included; Answerer candidates cost none.
    searcher_turns: most turns granted to one Searcher. searches: most searches of one Searcher; one
    with g turns searches at most g-1 times, since the last is its report.
    waves, subtasks: most waves, and most subtasks in each. passages: shown for one query.
    context: tokens of a conversation, prompt and generation. observation: tokens of one observation
    or of the evidence, beyond which passages, reports and words are left out.
    all_searches, all_tokens: of the whole episode, prompts as sent and sampled tokens of Leader and
    Searchers; caps for comparing systems at equal cost. Who has used them up must end: the action
    that ends an agent still costs its tokens.
    METHODS §1: 3 passages; 5 turns in the cascade (searches bounded by them); in the hierarchy 12
    turns, 3 waves of 4 subtasks, 2 searches a Searcher.
    """

    turns: int
    searcher_turns: int
    searches: int
    waves: int
    subtasks: int
    passages: int
    context: int
    observation: int
    all_searches: int = UNCAPPED
    all_tokens: int = UNCAPPED


@dataclass(frozen=True)
class Grant:
    """What one agent may use before it must end, out of what its episode has left."""

    turns: int
    searches: int
    tokens: int


@dataclass(frozen=True)
class Sampling:
    """How generations are drawn. max_tokens: by role; candidates: of the Answerer."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: Mapping[str, int]
    candidates: int


@dataclass(frozen=True)
class Team:
    """A named team with everything that its roles need.

    policies: role -> name of its weights. notes: by question, what a single agent reads behind it,
    such as a protocol. stepwise: texts of the history in a single agent's prompts, where each of
    its turns has a prompt of its own; None for one conversation. collaboration: of a team that is
    a topology, which takes the place of chat, prompts, sampling and policies; None for others.
    """

    name: str
    chat: Chat
    prompts: Prompts
    budgets: Budgets
    sampling: Sampling
    policies: Mapping[str, str]
    notes: Mapping[str, str] = field(default_factory=dict)
    stepwise: Stepwise | None = None
    collaboration: "Collaboration | None" = None


@dataclass(frozen=True)
class JudgeJob:
    """What one Searcher did for its subtask, as a judge reads it.

    question: the text of the episode's. searches: each query with the texts that were shown for
    it, none where nothing was found or the search failed. report: "" if there is none.
    """

    question: str
    path: str
    subtask: str
    searches: tuple[tuple[str, tuple[str, ...]], ...]
    report: str


@dataclass(frozen=True)
class World:
    """What surrounds the policy; every function may raise, which makes a failure of the world.

    sample(prompt, *, key, policy, n, max_tokens, temperature, top_p, top_k, stop) -> [Sample] * n;
    search(queries, k) -> one list of at most k Passages, or a SearchFailure, for each query;
    reward(question, predictions) -> one float for each prediction;
    judge(job, *, key) -> a Judgement of the job's path; a failure of it costs that score, not the
    episode. Without it nobody's work is judged;
    complete(messages, *, key, policy, max_tokens, temperature) -> a Reply: of policies that take
    and give text, where there are any.
    """

    sample: Callable[..., Awaitable]
    search: Callable[..., Awaitable]
    reward: Callable[..., Awaitable]
    judge: Callable[..., Awaitable] | None = None
    complete: Callable[..., Awaitable] | None = None


@dataclass(frozen=True)
class Run:
    """What the randomness of every episode of a run depends on, beside question and rollout."""

    seed: int
    purpose: str  # "train" or "eval"
    step: int
