"""A character tokenizer and scripted worlds, for tests that play teams without a model."""

import asyncio
from collections.abc import Callable

from mas_jax.agents import chat
from mas_jax.agents.prompts import load_prompts, load_stepwise
from mas_jax.agents.setting import Budgets, Run, Sampling, Team, World
from mas_jax.records import Passage, Question, Sample, StopReason

CONTROLS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
RUN = Run(seed=3, purpose="eval", step=7)
QUESTION = Question("toy/1", "toy", "who made the thing", ("ada",))
HIERARCHY = Budgets(
    turns=12,
    searcher_turns=3,
    searches=2,
    waves=3,
    subtasks=4,
    passages=3,
    context=4000,
    observation=1000,
)
CASCADE = Budgets(
    turns=5,
    searcher_turns=5,
    searches=4,
    waves=0,
    subtasks=0,
    passages=3,
    context=4000,
    observation=1000,
)


class CharTokenizer:
    """One id a character, 100 + its code point; control tokens are 0 to 3."""

    vocab_size = 100 + 0x110000
    stop_ids = (1,)
    pad_id = 99
    fingerprint = "characters"

    def encode(self, text: str) -> list[int]:
        return [100 + ord(char) for char in text]

    def encode_template(self, text: str) -> list[int]:
        ids = []
        while text:
            control = next((c for c in CONTROLS if text.startswith(c)), None)
            ids += self.encode(text[0]) if control is None else [CONTROLS.index(control)]
            text = text[len(control or text[0]) :]
        return ids

    def decode(self, ids) -> str:
        return "".join(self.token_text(i) for i in ids)

    def token_text(self, token: int) -> str:
        return CONTROLS[token] if token < 100 else chr(token - 100)


def make_team(
    name: str,
    *,
    budgets: Budgets | None = None,
    candidates: int = 1,
    max_tokens: int = 200,
    template: chat.ChatTemplate = chat.TOY,
    prompts: str = "toy",
    stepwise: bool = False,
) -> Team:
    """A team of the character tokenizer."""
    return Team(
        name=name,
        chat=chat.make_chat(CharTokenizer(), template),
        prompts=load_prompts(prompts),
        budgets=budgets or (HIERARCHY if name == "hierarchy" else CASCADE),
        sampling=Sampling(
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_tokens=dict(leader=max_tokens, searcher=max_tokens, answerer=max_tokens),
            candidates=candidates,
        ),
        policies=dict(leader="lead", searcher="seek", answerer="tell"),
        stepwise=load_stepwise(prompts) if stepwise else None,
    )


class Script:
    """A scripted world that keeps what it was asked.

    says: (path, turn) -> text of a generation, or a list of n texts. A text is cut behind its first
    stop string, or at max_tokens, or else ended by the stop token. finds: query -> what search
    gives. delays: path -> how often a request of this path lets others go first.
    """

    def __init__(
        self,
        says: dict,
        *,
        finds: Callable[[str], object] | None = None,
        delays: dict[str, int] | None = None,
    ) -> None:
        self.says, self.delays = says, delays or {}
        self.finds = finds or (lambda query: [Passage("p1", "thing", f"about {query}")])
        self.requests, self.queries, self.rewarded = [], [], []
        self.world = World(sample=self.sample, search=self.search, reward=self.reward)

    async def sample(self, prompt, *, key, policy, n, max_tokens, stop, temperature, top_p, top_k):
        self.requests.append((key, prompt, policy, n, max_tokens))
        for _ in range(self.delays.get(key.path, 0)):
            await asyncio.sleep(0)
        said = self.says[key.path, key.turn]
        texts = [said] * n if isinstance(said, str) else said
        return [cut(text, max_tokens, stop) for text in texts]

    async def search(self, queries, k):
        self.queries += queries
        return [self.finds(query) for query in queries]

    async def reward(self, question, predictions):
        self.rewarded.append(predictions)
        return tuple(float(p in question.golden_answers) for p in predictions)

    def prompt(self, path: str, turn: int) -> str:
        """Text of the prompt of a generation."""
        (ids,) = [p for key, p, *_ in self.requests if (key.path, key.turn) == (path, turn)]
        return CharTokenizer().decode(ids)


def cut(text: str, max_tokens: int, stop) -> Sample:
    """A sample of `text` as an engine would end it."""
    ends = [text.index(s) + len(s) for s in stop.strings if s in text]
    if ends:
        tokens, reason = CharTokenizer().encode(text[: min(ends)]), StopReason.STRING
    else:
        tokens, reason = [*CharTokenizer().encode_template(text), 1], StopReason.TOKEN
    if len(tokens) > max_tokens:
        tokens, reason = tokens[:max_tokens], StopReason.LENGTH
    return Sample(tuple(tokens), tuple(-0.01 * (i + 1) for i in range(len(tokens))), reason)
