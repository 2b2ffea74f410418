"""One agent at work: it is told outside text, acts, and pays for its turns.

`Play` is what the agents of one episode share: its functions, its turns and its counts.
Must not know: which role does what, failures of the world (they pass through).
"""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from mas_jax.agents.actions import Action, Invalid, closing_tags, parse
from mas_jax.agents.chat import Conversation, Strand
from mas_jax.agents.prompts import Message, fill
from mas_jax.agents.setting import Grant, JudgeJob, Run, Team, World
from mas_jax.records import (
    ROLES,
    Question,
    Sample,
    SampleKey,
    SearchFailure,
    Stop,
    StopReason,
    Trace,
)

if TYPE_CHECKING:
    from mas_jax.agents.speaker import Speaker

# roles whose generations are turns
_PAYING = ("leader", "searcher")
LONGEST_WORD = 40  # characters; a longer one is cut inside


async def run_all(work: Iterable[Awaitable]) -> list:
    """Results in order of things done at once; after one's exception none of the others runs on."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Play:
    """One episode in progress."""

    def __init__(
        self, question: Question, rollout: int, *, team: Team, world: World, run: Run
    ) -> None:
        self.question, self.rollout = question, rollout
        self.team, self.world, self.run = team, world, run
        self.agents: list[Agent | Speaker] = []
        self.turns_used = 0
        self.tokens_used = 0
        self.num_searches = 0
        self.failed_searches = 0
        self.retrieved: set[tuple[str, str]] = set()  # id and title of what searches found
        self.jobs: list[JudgeJob] = []  # finished subtasks, for a judge

    @property
    def turns_left(self) -> int:
        """Turns of the episode that nobody has taken yet."""
        return self.team.budgets.turns - self.turns_used

    def grant(self, num_agents: int, *, max_turns: int) -> Grant:
        """What each of several agents that start together may use, equal parts rounded down.

        Set at dispatch, so that arrival order changes nothing.
        """
        budgets = self.team.budgets
        return Grant(
            turns=min(max_turns, self.turns_left // num_agents),
            searches=min(budgets.searches, self.searches_left // num_agents),
            tokens=self.tokens_left // num_agents,
        )

    @property
    def searches_left(self) -> int:
        """Searches that the episode's cap leaves."""
        return max(0, self.team.budgets.all_searches - self.num_searches)

    @property
    def tokens_left(self) -> int:
        """Tokens that the episode's cap leaves."""
        return max(0, self.team.budgets.all_tokens - self.tokens_used)

    @property
    def is_spent(self) -> bool:
        """Whether a cap of the episode on searches or tokens is used up."""
        return not (self.searches_left and self.tokens_left)

    def traces(self) -> tuple[Trace, ...]:
        """Everything generated so far, in the order in which the agents were created."""
        return tuple(trace for agent in self.agents for trace in agent.traces())

    def key(self, path: str, turn: int) -> SampleKey:
        """What the randomness of an agent's generation depends on."""
        run = self.run
        return SampleKey(
            seed=run.seed,
            purpose=run.purpose,
            step=run.step,
            question=self.question.uid,
            rollout=self.rollout,
            path=path,
            turn=turn,
        )

    def trace(
        self, strand: Strand, *, role: str, path: str, policy: str, candidate: int = 0
    ) -> Trace:
        """A strand of this episode as a Trace."""
        return Trace(
            tokens=tuple(strand.tokens),
            owners=tuple(strand.owners),
            logprobs=tuple(strand.logprobs),
            question=self.question.uid,
            rollout=self.rollout,
            role=role,
            path=path,
            policy=policy,
            turns=tuple(strand.turns),
            candidate=candidate,
        )

    async def look_up(self, query: str) -> tuple[Message, tuple[str, ...]]:
        """Runs one query; the observation that shows its passages, or that it failed, and the ids
        of the passages."""
        prompts = self.team.prompts
        self.num_searches += 1
        (found,) = await self.world.search([query], self.team.budgets.passages)
        if isinstance(found, SearchFailure):
            self.failed_searches += 1
            return Message(prompts.search_failed, {"kind": found.kind}), ()
        self.retrieved.update((passage.id, passage.title) for passage in found)
        if not found:
            return Message(prompts.no_passages), ()
        items = tuple(
            fill(prompts.passage, {"index": index, "title": passage.title, "text": passage.text})
            for index, passage in enumerate(found, start=1)
        )
        message = Message(prompts.information, items=items, separator=prompts.passage_separator)
        return message, tuple(passage.id for passage in found)


