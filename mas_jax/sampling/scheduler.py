"""Decides what the next device call does, and keeps every generation's state between calls.

A sequence is one continuation of one prompt. Its life: waiting (no pages) -> prefilling (its
prompt's blocks are queued) -> ready (its next token is to be decoded) -> done. Prompts are always
prefilled and generated tokens always decoded, each in the call whose context bucket its position
alone picks; after a pre-emption the tokens drawn before are decoded again, forced. So which program
computes a token depends on its request and on nothing else.

Full pages of a prompt before its last block are shared by every prompt that begins the same way,
as soon as the first one queues them: blocks are taken in order, so a page is filled in an earlier
call or in the same one, which writes all pages before any block attends.
Must not know: devices, models, asyncio.
"""

import enum
from collections import deque
from dataclasses import dataclass, field

from mas_jax.records import SampleKey, Stop, StopReason
from mas_jax.sampling.pages import PagePool, prefix_digests


@dataclass(frozen=True)
class Request:
    """One call of `sample`: a prompt and how to continue it."""

    prompt: tuple[int, ...]
    key: SampleKey
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: Stop


class State(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    READY = "ready"
    DONE = "done"


@dataclass(eq=False)
class Sequence:
    """One continuation: what has been drawn, and the pages that hold its keys and values.

    num_cached: positions whose keys and values are in its pages.
    """

    request: Request
    candidate: int
    key_data: tuple[int, int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    state: State = State.WAITING
    stop_reason: StopReason | None = None
    was_started: bool = False  # has had pages before, perhaps lost again

    @property
    def num_prompt(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.request.prompt)


@dataclass(eq=False)
class Block:
    """Prompt tokens of one page to prefill; `sequence` draws its first token after its last block,
    None for a block of a shared page."""

    tokens: tuple[int, ...]
    table: tuple[int, ...]  # pages of the prompt up to this block's own, which is the last
    sequence: Sequence | None = None


@dataclass(frozen=True)
class Limits:
    """Shapes of the device calls; see `engine.EngineSettings`."""

    page_size: int
    prefill_blocks: int
    decode_rows: int
    decode_steps: int
    buckets: tuple[int, ...]


class Scheduler:
    """Queues of blocks and sequences over one page pool."""

    def __init__(self, pool: PagePool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.version = ""
        self.num_preemptions = 0
        self.num_shared_tokens = 0
        self.num_prompt_tokens = 0
        self._waiting: deque[Sequence] = deque()
        self._blocks: dict[Block, None] = {}  # queued, oldest first
        self._unfilled: set[int] = set()  # shared pages whose block is queued
        self._running: list[Sequence] = []  # prefilling or ready, oldest first

    @property
    def has_work(self) -> bool:
        """True while a sequence is not done."""
        return bool(self._waiting or self._running)

    def bucket_of(self, num_positions: int) -> int:
        """The smallest context bucket that holds so many positions."""
        return next(b for b in self.limits.buckets if b >= num_positions)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence."""
        self._waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence wherever it is; its pages are free at once."""
        if sequence.state is State.DONE:
            return
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        else:
            self._drop(sequence)
        sequence.state = State.DONE

    def finish(self, sequence: Sequence, reason: StopReason) -> None:
        """Ends a ready sequence for a reason."""
        self._drop(sequence)
        sequence.state, sequence.stop_reason = State.DONE, reason

    def _drop(self, sequence: Sequence) -> None:
        """Takes a running sequence out: its own block is not computed, its pages are released."""
        self._running.remove(sequence)
        self.pool.release(sequence.pages)
        sequence.pages, sequence.num_cached = [], 0
        if sequence.state is State.READY:
            return  # nothing of its prompt is queued
        for block in [b for b in self._blocks if b.sequence is sequence]:
            del self._blocks[block]
        for block in [b for b in self._blocks if b.sequence is None]:
            page = block.table[-1]
            if not self.pool.is_used(page):  # nobody is left who wants this page
                del self._blocks[block]
                self._unfilled.discard(page)
                self.pool.withdraw(page)

    def _preempt(self, sequence: Sequence) -> None:
        """Gives a running sequence's pages away; it waits in front, keeping what it has drawn."""
        self.num_preemptions += 1
        self._drop(sequence)
        sequence.state = State.WAITING
        self._waiting.appendleft(sequence)

    def admit(self) -> None:
        """Queues the blocks of waiting sequences, first come first served, while pages suffice."""
        while self._waiting and self._start(self._waiting[0]):
            self._waiting.popleft()

    def _start(self, sequence: Sequence) -> bool:
        """Finds or allocates the prompt's pages and queues its blocks; False if pages are short."""
        size, prompt = self.limits.page_size, sequence.request.prompt
        num_full = (len(prompt) - 1) // size  # before the last block, which draws
        digests = prefix_digests(self.version, prompt, size)
        pages, shared = [], 0
        while shared < num_full and (page := self.pool.find(digests[shared])) is not None:
            pages.append(page)
            shared += 1
        # one page more than the prompt needs, to decode into, unless nothing else runs
        reserve = 1 if self._running else 0
        if self.pool.num_available < num_full + 1 - shared + reserve:
            self.pool.release(pages)
            return False
        for index in range(shared, num_full + 1):
            page = self.pool.allocate()
            pages.append(page)
            tokens = prompt[index * size : (index + 1) * size]
            block = Block(tokens, tuple(pages))
            if index < num_full:
                self.pool.publish(page, digests[index])
                self._unfilled.add(page)
            else:
                block.sequence = sequence
            self._blocks[block] = None
        sequence.pages, sequence.state = pages, State.PREFILLING
        self._running.append(sequence)
        if not sequence.was_started:
            sequence.was_started = True
            self.num_shared_tokens += shared * size
            self.num_prompt_tokens += len(prompt)
        return True

    def _block_bucket(self, block: Block) -> int:
        return self.bucket_of(len(block.table) * self.limits.page_size)

    def _prefill_candidates(self) -> tuple[int, list[Block]]:
        """The bucket of the oldest block, and the blocks of that bucket that can go now."""
        bucket = self._block_bucket(next(iter(self._blocks)))
        chosen, filled_here = [], set()
        for block in self._blocks:
            if len(chosen) == self.limits.prefill_blocks:
                break
            before = [p for p in block.table[:-1] if p in self._unfilled]
            if self._block_bucket(block) == bucket and filled_here.issuperset(before):
                chosen.append(block)
                filled_here.add(block.table[-1])
        return bucket, chosen

    def _decode_candidates(self) -> tuple[int, list[Sequence]]:
        """The fullest bucket of ready sequences (the oldest's among equals), oldest first."""
        by_bucket: dict[int, list[Sequence]] = {}
        for sequence in self._running:
            if sequence.state is State.READY:
                by_bucket.setdefault(self.bucket_of(sequence.num_cached + 1), []).append(sequence)
        if not by_bucket:
            return 0, []
        rows = self.limits.decode_rows
        bucket = max(by_bucket, key=lambda b: min(len(by_bucket[b]), rows))
        return bucket, by_bucket[bucket][:rows]

    def next_call(self) -> tuple[str, int, list]:
        """("prefill", bucket, blocks) or ("decode", bucket, sequences).

        Prompts come first while there are rows to fill for the next decode call, whose many steps
        would cost more than a prefill of few blocks does. What is returned has to be run and
        handed back, blocks to `prefilled`.
        """
        self.admit()
        decode_bucket, sequences = self._decode_candidates()
        if self._blocks and len(sequences) < self.limits.decode_rows:
            return "prefill", *self._prefill_candidates()
        sequences = self._with_pages(decode_bucket, sequences)
        if sequences:
            return "decode", decode_bucket, sequences
        return self.next_call()  # the candidates were pre-empted to make room for one another

    def next_mixed(self) -> tuple[list[Block], list[Sequence]]:
        """Blocks and sequences of one ragged call, where all contexts are of one bucket."""
        self.admit()
        _, sequences = self._decode_candidates()
        sequences = self._with_pages(self.limits.buckets[-1], sequences)
        blocks = self._prefill_candidates()[1] if self._blocks else []
        return (blocks, sequences) if blocks or sequences else self.next_mixed()

    def num_others(self, bucket: int, sequences: list[Sequence]) -> int:
        """Sequences that could take the place of these: ready ones of the bucket, and those whose
        prompts are being prefilled."""
        others = sum(
            s.state is State.PREFILLING or self.bucket_of(s.num_cached + 1) == bucket
            for s in self._running
        )
        return others - len(sequences)

    def steps_left(self, sequence: Sequence, bucket: int) -> int:
        """Tokens that one decode call of this bucket may take for a sequence, at least 1: as many
        as its pages have room for."""
        held = len(sequence.pages) * self.limits.page_size
        return min(self._steps_wanted(sequence, bucket), held - sequence.num_cached)

    def _steps_wanted(self, sequence: Sequence, bucket: int) -> int:
        total = sequence.num_prompt + sequence.request.max_tokens
        room = min(total - 1, bucket) - sequence.num_cached
        return min(self.limits.decode_steps, room)

    def _with_pages(self, bucket: int, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences that have, or are given, pages that the call can write to.

        One that lacks room for all of its steps takes what the pool has. If that is not a single
        position, the youngest running sequence gives its pages up: the oldest of the call always
        goes on.
        """
        chosen = []
        for sequence in sequences:
            if sequence.state is not State.READY:
                continue  # pre-empted for an older one
            positions = sequence.num_cached + self._steps_wanted(sequence, bucket)
            while len(sequence.pages) * self.limits.page_size < positions:
                page = self.pool.allocate()
                if page is not None:
                    sequence.pages.append(page)
                    continue
                if len(sequence.pages) * self.limits.page_size > sequence.num_cached:
                    break
                victim = self._running[-1]
                if victim in chosen:
                    chosen.remove(victim)
                self._preempt(victim)
                if victim is sequence:
                    break
            if sequence.state is State.READY:
                chosen.append(sequence)
        return chosen

    def prefilled(self, blocks: list[Block]) -> list[Sequence]:
        """Notes that blocks were computed; returns the sequences whose prompts are complete."""
        finished = []
        for block in blocks:
            self._blocks.pop(block, None)  # a cancelled one has gone already
            self._unfilled.discard(block.table[-1])
            if block.sequence is not None and block.sequence.state is State.PREFILLING:
                block.sequence.num_cached = block.sequence.num_prompt
                block.sequence.state = State.READY
                finished.append(block.sequence)
        return finished
