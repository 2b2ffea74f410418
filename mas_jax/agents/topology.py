"""Topologies: who says what after reading whom, as plain data; `collaboration.py` plays them.

A node is one generation, a message goes from each node to those that read it, and the agents in
`trained` are the Collaborator's: any may be. The rest are the frozen Actor's.
Must not know: policies, prompts' words, how a node speaks.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

COLLABORATOR, ACTOR = "collaborator", "actor"


@dataclass(frozen=True)
class Node:
    """One generation. prompt: name of its texts, which hold the question and a placeholder for each
    key of `reads`: the nodes whose words stand there. agent: whose conversation goes on with it;
    its own where empty. is_varied: drawn at the vote's temperature, since equal greedy members of a
    vote would all say the same. judge: a node that may discard this one before it speaks, by saying
    so; `instead`: whose words then stand for it, nobody's where empty.
    """

    name: str
    prompt: str
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    agent: str = ""
    is_varied: bool = False
    judge: str = ""
    instead: str = ""

    @property
    def after(self) -> set[str]:
        """The nodes whose words it needs."""
        read = {name for names in self.reads.values() for name in names}
        return read | ({self.judge, self.instead} - {""})

    @property
    def speaker(self) -> str:
        """The agent whose conversation this is a part of."""
        return self.agent or self.name


@dataclass(frozen=True)
class Topology:
    """Nodes, each after those that it reads; `answers`: whose answers are voted on, one or more;
    `trained`: the agents that the Collaborator plays."""

    nodes: tuple[Node, ...]
    answers: tuple[str, ...]
    trained: tuple[str, ...] = ()

    def role(self, node: Node) -> str:
        """Who plays a node."""
        return COLLABORATOR if node.speaker in self.trained else ACTOR

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that act, the Collaborator first."""
        found = {self.role(node) for node in self.nodes}
        return tuple(role for role in (COLLABORATOR, ACTOR) if role in found)


def check(topology: Topology) -> None:
    """Raises: ValueError for a name that comes twice, or is of no node before, of an answer or a
    trained agent that there is not, or for no answer at all."""
    known: set[str] = set()
    for node in topology.nodes:
        unknown = node.after - known
        if unknown or node.name in known:
            raise ValueError(
                f"node {node.name!r} reads {sorted(unknown)}, which are no nodes before it, or is "
                "there twice; put nodes in the order in which they speak, each with its own name"
            )
        known.add(node.name)
    speakers = {node.speaker for node in topology.nodes}
    if not topology.answers or set(topology.answers) - known or set(topology.trained) - speakers:
        raise ValueError(
            f"answers={topology.answers} must be some of the nodes {sorted(known)}, "
            f"trained={topology.trained} of the agents {sorted(speakers)}"
        )


def resampled(topology: Topology, count: int) -> Topology:
    """The same with `count` solutions, drawn at the vote's temperature, in place of its one answer:
    what a hint is worth is then a mean. Unchanged for 1.

    Raises: ValueError unless one node answers, which is the Actor's, all that its agent says, and
    read by nobody.
    """
    if count == 1:
        return topology
    answering = [node for node in topology.nodes if node.name in topology.answers]
    speakers = [node.speaker for node in topology.nodes]
    read = {name for node in topology.nodes for name in node.after}
    found = [
        node for node in answering
        if topology.role(node) == ACTOR and speakers.count(node.speaker) == 1
        and node.name not in read
    ]  # fmt: skip
    if len(answering) != 1 or found != answering:
        raise ValueError(
            f"{count} solutions of answers={topology.answers}: want one node, the Actor's, alone "
            "in its conversation and read by nobody"
        )
    (node,) = found
    copies = tuple(
        replace(node, name=f"{node.name}.s{i}", agent="", is_varied=True)
        for i in range(1, count + 1)
    )
    others = tuple(other for other in topology.nodes if other is not node)
    return replace(topology, nodes=others + copies, answers=tuple(copy.name for copy in copies))


@dataclass(frozen=True)
class Sizes:
    """votes: solutions of self-consistency. debaters, rounds: of a debate. experts: of EvoAgent.
    METHODS 3.4: 3 debaters, 2 rounds, 3 experts."""

    votes: int
    debaters: int
    rounds: int
    experts: int


def _alone(sizes: Sizes) -> Topology:
    return Topology((Node("solve", "solve"),), answers=("solve",))


