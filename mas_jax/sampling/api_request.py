"""What is asked of a chat endpoint and what comes back: plain values.

Must not know: HTTP, money, caches.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

Message = Mapping[str, str]  # "role" and "content"
ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True)
class Request:
    """What decides a completion.

    seed: sent to the endpoint where given. sample: number of this draw among equal requests, which
    are then answered independently, and the same way when they are repeated; not sent.
    """

    messages: tuple[Message, ...]
    model: str
    temperature: float
    max_tokens: int
    seed: int | None = None
    stop: tuple[str, ...] = ()
    sample: int | None = None

    @property
    def is_repeatable(self) -> bool:
        """Whether an equal request may get the same answer: at temperature 0, or where a seed or a
        sample number says which draw is meant. Only these are cached and shared."""
        return self.temperature == 0 or self.seed is not None or self.sample is not None


@dataclass(frozen=True)
class Completion:
    """What an endpoint answered.

    finish_reason: its word ("stop", "length", …), "" if it said none. refusal: why it declined,
    "content_filter" where only its filter speaks, None if it answered. Tokens: as it reported; at
    their worst if it did not. cost: of this answer, 0.0 when is_cached, None without a price.
    is_cached: from disk, or from an equal request that was in flight. model: the name that the
    endpoint says answered.
    """

    text: str
    finish_reason: str
    refusal: str | None
    input_tokens: int
    output_tokens: int
    cost: float | None
    is_cached: bool
    model: str


@dataclass(frozen=True)
class Answer:
    """What an endpoint answered; `Completion` says what the fields mean. Tokens are None where the
    endpoint named none."""

    text: str
    finish_reason: str
    refusal: str | None
    model: str
    input_tokens: int | None
    output_tokens: int | None


class CallFailed(Exception):
    """One call without a usable answer; its text holds no key.

    is_retryable: the same call may succeed later. retry_after_s: how long the endpoint asked to be
    left alone. may_be_billed: the endpoint may have done the work.
    """

    def __init__(
        self,
        message: str,
        *,
        is_retryable: bool,
        may_be_billed: bool,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.is_retryable, self.may_be_billed = is_retryable, may_be_billed
        self.retry_after_s = retry_after_s


def check_request(request: Request) -> None:
    """Raises: ValueError for a request that no endpoint could answer, naming what is wrong."""
    if not request.messages or not request.model:
        raise ValueError(f"{len(request.messages)} messages to model {request.model!r}; want both")
    for number, message in enumerate(request.messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ValueError(f"message {number} is {_show(message)}; want its role and content")
        if message["role"] not in ROLES or not isinstance(message["content"], str):
            raise ValueError(
                f"message {number} is {_show(message)}; want a role of {ROLES} and text as content"
            )
    for text in (request.model, *request.stop, *(m["content"] for m in request.messages)):
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise ValueError(f"{_show(text)} holds half a surrogate pair, which is no character")
    if not 0 <= request.temperature < math.inf:
        raise ValueError(f"temperature={request.temperature}: want a number of at least 0")
    if request.max_tokens < 1:
        raise ValueError(f"max_tokens={request.max_tokens}: want at least 1")


def _show(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
