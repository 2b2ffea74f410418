"""Tree rollouts: what leaves share is the same and played once, and only the run decides it."""

import asyncio
import dataclasses
import random
from collections import Counter
from itertools import pairwise

import pytest
import small_runs
from config_files import load
from scripted_team import CASCADE, QUESTION, CharTokenizer, Script, cut, make_team
from test_rollout import PATIENT, failing, questions, raising

from mas_jax.agents import chat, rollout, tree
from mas_jax.agents.setting import Run, World
from mas_jax.agents.tree import Shape
from mas_jax.data.questions import of_step
from mas_jax.evaluation import ledger
from mas_jax.learning import teams
from mas_jax.learning.credit import credit
from mas_jax.learning.experience import collect, describe
from mas_jax.records import FailureKind, Sample, SearchFailure, WorldError
from mas_jax.rewards.exact_match import exact_match_reward

RUN = Run(seed=0, purpose="train", step=0)
PAPER = Shape(trees=2, expansions=2, rounds=1)
DEEP = Shape(trees=1, expansions=3, rounds=3)


def three_turns(key):
    """Two searches whose words name leaf and turn, and an answer."""
    name = f"{key.question} {key.rollout} {key.turn}"
    return f"<search> {name}</search>" if key.turn < 2 else f"<answer> {name}</answer>"


class Leaves(Script):
    """A scripted world in which every leaf says something else, with log-probs of its own."""

    def __init__(self, says=three_turns, **script):
        super().__init__({}, **script)
        self._says = says

    async def sample(self, prompt, *, key, n, max_tokens, stop, **unused):
        self.requests.append((key, prompt))
        said = cut(self._says(key), max_tokens, stop)
        text = CharTokenizer().decode(said.tokens)
        tokens = tuple(CharTokenizer().encode_template(text))  # with the ids of control tokens
        logprobs = tuple(-0.01 * (i + 1) - key.rollout for i in range(len(tokens)))
        return [Sample(tokens, logprobs, said.stop_reason)] * n


def grow(script, shape=PAPER, *, run=RUN, number=0, question=QUESTION, **team):
    """The leaves of one tree."""
    made = make_team("single", **team)
    playing = tree.play_tree(question, number, made, shape, world=script.world, run=run)
    return asyncio.run(playing)


def actions(leaf):
    return [turn.action for trace in leaf.traces for turn in trace.turns]


def words(leaf):
    """What was said at each turn."""
    decode = CharTokenizer().decode
    return [decode(t.tokens[turn.start : turn.end]) for t in leaf.traces for turn in t.turns]


def beginning(leaf, turn):
    """Tokens, owners and log-probs up to a generation."""
    (trace,) = leaf.traces
    upto = slice(0, trace.turns[turn].start)
    return trace.tokens[upto], trace.owners[upto], trace.logprobs[upto]


# --- what leaves share ----------------------------------------------------------------------------


def test_a_question_has_trees_times_leaves_each_an_ordinary_episode():
    script = Leaves()
    episodes = collect(
        [QUESTION], 6, make_team("single"), world=script.world, run=RUN, limits=PATIENT, shape=PAPER
    )
    assert [e.rollout for e in episodes] == list(range(6))
    assert [e.tree for e in episodes] == [0, 0, 0, 1, 1, 1]
    assert [e.shared_turns for e in episodes][::3] == [0, 0]
    for e in episodes:
        assert (e.turns_used, e.num_searches, e.outcome) == (3, 2, "answered")
        assert actions(e) == ["search", "search", "answer"]
        assert e.predictions == (f"toy/1 {e.rollout} 2",)  # the last turn is always its own
        assert len(e.retrieved) == 1
        assert {trace.rollout for trace in e.traces} == {e.rollout}


def test_what_leaves_share_is_the_same_token_by_token_and_what_follows_is_their_own():
    trunk, *others = grow(Leaves(), Shape(trees=1, expansions=12, rounds=1))
    assert {leaf.shared_turns for leaf in others} == {0, 1, 2}
    for leaf in others:
        assert beginning(leaf, leaf.shared_turns) == beginning(trunk, leaf.shared_turns)
        owners = [said.split()[-2] for said in words(leaf)]
        own = str(leaf.rollout)
        assert owners == ["0"] * leaf.shared_turns + [own] * (3 - leaf.shared_turns)


