"""Plays a topology: its nodes speak as soon as what they read is said; the answers are voted on.

What a prompt has no room for ends the episode with the outcome "context": wrong, and counted.
Must not know: policies and their engines, how an answer is graded.
"""

import importlib.resources
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mas_jax.agents.agent import Play, run_all
from mas_jax.agents.prompts import fill
from mas_jax.agents.searcher import Ending
from mas_jax.agents.speaker import Speaker, Voice
from mas_jax.agents.topology import Node, Topology, check

_PLACEHOLDER = re.compile(r"\{([a-z]+)\}")
_DISCARD = re.compile(r"\bdiscard", re.IGNORECASE)  # what a judge of nodes says; else it retains
SHIPPED = ("math", "math_toy")
IsSame = Callable[[str, str], Awaitable[bool]]  # of two answers


@dataclass(frozen=True)
class Texts:
    """The words of a topology's prompts: system and user text by prompt, and what stands between
    several nodes' words in one place."""

    system: Mapping[str, str]
    user: Mapping[str, str]
    separator: str


def load_texts(name: str | Path, topology: Topology) -> Texts:
    """The texts of the topology's prompts: of "math", "math_toy", or a folder of one's own with
    PROMPT.user.txt, perhaps PROMPT.system.txt, and separator.json.

    Raises: FileNotFoundError for a prompt that the folder lacks; ValueError for a placeholder that
    no node fills, or that a node fills and is not there.
    """
    check(topology)
    shipped = importlib.resources.files("mas_jax.agents") / "prompts"
    folder = shipped / name if name in SHIPPED else Path(name)
    system, user, begun = {}, {}, set()
    for node in topology.nodes:
        path = folder / f"{node.prompt}.user.txt"
        if not path.is_file():
            raise FileNotFoundError(f"prompts {name}: node {node.name!r} wants {path.name}")
        user[node.prompt] = path.read_text(encoding="utf-8").removesuffix("\n")
        above = folder / f"{node.prompt}.system.txt"
        found = above.read_text(encoding="utf-8").removesuffix("\n") if above.is_file() else ""
        system[node.prompt] = found
        placeholders = set(_PLACEHOLDER.findall(user[node.prompt]))
        needed = set(node.reads) | (set() if node.speaker in begun else {"question"})
        if not needed <= placeholders <= needed | {"question"}:
            raise ValueError(
                f"prompts {name}: {path.name} has placeholders {sorted(placeholders)}, and node "
                f"{node.name!r} fills {sorted(needed)}; make them the same"
            )
        begun.add(node.speaker)
    separator = json.loads((folder / "separator.json").read_text(encoding="utf-8"))
    return Texts(system, user, separator)


def toy_collaboration_words() -> tuple[str, ...]:
    """Every word of the toy prompts, sorted; their tokenizer has one token for each."""
    folder = importlib.resources.files("mas_jax.agents") / "prompts" / "math_toy"
    texts = [path.read_text(encoding="utf-8") for path in folder.iterdir() if ".txt" in path.name]
    return tuple(sorted({w for text in texts for w in _PLACEHOLDER.sub(" ", text).split()}))


@dataclass(frozen=True)
class Collaboration:
    """A topology with all that its nodes speak with.

    voices: by role. vote_temperature: of varied nodes. answer_of: the answer in a solution, None
    without one; is_same: whether two answers are one in a vote. control: "none", or how what the
    Collaborator says is made worthless, to see what it was worth: "other_problem", it is shown the
    problem of `others`, by uid; "no_answer", others read its words without the golden answers where
    they stand as they are written, so an answer in other words ("half" of 1/2), or all but its last
    step, still passes. What it answers itself is read whole. is_sampled: whether the answers are
    solutions of one task, each a prediction of its own, and not votes; see `resampled`.
    """

    topology: Topology
    texts: Texts
    voices: Mapping[str, Voice]
    vote_temperature: float
    answer_of: Callable[[str], str | None]
    is_same: IsSame
    control: str = "none"
    others: Mapping[str, str] = field(default_factory=dict)
    is_sampled: bool = False


