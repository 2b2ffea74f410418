"""Records into numbers: accuracy over repeated runs with fixed denominators, and cost.

Must not know: files, tables.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, fsum

from mas_jax.evaluation.records_file import Plan
from mas_jax.records import Episode, Question, Trace, Turn


@dataclass(frozen=True)
class EpisodeScore:
    """What the statistics need of one episode; small, so that all of them fit in memory.

    correct: whether the first candidate is right; candidates_mean: share of all candidates that
    are; both say wrong after a failure of the world. input_tokens: prompts as sent, summed over
    generations; output_tokens: sampled. num_actions: generations, each being one action.
    failure: kind of the world's failure or "". retrieved: as in `Episode`.
    """

    question: str
    rollout: int
    correct: bool
    candidates_mean: float
    num_searches: int
    failed_searches: int
    input_tokens: int
    output_tokens: int
    turns_used: int
    critical_steps: int
    num_actions: int
    invalid_actions: int
    outcome: str
    failure: str
    retrieved: tuple[tuple[str, str], ...]


def score_episode(episode: Episode) -> EpisodeScore:
    """The episode's contribution to the statistics."""
    correct = episode.correct if episode.failure is None else ()
    turns = [turn for trace in episode.traces for turn in trace.turns]
    return EpisodeScore(
        question=episode.question,
        rollout=episode.rollout,
        correct=correct[:1] == (1.0,),
        candidates_mean=fsum(correct) / len(correct) if correct else 0.0,
        num_searches=episode.num_searches,
        failed_searches=episode.failed_searches,
        input_tokens=count_input_tokens(episode.traces),
        output_tokens=sum(turn.end - turn.start for turn in turns),
        turns_used=episode.turns_used,
        critical_steps=critical_steps(episode),
        num_actions=len(turns),
        invalid_actions=sum(turn.action == "invalid" for turn in turns),
        outcome=episode.outcome,
        failure="" if episode.failure is None else episode.failure.kind.value,
        retrieved=episode.retrieved,
    )


def critical_steps(episode: Episode) -> int:
    """Turns that had to wait for each other: the Leader's, and of each wave its longest Searcher's;
    of a topology the waves in which anybody spoke.

    A lone Searcher's turns all count. As in `turns_used`, invalid turns count and the Answerer's
    candidates, which are drawn at once, do not.
    Source: Kimi K2.5, arXiv 2602.02276: sum over stages of S_main + max_i S_sub,i.
    """
    steps: set[tuple[str, int]] = set()  # a wave, and which of its steps
    turns: Counter[str] = Counter()
    for trace in episode.traces:
        if trace.role == "answerer":
            continue
        wave = trace.path.rpartition(".s")[0] or trace.path  # leader/w1 of leader/w1.s2
        for turn in trace.turns:
            steps.add((wave, turns[trace.path]) if turn.wave is None else ("", turn.wave))
            turns[trace.path] += 1
    return len(steps)


def count_input_tokens(traces: Sequence[Trace]) -> int:
    """Prompt tokens sent, summed over generations: each turn's prompt is all that precedes it.

    The candidates of one request were sent one first prompt, which counts once.
    """
    first_prompts = {(t.path, t.tokens[: t.turns[0].start]) for t in traces if t.turns}
    later = sum(turn.start for trace in traces for turn in trace.turns[1:])
    return sum(len(tokens) for _, tokens in first_prompts) + later


def shared_turns(episode: Episode) -> tuple[Turn, ...]:
    """The turns of a tree's leaf that another leaf played; the prompt of each is all that precedes
    it, as everywhere: only a search agent that plays alone grows trees."""
    turns = [turn for trace in episode.traces for turn in trace.turns]
    return tuple(turns[: episode.shared_turns])


def gold_recall(question: Question, retrieved: Iterable[tuple[str, str]]) -> float | None:
    """The share of a question's gold passages, or of its gold pages if those are known, among
    (id, title) of what was found; None where neither is known.

    Quotes at the ends of a title do not count: corpora differ in them.
    """
    if question.gold_titles:
        gold = {title.strip('"') for title in question.gold_titles}
        found = {title.strip('"') for _, title in retrieved}
    else:
        gold, found = set(question.gold_passages), {name for name, _ in retrieved}
    return len(gold & found) / len(gold) if gold else None


def mean_gold_recall(plan: Plan, scores: Sequence[EpisodeScore]) -> float | None:
    """Mean of `gold_recall` over the recorded episodes whose question's gold is known; None if
    there is none."""
    questions = {question.uid: question for question in plan.questions}
    found = [gold_recall(questions[score.question], score.retrieved) for score in scores]
    known = [recall for recall in found if recall is not None]
    return fsum(known) / len(known) if known else None


