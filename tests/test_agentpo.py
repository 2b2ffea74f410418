"""A Collaborator for a frozen Actor, end to end with tiny policies: local and at an endpoint."""

import asyncio
import dataclasses
import itertools
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_server import ChatServer, answer, failure
from config_files import load
from rich.console import Console
from test_batch import ROW, make_credited, pack_alone

from mas_jax import metrics
from mas_jax.agents import rollout
from mas_jax.agents.chat import TEMPLATES, make_chat
from mas_jax.agents.collaboration import toy_collaboration_words
from mas_jax.agents.math_oracle import MathFlaws, Player
from mas_jax.config_rules import validate
from mas_jax.data.arithmetic import make_arithmetic, make_arithmetic_tokenizer
from mas_jax.learning import assembly, evaluate, loop, math_policy, pipeline
from mas_jax.learning.programme import make_programme
from mas_jax.model import hf, qwen3
from mas_jax.records import UNTOLD, SampleKey, Stop

QUIET = Console(quiet=True)
PERFECT = MathFlaws()


def save_policy(directory, seed, vocab_extra=0):
    """A random policy of two thin layers with the tokenizer of toy mathematics."""
    tokenizer = make_arithmetic_tokenizer(toy_collaboration_words())
    model = dataclasses.replace(
        qwen3.PRESETS["toy-1m"], vocab_size=tokenizer.vocab_size + vocab_extra, num_layers=2,
        model_dim=32, ffw_dim=64, num_heads=2, num_kv_heads=1, head_dim=16, max_positions=192,
    )  # fmt: skip
    params = qwen3.init(model, jax.random.key(seed), dtype=jnp.float32)
    params["embed"] = 8 * params["embed"]
    files = directory.with_name(directory.name + "_tokenizer")
    files.mkdir()
    tokenizer.save(files)
    hf.save(directory, model, params, tokenizer_dir=files)
    return directory


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Directories of a Collaborator and of an Actor of another size."""
    root = tmp_path_factory.mktemp("policies")
    return save_policy(root / "collaborator", 0), save_policy(root / "actor", 1, vocab_extra=7)


def small_config(places, team="hint", **changes):
    config = load("agentpo_toy").get_config(team)
    for engine in (config.engine, config.actor.engine):
        engine.update(
            dict(buckets=(192,), num_pages=256, prefill_blocks=8, decode_rows=8, decode_steps=4)
        )
    config.update_from_flattened_dict(
        {
            "model.checkpoint": str(places[0]), "actor.checkpoint": str(places[1]),
            "collaboration.max_tokens": 6, "actor.max_tokens": 6, "collaboration.votes": 2,
            "arithmetic.train": 20, "arithmetic.held_out": 6, "stages.agentpo.steps": 2,
            "train.questions": 2, "train.group_size": 3, "train.micro_rows": 2,
            "train.validation_interval": 2, "train.validation_questions": 4,
            "train.checkpoint_interval": 1, "train.log_interval_s": 1e9,
            "evaluation.num_questions": 6, "evaluation.log_interval_s": 1e9,
            "rollout.min_episodes": 3,
        }
    )  # fmt: skip
    config.update_from_flattened_dict(changes)
    return config


def train(config, workdir):
    done = pipeline.run(pipeline.prepare(config, workdir), QUIET)
    return done["agentpo"], metrics.read(workdir / "agentpo" / "metrics.jsonl")


def weights(directory):
    return (directory / "model.safetensors").read_bytes()


# --- a frozen policy of its own -------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(places, tmp_path_factory):
    """A run of two steps; a tiny Actor never boxes a number, so every other answer is right."""
    workdir = tmp_path_factory.mktemp("run")
    made = pipeline.prepare(small_config(places), workdir)
    turns = itertools.count()

    async def reward(question, predictions):
        return tuple(float(next(turns) % 2) for _ in predictions)

    stage = pipeline.make_stage(made, "agentpo")
    stage = dataclasses.replace(stage, world=dataclasses.replace(stage.world, reward=reward))
    before = said(made.engines)
    loop.train(stage, workdir / "agentpo", QUIET)
    lines = metrics.read(workdir / "agentpo" / "metrics.jsonl")
    return before, said(made.engines), lines


def said(policies):
    """What each policy says to one prompt, with log-probs, whatever was said before."""
    key = SampleKey(0, "eval", 0, "q", 0, "solve", 0)
    knobs = dict(n=1, max_tokens=4, temperature=1.0, top_p=1.0, top_k=0, stop=Stop())
    return {
        name: asyncio.run(policies.sample((300, 301), key=key, policy=name, **knobs))
        for name in ("student", "actor")
    }


def test_only_the_collaborators_tokens_are_trained_and_the_actors_are_costed(trained):
    _, _, lines = trained
    assert [line["step"] for line in lines] == [0, 1]
    for line in lines:
        assert line["rollout/episodes"] == 6
        assert line["cost/actor/output_tokens"] > 0 and line["cost/actor/input_tokens"] > 0
        assert line["cost/collaborator/training_tokens"] > 0
        assert "cost/actor/training_tokens" not in line
        assert line["batch/skipped_traces"] == 6  # the Actor's
        assert line["update/collaborator/tokens"] > 0 and "update/actor/tokens" not in line
    assert lines[-1]["engine/actor_prompt_tokens"] > 0


def test_the_collaborator_moves_and_the_actor_stays(trained):
    before, after, _ = trained
    assert after["actor"] == before["actor"]
    assert after["student"] != before["student"]


def test_drafts_of_a_group_are_computed_once(places, tmp_path):
    """Six episodes of two problems: two drafts, and the rest is asked for anew."""
    config = small_config(places, "critic", **{"stages.agentpo.steps": 1})
    config.actor.remember = str(tmp_path / "drafts")
    _, lines = train(config, tmp_path / "run")
    assert lines[0]["engine/actor_recalled"] >= 4
    assert list((tmp_path / "drafts").rglob("*.json"))
    assert lines[0]["cost/actor/output_tokens"] > 0


@pytest.mark.parametrize("team", ["debate", "solver"])
def test_other_topologies_train_by_the_same_config(places, tmp_path, team):
    policy, lines = train(
        small_config(places, team, **{"stages.agentpo.steps": 1}), tmp_path / "run"
    )
    assert (policy / "config.json").is_file()
    assert ("cost/actor/output_tokens" in lines[0]) == (team != "solver")
    assert lines[0]["cost/collaborator/training_tokens"] > 0


def test_teams_and_baselines_are_evaluated_side_by_side(places, tmp_path):
    config = small_config(places)
    config.evaluation.teams = ("actor", "vote", "hint")
    prepared = evaluate.prepare(config, tmp_path / "eval")
    summary = evaluate.run(prepared, QUIET)
    assert set(summary["teams"]) == {"actor", "vote", "hint"}
    tokens = {
        name: sum(team["per_workflow"][f"{kind}_tokens"] for kind in ("input", "output"))
        for name, team in summary["teams"].items()
    }
    assert tokens["vote"] > 1.5 * tokens["actor"] and tokens["hint"] > tokens["actor"]
    assert "Cost a workflow by role" in (tmp_path / "eval" / "tables.md").read_text()
    other = small_config(places)
    other.evaluation.teams, other.collaboration.votes = ("vote",), 3
    with pytest.raises(ValueError, match=r"settings\.collaboration"):
        evaluate.prepare(other, tmp_path / "eval")


# --- an Actor at an endpoint ----------------------------------------------------------------------


def told(body):
    """The problem and the hint in a request to the Actor."""
    text = body["messages"][-1]["content"]
    problem, _, hint = text.removeprefix(" solve ").partition(" with ")
    return problem, hint


def solver(body):
    """An Actor that is right where it is told something of even length."""
    problem, hint = told(body)
    right = Player(PERFECT, 0).say([f" solve {problem}"], [])
    return answer(right if len(hint) % 2 == 0 else r"\boxed{99}")


def at_endpoint(places, server, **changes):
    config = small_config(places, **changes)
    config.actor.update(dict(kind="api", base_url=server.url, model="m", retries=0, timeout_s=20.0))
    return config


def test_an_actor_at_an_endpoint_teaches_the_collaborator_and_is_counted(places, tmp_path):
    with ChatServer(solver) as server:
        config = at_endpoint(places, server)
        config.actor.cache = str(tmp_path / "answers")
        policy, lines = train(config, tmp_path / "run")
    assert weights(policy) != weights(places[0])
    asked = {json.dumps(body["messages"]) for body in server.bodies}
    assert len(asked) == len(server.bodies)  # equal greedy requests are one call
    assert all(body["temperature"] == 0.0 for body in server.bodies)
    last = lines[-1]
    # 6 episodes a step, 4 of validation after the last: not yet there when its line is made
    assert 12 <= last["engine/endpoint_requests"] <= 16
    assert last["engine/endpoint_calls"] <= len(server.bodies)
    assert last["cost/actor/input_tokens"] == 6 * 10 and last["cost/actor/output_tokens"] == 6 * 2
    with ChatServer([]) as other:  # the same questions again: nothing is asked
        again = at_endpoint(places, other)
        again.actor.update(dict(cache=str(tmp_path / "answers"), base_url=server.url))
        repeated, _ = train(again, tmp_path / "again")
    assert other.bodies == [] and weights(repeated) == weights(policy)


def test_single_faults_are_masked_and_counted_and_the_run_goes_on(places, tmp_path):
    numbers = itertools.count()

    def faulty(body):
        return failure(500) if next(numbers) == 1 else solver(body)

    with ChatServer(faulty) as server:
        config = at_endpoint(places, server, **{"rollout.failure_frac": 0.4})
        _, lines = train(config, tmp_path / "run")
    assert lines[0]["rollout/errors/api"] >= 1
    assert lines[0]["credit/failed_episodes"] >= 1
    assert [line["step"] for line in lines] == [0, 1]


def test_a_dead_endpoint_stops_the_run_with_its_message_and_it_can_be_resumed(places, tmp_path):
    is_dead = threading.Event()

    def dying(body):
        return failure(500, "gone") if is_dead.is_set() else solver(body)

    with ChatServer(dying) as server:
        first = at_endpoint(places, server, **{"stages.agentpo.steps": 2})
        made = pipeline.prepare(first, tmp_path / "run")
        stage = pipeline.make_stage(made, "agentpo")

        def dies(step):
            is_dead.set()
            return 0.5

        settings = dataclasses.replace(stage.settings, validation_interval=1)
        stage = dataclasses.replace(stage, validate=dies, settings=settings)
        with pytest.raises(rollout.TooManyFailures, match=r"api: \d+, such as .*500"):
            loop.train(stage, tmp_path / "run" / "agentpo", QUIET)
        is_dead.clear()
        _, lines = train(first, tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1]


# --- starting policies ----------------------------------------------------------------------------


def test_one_call_makes_both_starting_policies(tmp_path):
    config = load("agentpo_toy").get_config()
    config.math_pretrain.update(dict(problems=30, held_out=4, teams=("hint", "debate")))
    config.math_pretrain.settings.update(dict(rows=4, warmup_steps=1))
    config.math_pretrain.steps.update(dict(actor=3, collaborator=2))
    records = math_policy.make(config, tmp_path / "made", QUIET)
    for name in ("actor", "collaborator"):
        place = tmp_path / "made" / name
        assert np.isfinite(records[name]["held_out_loss"])
        assert json.loads((place / "pretrain.json").read_text()) == records[name]
        assert assembly.load_tokenizer(place).encode(" plus") != []
    assert weights(tmp_path / "made" / "actor") != weights(tmp_path / "made" / "collaborator")
    with pytest.raises(FileExistsError, match="actor exists"):
        math_policy.make(config, tmp_path / "made", QUIET)


def test_first_traces_hold_good_and_bad_hints_and_no_problem_that_is_played():
    config = load("agentpo_toy").get_config()
    chat = make_chat(make_arithmetic_tokenizer(toy_collaboration_words()), TEMPLATES["toy"])
    questions = make_arithmetic(0, train=150, held_out=1).questions["train"]
    for name in ("actor", "hint"):
        episodes = math_policy.scripted_episodes(config, chat, name, questions)
        assert 0.3 < np.mean([episode.reward for episode in episodes]) < 0.6
    config.math_pretrain.collaborator = dict(plan=1.0)  # without a flaw
    episodes = math_policy.scripted_episodes(config, chat, "hint", questions)
    assert {episode.reward for episode in episodes} == {1.0}
    played = make_arithmetic(**config.arithmetic)
    texts = {q.text for found in played.questions.values() for q in found}
    learned = math_policy._questions(config.math_pretrain, texts)
    assert len(learned) == config.math_pretrain.problems
    assert not texts & {question.text for question in learned}


# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actor.kind": "none"}, r"evaluation\.teams='actor' has an Actor, and actor\.kind='none'"),
        ({"data.subject": "facts"}, r"'actor' and data\.subject='facts'"),
        ({"stages.agentpo.programme.actor.trained": True}, r"actor\.trained=True: the Actor is"),
        ({"actor.kind": "api"}, r"base_url='' and model=''; name both"),
        ({"actor.kind": "polcy"}, r"did you mean 'policy'"),
        ({"actor.base_url": "http://me:secret@x"}, "actor.base_url holds '@'"),
        ({"collaboration.max_tokens": 192}, r"collaboration\.max_tokens=192 must be above 0 and"),
        ({"actor.context": 500}, r"500, and that at most actor\.engine\.context=192"),
        ({"train.row_length": 96}, r"below collaboration\.context=192"),
        ({"stages.agentpo.team": "cascade"}, r"'cascade' and data\.subject='mathematics'"),
        ({"stages.agentpo.sampler": "oracle"}, r"sampler='oracle' searches for facts"),
        ({"data.corpus": "x"}, "nobody searches"),
        ({"collaboration.control": "wrong"}, "control='wrong'; choose from"),
        ({"collaboration.control": "other_problem", "evaluation.teams": ("critic",)},
         "'critic', whose Collaborator reads solutions"),
        ({"evaluation.caps.tokens": (9,)}, "are of teams that search"),
    ],
)  # fmt: skip
def test_settings_that_contradict_are_one_clear_error(places, changes, message):
    config = small_config(places, **changes)
    with pytest.raises(ValueError, match=message):
        validate(config)


def test_the_papers_formula_differs_from_the_script_in_two_values():
    script, paper = (load("agentpo").get_config(*args) for args in ((), ("paper",)))
    rows = [config.stages.agentpo.programme.collaborator for config in (script, paper)]
    differing = {key for key in rows[0] if rows[0][key] != rows[1][key]}
    assert differing == {"aggregation", "kl_coef"}
    assert (rows[0].clip_low, rows[0].clip_high, rows[0].dual_clip) == (0.2, 0.28, 10.0)
    assert (rows[0].kl_coef, rows[0].entropy_coef, rows[0].aggregation) == (0.0, 0.0, "token")
    assert (rows[1].kl_coef, rows[1].aggregation) == (1e-3, "sequence")
    assert make_programme(script.stages.agentpo.programme.to_dict())["actor"].learns is False
    assert script.collaboration.context - script.collaboration.max_tokens == 256
    with pytest.raises(ValueError, match="loss='papr'; choose from"):
        load("agentpo").get_config("papr")


def test_a_batch_of_two_policies_is_never_trained_on():
    row = ROW
    credited = [make_credited([1, 2], [0, 4], role="collaborator")]
    other = dataclasses.replace(credited[0].trace, policy="actor")
    untold = dataclasses.replace(credited[0].trace, tokens=(UNTOLD, UNTOLD))
    programme = {"collaborator": row}
    pack_alone(credited, programme)
    for trace in (other, untold):
        with pytest.raises(ValueError, match=r"roles \['collaborator'\] learn and were played by"):
            pack_alone([*credited, dataclasses.replace(credited[0], trace=trace)], programme)
