"""Many episodes at once, and the line between failures of the world, of the policy and of us."""

import asyncio
import dataclasses
import random

import pytest
from scripted_team import CharTokenizer, Script, cut, make_team

from mas_jax.agents import rollout
from mas_jax.agents.rollout import Limits, TooManyFailures
from mas_jax.agents.setting import Run
from mas_jax.records import (
    FailureKind,
    Judgement,
    Passage,
    Question,
    Sample,
    SearchFailure,
    WorldError,
)

RUN = Run(seed=0, purpose="train", step=0)
PATIENT = Limits(concurrent=8, failure_frac=1.0, min_episodes=1)
SAYS = {
    ("searcher", 0): "<search> q</search>",
    ("searcher", 1): "<report> found</report>",
    ("answerer", 0): "<answer> ada</answer>",
}
WAVE = {
    ("leader", 0): "<assign> s1 : one ; s2 : two</assign>",
    ("leader/w1.s1", 0): "<search> a</search>",
    ("leader/w1.s1", 1): "<report> x</report>",
    ("leader/w1.s2", 0): "<search> b</search>",
    ("leader/w1.s2", 1): "<report> y</report>",
    ("leader", 1): "<select> s1</select>",
    ("answerer", 0): "<answer> ada</answer>",
}


def questions(count):
    return [Question(f"q{i}", "toy", f"who {i}", ("ada",)) for i in range(count)]


def jobs(count, rollouts=1):
    return [(question, r) for question in questions(count) for r in range(rollouts)]


async def collect(work, team, world, limits=PATIENT, run=RUN):
    """Episodes in order of (question, rollout)."""
    episodes = [e async for e in rollout.play(work, team, world=world, run=run, limits=limits)]
    return sorted(episodes, key=lambda e: (int(e.question[1:]), e.rollout))


def play(work, team, world, limits=PATIENT):
    return asyncio.run(collect(work, team, world, limits))


def failing(script, **functions):
    """The script's world with some functions replaced."""
    return dataclasses.replace(script.world, **functions)


def raising(error):
    async def call(*args, **kwargs):
        raise error

    return call


def giving(value):
    async def call(*args, **kwargs):
        return value

    return call


# --- what is played -------------------------------------------------------------------------------


def test_every_job_is_played_once_and_as_it_would_be_alone():
    team = make_team("hierarchy")
    together = play(jobs(20, rollouts=3), team, Script(WAVE).world)
    assert [(e.question, e.rollout) for e in together] == [(q.uid, r) for q, r in jobs(20, 3)]
    for (question, index), episode in zip(jobs(20, 3), together, strict=True):
        alone = rollout.play_episode(question, index, team, world=Script(WAVE).world, run=RUN)
        assert episode == asyncio.run(alone)
    assert all(e.reward == 1.0 and e.turns_used == 6 and e.num_searches == 2 for e in together)


def test_schedule_and_concurrency_change_no_episode():
    rng = random.Random(0)
    team, expected = make_team("hierarchy"), None
    for concurrent in (1, 2, 7, 100):
        script = Script(WAVE)

        async def sample(prompt, script=script, **request):
            for _ in range(rng.randrange(9)):
                await asyncio.sleep(0)
            return await script.sample(prompt, **request)

        limits = dataclasses.replace(PATIENT, concurrent=concurrent)
        episodes = play(jobs(12), team, failing(script, sample=sample), limits)
        expected = expected or episodes
        assert episodes == expected


def test_no_more_episodes_are_in_progress_than_allowed_and_jobs_are_drawn_as_places_free_up():
    script = Script(SAYS)
    drawn, in_progress, most, ahead = [], set(), [], []

    def draw():
        for job in jobs(30):
            drawn.append(job)
            yield job

    async def sample(prompt, **request):
        in_progress.add(request["key"].question)
        most.append(len(in_progress))
        ahead.append(len(drawn) - len(script.rewarded))
        await asyncio.sleep(0)
        return await script.sample(prompt, **request)

    async def reward(question, predictions):
        in_progress.discard(question.uid)
        return await script.reward(question, predictions)

    limits = dataclasses.replace(PATIENT, concurrent=4)
    world = failing(script, sample=sample, reward=reward)
    episodes = play(draw(), make_team("cascade"), world, limits)
    assert sum(episode.reward for episode in episodes) == 30
    assert (max(most), max(ahead)) == (4, 4)


