"""Playing a plan into a file of records: completeness, resuming, refusals."""

import asyncio
import hashlib
import io
import json
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from evaluation_episodes import make_episode, make_plan, make_trace, random_episode
from rich.console import Console

from mas_jax.evaluation import episode_json, records_file, run
from mas_jax.evaluation.records_file import Plan
from mas_jax.records import Episode, Failure, FailureKind, Judgement, Question, StopReason

PLAN = make_plan({"a": 2, "b": 1}, num_runs=2, temperature=1.0, stop=("x", "y"))


class Player:
    """Plays jobs by a script, last job first, and remembers what it was asked for."""

    def __init__(self, episode_of=random_episode, *, stop_after: int | None = None) -> None:
        self.asked: list[tuple[str, int]] = []
        self._episode_of, self._stop_after = episode_of, stop_after

    async def __call__(self, jobs):
        self.asked += [(question.uid, rollout) for question, rollout in jobs]
        for index, (question, rollout) in enumerate(reversed(jobs)):
            if index == self._stop_after:
                raise KeyboardInterrupt
            await asyncio.sleep(0)
            yield self._episode_of(question.uid, rollout)


def evaluate(plan: Plan, path: Path, play, console: Console | None = None) -> None:
    console = console or Console(file=io.StringIO())
    asyncio.run(run.evaluate(plan, path, play, console=console, log_interval_s=1e9))


def recorded(path: Path, plan: Plan = PLAN) -> dict[tuple[str, int], Episode]:
    episodes = list(records_file.read(path, plan))
    by_run = {(episode.question, episode.rollout): episode for episode in episodes}
    assert len(by_run) == len(episodes)
    return by_run


def all_runs(plan: Plan) -> dict[tuple[str, int], Episode]:
    return {
        (question.uid, rollout): random_episode(question.uid, rollout)
        for question in plan.questions
        for rollout in range(plan.num_runs)
    }


def test_questions_that_know_no_gold_pages_have_the_digest_that_they_always_had():
    # as records of evaluations name them: a new field of Question must not stop their resuming
    question = Question("u", "d", "q?", ("a",), 1, ("s?",), ("p",))
    fields_of_one = {
        "uid": "u", "dataset": "d", "text": "q?", "golden_answers": ["a"], "hops": 1,
        "decomposition": ["s?"], "gold_passages": ["p"],
    }  # fmt: skip
    text = json.dumps([fields_of_one]).encode()
    wanted = hashlib.blake2b(text, digest_size=16).hexdigest()
    assert records_file.fingerprint((question,)) == wanted
    assert records_file.fingerprint((replace(question, gold_titles=("t",)),)) != wanted


def test_an_episode_as_json_by_hand():
    trace = make_trace("searcher", [(2, 1, "search"), (1, 2, "invalid")])
    value = episode_json.to_json(make_episode("a0", 1, traces=(trace,)))["traces"][0]
    assert value["tokens"] == (100, 101, 102, 103, 104, 105)
    assert value["owners"] == [[0, 2], [2, 1], [0, 1], [2, 2]]  # runs of owner, length
    assert value["logprobs"] == list(trace.logprobs[2:3] + trace.logprobs[4:6])
    assert value["turns"][1] == {
        "start": 4,
        "end": 6,
        "action": "invalid",
        "stop_reason": "token",
        "reason": "no tag",
    }


def test_every_episode_survives_json_exactly():
    kinds = set()
    for rollout in range(60):
        episode = random_episode("a0", rollout)
        back = episode_json.from_json(json.loads(json.dumps(episode_json.to_json(episode))))
        assert back == episode
        for record, copy in [(episode, back), *zip(episode.traces, back.traces, strict=True)]:
            for field in fields(record):  # equal is not enough: 1 == True == 1.0
                values = [getattr(item, field.name) for item in (record, copy)]
                assert repr(values[0]) == repr(values[1])
        kinds.add(episode.failure and episode.failure.kind)
    assert kinds == {None, *FailureKind}
    trace = make_trace("leader", [(1, 1, "assign")])
    for reason in StopReason:
        turn = replace(trace.turns[0], stop_reason=reason)
        episode = make_episode("a0", 0, traces=(replace(trace, turns=(turn,)),))
        assert episode_json.from_json(episode_json.to_json(episode)) == episode


