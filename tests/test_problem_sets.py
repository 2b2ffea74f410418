"""Each set of problems by itself: accuracies, means and tokens by hand."""

from evaluation_episodes import make_episode, make_plan, make_trace

from mas_jax.evaluation import problem_sets
from mas_jax.evaluation.statistics import score_episode


def episode(uid, rollout, is_right, words):
    """A hint of 3 tokens to a prompt of 5, and so many words of the Actor's to one of 10."""
    traces = (
        make_trace("collaborator", [(5, 3, "hint")], path="hint"),
        make_trace("actor", [(10, words, "solve")], path="solve"),
    )
    return make_episode(uid, rollout, team="hint", traces=traces, correct=(float(is_right),))


def described(sets, episodes, num_runs=2):
    plan = make_plan(sets, num_runs, team="hint")
    return problem_sets.describe(plan, list(map(score_episode, episodes)), lambda: iter(episodes))


def test_sets_their_mean_and_every_partys_tokens_by_hand():
    """Of a's two problems run 0 solves one and run 1 both; b's one is solved by run 1 alone."""
    right = {("a0", 0): True, ("a1", 0): False, ("a0", 1): True, ("a1", 1): True,
             ("b0", 0): False, ("b0", 1): True}  # fmt: skip
    words = {"a0": 20, "a1": 40, "b0": 100}
    rows = described(
        {"a": 2, "b": 1}, [episode(*key, ok, words[key[0]]) for key, ok in right.items()]
    )
    assert list(rows) == ["a", "b", "mean of 2"]
    accuracy = {name: (row["pass_at_1"]["difference"], row["avg"]["difference"])
                for name, row in rows.items()}  # fmt: skip
    assert accuracy == {"a": (0.5, 0.75), "b": (0.0, 0.5), "mean of 2": (0.25, 0.625)}
    assert rows["a"]["num_problems"] == 2 and rows["mean of 2"]["num_problems"] == 3
    assert rows["a"]["tokens"]["actor"] == {"input": 10.0, "output": 30.0}
    assert rows["a"]["tokens"]["collaborator"] == {"input": 5.0, "output": 3.0}
    # unweighted: (30 + 100) / 2, though a has twice as many problems
    assert rows["mean of 2"]["tokens"]["actor"] == {"input": 10.0, "output": 65.0}
    assert rows["b"]["avg"]["low"] == rows["b"]["avg"]["high"] == 0.5  # one problem: no spread
    assert rows["a"]["avg"]["low"] == 0.5 and rows["a"]["avg"]["high"] == 1.0
    grid = problem_sets.grid({"hint": rows}, num_runs=2)
    assert grid.rows[0] == ("hint", "a", "2", "50.00", "[0.00, 100.00]", "75.00",
                            "[50.00, 100.00]", "10", "30", "5", "3")  # fmt: skip
    assert grid.header[5:9] == ("avg@2", "interval", "actor input", "actor output")


def test_what_is_missing_is_wrong_and_its_tokens_are_not_counted():
    rows = described({"a": 2}, [episode("a0", 0, True, 20)], num_runs=1)
    assert list(rows) == ["a"]  # the mean of one set would be it again
    assert rows["a"]["avg"]["difference"] == 0.5
    assert rows["a"]["tokens"]["actor"]["output"] == 20.0
    assert described({"a": 1}, [])["a"]["tokens"] == {}


def test_of_two_forms_of_one_set_a_mean_holds_one():
    sets = {"amc23": 1, "amc83": 1, "b": 1}
    rows = described(sets, [episode("amc230", 0, True, 1)], num_runs=1)
    means = {name: row["avg"]["difference"] for name, row in rows.items() if "mean" in name}
    assert means == {"mean of 2, amc23": 0.5, "mean of 2, amc83": 0.0}


def test_a_team_without_a_party_shows_none_of_its_tokens():
    both = described({"a": 1}, [episode("a0", 0, True, 2)], num_runs=1)
    alone = {"a": both["a"] | {"tokens": {"actor": {"input": 1.0, "output": 1234.0}}}}
    grid = problem_sets.grid({"actor": alone, "hint": both}, num_runs=1)
    assert grid.rows[0][-4:] == ("1", "1,234", "-", "-")
