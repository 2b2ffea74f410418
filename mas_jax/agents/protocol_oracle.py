"""The toy world's script in the chairs of MAPD's offline system, with a skill and a style.

It answers as an endpoint would, one JSON object a request, and knows what `oracle.py` knows. What
it does follows from the request alone, so that a build can be repeated. Must not know: http.
"""

import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mas_jax.agents import protocol_roles
from mas_jax.agents.oracle import SEPARATOR, UNKNOWN, Step, answerer_action, follow, read
from mas_jax.agents.protocol_roles import Limits
from mas_jax.agents.protocol_team import Said
from mas_jax.data.world import World
from mas_jax.data.world_text import RELATIONS, parse_ask, parse_statement
from mas_jax.records import Passage

# how a teacher writes: words before each goal, and which of a relation's wordings it searches with
STYLES: Mapping[str, tuple[str, int, bool]] = {
    "plain": ("", 0, False),
    "other_words": ("", 1, False),
    "talkative": ("Okay, let me think about this. ", 0, True),
}
_HOP = re.compile(r"#(\d+)")


@dataclass(frozen=True)
class Oracle:
    """A scripted model. skill: probability with which a subtask's passages are read at all; style:
    of STYLES, a talkative one thinks aloud and repeats its steps."""

    world: World
    skill: float = 1.0
    style: str = "plain"

    def reply(self, role: str, payload: Mapping) -> dict:
        """What a role says to a payload."""
        return getattr(self, f"_{role}")(payload)

    # the roles

    def _orchestrator(self, payload: Mapping) -> dict:
        return {
            "task_type": self._task_type(payload["question"]),
            "subtasks": self._subtasks(payload["question"], "s"),
        }

    def _searcher(self, payload: Mapping) -> dict:
        parsed = parse_ask(self._resolved(payload))
        if parsed is None:
            return {"queries": [payload["objective"]]}
        relation, subject = parsed
        wording = RELATIONS[relation].queries
        _, first, _ = STYLES[self.style]
        return {"queries": [wording[first].format(s=subject), wording[1 - first].format(s=subject)]}

    def _summarizer(self, payload: Mapping) -> dict:
        nothing = {"summary": "not found", "evidence_ids": []}
        parsed = parse_ask(self._resolved(payload))
        if parsed is None or uniform(payload, self.style) >= self.skill:
            return nothing
        for shown in payload["passages"]:
            if found := read(*parsed, [_passage(shown)]):
                statement = RELATIONS[parsed[0]].statement.format(s=parsed[1], o=found)
                return {"summary": statement, "evidence_ids": [shown["id"]]}
        return nothing

    def _answerer(self, payload: Mapping) -> dict:
        told = [finding["summary"] for finding in payload["findings"]]
        return {"answer": self._answer(payload["question"], told)}

    def _solver(self, payload: Mapping) -> dict:
        """As the single agent of `oracle.py` does it: a hop that one search did not find is
        searched for once more in other words. A plain one says nothing beside."""
        question, turns = payload["question"], payload["turns"]
        _, wording, is_talkative = STYLES[self.style]
        before, steps = self._steps(question, turns[:-1]), self._steps(question, turns)
        found = [step for step in steps if step.object]
        pending = [step for step in steps if not step.object]
        new = [step for step in found if step not in before]
        statements = [step.statement for step in new]
        said = {
            "task_type": self._task_type(question),
            "finding": SEPARATOR.join(statements) if is_talkative else "",
            "evidence_ids": [p["id"] for p in turns[-1]["passages"] if _states(p, new)]
            if turns else [],
            "goal": pending[0].ask if pending and is_talkative else "", "queries": [],
            "answer": None,
        }  # fmt: skip
        if not payload["turns_left"] or not pending or len(turns) > len(found) + 1:
            return said | {"answer": self._answer(question, [step.statement for step in found])}
        words = RELATIONS[pending[0].relation].queries
        other = len(turns) > len(found)
        query = words[1 - wording if other else wording].format(s=pending[0].subject)
        return said | {"queries": [query]}

    def _repair(self, payload: Mapping) -> dict:
        return {
            "failure_type": "search", "diagnosis": "a fact was not found",
            "subtasks": self._subtasks(payload["question"], "r"),
        }  # fmt: skip

    def _protocolizer(self, payload: Mapping) -> dict:
        opening, wording, repeats = STYLES[self.style]
        steps = []
        for ask in self._asks(payload["question"]):
            relation, subject = parse_ask(ask) or ("", ask)
            hint = RELATIONS[relation].queries[wording].format(s=subject) if relation else ask
            kind = RELATIONS[relation].object if relation else "answer"
            steps.append({
                "goal": f"{opening}{ask}", "tool": "search", "query_hint": hint,
                "expected": f"name of a {kind}",
            })  # fmt: skip
        facts = [{"fact": p["text"], "passage_id": p["id"]} for p in payload["passages"]]
        found = {"task_type": payload["task_type"], "reasoning_plan": steps * (1 + repeats)}
        found["grounding_facts"] = facts * (1 + repeats)
        if payload["is_correct"]:
            return found | {"answer": payload["answer"], "answer_grounded": True}
        told = [f["summary"] for f in payload["findings"] if f["summary"]]
        return found | {"partial_findings": told or ["not found"], "answer_grounded": False}

    # what it knows of the language

    def _answer(self, question: str, told: Sequence[str]) -> str | None:
        said = answerer_action(self.world, question, told)
        answer = said.removeprefix("<answer> ").removesuffix("</answer>")
        return None if answer == UNKNOWN else answer

    def _steps(self, question: str, turns: Sequence[Mapping]) -> Sequence[Step]:
        """The hops of a question after some turns, of which it reads as many as it has skill."""
        shown = [p for turn in turns if uniform(turn, self.style) < self.skill
                 for p in turn["passages"]]  # fmt: skip
        return follow(self.world, question, [_passage(p) for p in shown])

    def _asks(self, question: str) -> Sequence[str]:
        known = self.world.by_text.get(question)
        return known.decomposition if known else (question,)

    def _task_type(self, question: str) -> str:
        asks = self._asks(question)
        if len(asks) == 1:
            return "single_hop"
        return "multi_hop" if any(map(_HOP.search, asks)) else "comparison"

    def _subtasks(self, question: str, letter: str) -> list[dict]:
        return [
            {
                "id": f"{letter}{number}", "objective": ask,
                "depends_on": [f"{letter}{hop}" for hop in _HOP.findall(ask)],
            }
            for number, ask in enumerate(self._asks(question), start=1)
        ]  # fmt: skip

    def _resolved(self, payload: Mapping) -> str:
        """The objective with what the findings say in the place of the hops it refers to."""
        ask = payload["objective"]
        for told in payload["findings"]:
            for relation in RELATIONS:
                if stated := parse_statement(relation, told):
                    ask = _HOP.sub(stated[1], ask, count=1)
                    break
        return ask