def test_judgements_survive_json_and_older_files_have_none():
    judged = replace(
        make_episode("a0", 0),
        judgements=(Judgement("leader/w1.s1", 0.7, 9, 2), Judgement("s", None)),
    )
    value = json.loads(json.dumps(episode_json.to_json(judged)))
    assert episode_json.from_json(value) == judged
    del value["judgements"]
    assert episode_json.from_json(value) == make_episode("a0", 0)


def test_what_a_search_found_survives_json_and_older_episodes_know_nothing_of_it():
    trace = make_trace("searcher", [(2, 1, "search"), (1, 2, "report")])
    first, second = trace.turns
    searched = replace(first, query="who", found=("p1", "p2"))
    episode = make_episode("a0", 0, traces=(replace(trace, turns=(searched, second)),))
    value = json.loads(json.dumps(episode_json.to_json(episode)))
    assert value["traces"][0]["turns"][0]["found"] == ["p1", "p2"]
    assert not {"query", "found"} & set(value["traces"][0]["turns"][1])
    assert episode_json.from_json(value) == episode
    for turn in value["traces"][0]["turns"]:
        turn.pop("query", None), turn.pop("found", None)
    assert episode_json.from_json(value) == make_episode("a0", 0, traces=(trace,))


def test_a_leaf_of_a_tree_survives_json_and_a_record_from_before_trees_is_of_none():
    leaf = replace(make_episode("a0", 4), tree=1, shared_turns=2)
    written = json.loads(json.dumps(episode_json.to_json(leaf)))
    assert episode_json.from_json(written) == leaf
    del written["tree"], written["shared_turns"]
    assert episode_json.from_json(written) == make_episode("a0", 4)


def test_a_token_that_was_certain_keeps_its_place_in_json():
    trace = make_trace("searcher", [(2, 3, "search")])
    trace = replace(trace, logprobs=(0.0, 0.0, -1.0, 0.0, -2.0))
    episode = make_episode("a0", 0, traces=(trace,))
    assert episode_json.from_json(episode_json.to_json(episode)) == episode


def test_a_trace_that_breaks_its_contract_is_not_written():
    trace = make_trace("searcher", [(2, 1, "search")])
    for broken, message in [
        (replace(trace, logprobs=(0.0, -1.0, -1.0)), "nobody sampled"),
        (replace(trace, owners=(0, 0)), "3 tokens, 2 owners, 3 logprobs"),
    ]:
        with pytest.raises(ValueError, match=message):
            episode_json.to_json(make_episode("a0", 0, traces=(broken,)))


def test_every_planned_episode_is_played_once_and_recorded_with_its_question(tmp_path):
    path, play = tmp_path / "new folder" / "records.jsonl", Player()
    evaluate(PLAN, path, play)
    assert play.asked == [("a0", 0), ("a0", 1), ("a1", 0), ("a1", 1), ("b0", 0), ("b0", 1)]
    assert recorded(path) == all_runs(PLAN)
    header, *lines = map(json.loads, path.read_text().split("\n")[:-1])
    assert (header["team"], header["num_runs"], header["num_questions"]) == ("cascade", 2, 3)
    assert header["settings"] == {"temperature": 1.0, "stop": ["x", "y"]}
    assert len(lines) == 6
    assert lines[0]["dataset"] == "b"
    assert lines[0]["golden_answers"] == ["answer 0", "alias"]
    assert lines[0]["episode"]["question"] == "b0"


def test_a_finished_evaluation_is_not_played_again(tmp_path):
    path = tmp_path / "records.jsonl"
    evaluate(PLAN, path, Player())
    before, again = path.read_bytes(), Player()
    evaluate(PLAN, path, again)
    assert again.asked == [] and path.read_bytes() == before