def pass_at_k(num_runs: int, num_correct: int, k: int) -> float:
    """Chance that at least one of k runs, drawn without replacement from num_runs, is correct.

    The unbiased estimator 1 - C(n - c, k) / C(n, k); any(correct) where k = n.
    Source: Chen et al. 2021, arXiv 2107.03374, equation 1.
    """
    _check_counts(num_runs, num_correct, k)
    num_draws = comb(num_runs, k)
    return (num_draws - comb(num_runs - num_correct, k)) / num_draws


def all_at_k(num_runs: int, num_correct: int, k: int) -> float:
    """Chance that all of k runs, drawn without replacement from num_runs, are correct."""
    _check_counts(num_runs, num_correct, k)
    return comb(num_correct, k) / comb(num_runs, k)


def accuracy_by_dataset(
    plan: Plan, scores: Sequence[EpisodeScore], *, k: int
) -> dict[str, dict[str, float]]:
    """For each dataset of the plan its num_questions, avg, candidates_mean, pass_at_k, all_at_k.

    Denominators are the planned questions times the planned runs: an episode that failed or is
    missing counts as wrong. Raises: ValueError on an episode that is not planned, or there twice.
    """
    _check_planned(plan, scores)
    num_correct = Counter(score.question for score in scores if score.correct)
    candidates_means: dict[str, list[float]] = {}
    for score in scores:
        candidates_means.setdefault(score.question, []).append(score.candidates_mean)
    uids_by_dataset: dict[str, list[str]] = {}
    for question in plan.questions:
        uids_by_dataset.setdefault(question.dataset, []).append(question.uid)

    n = plan.num_runs
    return {
        dataset: {
            "num_questions": len(uids),
            "avg": sum(num_correct[uid] for uid in uids) / (len(uids) * n),
            "candidates_mean": fsum(x for uid in uids for x in candidates_means.get(uid, ()))
            / (len(uids) * n),
            "pass_at_k": fsum(pass_at_k(n, num_correct[uid], k) for uid in uids) / len(uids),
            "all_at_k": fsum(all_at_k(n, num_correct[uid], k) for uid in uids) / len(uids),
        }
        for dataset, uids in uids_by_dataset.items()
    }


def macro_average(by_dataset: Mapping[str, Mapping[str, float]], name: str) -> float:
    """Unweighted mean of one number over the datasets."""
    return fsum(values[name] for values in by_dataset.values()) / len(by_dataset)


# kinds of cost, and which numbers of `cost_per_workflow` each is the sum of
COSTS = {"searches": ("searches",), "tokens": ("input_tokens", "output_tokens")}


def cost_per_workflow(scores: Sequence[EpisodeScore]) -> dict[str, float]:
    """Means over the recorded episodes, failed ones included with what they had spent; 0.0 if none.

    A missing episode has no cost to count: unlike accuracy, cost has the recorded denominator.
    """
    num_episodes = max(len(scores), 1)
    return {
        "searches": sum(score.num_searches for score in scores) / num_episodes,
        "failed_searches": sum(score.failed_searches for score in scores) / num_episodes,
        "input_tokens": sum(score.input_tokens for score in scores) / num_episodes,
        "output_tokens": sum(score.output_tokens for score in scores) / num_episodes,
        "turns": sum(score.turns_used for score in scores) / num_episodes,
        "critical_steps": sum(score.critical_steps for score in scores) / num_episodes,
    }


def invalid_action_frac(scores: Sequence[EpisodeScore]) -> float:
    """Share of all generations that were invalid actions; 0.0 if there was none."""
    num_actions = sum(score.num_actions for score in scores)
    return sum(score.invalid_actions for score in scores) / num_actions if num_actions else 0.0


def _check_counts(num_runs: int, num_correct: int, k: int) -> None:
    if not (1 <= k <= num_runs and 0 <= num_correct <= num_runs):
        raise ValueError(
            f"num_runs={num_runs}, num_correct={num_correct}, k={k}; "
            "want 1 <= k <= num_runs and 0 <= num_correct <= num_runs"
        )


def _check_planned(plan: Plan, scores: Sequence[EpisodeScore]) -> None:
    planned = {question.uid for question in plan.questions}
    seen = set()
    for score in scores:
        run = (score.question, score.rollout)
        if score.question not in planned or not 0 <= score.rollout < plan.num_runs:
            raise ValueError(f"episode {run} is not in the plan of {plan.num_runs} runs a question")
        if run in seen:
            raise ValueError(f"episode {run} is there twice; it would count twice")
        seen.add(run)