def test_nothing_shared_is_sampled_or_searched_again():
    script = Leaves()
    leaves = grow(script, DEEP)
    own = [3 - leaf.shared_turns for leaf in leaves]
    assert sum(leaf.shared_turns for leaf in leaves) > 0
    assert len(script.requests) == len({key for key, _ in script.requests}) == sum(own)
    assert len(script.queries) == len(set(script.queries)) == sum(number - 1 for number in own)
    assert len(script.rewarded) == len(leaves)
    for leaf in leaves:
        keys = [key for key, _ in script.requests if key.rollout == leaf.rollout]
        assert [key.turn for key in keys] == list(range(leaf.shared_turns, 3))


def test_later_rounds_also_go_on_from_what_earlier_ones_added():
    # words name who said them: what a leaf says up to its own turns is what one leaf before said
    leaves = grow(Leaves(), DEEP)
    assert len(leaves) == DEEP.leaves == 10
    for index, leaf in enumerate(leaves):
        rounds_before = leaves[: 1 + 3 * ((index - 1) // 3)] or [leaf]
        shared = words(leaf)[: leaf.shared_turns]
        assert shared in [words(other)[: leaf.shared_turns] for other in rounds_before]
    added = [leaf for leaf in leaves if leaf.shared_turns and " 0 " not in words(leaf)[0]]
    late = [leaf for leaf in leaves if leaf.shared_turns == 2 and " 0 " not in words(leaf)[1]]
    assert added and late


def test_each_node_of_a_tree_stands_once_among_those_to_draw_from():
    async def leaf(turn, tape):
        own = tree.Tape(script.world, tape.before(turn))
        episode = await rollout.play_episode(
            QUESTION, turn, make_team("single"), world=own.world, run=RUN
        )
        return dataclasses.replace(episode, shared_turns=turn), own

    script = Leaves()
    trunk = asyncio.run(leaf(0, tree.Tape(script.world)))
    again = asyncio.run(leaf(1, trunk[1]))
    # the root, the trunk's two later turns, and of the other leaf what follows its first own turn
    found = tree._nodes([trunk, again])
    assert found == [(0, trunk[1]), (1, trunk[1]), (2, trunk[1]), (2, again[1])]


def test_a_replay_that_strays_is_our_bug_and_never_the_worlds():
    script = Leaves()
    trunk = tree.Tape(script.world)
    asyncio.run(rollout.play_episode(QUESTION, 0, make_team("single"), world=trunk.world, run=RUN))
    (_, answer), *_ = trunk.before(1)
    forged = tree.Tape(script.world, [((1, 2, 3), answer)])  # another prompt had that answer
    episode = asyncio.run(
        rollout.play_episode(QUESTION, 1, make_team("single"), world=forged.world, run=RUN)
    )
    assert forged.strayed and not trunk.strayed
    assert episode.failure is None


def test_a_template_that_rewrites_the_past_is_played_again_strand_by_strand():
    def says(key):
        return f"<think>\nwhy {key.rollout}\n</think>\n\n" + three_turns(key)

    trunk, *others = grow(Leaves(says), DEEP, template=chat.THINKING)
    assert any(leaf.shared_turns == 2 for leaf in others)
    for leaf in others:
        assert len(leaf.traces) == 3
        if " 0 " in words(leaf)[0] and leaf.shared_turns:
            assert leaf.traces[0].tokens == trunk.traces[0].tokens
            assert leaf.traces[0].logprobs == trunk.traces[0].logprobs


# --- what it hangs on -----------------------------------------------------------------------------


def test_schedule_and_concurrency_change_no_leaf():
    rng, expected = random.Random(0), None
    for concurrent in (1, 2, 7, 100):
        script = Leaves()

        async def sample(prompt, script=script, **request):
            for _ in range(rng.randrange(9)):
                await asyncio.sleep(0)
            return await script.sample(prompt, **request)

        leaves = collect(
            questions(5), 8, make_team("single"), world=failing(script, sample=sample), run=RUN,
            limits=dataclasses.replace(PATIENT, concurrent=concurrent), shape=Shape(2, 3, 1),
        )  # fmt: skip
        assert [(e.question, e.rollout) for e in leaves] == [
            (q.uid, r) for q in questions(5) for r in range(8)
        ]
        expected = expected or leaves
        assert leaves == expected


@pytest.mark.parametrize(
    "change",
    [
        dict(run=dataclasses.replace(RUN, seed=1)),
        dict(run=dataclasses.replace(RUN, step=1)),
        dict(number=1),
        dict(question=questions(1)[0]),
    ],
    ids=["seed", "step", "tree", "question"],
)
def test_nodes_are_drawn_by_seed_step_question_tree_and_round(change):
    shape = Shape(trees=1, expansions=12, rounds=2)
    turns = [leaf.shared_turns for leaf in grow(Leaves(), shape)]
    assert turns == [leaf.shared_turns for leaf in grow(Leaves(), shape)]
    assert turns[1:13] != turns[13:]
    assert turns != [leaf.shared_turns for leaf in grow(Leaves(), shape, **change)]


def test_another_team_grows_no_tree():
    with pytest.raises(ValueError, match="trees of the team 'cascade'"):
        tree.play([], make_team("cascade"), PAPER, world=Leaves().world, run=RUN, limits=PATIENT)


# --- what happened in the shared part -------------------------------------------------------------


def test_a_failed_search_is_shared_and_counted_in_every_leaf_and_asked_once():
    def finds(query):
        return SearchFailure("timeout", "late") if query.endswith("0 0") else []

    script = Leaves(finds=finds)
    leaves = grow(script, Shape(trees=1, expansions=12, rounds=1))
    assert [e.failed_searches for e in leaves] == [
        int(e.rollout == 0 or e.shared_turns > 0) for e in leaves
    ]
    assert script.queries.count("toy/1 0 0") == 1
    assert all(e.failure is None for e in leaves)


def test_an_invalid_action_in_the_shared_part_leaves_one_fewer_to_make():
    def says(key):
        if key.rollout == 0:
            return "what" if key.turn == 0 else three_turns(key)
        return "what" if key.turn == 1 else three_turns(key)

    for leaf in grow(Leaves(says), Shape(trees=1, expansions=12, rounds=1)):
        want = {  # the trunk's first turn was invalid; a leaf's own second one is
            0: ["search", "invalid", "answer"],
            1: ["invalid", "invalid"],
            2: ["invalid", "search", "answer"],
        }[leaf.shared_turns]
        if leaf.rollout == 0:
            want = ["invalid", "search", "answer"]
        assert actions(leaf) == want
        assert leaf.outcome == ("invalid" if want[1:] == ["invalid"] else "answered")


def test_budgets_go_on_where_the_shared_part_left_them():
    script = Leaves()
    leaves = grow(
        script, Shape(trees=1, expansions=12, rounds=1),
        budgets=dataclasses.replace(CASCADE, searches=1),
    )  # fmt: skip
    for leaf in leaves:
        assert leaf.num_searches == 1
        # the second turn must be an answer, of which the third makes the first valid one
        assert actions(leaf) == ["search", "invalid", "answer"]
        assert leaf.turns_used == 3
    tokens = {leaf.shared_turns: leaf for leaf in leaves}
    assert set(tokens) == {0, 1, 2}


def test_a_world_that_fails_one_leaf_fails_no_other():
    script = Leaves()

    async def search(queries, k):
        if queries == ["toy/1 0 1"]:
            raise WorldError(FailureKind.RETRIEVER, "down")
        return await script.search(queries, k)

    made = failing(script, search=search)
    script.world = made
    trunk, *others = grow(script, Shape(trees=1, expansions=12, rounds=1))
    assert trunk.failure.kind == FailureKind.RETRIEVER and trunk.reward is None
    assert {leaf.shared_turns for leaf in others} == {0, 1}  # its third turn never came
    assert all(leaf.outcome == "answered" and leaf.tree == 0 for leaf in others)


def test_a_world_that_samples_nothing_fails_every_leaf_at_the_root():
    script = Leaves()
    script.world = failing(script, sample=raising(RuntimeError("gone")))
    leaves = grow(script, DEEP)
    assert [leaf.failure.kind for leaf in leaves] == [FailureKind.SAMPLER] * 10
    assert all(leaf.shared_turns == 0 and leaf.traces == () for leaf in leaves)
    assert describe(leaves)["rollout/tree/shared_token_frac"] == 0.0


# --- what it saved --------------------------------------------------------------------------------


def test_what_is_shared_costs_once_and_is_reported():
    script = Leaves()
    leaves = grow(script, DEEP)
    (entry,) = ledger.play_entries("s", leaves, accelerator_s=0.0)
    assert entry.searches == len(script.queries)
    assert entry.input_tokens == sum(len(prompt) for _, prompt in script.requests)
    sampled = sum(
        turn.end - turn.start
        for leaf in leaves
        for turn in leaf.traces[0].turns[leaf.shared_turns :]
    )
    assert entry.output_tokens == sampled
    found = describe(leaves)
    # chains of their own would have paid for every turn of every leaf
    assert found["rollout/tree/shared_searches"] == found["rollout/searches"] - entry.searches / 10
    whole = found["rollout/input_tokens"] + found["rollout/output_tokens"]
    spent = (entry.input_tokens + entry.output_tokens) / 10
    shared = found["rollout/tree/shared_input_tokens"] + found["rollout/tree/shared_output_tokens"]
    assert shared == pytest.approx(whole - spent)
    assert found["rollout/tree/shared_token_frac"] == pytest.approx(shared / whole)


def test_an_engine_prefills_less_for_a_tree_than_for_as_many_chains(tmp_path):
    # the toy world's script speaks, so that conversations are long; the engine reads every prompt
    start = small_runs.save_start(tmp_path / "start")
    scene = small_runs.scene_of(start)
    config = small_runs.small_config(start)
    team = teams.make_team(config, "single", scene, training=True)
    script = small_runs.Script(scene, chaotic=False)
    sent, prefilled = {}, {}
    for name, shape in (("chains", None), ("tree", Shape(1, 5, 1))):
        (engine,) = small_runs.engines_of(start).engines
        engine.scheduler.pool.withdraw_all()
        before, sent[name] = engine.metrics.prefill_tokens, 0

        async def sample(prompt, name=name, engine=engine, **request):
            sent[name] += len(prompt)
            await engine.sample(prompt, **request | {"max_tokens": 1})
            return await script.sample(prompt, **request)

        world = World(sample, scene.retriever.search, exact_match_reward)
        episodes = collect(
            scene.world.questions["train"][:2], 6, team, world=world, run=RUN, limits=PATIENT,
            shape=shape,
        )  # fmt: skip
        prefilled[name] = engine.metrics.prefill_tokens - before
        assert all(e.failure is None for e in episodes)
    (entry,) = ledger.play_entries("s", episodes, accelerator_s=0.0)
    found = describe(episodes)
    assert sent["tree"] == entry.input_tokens
    assert found["rollout/tree/shared_input_tokens"] > 0
    assert sent["tree"] < sent["chains"]
    assert prefilled["tree"] < prefilled["chains"]
    # of a node's prompt all full pages are found again, of a later one those of the turn before
    page, most = config.engine.page_size, 0
    for leaf in episodes:
        starts = [turn.start for turn in leaf.traces[0].turns[leaf.shared_turns :]]
        most += page if leaf.rollout else starts[0]
        most += sum(end - start // page * page for start, end in pairwise(starts))
    assert prefilled["tree"] <= most


def test_a_stage_of_trees_credits_every_leaf_within_its_tree(tmp_path):
    start = small_runs.save_start(tmp_path / "start")
    config = load("toy_tree_grpo").get_config()
    config.model.checkpoint = str(start)
    stage = small_runs.scripted_stage(config, tmp_path, "agent")
    assert stage.shape == PAPER
    leaves = collect(
        of_step(stage.questions, seed=0, step=0, count=12, host=0, num_hosts=1),
        stage.settings.group_size, stage.team, world=stage.world, run=RUN, limits=stage.limits,
        shape=stage.shape,
    )  # fmt: skip
    credited, metrics = credit(leaves, stage.programme)
    assert len(credited) == len(leaves) == 72
    assert (metrics["credit/searcher/groups"], metrics["credit/searcher/group_size"]) == (12, 6)
    sums = Counter()
    for found in credited:
        sums[found.trace.question] += found.advantage
    assert any(found.advantage for found in credited)
    assert list(sums.values()) == pytest.approx([0.0] * 12, abs=1e-9)


def test_episodes_of_their_own_report_no_trees():
    episodes = collect(
        [QUESTION], 2, make_team("single"), world=Leaves().world, run=RUN, limits=PATIENT
    )
    assert [e.tree for e in episodes] == [None, None]
    assert not any(name.startswith("rollout/tree") for name in describe(episodes))