def test_every_cut_of_the_file_resumes_to_the_uninterrupted_result(tmp_path):
    def short_episode(uid: str, rollout: int) -> Episode:
        trace = make_trace("answerer", [(2, 1, "answer")])
        return make_episode(uid, rollout, traces=(trace,), correct=(float(rollout),))

    plan = make_plan({"a": 1}, num_runs=2)
    path = tmp_path / "records.jsonl"
    evaluate(plan, path, Player(short_episode))
    whole, wanted = path.read_bytes(), recorded(path, plan)
    line_ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    assert len(line_ends) == 3 and line_ends[-1] == len(whole)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        play = Player(short_episode)
        evaluate(plan, path, play)
        num_kept = max(sum(end <= cut for end in line_ends) - 1, 0)
        assert len(play.asked) == 2 - num_kept, cut
        assert recorded(path, plan) == wanted, cut
        assert path.read_bytes().count(b"\n") == 3, cut


@pytest.mark.parametrize("stop_after", range(7))
def test_an_interrupted_play_keeps_what_had_ended(tmp_path, stop_after):
    path = tmp_path / "records.jsonl"
    if stop_after < 6:
        with pytest.raises(KeyboardInterrupt):
            evaluate(PLAN, path, Player(stop_after=stop_after))
    else:
        evaluate(PLAN, path, Player(stop_after=stop_after))
    ended = recorded(path).values()
    assert len(ended) == stop_after
    num_failed = 0 if stop_after == 6 else sum(e.failure is not None for e in ended)
    play = Player()
    evaluate(PLAN, path, play)
    assert len(play.asked) == 6 - stop_after + num_failed
    assert recorded(path) == all_runs(PLAN)