def _passage(shown: Mapping[str, str]) -> Passage:
    return Passage(shown["id"], shown["title"], shown["text"])


def _states(shown: Mapping[str, str], steps: Sequence[Step]) -> bool:
    """Whether a passage states one of the steps."""
    return any(read(step.relation, step.subject, [_passage(shown)]) for step in steps)


def role_of(messages: Sequence[Mapping[str, str]], limits: Limits) -> str:
    """The role that a request is for, by its instructions. Raises: ValueError for none."""
    for role in protocol_roles.ROLES:
        if messages[0]["content"] == protocol_roles.instructions(role, limits):
            return role
    raise ValueError(f"no role is told {messages[0]['content'][:60]!r}")


class Player(Protocol):
    """A script in the chairs of the offline system."""

    def reply(self, role: str, payload: Mapping) -> dict:
        """What a role says to a payload."""


def local(oracle: Player, limits: Limits) -> Callable[..., Awaitable[Said]]:
    """The `complete` function of a desk at which a script sits; words count as tokens."""

    async def _complete(messages: Sequence[Mapping[str, str]], **_) -> Said:
        payload = json.loads(messages[1]["content"])
        text = json.dumps(oracle.reply(role_of(messages, limits), payload))
        num_input = sum(len(message["content"].split()) for message in messages)
        return Said(text, None, num_input, len(text.split()), 0.0)

    return _complete


def uniform(payload: Mapping, style: str) -> float:
    """A number in [0, 1) that follows from a request."""
    text = json.dumps([style, payload], sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64