async def play_topology(play: Play) -> list[Ending]:
    """One prediction, the answer that most of the answering nodes give; where they are samples of a
    solution, the answer of each."""
    c = play.team.collaboration
    topology = c.topology
    roles = {node.speaker: topology.role(node) for node in topology.nodes}
    speakers = {agent: Speaker(play, agent, role, c.voices[role]) for agent, role in roles.items()}
    said: dict[str, str] = {}
    for wave, nodes in enumerate(waves(topology)):
        words = await run_all(
            _speak(play, node, wave, speakers[node.speaker], said) for node in nodes
        )
        if None in words:
            return [Ending("", "context")] * (len(topology.answers) if c.is_sampled else 1)
        said |= {node.name: text for node, text in zip(nodes, words, strict=True)}
    answers = [c.answer_of(said[name]) for name in topology.answers]
    if not c.is_sampled:
        answers = [await majority([a for a in answers if a is not None], c.is_same)]
    return [Ending("", "invalid") if a is None else Ending(a, "answered") for a in answers]


async def _speak(
    play: Play, node: Node, wave: int, speaker: Speaker, said: Mapping[str, str]
) -> str | None:
    c = play.team.collaboration
    if node.judge and _DISCARD.search(said[node.judge]):
        return said.get(node.instead, "")
    by_name = {other.name: other for other in c.topology.nodes}
    values = {
        key: c.texts.separator.join(_passed_on(play, by_name[name], said[name]) for name in names)
        for key, names in node.reads.items()
    }
    question = play.question.text
    if c.control == "other_problem" and not _is_frozen(c, node):
        question = c.others[play.question.uid]
    text = fill(c.texts.user[node.prompt], values | {"question": question})
    must_answer = node.name in c.topology.answers
    return await speaker.say(
        c.texts.system[node.prompt],
        text,
        action=node.prompt,
        wave=wave,
        temperature=c.vote_temperature if node.is_varied and _is_frozen(c, node) else None,
        fault=lambda words: "no answer" if must_answer and c.answer_of(words) is None else "",
    )


def _passed_on(play: Play, node: Node, text: str) -> str:
    """What others read of a node's words."""
    c = play.team.collaboration
    if c.control != "no_answer" or _is_frozen(c, node):
        return text
    return without(text, play.question.golden_answers)


def without(text: str, answers: Sequence[str]) -> str:
    """A text without the answers, wherever one stands by itself as it is written: not in -5 or 5/7
    where it is 5."""
    for answer in answers:
        text = re.sub(rf"(?<![\w./-]){re.escape(answer)}(?!\w|/|\.\d)", "", text)
    return text


def _is_frozen(c: Collaboration, node: Node) -> bool:
    """Whether the Actor speaks: the Collaborator draws as it is trained to."""
    return node.speaker not in c.topology.trained


def waves(topology: Topology) -> list[list[Node]]:
    """The nodes in groups that can speak at once: each after what it reads and what its agent said
    before."""
    wave_of: dict[str, int] = {}
    last_of: dict[str, int] = {}  # wave in which an agent spoke last
    found: list[list[Node]] = []
    for node in topology.nodes:
        before = [wave_of[name] for name in node.after]
        wave = 1 + max([*before, last_of.get(node.speaker, -1)], default=-1)
        wave_of[node.name] = last_of[node.speaker] = wave
        found += [[] for _ in range(wave + 1 - len(found))]
        found[wave].append(node)
    return found


async def majority(answers: Sequence[str], is_same: IsSame) -> str | None:
    """The answer that most are the same as; of equals the first one; None of none."""
    classes: list[list[str]] = []
    for answer in answers:
        for own in classes:
            if await is_same(own[0], answer):
                own.append(answer)
                break
        else:
            classes.append([answer])
    return max(classes, key=len)[0] if classes else None


def prompt_names(topologies: Iterable[Topology]) -> tuple[str, ...]:
    """Names of the prompts of several topologies, sorted."""
    return tuple(sorted({node.prompt for t in topologies for node in t.nodes}))