def test_a_killed_process_leaves_every_episode_that_had_ended(tmp_path):
    path = tmp_path / "records.jsonl"
    code = f"""
import os, signal, sys
from pathlib import Path
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parent.parent)]!r}
from test_evaluation_run import PLAN, evaluate, random_episode

async def play(jobs):
    for index, (question, rollout) in enumerate(jobs):
        if index == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        yield random_episode(question.uid, rollout)

evaluate(PLAN, Path({str(path)!r}), play)
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(recorded(path)) == 4
    evaluate(PLAN, path, Player())
    assert recorded(path) == all_runs(PLAN)


def test_records_can_be_read_while_a_line_is_being_written(tmp_path):
    path = tmp_path / "records.jsonl"
    evaluate(PLAN, path, Player())
    path.write_bytes(path.read_bytes()[:-10])
    size = path.stat().st_size
    assert len(recorded(path)) == 5
    assert path.stat().st_size == size  # reading mends nothing


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "records.jsonl"
    evaluate(PLAN, path, Player())
    lines = path.read_bytes().split(b"\n")
    lines[3] = lines[3][:40]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=r"records\.jsonl, line 4: damaged record"):
        evaluate(PLAN, path, Player())
    assert path.read_bytes() == b"\n".join(lines)


OTHERS = {
    "num_runs is 2 there, 3 here": replace(PLAN, num_runs=3),
    "team is 'cascade' there, 'hierarchy' here": replace(PLAN, team="hierarchy"),
    "num_questions is 3 there, 2 here": replace(PLAN, questions=PLAN.questions[:2]),
    "questions is '": replace(
        PLAN, questions=(replace(PLAN.questions[0], golden_answers=("other",)), *PLAN.questions[1:])
    ),
    "settings.temperature is 1.0 there, 0.7 here": replace(
        PLAN, settings={**PLAN.settings, "temperature": 0.7}
    ),
    "settings.seed is None there, 1 here": replace(PLAN, settings={**PLAN.settings, "seed": 1}),
}


@pytest.mark.parametrize("message", OTHERS)
def test_records_of_another_evaluation_are_refused_and_left_alone(tmp_path, message):
    path = tmp_path / "records.jsonl"
    evaluate(PLAN, path, Player())
    before = path.read_bytes()
    with pytest.raises(ValueError, match="belongs to another evaluation: ") as error:
        evaluate(OTHERS[message], path, Player())
    assert message in str(error.value)
    # what is equal is not listed
    assert ("temperature" in message) == ("temperature" in str(error.value))
    assert path.read_bytes() == before


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    for content in (b"my notes", b"my notes\n", b"[1, 2]\n", b'{"a": 1}\n'):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a file of records"):
            evaluate(PLAN, path, Player())
        assert path.read_bytes() == content


def test_the_order_of_questions_and_tuples_for_lists_are_the_same_evaluation(tmp_path):
    path = tmp_path / "records.jsonl"
    evaluate(PLAN, path, Player())
    same = replace(
        PLAN, questions=PLAN.questions[::-1], settings={"stop": ["x", "y"], "temperature": 1.0}
    )
    play = Player()
    evaluate(same, path, play)
    assert play.asked == []


def test_plans_that_cannot_be_played_are_errors(tmp_path):
    twice = replace(PLAN, questions=PLAN.questions + PLAN.questions[:1])
    with pytest.raises(ValueError, match="'a0' is planned more than once"):
        evaluate(twice, tmp_path / "r.jsonl", Player())
    for empty in (replace(PLAN, questions=()), replace(PLAN, num_runs=0)):
        with pytest.raises(ValueError, match="want at least 1 each"):
            evaluate(empty, tmp_path / "r.jsonl", Player())
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda uid, rollout: random_episode("z9", rollout),
        lambda uid, rollout: random_episode(uid, rollout + 2),
        lambda uid, rollout: random_episode("a0", 0),
        lambda uid, rollout: random_episode(uid, rollout, team="hierarchy"),
    ],
    ids=["unknown question", "unknown run", "twice", "another team"],
)
def test_an_episode_that_was_not_asked_for_is_an_error(tmp_path, wrong):
    path = tmp_path / "records.jsonl"
    with pytest.raises(ValueError, match="not asked for, or given before"):
        evaluate(PLAN, path, Player(wrong))
    evaluate(PLAN, path, Player())  # what had been recorded before is sound
    assert recorded(path).keys() == all_runs(PLAN).keys()


def test_episodes_that_play_leaves_out_are_reported_and_played_next_time(tmp_path, caplog):
    async def half(jobs):
        for question, rollout in jobs[::2]:
            yield random_episode(question.uid, rollout)

    path = tmp_path / "records.jsonl"
    evaluate(PLAN, path, half)
    assert "3 of 6 episodes are missing" in caplog.text
    num_failed = sum(episode.failure is not None for episode in recorded(path).values())
    play = Player()
    evaluate(PLAN, path, play)
    assert len(play.asked) == 3 + num_failed
    assert recorded(path) == all_runs(PLAN)


def test_what_the_world_failed_is_played_again_where_that_stopped_the_evaluation(tmp_path):
    def failing(uid: str, rollout: int) -> Episode:
        failure = Failure(FailureKind.API, "gone") if (uid, rollout) == ("b0", 1) else None
        return make_episode(uid, rollout, correct=(1.0,), failure=failure)

    path = tmp_path / "records.jsonl"
    with pytest.raises(KeyboardInterrupt):
        evaluate(PLAN, path, Player(failing, stop_after=3))  # the last job first
    again = Player(failing)
    evaluate(PLAN, path, again)
    assert again.asked == [("a0", 0), ("a0", 1), ("a1", 0), ("b0", 1)]
    assert len(path.read_bytes().splitlines()) == 1 + 6
    evaluate(PLAN, path, again)  # finished, with one failure
    assert len(again.asked) == 4
    assert [e.rollout for e in recorded(path).values() if e.failure is not None] == [1]


def test_a_failure_of_the_world_is_recorded_and_counted_on_the_way(tmp_path):
    def episode(uid: str, rollout: int) -> Episode:
        failure = Failure(FailureKind.SAMPLER, "lost") if uid == "a1" else None
        return make_episode(uid, rollout, correct=(float(rollout == 0),), failure=failure)

    console = Console(file=io.StringIO())
    evaluate(PLAN, tmp_path / "records.jsonl", Player(episode), console)
    # 6 episodes, 2 failed, run 0 of the two other questions right
    assert console.file.getvalue().split("\n")[-2].endswith("avg 0.333, 2 failed")
    assert len(recorded(tmp_path / "records.jsonl")) == 6
