"""Scripted players of the toy world: the ceiling of every role, and the source of first traces.

A player sees what its role sees and knows the language of the world and how its questions are
made, never their answers: it reads them in passages, reports and evidence. Only closed-book facts
are known by heart. A tag's text begins with a space and its closing tag follows directly, so that
every word and tag is one token. Must not know: tokens, budgets, turns.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mas_jax.data.world import World
from mas_jax.data.world_text import NAME_PARTS, RELATIONS, parse_ask, parse_statement
from mas_jax.records import Passage

NOT_FOUND = "not found"
UNKNOWN = "unknown"
SEPARATOR = " ; "  # between statements and between subtasks


@dataclass(frozen=True)
class Flaws:
    """Probabilities of a player's mistakes; all 0 by default.

    stop_early: report or select although another hop is open, each time one is reached.
    drop_word: each word of a query. whole_question: handed on as one subtask. misread: another
    name of the right kind is reported or answered. skip_search: a guess is reported unsearched.
    from_memory: a closed-book fact is reported unsearched, rightly. waste_report: a Leader with
    several reports selects one of them; an Answerer answers as if it had no evidence. shortcut: a
    single agent whose protocol tells the answer gives it unsearched.
    """

    stop_early: float = 0.0
    drop_word: float = 0.0
    whole_question: float = 0.0
    misread: float = 0.0
    skip_search: float = 0.0
    from_memory: float = 0.0
    waste_report: float = 0.0
    shortcut: float = 0.0


# what a section of a protocol keeps its reader from: a plan from losing the way, facts, findings
# and the answer from misreading
_PLANNED = dict(stop_early=0.0, drop_word=0.0, whole_question=0.0, skip_search=0.0)
_READ = dict(misread=0.0, waste_report=0.0)
_SECTIONS = {"find": _PLANNED, "from": _READ, "report": _READ, "answer": _READ}


def informed(flaws: Flaws, sections: Mapping[str, str]) -> Flaws:
    """The flaws of a reader of a protocol's sections, each of which takes some away."""
    for name in sections:
        flaws = dataclasses.replace(flaws, **_SECTIONS[name])
    return flaws


@dataclass(frozen=True)
class Mistakes:
    """Flaws with the generator that decides when they show."""

    flaws: Flaws
    rng: np.random.Generator

    def happen(self, probability: float) -> bool:
        """Whether a mistake of this probability is made now."""
        return probability > 0 and bool(self.rng.random() < probability)

    def pick(self, options: Sequence[str]) -> str:
        """One of the options."""
        return options[self.rng.integers(len(options))]


def imperfect(flaws: Flaws, seed: int) -> Mistakes:
    """Mistakes drawn from a seed."""
    return Mistakes(flaws, np.random.default_rng(seed))


FAULTLESS = imperfect(Flaws(), 0)  # draws nothing


@dataclass(frozen=True)
class Step:
    """One single-hop question of a task; `object` is what was read, "" if nothing was."""

    ask: str
    relation: str
    subject: str
    object: str = ""

    @property
    def statement(self) -> str:
        """The sentence that reports the step."""
        return RELATIONS[self.relation].statement.format(s=self.subject, o=self.object)


def searcher_action(
    world: World,
    task: str,
    passages: Sequence[Passage],
    num_searches: int,
    *,
    must_report: bool = False,
    mistakes: Mistakes = FAULTLESS,
) -> str:
    """A search for the next open hop of a task, or a report of what the passages say.

    passages: all that were seen so far; num_searches: how many searches showed them. A hop that
    one search did not find is searched for once more in other words.
    """
    steps = follow(world, task, passages)
    found = [step for step in steps if step.object]
    pending = [step for step in steps if not step.object]
    if num_searches == 0 and steps and not must_report:
        guess = _unsearched(world, steps, mistakes)
        if guess:
            return _tag("report", guess)
    stops = bool(found and pending and mistakes.happen(mistakes.flaws.stop_early))
    given_up = num_searches > len(found) + 1 or (not steps and num_searches > 0)
    if must_report or given_up or stops or (steps and not pending):
        return _tag("report", _report(found, passages, mistakes))
    query = task
    if pending:
        wording = RELATIONS[pending[0].relation].queries[num_searches > len(found)]
        query = wording.format(s=pending[0].subject)
    words = query.split()
    kept = [word for word in words if not mistakes.happen(mistakes.flaws.drop_word)]
    return _tag("search", " ".join(kept or words[:1]))


def leader_action(
    world: World,
    question: str,
    reports: Mapping[str, str],
    *,
    must_select: bool = False,
    mistakes: Mistakes = FAULTLESS,
) -> str:
    """A wave of subtasks, one for each hop that is open and asks for a known name; or a selection.

    reports: text by id, in order. Selects the reports that state something, or all if none does.
    """
    steps = follow(world, question, sentences(reports.values()))
    found = [step for step in steps if step.object]
    pending = [step for step in steps if not step.object]
    stops = bool(reports and pending and mistakes.happen(mistakes.flaws.stop_early))
    failed = len(reports) > len(found)
    if must_select or stops or (reports and (failed or not pending)):
        useful = [name for name, text in reports.items() if text.strip() != NOT_FOUND]
        chosen = useful or list(reports)
        if len(chosen) > 1 and mistakes.happen(mistakes.flaws.waste_report):
            chosen = [mistakes.pick(chosen)]
        return _tag("select", " ".join(chosen))
    tasks = [step.ask for step in pending] or [question]
    if not reports and mistakes.happen(mistakes.flaws.whole_question):
        tasks = [question]
    first = len(reports) + 1
    return _tag("assign", SEPARATOR.join(f"s{first + i} : {t}" for i, t in enumerate(tasks)))


