"""What passes between the parts: questions, passages, samples, traces and episodes.

Plain frozen values. Token positions are indices into `Trace.tokens`; log-probs are in nats, under
the distribution that the token was drawn from. Must not know: models, devices, prompts.
"""

import enum
from dataclasses import asdict, dataclass

# owner ids of tokens: 0 is nobody's (template, instructions, tool results, other agents' words)
NOBODY = 0
ROLES = {"leader": 1, "searcher": 2, "answerer": 3, "collaborator": 4, "actor": 5}
UNTOLD = -1  # stands for each token of an endpoint, which counts them and tells no ids


@dataclass(frozen=True)
class Question:
    """One question with every answer that counts as right.

    uid: unique over datasets and splits. decomposition: the single-hop questions it is made of.
    gold_passages: ids of the passages that hold the facts, hop by hop; gold_titles: instead of
    them, titles of the pages that do, where it is not known which passage of a page. Each is
    empty if it is not known whole.
    """

    uid: str
    dataset: str
    text: str
    golden_answers: tuple[str, ...]
    hops: int = 0
    decomposition: tuple[str, ...] = ()
    gold_passages: tuple[str, ...] = ()
    gold_titles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem(Question):
    """A mathematical problem: a question whose answers are compared by their value.

    level: of difficulty, 1 to 5, 0 where not known. tolerance: how far a number may be from the
    answer, 0.0 for not at all. is_multiple: whether each golden answer lists several, all asked.
    """

    level: int = 0
    subject: str = ""
    tolerance: float = 0.0
    is_multiple: bool = False


def question_fields(question: Question) -> dict:
    """A question's fields, for digests and JSON; `gold_titles` only where there are some, so that
    digests of questions that know nothing of pages do not depend on that field."""
    found = asdict(question)
    if not question.gold_titles:
        del found["gold_titles"]
    return found


@dataclass(frozen=True)
class Passage:
    """One passage of a corpus and, when it was retrieved, its score (larger is closer)."""

    id: str
    title: str
    text: str
    score: float | None = None


@dataclass(frozen=True)
class SearchFailure:
    """Stands where a query's passages would; `kind` is one word, `message` says what happened."""

    kind: str
    message: str


class StopReason(enum.StrEnum):
    """Why a generation ended."""

    TOKEN = "token"  # a stop token id, which is the last token kept
    STRING = "string"  # a stop string, which the last token kept completes
    LENGTH = "length"  # max_tokens
    CONTEXT = "context"  # the model's or the pool's context is full


@dataclass(frozen=True)
class Stop:
    """What ends a generation: token ids, or strings in the decoded text."""

    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class SampleKey:
    """Everything that the randomness of a generation depends on; the engine adds candidate and
    position. Two generations with equal keys and prompts draw the same tokens."""

    seed: int
    purpose: str  # "train" or "eval"
    step: int
    question: str
    rollout: int
    path: str  # of the agent within the team, such as "leader/w1.s2"
    turn: int


@dataclass(frozen=True)
class Sample:
    """One generated continuation: its tokens, their log-probs, and why it ended."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason


@dataclass(frozen=True)
class Reply:
    """What an endpoint answered to a conversation: its text, "" where it declined, and the tokens
    that it counted."""

    text: str
    input_tokens: int
    output_tokens: int
    stop_reason: StopReason
    is_refused: bool = False


@dataclass(frozen=True)
class Turn:
    """One generation inside a trace: tokens [start, end), what it did, and why it ended.

    action: "search", "report", "assign", "select", "answer", or "invalid" for a reason.
    query, found: of a search, what was asked and the ids of the passages that came back, best
    first; none after a failure. dropped: of a stepwise agent's turn, entries of the history that
    its prompt left out; None of others. wave: of a topology's turn: all of a wave are drawn at
    once; None of others. text: what an endpoint said, whose tokens are UNTOLD.
    """

    start: int
    end: int
    action: str
    stop_reason: StopReason
    reason: str = ""
    query: str = ""
    found: tuple[str, ...] = ()
    dropped: int | None = None
    wave: int | None = None
    text: str = ""


@dataclass(frozen=True)
class Trace:
    """One agent's conversation in one episode, token by token.

    owners: role id that sampled each token, 0 for nobody's; logprobs: 0.0 where nobody sampled.
    candidate: index among the continuations of one request. policy: name of the weights.
    """

    tokens: tuple[int, ...]
    owners: tuple[int, ...]
    logprobs: tuple[float, ...]
    question: str
    rollout: int
    role: str
    path: str
    policy: str
    turns: tuple[Turn, ...]
    candidate: int = 0


class FailureKind(enum.StrEnum):
    """Failures of the world, never of the policy: masked from learning, counted by kind."""

    RETRIEVER = "retriever"
    API = "api"
    SAMPLER = "sampler"
    JUDGE = "judge"
    REWARD = "reward"


class WorldError(Exception):
    """Raised by what surrounds the policy when it fails; `kind` says which part."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Failure:
    """What kept an episode from being finished."""

    kind: FailureKind
    message: str


@dataclass(frozen=True)
class Judgement:
    """A judge's score of the Searcher at a path, in [0, 1], None where it failed; tokens that the
    judge read and wrote, 0 where it is no language model or its answer was there already."""

    path: str
    score: float | None
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class Episode:
    """One play of one question by one team.

    predictions: the Answerer's candidates, "" for an invalid one; correct: 1.0 or 0.0 each.
    reward: mean of `correct`, None after a failure of the world. num_searches: queries executed;
    failed_searches: of these, how many the retriever failed. turns_used: by Leader and Searchers.
    outcome: "answered", or what kept the policy from answering ("invalid", "no turns", "context").
    "failure": the world failed before that was known. retrieved: id and title of each passage
    that a search found, each once, sorted. judgements: of each Searcher's work, where a judge was
    asked. tree: the tree of the question that it is a
    leaf of, None for an episode of its own; shared_turns: its first ones that another leaf of the
    tree played, tokens, searches and all, and that counts and traces here hold again.
    reward_error: standard error of `reward` where it is measured by several solutions of an Actor,
    None elsewhere.
    """

    question: str
    rollout: int
    team: str
    traces: tuple[Trace, ...]
    predictions: tuple[str, ...]
    correct: tuple[float, ...]
    reward: float | None
    num_searches: int
    failed_searches: int
    turns_used: int
    outcome: str
    failure: Failure | None = None
    retrieved: tuple[tuple[str, str], ...] = ()
    judgements: tuple[Judgement, ...] = ()
    tree: int | None = None
    shared_turns: int = 0
    reward_error: float | None = None
