"""Tree rollouts of the single search agent: episodes that share their beginnings.

A tree starts as one episode; in each round, nodes of it are drawn and each is played to its end
once more. A node is the conversation before a generation. What leads to it is not copied state: the
new leaf, an ordinary episode, runs the agent from the start over a world that answers its first
turns as it answered them before, so tokens, counts and budgets of the shared part are the same by
construction, and nothing of it is sampled or searched again.
Must not know: how leaves are compared, engines.
Source: Tree-GRPO (arXiv 2509.21240). As in its repository (AMAP-ML/Tree-GRPO, tree_node.py,
expand_mode "random") nodes are drawn with replacement, the root among them.
"""

import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from mas_jax.agents.agent import run_all
from mas_jax.agents.rollout import Limits, play_episode, play_jobs
from mas_jax.agents.setting import Run, Team, World
from mas_jax.records import Episode, Passage, Question, Sample, SearchFailure


@dataclass(frozen=True)
class Shape:
    """trees: of a question. rounds: of growth, each of which adds `expansions` leaves to a tree."""

    trees: int
    expansions: int
    rounds: int

    @property
    def leaves(self) -> int:
        """Of one tree."""
        return 1 + self.expansions * self.rounds


Heard = tuple[Hashable, object]  # what was asked, and the answer


class Tape:
    """The world of one leaf, which keeps what it answers.

    As far as a beginning reaches it is played again, and the real world is not asked.
    """

    def __init__(self, world: World, beginning: Sequence[Heard] = ()) -> None:
        self._asked, self._beginning = world, beginning
        self._heard: list[Heard] = []
        self.strayed = False  # an agent did otherwise when it was told the same: a bug
        self._starts: list[int] = []  # how much had been heard before each generation
        self.world = World(sample=self._sample, search=self._search, reward=world.reward)

    @property
    def num_turns(self) -> int:
        """Generations so far, one that the world failed included."""
        return len(self._starts)

    def before(self, turn: int) -> list[Heard]:
        """The beginning of a leaf that goes on with this generation."""
        return self._heard[: self._starts[turn]] if turn else []

    async def _sample(self, prompt: tuple[int, ...], **request: object) -> list[Sample]:
        self._starts.append(len(self._heard))
        return await self._hear(prompt, lambda: self._asked.sample(prompt, **request))

    async def _search(self, queries: list[str], k: int) -> list[list[Passage] | SearchFailure]:
        return await self._hear((*queries, k), lambda: self._asked.search(queries, k))

    async def _hear(self, asked: Hashable, call: Callable[[], Awaitable]) -> object:
        at = len(self._heard)
        if at < len(self._beginning):
            before, answer = self._beginning[at]
            self.strayed |= asked != before  # what is raised here would pass for the world's
        else:
            answer = await call()
        self._heard.append((asked, answer))
        return answer


def play(
    jobs: Iterable[tuple[Question, int]], team: Team, shape: Shape, *, world: World, run: Run,
    limits: Limits,
) -> AsyncIterator[Episode]:  # fmt: skip
    """Leaves of (question, tree) jobs; order and errors as in `rollout.play_jobs`.

    Raises: ValueError for another team than the single agent.
    """
    if team.name != "single":
        raise ValueError(
            f"trees of the team {team.name!r}; only 'single' takes one turn after another"
        )

    async def _play_one(question: Question, tree: int) -> list[Episode]:
        return await play_tree(question, tree, team, shape, world=world, run=run)

    places = max(1, limits.concurrent // max(1, shape.expansions))
    return play_jobs(jobs, _play_one, limits=replace(limits, concurrent=places))


async def play_tree(
    question: Question, tree: int, team: Team, shape: Shape, *, world: World, run: Run
) -> list[Episode]:
    """The leaves of one tree in order of their `rollout`, which none of the question's others has.

    Which nodes are drawn depends on the run, the question, the tree, the round and how the leaves
    before went; not on which leaf finished first.
    """

    async def _grow(rollout: int, turn: int, tape: Tape) -> tuple[Episode, Tape]:
        own = Tape(world, tape.before(turn))
        episode = await play_episode(question, rollout, team, world=own.world, run=run)
        assert not own.strayed, "an agent does the same again when it is told the same"
        return replace(episode, tree=tree, shared_turns=turn), own

    first = tree * shape.leaves
    leaves = [await _grow(first, 0, Tape(world))]
    for round_ in range(shape.rounds):
        of = (*vars(run).values(), question.uid, tree, round_)
        drawn = _draw(_nodes(leaves), shape.expansions, of=of)
        leaves += await run_all(
            _grow(first + number, turn, tape)
            for number, (turn, tape) in enumerate(drawn, start=len(leaves))
        )
    return [episode for episode, _ in leaves]


def _nodes(leaves: Sequence[tuple[Episode, Tape]]) -> list[tuple[int, Tape]]:
    """Each node of a tree once, as a turn of a leaf: the root, and what follows the turns that are
    a leaf's own."""
    (_, trunk), *_ = leaves
    return [(0, trunk)] + [
        (turn, tape)
        for episode, tape in leaves
        for turn in range(episode.shared_turns + 1, tape.num_turns)
    ]


def _draw(nodes: Sequence[tuple[int, Tape]], count: int, *, of: tuple) -> list[tuple[int, Tape]]:
    """`count` nodes, perhaps the same twice; equal draws for equal `of`."""
    seed = int.from_bytes(hashlib.blake2b(repr(of).encode(), digest_size=8).digest())
    return random.Random(seed).choices(nodes, k=count)
