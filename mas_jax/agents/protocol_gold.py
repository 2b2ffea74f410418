"""A script in the chairs of MAPD's offline system for real questions whose decomposition is known.

It plans, searches and concludes as the gold decomposition says, but finds only what stands in a
passage that a search gave it: where the retriever brings none, a step stays open and so does the
answer. What it does follows from the request alone. Must not know: http, which retriever.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mas_jax.agents.protocol import holds
from mas_jax.agents.protocol_oracle import STYLES, uniform
from mas_jax.data.decomposition import HOP, Step
from mas_jax.records import Question

NOTHING = "not found"
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
# what a step gives, by the first of these words in it
_KINDS = {
    "a date": r"when|date|year|month|day",
    "a number": r"how many|number|population",
    "a place": r"where|place|country|city|county|state|region|location|located|birthplace|"
    r"citizenship|headquarters",
    "the name of a person": r"who|whom|whose|father|mother|spouse|child|sibling|director|performer|"
    r"composer|author|screenwriter|producer|founder|creator|president",
}


@dataclass(frozen=True)
class GoldScript:
    """A scripted model. questions: by uid, with the steps of each; skill and style: as those of
    `protocol_oracle.Oracle`."""

    questions: Mapping[str, Question]
    steps: Mapping[str, Sequence[Step]]
    skill: float = 1.0
    style: str = "plain"

    def reply(self, role: str, payload: Mapping) -> dict:
        """What a role says to a payload."""
        return getattr(self, f"_{role}")(payload)

    # the roles

    def _orchestrator(self, payload: Mapping) -> dict:
        uid = self._by_text.get(payload["question"])
        steps = self._steps_of(payload["question"])
        is_again = bool(payload["findings"])  # it has nothing else to ask
        asks = [] if is_again else [step.ask for step in steps] or [payload["question"]]
        if len(steps) < 2:
            kind = "single_hop" if uid and steps else "others"
        else:
            kind = "multi_hop" if any(step.hops for step in steps) else "comparison"
        return {"task_type": kind, "subtasks": _subtasks(asks, "s")}

    def _searcher(self, payload: Mapping) -> dict:
        queries = []
        _, first, _ = STYLES[self.style]
        for steps, step in self._meant(payload):
            ways = [_resolved(text, steps) for text in (step.ask, step.bare)]
            if payload["objective"] != step.ask:  # the page is named
                ways = [f"{step.title} {way}" for way in ways]
            queries += [ways[first], ways[1 - first]]
        return {"queries": list(dict.fromkeys(queries)) or [payload["objective"]]}

    def _summarizer(self, payload: Mapping) -> dict:
        if uniform(payload, self.style) < self.skill:
            for steps, step in self._meant(payload):
                for passage in payload["passages"]:
                    if _states(passage, step, steps):
                        said = f"{_resolved(step.ask, steps)}: {step.answer}"
                        return {"summary": said, "evidence_ids": [passage["id"]]}
        return {"summary": NOTHING, "evidence_ids": []}

    def _answerer(self, payload: Mapping) -> dict:
        """Who has found every step concludes rightly; others do not conclude."""
        steps = self._steps_of(payload["question"])
        found = [any(_tells(finding, step) for finding in payload["findings"]) for step in steps]
        if not steps or not all(found):
            return {"answer": None}
        question = self.questions[self._by_text[payload["question"]]]
        return {"answer": question.golden_answers[0]}

    def _repair(self, payload: Mapping) -> dict:
        """Asks once more for every step, with the page that is to be found, unless that would tell
        the answer."""
        steps, golds = self._steps_of(payload["question"]), payload["accepted_answers"]
        asks = [
            step.ask if any(holds(step.title, gold) for gold in golds) else _titled(step)
            for step in steps
        ]
        asked = {finding["objective"] for finding in payload["findings"]}
        if set(asks) <= asked:
            asks = []
        return {
            "failure_type": "search", "diagnosis": "a fact was not found",
            "subtasks": _subtasks(asks, "r"),
        }  # fmt: skip

    def _protocolizer(self, payload: Mapping) -> dict:
        opening, wording, repeats = STYLES[self.style]
        steps = self._steps_of(payload["question"])
        plan, facts = [], []
        for step in steps:
            goal, hint = (
                HOP.sub(r"the result of step \1", text)
                for text in (step.ask, (step.ask, step.bare)[wording])
            )
            plan.append({
                "goal": f"{opening}{goal}", "tool": "search", "query_hint": hint,
                "expected": kind_of(step.ask),
            })  # fmt: skip
            shown = [p for p in payload["passages"] if _states(p, step, steps)]
            facts += [
                {"fact": _sentence(p["text"], step.answer), "passage_id": p["id"]}
                for p in shown[:1]
            ]
        if not plan:
            plan = [{
                "goal": payload["question"], "tool": "search", "query_hint": payload["question"],
                "expected": kind_of(payload["question"]),
            }]  # fmt: skip
        found = {
            "task_type": payload["task_type"], "reasoning_plan": plan * (1 + repeats),
            "grounding_facts": facts * (1 + repeats),
        }  # fmt: skip
        if payload["is_correct"]:
            return found | {"answer": payload["answer"], "answer_grounded": True}
        told = [f["summary"] for f in payload["findings"] if f["summary"] != NOTHING]
        told = list(dict.fromkeys(told))
        return found | {"partial_findings": told or [NOTHING], "answer_grounded": False}

    # what it knows of the questions

    @functools.cached_property
    def _by_text(self) -> dict[str, str]:
        return {question.text: uid for uid, question in self.questions.items()}

    def _steps_of(self, text: str) -> Sequence[Step]:
        return self.steps.get(self._by_text.get(text, ""), ())

    @functools.cached_property
    def _by_objective(self) -> dict[str, list[tuple[Sequence[Step], Step]]]:
        """Steps, each with its question's, by how they are asked for; several questions may ask
        alike."""
        found: dict[str, list] = {}
        for steps in self.steps.values():
            for step in steps:
                for objective in {step.ask, _titled(step)}:
                    found.setdefault(objective, []).append((steps, step))
        return found

    def _meant(self, payload: Mapping) -> list[tuple[Sequence[Step], Step]]:
        """The steps that an objective may be, as far as the findings give what it refers to."""
        told = "\n".join(payload["findings"])
        return [
            (steps, step)
            for steps, step in self._by_objective.get(payload["objective"], ())
            if all(holds(told, steps[hop - 1].answer) for hop in step.hops)
        ]


def kind_of(ask: str) -> str:
    """What kind of thing a step gives, by its words."""
    found = {
        kind: match.start()
        for kind, pattern in _KINDS.items()
        if (match := re.search(rf"\b({pattern})\b", ask, re.IGNORECASE))
    }
    return min(found, key=found.get) if found else "a name or a few words"


def _subtasks(asks: Sequence[str], letter: str) -> list[dict]:
    return [
        {
            "id": f"{letter}{number}", "objective": ask,
            "depends_on": [f"{letter}{hop}" for hop in HOP.findall(ask)],
        }
        for number, ask in enumerate(asks, start=1)
    ]  # fmt: skip


def _titled(step: Step) -> str:
    return f"{step.ask} ({step.title})" if step.title else step.ask


def _resolved(text: str, steps: Sequence[Step]) -> str:
    return HOP.sub(lambda match: steps[int(match[1]) - 1].answer, text)


def _states(passage: Mapping, step: Step, steps: Sequence[Step]) -> bool:
    """Whether a passage is of the step's page, or of its subject, and holds its answer."""
    text = f"{passage['title']}\n{passage['text']}"
    if step.title:
        is_page = holds(passage["title"], step.title) and holds(step.title, passage["title"])
    else:
        is_page = holds(text, _resolved(step.subject, steps))
    return is_page and holds(text, step.answer)


def _tells(finding: Mapping, step: Step) -> bool:
    is_its = finding["objective"] in (step.ask, _titled(step))
    return is_its and finding["summary"] != NOTHING and holds(finding["summary"], step.answer)


def _sentence(text: str, answer: str) -> str:
    """The first sentence that holds an answer, else the first one, as it stands in a text."""
    sentences = [part for part in _SENTENCE.split(text.strip()) if part]
    return next((part for part in sentences if holds(part, answer)), (sentences or [text])[0])