def test_thousands_of_episodes_play_at_once():
    world = Script(SAYS).world
    limits = dataclasses.replace(PATIENT, concurrent=1000)
    episodes = play(jobs(2000), make_team("cascade"), world, limits)
    assert len({e.question for e in episodes}) == 2000 == sum(e.reward for e in episodes)


def test_no_jobs_give_no_episodes_and_no_places_are_an_error():
    assert play([], make_team("cascade"), Script(SAYS).world) == []
    with pytest.raises(ValueError, match="concurrent=0"):
        play([], make_team("cascade"), Script({}).world, dataclasses.replace(PATIENT, concurrent=0))


# --- failures of the world ------------------------------------------------------------------------

BAD_SAMPLE = Sample((100, 101), (-1.0,), "length")
FAULTS = {
    "sampler raises": (dict(sample=raising(RuntimeError("boom"))), "sampler", "boom"),
    "sampler is an api": (dict(sample=raising(WorldError(FailureKind.API, "429"))), "api", "429"),
    "sampler times out": (dict(sample=raising(TimeoutError("slow"))), "sampler", "slow"),
    "too few samples": (dict(sample=giving([])), "sampler", "0 samples for n=1"),
    "no samples at all": (dict(sample=giving(None)), "sampler", "TypeError"),
    "log-probs missing": (dict(sample=giving([BAD_SAMPLE])), "sampler", "2 tokens with 1"),
    "retriever raises": (dict(search=raising(ConnectionError("gone"))), "retriever", "gone"),
    "retriever times out": (dict(search=raising(TimeoutError())), "retriever", "TimeoutError"),
    "retriever says so": (
        dict(search=raising(WorldError(FailureKind.RETRIEVER, "no index"))),
        "retriever",
        "no index",
    ),
    "too many results": (dict(search=giving([[], []])), "retriever", "2 results for 1"),
    "too many passages": (
        dict(search=giving([[Passage("1", "t", "x")] * 4])),
        "retriever",
        "4 passages for k=3",
    ),
    "passage without utf-8": (
        dict(search=giving([[Passage("1", "t", "\ud800")]])),
        "retriever",
        "surrogates",
    ),
    "reward raises": (dict(reward=raising(KeyError("gold"))), "reward", "gold"),
    "judge raises": (dict(reward=raising(WorldError(FailureKind.JUDGE, "mute"))), "judge", "mute"),
    "reward is nan": (dict(reward=giving((float("nan"),))), "reward", "nan"),
    "reward is none": (dict(reward=giving((None,))), "reward", "TypeError"),
    "too few rewards": (dict(reward=giving(())), "reward", "for 1 predictions"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_of_the_world_masks_the_episode_and_names_its_kind(fault):
    functions, kind, message = FAULTS[fault]
    script = Script(SAYS)
    (episode,) = play(jobs(1), make_team("cascade"), failing(script, **functions))
    assert episode.reward is None
    assert episode.failure.kind == kind and message in episode.failure.message
    assert episode.correct == ()
    # what was generated before is kept
    generated = {"sampler": 0, "api": 0, "retriever": 1, "reward": 3, "judge": 3}[kind]
    assert sum(len(trace.turns) for trace in episode.traces) == generated
    in_reward = kind in ("reward", "judge")
    assert episode.predictions == (("ada",) if in_reward else ())
    assert episode.outcome == ("answered" if in_reward else "failure")


def test_a_wrong_answer_is_zero_and_a_failure_is_none():
    script = Script({**SAYS, ("answerer", 0): "<answer> bob</answer>"})

    async def reward(question, predictions):
        if question.uid == "q1":
            raise RuntimeError("down")
        return (0.0,)

    wrong, failed = play(jobs(2), make_team("cascade"), failing(script, reward=reward))
    assert (wrong.reward, wrong.correct, wrong.failure) == (0.0, (0.0,), None)
    assert (failed.reward, failed.correct, failed.outcome) == (None, (), "answered")


def test_outcomes_of_the_policy_are_not_failures():
    script = Script({("searcher", 0): "?", ("searcher", 1): "?", ("answerer", 0): "?"})
    script.says["answerer/c0", 1] = "?"
    script.finds = lambda query: SearchFailure("timeout", "")
    (episode,) = play(jobs(1), make_team("cascade"), script.world)
    assert (episode.reward, episode.failure, episode.outcome) == (0.0, None, "invalid")


def test_one_failing_searcher_ends_its_whole_episode_and_no_other():
    script = Script(WAVE)
    left_over = []

    async def search(queries, k):
        if queries == ["a"]:
            raise OSError("broken pipe")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            left_over.append(queries)
            raise

    (episode,) = play(jobs(1), make_team("hierarchy"), failing(script, search=search))
    assert episode.failure.kind == FailureKind.RETRIEVER
    assert left_over == [["b"]]  # cancelled, not left running
    assert [t.path for t in episode.traces] == ["leader", "leader/w1.s1", "leader/w1.s2"]
    assert (episode.turns_used, episode.num_searches) == (3, 2)


# --- too many of them -----------------------------------------------------------------------------


def flaky(script, bad):
    """A world that fails the questions whose number is in `bad`, by turns in three ways."""

    async def search(queries, k):
        return [[Passage("1", "t", "x")]]

    async def sample(prompt, **request):
        number = int(request["key"].question[1:])
        if number in bad and number % 3 == 0:
            raise TimeoutError(f"slot {number}")
        if number in bad and number % 3 == 1:
            raise WorldError(FailureKind.API, f"status {number}")
        return await script.sample(prompt, **request)

    async def reward(question, predictions):
        if int(question.uid[1:]) in bad:
            raise ValueError(f"gold {question.uid}")
        return (1.0,)

    return failing(script, search=search, sample=sample, reward=reward)


def test_a_run_stops_above_its_failure_fraction_with_a_summary_by_kind():
    limits = Limits(concurrent=1, failure_frac=0.5, min_episodes=6)
    seen = []

    async def watch(bad):
        seen.clear()
        world = flaky(Script(SAYS), bad)
        stream = rollout.play(jobs(30), make_team("cascade"), world=world, run=RUN, limits=limits)
        async for episode in stream:
            seen.append(episode)

    with pytest.raises(TooManyFailures) as error:
        asyncio.run(watch(bad={0, 1, 2, 3}))  # 4 of the first 6, more than half
    message = str(error.value)
    assert "4 of 6 episodes failed" in message and len(seen) == 6
    assert "sampler: 2, such as 'TimeoutError: slot 0'" in message
    assert "api: 1, such as 'status 1'" in message
    assert "reward: 1, such as 'ValueError: gold q2'" in message
    assert "retriever" not in message

    asyncio.run(watch(bad={0, 1, 2}))  # half is not more than half
    assert len(seen) == 30 and sum(e.failure is not None for e in seen) == 3
    asyncio.run(watch(bad={10, 11, 12, 13, 14}))
    assert [e.reward for e in seen].count(None) == 5


def test_a_fraction_of_zero_stops_at_the_first_failure():
    limits = Limits(concurrent=2, failure_frac=0.0, min_episodes=1)
    assert len(play(jobs(9), make_team("cascade"), Script(SAYS).world, limits)) == 9
    with pytest.raises(TooManyFailures, match="1 of"):
        play(jobs(9), make_team("cascade"), flaky(Script(SAYS), {0}), limits)


def test_a_retriever_that_answers_no_search_stops_the_run():
    limits = Limits(concurrent=2, failure_frac=0.5, min_episodes=4)
    dead = Script(SAYS, finds=lambda query: SearchFailure("timeout", "no answer in 1 s"))
    with pytest.raises(TooManyFailures, match="4 of 4 episodes failed"):
        play(jobs(9), make_team("cascade"), dead.world, limits)
    # an episode that found something elsewhere, or never searched, is none of these
    by_turns = iter([SearchFailure("timeout", "late"), [Passage("p7", "t", "x")]] * 9)
    half = Script(WAVE, finds=lambda query: next(by_turns))
    for episode in play(jobs(9), make_team("hierarchy"), half.world, limits):
        assert (episode.num_searches, episode.failed_searches) == (2, 1)
        assert episode.retrieved == (("p7", "t"),)
    silent = Script(
        {("searcher", 0): "<report> x</report>", ("answerer", 0): "<answer> y</answer>"}
    )
    assert len(play(jobs(9), make_team("cascade"), silent.world, limits)) == 9


# --- what is not a failure of the world -----------------------------------------------------------


def test_a_bug_in_our_own_code_is_not_swallowed():
    team = make_team("cascade")
    broken = dataclasses.replace(team.prompts, searcher=" search {nonsense}")
    with pytest.raises(KeyError, match="nonsense"):
        play(jobs(3), dataclasses.replace(team, prompts=broken), Script(SAYS).world)
    with pytest.raises(KeyError, match="quartet"):
        play(jobs(3), dataclasses.replace(team, name="quartet"), Script(SAYS).world)

    def bad_jobs():
        yield from jobs(2)
        raise LookupError("no more questions")

    with pytest.raises(LookupError, match="no more questions"):
        play(bad_jobs(), team, Script(SAYS).world)


def endless(script):
    """A world whose Answerer never comes back, and the list of its cancelled requests."""
    cancelled = []

    async def sample(prompt, **request):
        if request["key"].path == "answerer":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(request["key"].question)
                raise
        return await script.sample(prompt, **request)

    return failing(script, sample=sample), cancelled


def test_cancelling_the_run_cancels_every_request_in_progress():
    world, cancelled = endless(Script(SAYS))

    async def go():
        task = asyncio.create_task(collect(jobs(9), make_team("cascade"), world))
        for _ in range(50):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    assert sorted(cancelled) == [f"q{i}" for i in range(8)]


def test_leaving_the_iterator_early_cancels_what_is_in_progress():
    script = Script(SAYS)
    world, cancelled = endless(script)

    async def sample(prompt, **request):
        if request["key"].question == "q0":
            return await script.sample(prompt, **request)
        return await world.sample(prompt, **request)

    async def go():
        patient = dataclasses.replace(PATIENT, concurrent=3)
        stream = rollout.play(
            jobs(9),
            make_team("cascade"),
            world=dataclasses.replace(world, sample=sample),
            run=RUN,
            limits=patient,
        )
        first = await anext(stream)
        for _ in range(50):
            await asyncio.sleep(0)
        await stream.aclose()
        return first

    assert asyncio.run(go()).question == "q0"
    assert sorted(cancelled) == ["q1", "q2", "q3"]


def test_the_script_ends_texts_as_an_engine_would():
    stop = dataclasses.make_dataclass("Stop", ["strings"])(("</a>",))
    text = CharTokenizer().decode
    assert text(cut("x</a>y", 99, stop).tokens) == "x</a>"
    assert text(cut("xy", 99, stop).tokens) == "xy<|im_end|>"
    assert (text(cut("xyz", 2, stop).tokens), cut("xyz", 2, stop).stop_reason) == ("xy", "length")


# --- judged episodes ------------------------------------------------------------------------------


def test_each_searchers_work_is_judged_once_and_at_once_after_the_play():
    script, asked, at_once = Script(WAVE), [], asyncio.Event()

    async def judge(job, *, key):
        assert len(script.rewarded) == 1
        asked.append((job, key))
        if len(asked) == 2:
            at_once.set()
        await at_once.wait()
        return Judgement(job.path, {"one": 0.25, "two": 1}[job.subtask], 9, 2)

    (episode,) = play(jobs(1), make_team("hierarchy"), failing(script, judge=judge))
    assert episode.judgements == (
        Judgement("leader/w1.s1", 0.25, 9, 2), Judgement("leader/w1.s2", 1, 9, 2)
    )  # fmt: skip
    assert (episode.reward, episode.failure) == (1.0, None)
    (first, key), (second, _) = sorted(asked, key=lambda pair: pair[0].path)
    assert (first.question, first.path, first.report) == ("who 0", "leader/w1.s1", "x")
    assert first.searches == (("a", (" thing about a |",)),)
    assert (second.subtask, second.report) == ("two", "y")
    assert (key.path, key.question, key.rollout) == ("leader/w1.s1/judge", "q0", 0)
    assert (key.seed, key.purpose, key.step) == (RUN.seed, RUN.purpose, RUN.step)
    # without a judge the same episode has no judgements
    assert play(jobs(1), make_team("hierarchy"), script.world)[0].judgements == ()


MUTE = {
    "raises": raising(RuntimeError("boom")),
    "api is down": raising(WorldError(FailureKind.API, "429")),
    "cannot be read": giving(Judgement("leader/w1.s1", None)),
    "is nan": giving(Judgement("leader/w1.s1", float("nan"))),
    "is above 1": giving(Judgement("leader/w1.s1", 7.0)),
    "is text": giving("7"),
    "is of another": giving(Judgement("leader/w1.s2", 0.5)),
}


@pytest.mark.parametrize("fault", MUTE)
def test_a_failed_judgement_costs_its_score_and_not_the_episode(fault):
    async def judge(job, *, key):
        if job.subtask == "two":
            return Judgement(job.path, 0.5)
        return await MUTE[fault](job, key=key)

    strict = dataclasses.replace(PATIENT, failure_frac=0.0)
    world = failing(Script(WAVE), judge=judge)
    (episode,) = play(jobs(1), make_team("hierarchy"), world, strict)
    assert episode.judgements == (Judgement("leader/w1.s1", None), Judgement("leader/w1.s2", 0.5))
    assert (episode.reward, episode.failure, episode.correct) == (1.0, None, (1.0,))


def test_a_judge_that_judges_nothing_stops_the_run():
    world = failing(Script(WAVE), judge=raising(OSError("gone")))
    limits = Limits(concurrent=2, failure_frac=0.5, min_episodes=4)
    with pytest.raises(TooManyFailures, match="judge: 4, such as 'every judgement of an episode"):
        play(jobs(9), make_team("hierarchy"), world, limits)


def test_a_failed_episode_and_a_searcher_that_said_nothing_are_not_judged():
    asked = []

    async def judge(job, *, key):
        asked.append(job.path)
        return Judgement(job.path, 1.0)

    lost = failing(Script(SAYS), reward=raising(OSError("gone")), judge=judge)
    (episode,) = play(jobs(1), make_team("cascade"), lost)
    assert episode.failure.kind == FailureKind.REWARD and episode.judgements == () == tuple(asked)
    # the report of an invalid Searcher is empty, and judged; with no turn there was none
    script = Script({**SAYS, ("searcher", 0): "?", ("searcher", 1): "?"})
    (episode,) = play(jobs(1), make_team("cascade"), failing(script, judge=judge))
    assert episode.judgements == (Judgement("searcher", 1.0),)
    team = make_team("cascade")
    none = dataclasses.replace(team, budgets=dataclasses.replace(team.budgets, turns=0))
    (episode,) = play(jobs(1), none, failing(Script(SAYS), judge=judge))
    assert episode.judgements == ()


def test_cancelling_a_judgement_is_no_failure_of_the_judge():
    async def judge(job, *, key):
        await asyncio.sleep(60)

    async def go():
        task = asyncio.create_task(
            collect(jobs(1), make_team("cascade"), failing(Script(SAYS), judge=judge))
        )
        for _ in range(60):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