class Agent:
    """One role's part in an episode: a conversation and the turns it has taken in it."""

    def __init__(self, play: Play, role: str, path: str, *, actions: Sequence[str]) -> None:
        """actions: kinds the role has at all; their closing tags stop its generations."""
        self.play, self.role, self.path = play, role, path
        self.candidate = 0
        self.num_generations = 0
        self.num_invalid = 0
        self.tokens_used = 0
        self.searches: list[tuple[str, tuple[str, ...]]] = []  # queries, texts shown for each
        self.conversation: Conversation | None = None
        self._stop = Stop(play.team.chat.tokenizer.stop_ids, closing_tags(actions))
        play.agents.append(self)

    def hear(self, message: Message) -> None:
        """Adds outside text: the opening prompt, or an observation.

        If its items pass the budget of an observation, or all of it would not leave room for a
        generation, items are left out from the last, then words of the first, and a marker is set.
        """
        marker = self.play.team.prompts.truncated
        items = shortened(message.items, lambda kept: self._fits(message, kept), marker)
        text = message.render(items)
        if self.conversation is None:
            self.conversation = Conversation(self.play.team.chat, text, examples=message.examples)
        else:
            self.conversation.extend(text)

    def _fits(self, message: Message, items: Sequence[str]) -> bool:
        budgets, chat = self.play.team.budgets, self.play.team.chat
        if len(chat.tokenizer.encode(message.separator.join(items))) > budgets.observation:
            return False
        text = message.render(items)
        if self.conversation is None:
            length = len(Conversation(chat, text, examples=message.examples).prompt())
        else:
            length = self.conversation.length_after(text)
        return length + self.play.team.sampling.max_tokens[self.role] <= budgets.context

    async def act(
        self, allowed: Collection[str], *, known_ids: Collection[str] = (), max_subtasks: int = 0
    ) -> Action | None:
        """One generation and the action in it, see `actions.parse`; None if the context is full."""
        samples = await self.generate(1, path=self.path)
        if samples is None:
            return None
        return self.take(samples[0], allowed, known_ids=known_ids, max_subtasks=max_subtasks)

    async def generate(self, n: int, *, path: str) -> list[Sample] | None:
        """n continuations of the conversation; None if no room is left for a token.

        path: of the sampling key. Costs a turn if the role pays for its generations.
        """
        team = self.play.team
        prompt = self.conversation.prompt()
        room = team.budgets.context - len(prompt)
        if room <= 0:
            return None
        key = self.play.key(path, self.num_generations)
        self.num_generations += 1
        self.play.turns_used += self.role in _PAYING
        samples = await self.play.world.sample(
            prompt,
            key=key,
            policy=team.policies[self.role],
            n=n,
            max_tokens=min(team.sampling.max_tokens[self.role], room),
            temperature=team.sampling.temperature,
            top_p=team.sampling.top_p,
            top_k=team.sampling.top_k,
            stop=self._stop,
        )
        if self.role in _PAYING:
            used = len(prompt) + sum(len(sample.tokens) for sample in samples)
            self.tokens_used += used
            self.play.tokens_used += used
        return samples

    def take(
        self,
        sample: Sample,
        allowed: Collection[str],
        *,
        known_ids: Collection[str] = (),
        max_subtasks: int = 0,
    ) -> Action | None:
        """Makes a sample of `generate` the agent's turn; None if it filled the context."""
        tokenizer = self.play.team.chat.tokenizer
        tokens = sample.tokens
        if tokens and tokens[-1] in tokenizer.stop_ids:
            tokens = tokens[:-1]
        text = tokenizer.decode(tokens)
        action = parse(text, allowed=allowed, known_ids=known_ids, max_subtasks=max_subtasks)
        invalid = isinstance(action, Invalid)
        self.num_invalid += invalid
        reason = action.reason.value if invalid else ""
        owner = ROLES[self.role]
        self.conversation.append(sample, owner=owner, action=action.kind, reason=reason)
        return None if invalid and sample.stop_reason == StopReason.CONTEXT else action

    def fork(self, candidate: int) -> "Agent":
        """A copy that goes on as another candidate of the same request."""
        other = copy.copy(self)
        other.candidate = candidate
        other.conversation = self.conversation.fork()
        self.play.agents.append(other)
        return other

    @property
    def strands(self) -> list[Strand]:
        """All that it was told and said, token by token."""
        return [] if self.conversation is None else self.conversation.strands

    def traces(self) -> list[Trace]:
        """One Trace for each strand in which something was generated."""
        return [
            self.play.trace(
                strand,
                role=self.role,
                path=self.path,
                policy=self.play.team.policies[self.role],
                candidate=self.candidate,
            )
            for strand in self.strands
            if strand.turns
        ]


def shortened(items: Sequence[str], fits: Callable[[list[str]], bool], marker: str) -> list[str]:
    """The longest beginning of a list of texts that fits, marked where it ends early.

    Whole items are dropped from the end; of the only one left, words; of one beyond LONGEST_WORD,
    characters.
    """
    for count in range(len(items), 0, -1):
        kept = list(items[:count])
        if count < len(items):
            kept[-1] += marker
        if fits(kept):
            return kept
    if not items:
        return []
    text, low, high = items[0], 0, len(items[0])
    while low < high:  # most characters that fit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits([text[:middle] + marker]) else (low, middle - 1)
    if not text[low : low + 1].isspace():
        space = text.rfind(" ", max(0, low - LONGEST_WORD), low)
        low = space if space > 0 else low
    return [text[:low].rstrip() + marker]