def answerer_action(
    world: World, question: str, evidence: Sequence[str], *, mistakes: Mistakes = FAULTLESS
) -> str:
    """The answer that the evidence gives.

    Without a full chain it is the last name read, else what is known by heart, else "unknown".
    """
    wasted = mistakes.happen(mistakes.flaws.waste_report)
    stated = [] if wasted else sentences(evidence)
    steps = follow(world, question, stated)
    found = [step for step in steps if step.object]
    answer = UNKNOWN
    if _is_comparison(steps):
        same = len(found) == 2 and found[0].object == found[1].object
        answer = "yes" if same else "no"
    elif found:
        answer = found[-1].object
    elif steps:
        answer = world.closed_book.get((steps[0].relation, steps[0].subject), UNKNOWN)
    if mistakes.happen(mistakes.flaws.misread):
        others = [name for kind in NAME_PARTS for name in mentions(kind, stated)]
        others = ["yes", "no"] if _is_comparison(steps) else others
        answer = mistakes.pick([name for name in others if name != answer] or [answer])
    return _tag("answer", answer)


def single_action(
    world: World,
    question: str,
    passages: Sequence[Passage],
    num_searches: int,
    *,
    must_answer: bool = False,
    told: str = "",
    mistakes: Mistakes = FAULTLESS,
) -> str:
    """The single agent: searches as the Searcher does, and answers where that one would report.

    told: the answer, where its protocol has one.
    """
    if told and num_searches == 0 and mistakes.happen(mistakes.flaws.shortcut):
        return _tag("answer", told)
    action = searcher_action(
        world, question, passages, num_searches, must_report=must_answer, mistakes=mistakes
    )
    if action.startswith("<search>"):
        return action
    report = action.removeprefix("<report> ").removesuffix("</report>")
    return answerer_action(world, question, [report], mistakes=mistakes)


def follow(world: World, task: str, sources: Sequence[Passage]) -> list[Step]:
    """The hops of a task that are answered by the sources, then those that can be asked next.

    Empty for a task that is no question of this world.
    """
    question = world.by_text.get(task)
    asks = question.decomposition if question else (task,)
    steps: list[Step] = []
    for ask in asks:
        for hop, step in enumerate(steps, start=1):
            if step.object:
                ask = ask.replace(f"#{hop}", step.object)
        parsed = parse_ask(ask)
        if parsed:
            steps.append(Step(ask, *parsed, read(*parsed, sources)))
    return steps


def read(relation: str, subject: str, sources: Sequence[Passage]) -> str:
    """The object that the first fitting source states; "" if none does."""
    for source in sources:
        stated = parse_statement(relation, source.text)
        if stated and stated[0] == subject:
            return stated[1]
    return ""


def sentences(texts: Sequence[str]) -> list[Passage]:
    """Reported statements as untitled passages."""
    return [
        Passage("", "", sentence.strip()) for text in texts for sentence in text.split(SEPARATOR)
    ]


def mentions(kind: str, sources: Sequence[Passage]) -> list[str]:
    """Names of a kind in the sources, each once."""
    parts = NAME_PARTS[kind]
    found = {}
    for source in sources:
        words = source.text.split()
        for start in range(len(words) - len(parts) + 1):
            name = words[start : start + len(parts)]
            if all(word in part for word, part in zip(name, parts, strict=True)):
                found[" ".join(name)] = None
    return list(found)


def _is_comparison(steps: Sequence[Step]) -> bool:
    """Whether two steps ask the same of two subjects; in a chain each relation leads elsewhere."""
    return len(steps) == 2 and steps[0].relation == steps[1].relation


def _unsearched(world: World, steps: Sequence[Step], mistakes: Mistakes) -> str:
    """A report made without searching, from memory or as a guess; "" for neither."""
    step = steps[0]
    known = world.closed_book.get((step.relation, step.subject))
    if known and len(steps) == 1 and mistakes.happen(mistakes.flaws.from_memory):
        return Step(step.ask, step.relation, step.subject, known).statement
    if mistakes.happen(mistakes.flaws.skip_search):
        name = mistakes.pick(world.names[RELATIONS[step.relation].object])
        return Step(step.ask, step.relation, step.subject, name).statement
    return ""


def _report(found: Sequence[Step], passages: Sequence[Passage], mistakes: Mistakes) -> str:
    """Statements of the hops found, in order; a misread one tells another name."""
    statements = []
    for step in found:
        if mistakes.happen(mistakes.flaws.misread):
            seen = mentions(RELATIONS[step.relation].object, passages)
            others = [name for name in seen if name != step.object]
            name = mistakes.pick(others or [step.object])
            step = Step(step.ask, step.relation, step.subject, name)
        statements.append(step.statement)
    return SEPARATOR.join(statements) or NOT_FOUND


def _tag(kind: str, text: str) -> str:
    return f"<{kind}> {text}</{kind}>"
