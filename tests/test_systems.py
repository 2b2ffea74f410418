"""What an evaluation compares: variants under caps and controls, votes at matched tokens."""

from pathlib import Path

import pytest
from config_files import load
from evaluation_episodes import make_episode, make_trace

from mas_jax.config import default_config
from mas_jax.evaluation.statistics import score_episode
from mas_jax.learning import systems
from mas_jax.learning.systems import System

POLICY = Path("policy")


def spent(read, wrote):
    """Scores of one episode of so many tokens."""
    trace = make_trace("actor", [(read, wrote, "solve")])
    return [score_episode(make_episode("a0", 0, traces=(trace,)))]


def test_a_system_plays_again_under_each_cap_and_control_and_changes_nothing_else():
    config = default_config()
    config.evaluation.caps.update(dict(searches=(1,), tokens=(90,)))
    (free, by_searches, by_tokens) = systems.variants(config, [System("s", "single", POLICY)])
    assert [free.name, by_searches.name, by_tokens.name] == [
        "s", "s, at most 1 searches", "s, ending after 90 tokens"
    ]  # fmt: skip
    assert systems.as_played(config, free) is config
    capped = systems.as_played(config, by_tokens)
    assert (capped.budgets.single.all_tokens, capped.budgets.single.all_searches) == (90, 10**9)
    assert config.budgets.single.all_tokens == 10**9


def test_only_a_collaborators_team_is_under_a_control():
    config = load("agentpo_toy").get_config()
    config.evaluation.controls = ("other_problem", "no_answer")
    alone, hint = System("actor", "actor", POLICY), System("hint", "hint", POLICY)
    found = systems.variants(config, [alone, hint])
    assert [system.name for system in found] == [
        "actor", "hint", "hint, shown another problem", "hint, without the answer"
    ]  # fmt: skip
    assert systems.as_played(config, found[3]).collaboration.control == "no_answer"
    assert systems.controls(config, found) == {hint: found[2:]}
    assert systems.controls(config, [alone, hint]) == {}


@pytest.mark.parametrize(("of_hint", "votes"), [((140, 20), 3), ((120, 20), 3), ((30, 1), 1)])
def test_votes_match_a_teams_tokens_to_the_nearest_and_are_at_least_one(of_hint, votes):
    """One solution is 40 + 10: 160 tokens are 3.2 of it, 140 are 2.8, 31 are 0.62."""
    config = load("agentpo_toy").get_config()
    config.evaluation.matched_votes = "hint"
    both = [System(name, name, POLICY) for name in ("actor", "hint")]
    scores = {"actor": spent(40, 10), "hint": spent(*of_hint)}
    system = systems.matched_votes(config, both, scores)
    assert (system.name, system.team) == ("vote, at the tokens of hint", "vote")
    assert systems.as_played(config, system).collaboration.votes == votes
    played = {name: (None, found) for name, found in scores.items()}
    played[system.name] = None, spent(50 * votes - 5, 5)
    found = systems.describe_match(config, [*both, system], played)
    assert found["votes"] == votes and found["ratio"] == 50 * votes / sum(of_hint)
    (row,) = systems.match_grid(found).rows
    assert row[1:] == (str(votes), str(50 * votes), str(sum(of_hint)), f"{found['ratio']:.2f}")


def test_an_actor_that_spends_nothing_is_matched_by_no_number_of_votes():
    config = load("agentpo_toy").get_config()
    config.evaluation.matched_votes = "hint"
    both = [System(name, name, POLICY) for name in ("actor", "hint")]
    with pytest.raises(ValueError, match="the Actor alone spent no token"):
        systems.matched_votes(config, both, {"actor": [], "hint": spent(1, 1)})
