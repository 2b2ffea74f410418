"""Players of toy mathematics: they compute, follow plans, misread by their flaws, play teams."""

import asyncio
import dataclasses

import pytest
from test_topology import SIZES, Cast, team_of, voice

from mas_jax.agents import chat, rollout
from mas_jax.agents.collaboration import toy_collaboration_words
from mas_jax.agents.math_oracle import (
    RIGHT,
    VAGUE,
    MathFlaws,
    MathScript,
    Player,
    mistaken,
    plan,
    read_plan,
)
from mas_jax.agents.setting import Run, World
from mas_jax.agents.topology import TOPOLOGIES
from mas_jax.data.arithmetic import (
    OBSCURE,
    OPERATION_OF,
    Step,
    make_arithmetic,
    make_arithmetic_tokenizer,
    parse_problem,
)

TEXT = "mira has 6 then gains 5 then lends 3 , how many"
ACTOR = MathFlaws(misread_obscure=1.0, plan=0.0, approve=1.0, persuaded=1.0)
PERFECT = MathFlaws()


def say(flaws, *heard, said=(), seed=0):
    return Player(flaws, seed).say(heard, said)


def test_an_actor_errs_on_an_obscure_verb_and_not_when_it_is_told_the_steps():
    # lends is minus, and read as the next operation, times: 11 * 3 = 33, at most 12
    assert mistaken("lends") == "times"
    assert say(ACTOR, f" solve {TEXT}") == r"6 plus 5 is 11 ; 11 times 3 is 12 \boxed{12}"
    right = r"6 plus 5 is 11 ; 11 minus 3 is 8 \boxed{8}"
    for words in ("with", "as"):
        assert say(ACTOR, f" solve {TEXT} {words} plus 5 then minus 3") == right
        assert say(ACTOR, f" solve {TEXT} {words} think first").endswith(r"\boxed{12}")
        assert say(ACTOR, f" solve {TEXT} {words} ").endswith(r"\boxed{12}")  # an empty hint
    assert say(PERFECT, f" solve {TEXT}") == right
    assert say(PERFECT, f" solve {TEXT} with minus 4") == r"6 minus 4 is 2 \boxed{2}"


def test_a_critics_plan_revises_a_draft_and_approval_repeats_it():
    draft = r"6 plus 5 is 11 ; 11 times 3 is 12 \boxed{12}"
    asked = f" revise {TEXT} done {draft} comment"
    assert say(ACTOR, f"{asked} plus 5 then minus 3").endswith(r"\boxed{8}")
    assert say(ACTOR, f"{asked} {RIGHT}") == draft
    assert say(ACTOR, f"{asked} ") == draft
    assert say(ACTOR, f" judge {TEXT} done {draft}") == RIGHT
    assert say(PERFECT, f" judge {TEXT} done {draft}") == "plus 5 then minus 3"


def test_a_debater_is_persuaded_by_the_first_that_ends_otherwise():
    own, same, other, third = (rf"7 plus {n} is 1 \boxed{{{n}}}" for n in (2, 2, 5, 6))
    again = f" others {same} | {other} | {third} again"
    asked = (f" solve {TEXT}", again)
    assert say(ACTOR, *asked, said=(own,)) == other
    assert say(PERFECT, *asked, said=(own,)) == own
    assert say(ACTOR, asked[0], f" others {same} again", said=(own,)) == own


def test_hints_are_plans_or_vague_as_often_as_the_flaws_say():
    half = MathFlaws(plan=0.5, misread_obscure=1.0)
    said = [say(half, f" hint {TEXT}", seed=seed) for seed in range(400)]
    assert set(said) == {"plus 5 then times 3", *VAGUE}
    assert 170 < said.count("plus 5 then times 3") < 230
    skipping = MathFlaws(skip_step=1.0)
    assert say(skipping, f" assign {TEXT}") == "plus 5"
    assert read_plan(plan((Step("from", 4), Step("times", 6)))) == (
        Step("from", 4), Step("times", 6),
    )  # fmt: skip
    for verb in OBSCURE:
        assert mistaken(verb) != OPERATION_OF[verb]


@pytest.mark.parametrize("heard", [" sing a song", f" sing {TEXT}", " solve it"])
def test_what_is_no_toy_prompt_is_an_error(heard):
    with pytest.raises(ValueError, match="no player of toy mathematics"):
        say(PERFECT, heard)


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_scripted_teams_play_every_topology_and_a_perfect_collaborator_helps(name):
    tokenizer = make_arithmetic_tokenizer(toy_collaboration_words())
    spoken = chat.make_chat(tokenizer, chat.TOY)
    team = team_of(name)
    voices = {
        "collaborator": voice("student", chat=spoken), "actor": voice("frozen", chat=spoken),
    }  # fmt: skip
    team = dataclasses.replace(
        team, collaboration=dataclasses.replace(team.collaboration, voices=voices)
    )
    script = MathScript(spoken, {"student": PERFECT, "frozen": ACTOR})
    world = World(script.sample, None, Cast({}).reward)
    questions = make_arithmetic(0, train=1, held_out=40).questions["test"]
    run = Run(seed=0, purpose="eval", step=0)
    right = 0
    for question in questions:
        episode = asyncio.run(rollout.play_episode(question, 0, team, world=world, run=run))
        assert episode.outcome == "answered"
        for trace in episode.traces:
            assert 0 not in trace.tokens and max(trace.tokens) < tokenizer.vocab_size
            assert not any(1 <= token < 257 for token in trace.tokens)  # no word is spelled
        misread = any(verb in OBSCURE for verb, _ in parse_problem(question.text).acts)
        if not misread:
            assert episode.reward == 1.0
        right += episode.reward
    helps = name in ("solver", "hint", "critic", "roles", "debate", "guided_debate")
    assert right == 40 if helps and name != "debate" else right > 35 if helps else right < 30
    assert SIZES.debaters == 3
