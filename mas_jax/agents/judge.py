"""Judges of a subtask's execution: a language model's score, and the toy world's truth.

A judge is `await judge(job, *, key)`: a Judgement, whose score is None where the judge's words hold
none, which is a failure and never 0.0. What it raises is one too, at the boundary in `rollout.py`.
Must not know: engines and endpoints (`sample` and `complete` are handed in), rewards.
"""

import hashlib
import re
from collections.abc import Awaitable, Callable

from mas_jax.agents.agent import shortened
from mas_jax.agents.chat import Chat, Conversation
from mas_jax.agents.oracle import sentences
from mas_jax.agents.prompts import fill
from mas_jax.agents.setting import JudgeJob
from mas_jax.data.world import World
from mas_jax.data.world_facts import Fact, draw_parts
from mas_jax.data.world_text import parse_ask, parse_statement
from mas_jax.records import Judgement, Passage, SampleKey, Stop

Judge = Callable[..., Awaitable[Judgement]]  # (job, *, key)

BEST = 10  # the score that is worth 1.0
_NUMBER = r"\s*([0-9]{1,2}(?:\.[0-9]+)?)\s*"
_PLAIN = re.compile(_NUMBER)
_TAGGED = re.compile(rf"<score>{_NUMBER}</score>")
_TAG = re.compile(r"</?score>")
_THOUGHT_END = "</think>"
_CUT = " [cut]"


def parse_score(text: str) -> float | None:
    """The score in a judge's words, over 10; None unless there is exactly one, from 0 to 10.

    It stands in `<score>7</score>`, with any words around it, or is the whole text. What comes
    before the last `</think>` is thought and not read.
    """
    body = text.rpartition(_THOUGHT_END)[2]
    tags = len(_TAG.findall(body))
    match = _TAGGED.search(body) if tags == 2 else _PLAIN.fullmatch(body) if tags == 0 else None
    value = float(match[1]) if match else BEST + 1.0
    return value / BEST if value <= BEST else None


# --- language models ------------------------------------------------------------------------------


def policy_judge(
    sample: Callable[..., Awaitable],
    *,
    chat: Chat,
    prompt: str,
    policy: str,
    context: int,
    max_tokens: int,
) -> Judge:
    """A policy's greedy score through a `sample` function. prompt: text of `load_judge_prompt`;
    searches are left out of it, from the last, until it fits the context."""
    stop = Stop(chat.tokenizer.stop_ids, ("</score>",))

    def _fits(text: str) -> bool:
        return len(Conversation(chat, text).prompt()) + max_tokens <= context

    async def _judge(job: JudgeJob, *, key: SampleKey) -> Judgement:
        text = written(job, prompt, _fits)
        asked = Conversation(chat, text).prompt()
        (said,) = await sample(
            asked, key=key, policy=policy, n=1, max_tokens=max_tokens,
            temperature=0.0, top_p=1.0, top_k=0, stop=stop,
        )  # fmt: skip
        tokens = [token for token in said.tokens if token not in chat.tokenizer.stop_ids]
        score = parse_score(chat.tokenizer.decode(tokens))
        return Judgement(job.path, score, len(asked), len(said.tokens))

    return _judge


def api_judge(
    complete: Callable[..., Awaitable],
    *,
    prompt: str,
    model: str,
    max_chars: int,
    max_tokens: int,
) -> Judge:
    """An endpoint's score through `complete` of `sampling/api.py`, at temperature 0. A refusal is
    no score."""

    async def _judge(job: JudgeJob, *, key: SampleKey) -> Judgement:
        text = written(job, prompt, lambda text: len(text) <= max_chars)
        said = await complete(
            [{"role": "user", "content": text}],
            model=model, temperature=0.0, max_tokens=max_tokens,
        )  # fmt: skip
        score = None if said.refusal is not None else parse_score(said.text)
        spent = (0, 0) if said.is_cached else (said.input_tokens, said.output_tokens)
        return Judgement(job.path, score, *spent)

    return _judge


def written(job: JudgeJob, prompt: str, fits: Callable[[str], bool]) -> str:
    """The judge's prompt about a job, with as many of its searches as fit."""
    items = [
        "\n".join([f"{number}. {query}", *texts])
        for number, (query, texts) in enumerate(job.searches, start=1)
    ]

    def _render(kept: list[str]) -> str:
        values = vars(job) | {"searches": "\n".join(kept) or "-", "report": job.report or "-"}
        return fill(prompt, values)

    return _render(shortened(items, lambda kept: fits(_render(kept)), _CUT))


# --- the toy world's ------------------------------------------------------------------------------


def oracle_judge(world: World, *, accuracy: float) -> Judge:
    """1.0 for a report that states every fact its subtask asks for, else 0.0.

    accuracy: probability that the verdict is said as it is, otherwise its opposite; which of the
    two follows from the key.
    """
    return length_judge(world, accuracy=accuracy, bias=0.0, full_words=1)


def length_judge(world: World, *, accuracy: float, bias: float, full_words: int) -> Judge:
    """(1 - bias) verdict + bias length: the oracle's verdict, and the report's number of words over
    full_words, at most 1. What is long is liked for that alone."""
    is_right = make_truth(world)

    async def _judge(job: JudgeJob, *, key: SampleKey) -> Judgement:
        verdict = is_right(job.subtask, job.report) == (_uniform(key) < accuracy)
        length = min(len(job.report.split()) / full_words, 1.0)
        return Judgement(job.path, (1.0 - bias) * verdict + bias * length)

    return _judge


def make_truth(world: World) -> Callable[[str, str], bool]:
    """Whether a report gives the true object of every hop of a subtask, by any of its names.

    It is read as its readers do: the first statement about a hop counts. False where the subtask
    is no question of the world.
    """
    facts = {
        (fact.relation, name): fact
        for part in draw_parts(world.seed).values()
        for fact in part.facts
        for name in fact.subject.names
    }

    def _wanted(subtask: str) -> list[Fact]:
        """The fact of every hop; none if one of them is not known."""
        question = world.by_text.get(subtask)
        found: list[Fact] = []
        for ask in question.decomposition if question else (subtask,):
            for hop, fact in enumerate(found, start=1):
                ask = ask.replace(f"#{hop}", fact.object.name)
            if parse_ask(ask) not in facts:
                return []
            found.append(facts[parse_ask(ask)])
        return found

    def _states(sources: list[Passage], fact: Fact) -> bool:
        for source in sources:
            stated = parse_statement(fact.relation, source.text)
            if stated and stated[0] in fact.subject.names:
                return stated[1] in fact.object.names
        return False

    def _is_right(subtask: str, report: str) -> bool:
        sources, hops = sentences([report]), _wanted(subtask)
        return bool(hops) and all(_states(sources, fact) for fact in hops)

    return _is_right


def _uniform(key: SampleKey) -> float:
    """A number in [0, 1) that follows from the key."""
    digest = hashlib.blake2b(repr(tuple(vars(key).values())).encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64
