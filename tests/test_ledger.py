"""Cost by stage and role, and critical steps: by hand, sums kept, order of no matter."""

import random
from dataclasses import replace

import pytest
from evaluation_episodes import make_episode, make_trace, random_episode

from mas_jax.evaluation import ledger, report
from mas_jax.evaluation.ledger import Entry, play_entries, training_entries
from mas_jax.evaluation.statistics import cost_per_workflow, critical_steps, score_episode
from mas_jax.records import Judgement


def hierarchy_episode():
    """A Leader with a wave of two Searchers and a wave of one; two candidates of one request."""
    traces = (
        make_trace("leader", [(10, 4, "assign"), (6, 2, "assign"), (3, 1, "select")]),
        make_trace("searcher", [(5, 2, "search"), (9, 2, "search"), (1, 3, "report")],
                   path="leader/w1.s1"),
        make_trace("searcher", [(5, 3, "report")], path="leader/w1.s2"),
        make_trace("searcher", [(5, 2, "search"), (7, 1, "invalid")], path="leader/w2.s1"),
        make_trace("answerer", [(20, 2, "answer")], candidate=0),
        make_trace("answerer", [(20, 3, "answer")], candidate=1),
    )  # fmt: skip
    return make_episode("a0", 0, team="hierarchy", traces=traces, num_searches=3, turns_used=9)


# --- playing --------------------------------------------------------------------------------------


def test_cost_of_every_role_by_hand():
    # leader: prompts 10, 10 + 4 + 6 = 20, 20 + 2 + 3 = 25, sampled 4 + 2 + 1; searchers: prompts
    # 5, 5 + 2 + 9 = 16, 16 + 2 + 1 = 19; 5; 5, 5 + 2 + 7 = 14, sampled 2 + 2 + 3 + 3 + 2 + 1;
    # answerer: one prompt of 20 for both candidates, sampled 5. In all 55 + 64 + 20 = 139 and 25
    answerer, leader, searcher = play_entries("student", [hierarchy_episode()], accelerator_s=16.4)
    assert leader == Entry("student", "leader", 0, 55, 7, 0, pytest.approx(16.4 * 62 / 164))
    assert searcher == Entry("student", "searcher", 3, 64, 13, 0, pytest.approx(16.4 * 77 / 164))
    assert answerer == Entry("student", "answerer", 0, 20, 5, 0, pytest.approx(16.4 * 25 / 164))


def test_roles_add_up_to_the_cost_of_the_workflows():
    episodes = [
        replace(episode, num_searches=sum(t.action == "search" for x in episode.traces
                                          for t in x.turns))
        for episode in (random_episode(f"a{i}", r) for i in range(20) for r in range(3))
    ]  # fmt: skip
    entries = play_entries("evaluation", episodes, accelerator_s=7.0)
    whole = ledger.total(entries)
    want = cost_per_workflow([score_episode(episode) for episode in episodes])
    assert whole.searches / 60 == pytest.approx(want["searches"])
    assert whole.input_tokens / 60 == pytest.approx(want["input_tokens"])
    assert whole.output_tokens / 60 == pytest.approx(want["output_tokens"])
    assert whole.accelerator_s == pytest.approx(7.0)
    random.Random(0).shuffle(episodes)
    assert play_entries("evaluation", episodes, accelerator_s=7.0) == entries


def test_time_without_tokens_is_kept_and_named_nobodys():
    assert play_entries("s", [], accelerator_s=2.0) == (Entry("s", "", accelerator_s=2.0),)
    assert play_entries("s", [make_episode("a0", 0)], accelerator_s=0.0) == ()
    idle = training_entries("s", {"leader": 0}, accelerator_s=2.0)
    assert idle == (Entry("s", "", accelerator_s=2.0), Entry("s", "leader"))


# --- training -------------------------------------------------------------------------------------


