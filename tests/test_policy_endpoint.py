"""A local policy in an endpoint's place: what it is shown, what counts as said, whole builds."""

import asyncio
import dataclasses
import json
import subprocess
import sys

import jax.numpy as jnp
import pytest
from conftest import ROOT
from scripted_team import CharTokenizer
from small_runs import save_start, scene_of

from mas_jax.agents import chat
from mas_jax.agents.policy_endpoint import policy_complete, prompt_of
from mas_jax.agents.protocol_files import read
from mas_jax.agents.protocol_oracle import Oracle, local, role_of
from mas_jax.agents.protocol_roles import Limits
from mas_jax.agents.protocol_team import Desk, work_on
from mas_jax.model import hf
from mas_jax.records import Sample, StopReason
from mas_jax.sampling.engine import Engine
from mas_jax.sampling.engine_settings import EngineSettings

TOKENIZER = CharTokenizer()
SPOKEN = chat.make_chat(TOKENIZER, chat.INSTRUCT)
NOT_THINKING = chat.make_chat(TOKENIZER, chat.NOT_THINKING)
SYSTEM, USER = {"role": "system", "content": "S"}, {"role": "user", "content": "U"}
ASSISTANT = {"role": "assistant", "content": "A<|im_end|>"}


def test_messages_become_the_templates_tokens_and_nothing_is_forged():
    ids = prompt_of([SYSTEM, USER, ASSISTANT, USER | {"content": "V"}], SPOKEN)
    assert TOKENIZER.decode(ids) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
        "<|im_start|>assistant\nA<|im_end|><|im_end|>\n<|im_start|>user\nV<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids.count(SPOKEN.end[0]) == 4  # the one in the assistant's words is no token
    assert TOKENIZER.decode(prompt_of([USER], NOT_THINKING)).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize("messages", [[], [SYSTEM], [USER, ASSISTANT], [USER, USER], [ASSISTANT]])
def test_other_orders_of_messages_are_refused(messages):
    with pytest.raises(ValueError, match="the last a user's"):
        prompt_of(messages, SPOKEN)


def replying(reply, asked=None):
    """A `sample` that says what `reply` makes of the prompt's text."""

    async def sample(prompt, *, key, n, max_tokens, temperature, stop, **_):
        if asked is not None:
            asked.append((key, max_tokens, temperature))
        assert stop.token_ids == TOKENIZER.stop_ids
        ids = tuple(TOKENIZER.encode_template(reply(TOKENIZER.decode(prompt)))) + SPOKEN.end
        return [Sample(ids, (0.0,) * len(ids), StopReason.TOKEN)] * n

    return sample


def complete(sample, *messages, context=4000, max_tokens=50):
    made = policy_complete(sample, chat=SPOKEN, policy="p", context=context)
    return asyncio.run(made(messages, model="m", temperature=0.5, max_tokens=max_tokens))


def test_thoughts_and_the_end_of_the_turn_are_not_said_and_tokens_are_counted():
    asked = []
    sample = replying(lambda text: '<think>{"a": 2}</think>\n\n{"a": 1}\n', asked)
    said = complete(sample, USER)
    assert (said.text, said.refusal, said.cost) == ('{"a": 1}', None, 0.0)
    prompt = prompt_of([USER], SPOKEN)
    # two thought marks, eight characters, two line ends, eight, a line end, the end of the turn
    assert (said.input_tokens, said.output_tokens) == (len(prompt), 22)
    complete(sample, USER)
    complete(sample, SYSTEM, USER)
    keys = [key for key, *_ in asked]
    assert keys[0] == keys[1] != keys[2]
    assert asked[0][1:] == (50, 0.5)


def test_a_request_that_fills_the_context_is_refused_and_one_that_nearly_does_is_cut():
    asked, size = [], len(prompt_of([USER], SPOKEN))
    sample = replying(lambda text: "{}", asked)
    said = complete(sample, USER, context=size)
    assert said.refusal == f"a prompt of {size} tokens fills the context of {size}"
    assert asked == []
    complete(sample, USER, context=size + 3)
    assert asked[0][1] == 3


# --- whole builds ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("start") / "policy")


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_policy_that_speaks_as_the_script_builds_the_scripts_records(start, is_alone):
    scene, limits = scene_of(start), Limits()
    oracle = Oracle(scene.world)

    def reply(text):
        opening, _, rest = text.partition("<|im_end|>\n<|im_start|>user\n")
        system = opening.removeprefix("<|im_start|>system\n")
        role = role_of([{"role": "system", "content": system}], limits)
        return json.dumps(oracle.reply(role, json.loads(rest.partition("<|im_end|>")[0])))

    ours = policy_complete(replying(reply), chat=SPOKEN, policy="p", context=10**6)
    questions = scene.questions["train"][::640]

    async def _records(said):
        desk = Desk(said, scene.retriever.search, "m", limits=limits, is_alone=is_alone)
        return [await work_on(question, desk) for question in questions]

    for one, other in zip(
        asyncio.run(_records(ours)), asyncio.run(_records(local(oracle, limits))), strict=True
    ):
        assert one.protocol is not None
        assert one.input_tokens > other.input_tokens  # characters against words
        known = dict(input_tokens=0, output_tokens=0)
        assert dataclasses.replace(one, **known) == dataclasses.replace(other, **known)


def test_what_a_random_policy_says_is_malformed_and_counted(start):
    scene, limits = scene_of(start), Limits(max_tokens=8)
    model, params = hf.load(start, dtype=jnp.float32)
    settings = EngineSettings(
        context=2048, buckets=(2048,), num_pages=1024, page_size=8, prefill_blocks=16,
        decode_rows=8, decode_steps=4,
    )  # fmt: skip
    model = dataclasses.replace(model, max_positions=2048)
    decode = scene.tokenizer.decode
    engine = Engine(model, params, settings, policy="student", decode=decode)
    made = policy_complete(engine.sample, chat=scene.chat, policy="student", context=2048)
    questions = scene.questions["train"][:3]

    async def _records(is_alone):
        desk = Desk(made, scene.retriever.search, "random", limits=limits, is_alone=is_alone)
        return await asyncio.gather(*(work_on(question, desk) for question in questions))

    for is_alone, role in ((False, "orchestrator"), (True, "solver")):
        for record in asyncio.run(_records(is_alone)):
            assert (record.protocol, record.reason) == (None, role)
            assert (record.malformed, record.calls, record.cost) == (2, 2, 0.0)
            assert record.input_tokens > 500  # two prompts
            assert 0 < record.output_tokens <= 16


def test_the_command_builds_with_a_policy(start, tmp_path):
    out = tmp_path / "protocols.jsonl"
    command = [
        sys.executable, "launch/build_protocols.py", "--config=configs/toy.py",
        f"--policy={start}", f"--out={out}", "--num_questions=2", "--alone",
        "--config.engine.context=384",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all: 0 of 2 passed, 0 answered rightly, right protocols 0.0%; rejected" in done.stdout
    assert [(r["model"], r["malformed"]) for r in read(out)] == [("policy", 2)] * 2
    both = subprocess.run([*command, "--oracle=plain"], cwd=ROOT, capture_output=True, text=True)
    assert both.returncode != 0
    assert "or --policy, or --oracle" in both.stderr
