"""What calls to an endpoint cost: counted by model, estimated before, and capped.

Money is in the currency of the prices. Must not know: HTTP, files, events.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TYPICAL_CHARS_PER_TOKEN = 4  # of English prose
# chat templates wrap each message in a few tokens, and some add a system message of their own
TEMPLATE_TOKENS, MESSAGE_TOKENS = 64, 16
_ROUNDING = 1e-9  # relative; of sums of money


class BudgetExceeded(RuntimeError):
    """A call was not sent: at its worst it would have taken the spending above the cap."""


@dataclass(frozen=True)
class Price:
    """Money per million tokens."""

    input: float
    output: float


def prices_of(models: Sequence[str], numbers: Sequence[str]) -> dict[str, Price]:
    """The price of each model, none without numbers: one pair in and out for all of them, or one
    for each in their order. Raises: ValueError for other numbers, which are a flag's words."""
    told = f"--price={','.join(numbers)}"
    try:
        pairs = [float(number) for number in numbers]
    except ValueError as error:
        raise ValueError(f"{told}: {error}; want numbers, money per million tokens") from error
    if len(pairs) not in (0, 2, 2 * len(models)):
        raise ValueError(
            f"{told}: {len(pairs)} numbers for {len(models)} models; want two for all of them, or "
            "two for each"
        )
    pairs = pairs * len(models) if len(pairs) == 2 else pairs
    return {m: Price(*pairs[2 * i : 2 * i + 2]) for i, m in enumerate(models) if pairs}


@dataclass
class Counts:
    """What was asked of one model so far.

    requests: completions asked for; of these, `cached` were answered without a call of their own,
    and `failed` got none from the endpoint or were stopped by the cap. calls: sent to the endpoint;
    of these, `retries` repeated a failed one.
    input_tokens, output_tokens, cost: as the endpoint reported, or at their worst for the
    `unreported` calls whose answer named no usage. cost is None for a model without a price.
    uncertain_cost: at most what was billed for calls whose answer was lost (timeouts, broken
    connections, damaged bodies); the cap counts it as spent.
    """

    requests: int = 0
    calls: int = 0
    retries: int = 0
    cached: int = 0
    failed: int = 0
    unreported: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float | None = None
    uncertain_cost: float = 0.0


def typical_input_tokens(messages: Sequence[Mapping[str, str]]) -> int:
    """Prompt tokens of messages as English prose takes them, four characters a token."""
    chars = sum(len(message["content"]) for message in messages)
    return math.ceil(chars / TYPICAL_CHARS_PER_TOKEN) + MESSAGE_TOKENS * len(messages)


def worst_input_tokens(messages: Sequence[Mapping[str, str]]) -> int:
    """Prompt tokens of messages at most: a byte-level vocabulary needs no more than one a byte."""
    size = sum(len(message["content"].encode()) for message in messages)
    return size + MESSAGE_TOKENS * len(messages) + TEMPLATE_TOKENS


class Budget:
    """The money spent, held for calls in flight, and left; `counts` by model.

    Use it from one event loop: nothing here awaits, so no sum is seen half changed.
    """

    def __init__(self, prices: Mapping[str, Price], max_cost: float | None) -> None:
        self.counts: dict[str, Counts] = {}
        self._prices, self._max_cost = dict(prices), max_cost
        self._held = 0.0

    def counts_of(self, model: str) -> Counts:
        """The model's counts, which the caller may add to.

        Raises: ValueError if there is a cap and the model has no price.
        """
        if self._max_cost is not None and model not in self._prices:
            raise ValueError(
                f"model {model!r} has no price, but max_cost={self._max_cost} caps the spending; "
                f"add it to prices (there: {sorted(self._prices)}) or set max_cost=None"
            )
        if model not in self.counts:
            self.counts[model] = Counts(cost=0.0 if model in self._prices else None)
        return self.counts[model]

    def cost(self, model: str, input_tokens: int, output_tokens: int) -> float | None:
        """Money for so many tokens, None for a model without a price."""
        if model not in self._prices:
            return None
        price = self._prices[model]
        return (input_tokens * price.input + output_tokens * price.output) / 1e6

    def spent(self) -> float:
        """Money that the endpoint billed, or may have billed, so far."""
        parts = self.counts.values()
        return math.fsum((counts.cost or 0.0) + counts.uncertain_cost for counts in parts)

    def hold(self, model: str, input_tokens: int, output_tokens: int) -> float:
        """Sets aside a call's worst case and returns it; pass it to `release` when the call ends.

        Raises: BudgetExceeded if it, what was spent, and what calls in flight hold exceed the cap.
        """
        worst = self.cost(model, input_tokens, output_tokens) or 0.0
        spent = self.spent()
        if self._max_cost is not None:
            total = spent + self._held + worst
            if total > self._max_cost * (1 + _ROUNDING):
                raise BudgetExceeded(
                    f"a call to {model!r} was not sent: {spent:.6g} spent, {self._held:.6g} held "
                    f"for calls in flight and at most {worst:.6g} for this one make {total:.6g}, "
                    f"above max_cost={self._max_cost:.6g}; raise max_cost or ask for less"
                )
        self._held += worst
        return worst

    def release(self, model: str, held: float, uncertain: float) -> None:
        """Ends a hold; `uncertain` of it may have been billed although the answer was lost."""
        self._held = max(self._held - held, 0.0)
        self.counts_of(model).uncertain_cost += uncertain

    def charge(self, model: str, input_tokens: int, output_tokens: int) -> float | None:
        """Counts an answer's tokens and returns what they cost, None without a price."""
        counts, cost = self.counts_of(model), self.cost(model, input_tokens, output_tokens)
        counts.input_tokens += input_tokens
        counts.output_tokens += output_tokens
        if cost is not None:
            counts.cost += cost
        return cost
