"""Published numbers: they agree with their own averages, and stand beside ours as published."""

import pytest
from evaluation_episodes import make_episode, make_plan

from mas_jax.evaluation import published, report
from mas_jax.evaluation.published import AVERAGE, ROWS, SETS
from mas_jax.evaluation.statistics import score_episode


def find(system, backbone, source):
    (row,) = [
        r for r in ROWS if (r.system, r.backbone) == (system, backbone) and source in r.source
    ]
    return row


def test_every_published_average_is_that_of_its_seven_sets():
    checked = 0
    for row in ROWS:
        if {*SETS, AVERAGE} <= row.values.keys():
            mean = sum(row.values[name] for name in SETS) / 7
            # numbers of one digit: each is up to .05 off, and so is the average
            assert mean == pytest.approx(row.values[AVERAGE], abs=0.1), row
            checked += 1
    assert checked == 17


def test_hop_averages_are_those_of_their_sets():
    row = find("Tree-GRPO", "3B", "Tree-GRPO")
    assert sum(row.values[s] for s in SETS[:3]) / 3 == pytest.approx(row.values["single-hop"], 0.1)
    assert sum(row.values[s] for s in SETS[3:]) / 4 == pytest.approx(row.values["multi-hop"], 0.1)


def test_some_numbers_by_name():
    best = find("MultiAgent-OPD", "Qwen3-4B-Instruct-2507", "MultiAgent-OPD")
    assert best.values == {AVERAGE: 38.68, "pass@4": 48.73, "4/4": 29.27}
    assert find("Searcher with outcome RL", best.backbone, "OPD").values == {AVERAGE: 17.78}
    assert find("Search-R1 (PPO)", "Qwen2.5-7B", "Search-R1").values["musique"] == 19.6
    steps = find("StepSearch", "Qwen2.5-3B", "OPDSearch+")
    assert steps.values == {
        "hotpotqa": 32.9,
        "2wikimultihopqa": 33.9,
        "musique": 18.1,
        "bamboogle": 32.8,
    }
    assert "nq" not in find("SkyRL, 3 turns", "Qwen2.5-3B-Instruct", "SkyRL").values
    assert find("MAPD (Claude-Opus-4.6)", "Qwen3-4B", "MAPD").values == {AVERAGE: 44.4}


def test_papers_that_contradict_each_other_are_both_there():
    theirs = find("SDAR", "Qwen3-1.7B", "SDAR, arXiv").values[AVERAGE]
    others = find("SDAR", "Qwen3-1.7B", "MAPD").values[AVERAGE]
    assert (theirs, others) == (41.9, 37.6)


def test_rows_are_percentages_of_named_sources_and_each_there_once():
    for row in ROWS:
        assert row.values and all(1.0 < value < 100.0 for value in row.values.values()), row
        assert row.source and row.metric and row.system and row.backbone
    keys = [(row.system, row.backbone, row.source) for row in ROWS]
    assert len(set(keys)) == len(keys)


def summary_of(datasets, num_right):
    """A team that is right in `num_right` of 4 runs of one question a set."""
    plan = make_plan(dict.fromkeys(datasets, 1), num_runs=4)
    scores = [
        score_episode(make_episode(q.uid, run, correct=(float(run < num_right),)))
        for q in plan.questions
        for run in range(4)
    ]
    return report.summary([(plan, scores)], k=4)


def test_ours_stand_beside_published_ones_that_are_marked():
    table = published.beside(summary_of(SETS, 3))
    assert table.header == ("system", "origin", *SETS, AVERAGE)
    ours, *others = table.rows
    assert ours == ("cascade", "ours", *["75.00"] * 8)
    assert all(row[1].startswith("published: ") for row in others)
    (search_r1,) = [row for row in others if row[0] == "Search-R1 (PPO), Qwen2.5-7B"]
    assert search_r1[1:] == (
        "published: Search-R1 (EM; greedy, one seed)",
        *("48.0", "63.8", "45.7", "43.3", "38.2", "19.6", "43.2", "43.1"),
    )
    (opd,) = [row for row in others if row[0].startswith("MultiAgent-OPD,")]
    assert opd[2:] == ("", "", "", "", "", "", "", "38.68")
    # with the digits that were published
    assert [r[-1] for r in others if r[0].startswith("untrained teacher,")] == ["29.50"]
    (rag,) = [row for row in others if row[0] == "naive RAG, Qwen2.5-3B"]
    assert rag[2:] == ("34.8", "54.4", "38.7", "25.5", "22.6", "4.7", "8.0", "27.0")
    # rows of other columns alone say nothing here
    assert not [row for row in others if row[0] == "GRPO, 14B"]
    assert "published" in report.to_markdown(table) and "published" in report.to_latex(table)


def test_an_average_of_some_sets_is_not_shown_as_the_average():
    ours = published.beside(summary_of(["nq", "musique"], 1), rows=()).rows
    assert ours == (("cascade", "ours", "25.00", "", "", "", "", "25.00", "", ""),)


def test_other_sets_cannot_be_compared_with_published_numbers():
    with pytest.raises(ValueError, match=r"evaluated on \['toy'\]"):
        published.beside(summary_of(["toy"], 1))


def test_published_rows_alone_show_the_columns_asked_for():
    rows = [row for row in ROWS if row.source.startswith("Tree-GRPO")]
    table = published.grid(rows, columns=("single-hop", "multi-hop"), title="hops")
    assert ("GRPO, 14B", "published: Tree-GRPO, arXiv 2509.21240 (EM)", "", "41.8") in table.rows
    assert len(table.rows) == len(rows) == 10