def test_a_students_ledger_holds_its_teachers_training():
    teacher = training_entries("teacher", {"searcher": 300, "answerer": 100}, accelerator_s=8.0)
    student = training_entries("student", {"searcher": 500, "leader": 500}, accelerator_s=4.0)
    assert teacher == (
        Entry("teacher", "answerer", training_tokens=100, accelerator_s=2.0),
        Entry("teacher", "searcher", training_tokens=300, accelerator_s=6.0),
    )
    both = (*teacher, *student)
    assert ledger.by_role(both) == (
        Entry("all", "answerer", training_tokens=100, accelerator_s=2.0),
        Entry("all", "leader", training_tokens=500, accelerator_s=2.0),
        Entry("all", "searcher", training_tokens=800, accelerator_s=8.0),
    )
    assert ledger.by_stage(both) == (
        Entry("teacher", "all", training_tokens=400, accelerator_s=8.0),
        Entry("student", "all", training_tokens=1000, accelerator_s=4.0),
    )
    assert ledger.total(both) == Entry("all", "all", training_tokens=1400, accelerator_s=12.0)
    assert ledger.total(()) == Entry("all", "all")


def test_negative_amounts_are_errors():
    with pytest.raises(ValueError, match="want none below 0"):
        play_entries("s", [], accelerator_s=-1.0)
    with pytest.raises(ValueError, match="want none below 0"):
        training_entries("s", {"leader": -1}, accelerator_s=1.0)


# --- critical steps -------------------------------------------------------------------------------


def test_critical_steps_by_hand():
    # the Leader's 3, then max(3, 1) of the first wave and 2 of the second; no candidates
    assert critical_steps(hierarchy_episode()) == 3 + 3 + 2
    searcher = make_trace("searcher", [(5, 2, "search"), (5, 2, "report")])
    answerer = make_trace("answerer", [(9, 1, "invalid"), (4, 1, "answer")])
    assert critical_steps(make_episode("a0", 0, traces=(searcher, answerer))) == 2
    assert critical_steps(make_episode("a0", 0)) == 0


def test_strands_of_one_agent_follow_each_other_and_searchers_of_a_wave_do_not():
    def searcher(path, num_turns):
        return make_trace("searcher", [(5, 2, "search")] * num_turns, path=path)

    # s1 has two strands of 2 and 1 turns; s10 is another agent of the same wave, not of s1
    traces = (
        searcher("leader/w1.s1", 2),
        searcher("leader/w1.s1", 1),
        searcher("leader/w1.s10", 2),
    )
    episode = make_episode("a0", 0, traces=traces)
    assert critical_steps(episode) == 3
    assert critical_steps(replace(episode, traces=traces[::-1])) == 3


def test_waves_of_one_searcher_have_no_step_to_spare():
    for number in range(1, 5):
        traces = tuple(
            make_trace("searcher", [(5, 2, "report")], path=f"leader/w{wave}.s1")
            for wave in range(number)
        )
        assert critical_steps(make_episode("a0", 0, traces=traces)) == number


# --- the table ------------------------------------------------------------------------------------


def test_the_table_divides_by_the_workflows_and_sums_stages_and_parts():
    entries = (
        Entry("teacher", "searcher", 10, 40_000, 3000, 8000, 5.0),
        Entry("teacher", "answerer", 0, 4000, 200, 0, 1.0),
        Entry("student", "leader", 0, 20_000, 1000, 2000, 3.0),
    )
    table = ledger.grid(entries, title="cost", num_workflows=4, are_parts=True)
    assert table.rows == (
        ("teacher", "searcher", "2.50", "10,000", "750", "2,000", "1.25"),
        ("teacher", "answerer", "0.00", "1,000", "50", "0", "0.25"),
        ("student", "leader", "0.00", "5,000", "250", "500", "0.75"),
        ("teacher", "all", "2.50", "11,000", "800", "2,000", "1.50"),
        ("student", "all", "0.00", "5,000", "250", "500", "0.75"),
        ("all", "all", "2.50", "16,000", "1,050", "2,500", "2.25"),
    )
    compared = ledger.grid(entries, title="cost", num_workflows=4, are_parts=False)
    assert compared.rows == table.rows[:-1]
    assert "| --- | --- | ---: |" in report.to_markdown(table)
    with pytest.raises(ValueError, match="num_workflows=0"):
        ledger.grid(entries, title="cost", num_workflows=0, are_parts=True)


def test_a_judges_tokens_are_a_row_of_their_own():
    judged = replace(
        make_episode("a0", 0),
        judgements=(Judgement("s1", 0.5, 30, 4), Judgement("s2", None, 20, 1)),
    )
    entries = play_entries("x", [judged], accelerator_s=0.0)
    (entry,) = [entry for entry in entries if entry.role == ledger.JUDGE]
    assert (entry.input_tokens, entry.output_tokens, entry.searches) == (50, 5, 0)