def _solver(sizes: Sizes) -> Topology:
    """The trained policy by itself: with the Actor's weights, fine-tuning the Actor."""
    return Topology((Node("solve", "solve"),), answers=("solve",), trained=("solve",))


def _vote(sizes: Sizes) -> Topology:
    nodes = tuple(Node(f"solve{i}", "solve", is_varied=True) for i in range(1, sizes.votes + 1))
    return Topology(nodes, answers=tuple(node.name for node in nodes))


def _hint(sizes: Sizes) -> Topology:
    nodes = (Node("hint", "hint"), Node("solve", "hinted", {"hint": ("hint",)}))
    return Topology(nodes, answers=("solve",), trained=("hint",))


def _critic(sizes: Sizes) -> Topology:
    """The draft does not depend on who is trained: greedy, it is computed once a question."""
    nodes = (
        Node("draft", "solve"),
        Node("critique", "critique", {"solution": ("draft",)}),
        Node("revise", "revise", {"solution": ("draft",), "comment": ("critique",)}),
    )
    return Topology(nodes, answers=("revise",), trained=("critique",))


def _roles(sizes: Sizes) -> Topology:
    """Who solves is told what kind of expert to be; a second look revises the solution."""
    nodes = (
        Node("assign", "assign"),
        Node("solve", "as_expert", {"experts": ("assign",)}),
        Node("review", "critique", {"solution": ("solve",)}),
        Node("revise", "revise", {"solution": ("solve",), "comment": ("review",)}),
    )
    return Topology(nodes, answers=("revise",), trained=("assign",))


def _evoagent(sizes: Sizes, *, is_checked: bool = False) -> Topology:
    """EvoAgent (Yuan et al. 2024): one new expert after another, each of whose solutions refines
    the one so far. is_checked: the Actor first decides whether a new expert is retained; without,
    every one is. The check reads discarded experts too, so that none comes back in other words."""
    nodes, last = [Node("draft", "solve")], "draft"
    for i in range(1, sizes.experts + 1):
        nodes.append(Node(f"expert{i}", "assign", is_varied=True))
        if is_checked:
            so_far = tuple(f"expert{j}" for j in range(1, i + 1))
            nodes.append(Node(f"check{i}", "check", {"experts": so_far}))
        judge = f"check{i}" if is_checked else ""
        nodes += [
            Node(f"solve{i}", "as_expert", {"experts": (f"expert{i}",)}, judge=judge),
            Node(
                f"refine{i}", "revise", {"solution": (last,), "comment": (f"solve{i}",)},
                judge=judge, instead=last if is_checked else "",
            ),
        ]  # fmt: skip
        last = f"refine{i}"
    return Topology(tuple(nodes), answers=(last,))


def _mad(sizes: Sizes) -> Topology:
    """Multi-agent debate (Du et al. 2023): each reads the others' last solutions, then a vote."""
    agents = [f"a{i}" for i in range(1, sizes.debaters + 1)]
    nodes = [Node(f"{a}.r1", "solve", agent=a, is_varied=True) for a in agents]
    for turn in range(2, sizes.rounds + 1):
        for a in agents:
            others = tuple(f"{b}.r{turn - 1}" for b in agents if b != a)
            nodes.append(
                Node(f"{a}.r{turn}", "debate", {"solutions": others}, agent=a, is_varied=True)
            )
    return Topology(tuple(nodes), answers=tuple(f"{a}.r{sizes.rounds}" for a in agents))


def _debate(sizes: Sizes) -> Topology:
    """The same with the Collaborator as its first member."""
    mad = _mad(sizes)
    return Topology(mad.nodes, mad.answers, trained=("a1",))


def _guided_debate(sizes: Sizes) -> Topology:
    """The same, all of whose members read the Collaborator's hint first."""
    mad, reads = _mad(sizes), {"hint": ("hint",)}
    nodes = tuple(
        Node(node.name, "hinted", reads, agent=node.agent, is_varied=True)
        if node.prompt == "solve"
        else node
        for node in mad.nodes
    )
    return Topology((Node("hint", "hint"), *nodes), mad.answers, trained=("hint",))


TOPOLOGIES: Mapping[str, Callable[[Sizes], Topology]] = {
    "actor": _alone,
    "solver": _solver,
    "vote": _vote,
    "hint": _hint,
    "critic": _critic,
    "roles": _roles,
    "evoagent": _evoagent,
    "evoagent_checked": functools.partial(_evoagent, is_checked=True),
    "mad": _mad,
    "debate": _debate,
    "guided_debate": _guided_debate,
}
