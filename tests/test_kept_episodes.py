"""Episodes that training kept: written once a step, read back, compared token by token."""

from dataclasses import replace

import pytest
from evaluation_episodes import make_episode, make_trace, random_episode

from mas_jax.data.world import make_world
from mas_jax.learning import kept_episodes

QUESTIONS = {
    q.uid: q for q in make_world(0, closed_share=0.3, train=7, held_out=7).questions["train"]
}


def played(step):
    return [random_episode(uid, step, "hierarchy") for uid in QUESTIONS]


def keep(stage, step, episodes, host, num_hosts):
    kept_episodes.write(stage, step, episodes, QUESTIONS, host=host, num_hosts=num_hosts)


def test_what_hosts_keep_is_read_back_step_by_step(tmp_path):
    for step in (0, 1):
        keep(tmp_path, step, played(step)[:3], 0, 2)
        keep(tmp_path, step, played(step)[3:], 1, 2)
    assert kept_episodes.read(tmp_path) == {0: played(0), 1: played(1)}


@pytest.mark.parametrize("hosts", [1, 3])
def test_a_step_that_other_hosts_play_again_replaces_what_was_kept(tmp_path, hosts):
    keep(tmp_path, 0, played(1), 0, 2)
    keep(tmp_path, 0, played(1), 1, 2)
    for host in reversed(range(hosts)):
        keep(tmp_path, 0, played(0)[host::hosts], host, hosts)
    (episodes,) = kept_episodes.read(tmp_path).values()
    assert sorted(e.question for e in episodes) == sorted(QUESTIONS)
    assert all(e in played(0) for e in episodes)


def test_missing_episodes_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no episodes in .*train with --keep_episodes"):
        kept_episodes.read(tmp_path)
    keep(tmp_path, 3, played(0), 1, 2)
    with pytest.raises(ValueError, match="step 3 has the episodes of 1 hosts of 2"):
        kept_episodes.read(tmp_path)


def test_equal_tokens_by_hand():
    # three tokens of nobody's, then two and, after two of nobody's, three that were sampled
    searcher = make_trace("searcher", [(3, 2, "search"), (2, 3, "report")])
    answers = [make_trace("answerer", [(1, 4, "answer")], candidate=c) for c in (0, 1)]

    def run(*traces):
        return [make_episode("a", 0, traces=traces)]

    whole = run(searcher, *answers)
    assert kept_episodes.equal_tokens(whole, whole) == (13, 13)
    # another fourth sampled token ends the trace's equality; the last one is the same again
    tokens = list(searcher.tokens)
    tokens[8] += 1
    assert kept_episodes.equal_tokens(
        whole, run(replace(searcher, tokens=tuple(tokens)), *answers)
    ) == (3 + 8, 13)
    # another observation too: nothing after it is sampled in the same context
    tokens[5] += 1
    other = run(replace(searcher, tokens=tuple(tokens)), *answers)
    assert kept_episodes.equal_tokens(other, whole) == (2 + 8, 13)
    # a trace that the other run lacks, and one that goes on for longer there
    longer = make_trace("searcher", [(3, 2, "search"), (2, 3, "report"), (1, 5, "report")])
    assert longer.tokens[: len(searcher.tokens)] == searcher.tokens
    assert kept_episodes.equal_tokens(run(searcher, answers[0]), run(longer, *answers)) == (9, 18)
