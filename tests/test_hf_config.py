"""config.json as transformers 4 and 5 write it, its token ids, and the tokenizer beside it."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import pytest
import transformers
from hf_models import FAMILIES, LLAMA3_ROPE, constant_params, edit_json, save_families

from mas_jax.model import hf, hf_config, qwen3


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Directory of each family's random model, float32, as transformers saves it."""
    return save_families(tmp_path_factory.mktemp("families"))


@pytest.fixture
def broken(checkpoints, tmp_path):
    """A copy of the tied Qwen3 checkpoint for a test to damage."""
    return shutil.copytree(checkpoints["qwen3"], tmp_path / "broken")


# --- reading and writing --------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(FAMILIES))
def test_transformers_5_reads_the_same_settings_from_our_config(checkpoints, tmp_path, family):
    config, params = hf.load(checkpoints[family], dtype=jnp.float32)
    hf.save(tmp_path / "out", config, params)
    theirs = transformers.AutoConfig.from_pretrained(checkpoints[family])
    ours = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert ours.rope_parameters == theirs.rope_parameters
    assert type(ours) is type(theirs) and ours.architectures == theirs.architectures
    for key in FAMILIES[family][1]:
        assert ours.to_dict()[key] == theirs.to_dict()[key], key


@pytest.mark.parametrize("name", list(qwen3.PRESETS))
def test_every_preset_survives_config_json(name):
    config = qwen3.PRESETS[name]
    text = json.dumps(hf_config.config_to_hf(config, dtype="bfloat16", token_ids={}))
    assert hf_config.config_from_hf(json.loads(text), where="here") == config


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
@pytest.mark.parametrize("family", ["qwen3-untied", "llama3"])
def test_config_of_transformers_4_loads_alike(checkpoints, tmp_path, family, type_key):
    shutil.copy(checkpoints[family] / "config.json", tmp_path)
    rope = dict(FAMILIES[family][1]["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    scaling = {**rope, type_key: kind} if kind == "llama3" else None
    older = {"rope_theta": theta, "rope_scaling": scaling, "torch_dtype": "float32"}
    edit_json(tmp_path / "config.json", rope_parameters=..., dtype=..., **older)
    assert hf.load_config(tmp_path) == hf.load_config(checkpoints[family])


def test_our_config_still_loads_when_a_generation_of_transformers_drops_the_keys_of_the_other(
    checkpoints, tmp_path
):
    config, params = hf.load(checkpoints["llama3"], dtype=jnp.float32)
    for number, dropped in enumerate((["rope_parameters"], ["rope_theta", "rope_scaling"])):
        hf.save(tmp_path / str(number), config, params)
        edit_json(tmp_path / str(number) / "config.json", **dict.fromkeys(dropped, ...))
        assert hf.load_config(tmp_path / str(number)) == config
        theirs = transformers.AutoConfig.from_pretrained(tmp_path / str(number))
        assert theirs.rope_parameters == LLAMA3_ROPE


def test_absent_head_dim_and_groups_take_their_defaults(checkpoints, tmp_path):
    shutil.copy(checkpoints["llama"] / "config.json", tmp_path)
    edit_json(tmp_path / "config.json", head_dim=..., num_key_value_heads=...)
    assert hf.load_config(tmp_path) == hf.load_config(
        checkpoints["llama"]
    )  # 48 / 4 heads, 4 groups


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, r"'gemma3' is not supported, wanted one of \['llama', 'qwen2'"),
        ({"model_type": ...}, "model_type=None is not supported"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, r"wanted \['Qwen3ForCausalLM'\]"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"vocab_size": "97"}, "vocab_size='97', wanted a positive integer"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1,
          "layer_types": ...},
         "use_sliding_window=True is not supported, wanted full attention"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
         "layer_types=.* is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, wanted 'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
         "yarn.* not supported, wanted rope_type 'default' or 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": ...},
         "linear.* not supported"),
        ({"rope_parameters": LLAMA3_ROPE | {"factor": None}}, "wants the settings .*'factor'"),
        ({"rope_theta": 5e6}, "rope_theta is 1000000.0 in one place and 5000000.0 in another"),
        ({"num_attention_heads": 3}, "num_heads=3 is not a multiple of num_kv_heads=2"),
    ],
)  # fmt: skip
def test_unsupported_settings_are_refused_by_name(broken, changes, message):
    edit_json(broken / "config.json", **changes)
    with pytest.raises(ValueError, match=message) as error:
        hf.load(broken, dtype=jnp.float32)
    if "num_heads" not in message:
        assert str(broken / "config.json") in str(error.value)


def test_settings_that_qwen3_and_llama_refuse_do_not_hinder_qwen2(checkpoints, tmp_path):
    # the biases of Qwen2 are no setting, and its windows start at a layer that is not there
    shutil.copy(checkpoints["qwen2"] / "config.json", tmp_path)
    changes = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 3}
    edit_json(tmp_path / "config.json", attention_bias=True, layer_types=..., **changes)
    assert hf.load_config(tmp_path) == hf.load_config(checkpoints["qwen2"])


def test_an_architecture_that_nobody_else_has_cannot_be_exported(tmp_path):
    config = dataclasses.replace(qwen3.PRESETS["toy-1m"], num_layers=1, qkv_bias=True)
    params = constant_params(config, jnp.float32)
    with pytest.raises(ValueError, match="both qk_norm=True and qkv_bias=True"):
        hf.save(tmp_path / "out", config, params)
    assert not list(tmp_path.iterdir())


# --- the tokenizer --------------------------------------------------------------------------------


@pytest.fixture
def tokenizer_dir(tmp_path):
    """A chat tokenizer's files, as a hub repository has them; the texts are not all valid JSON."""
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    added = [{"content": "<|endoftext|>", "id": 3}, {"content": "<|im_end|>", "id": 5}]
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": added}, indent=7))
    names = {
        "eos_token": {"content": "<|im_end|>"},
        "pad_token": "<|endoftext|>",
        "bos_token": None,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(names) + "\r\n\r\n")
    for name in ("merges.txt", "chat_template.jinja", "generation_config.json", "LICENSE"):
        (directory / name).write_bytes(f"{name} \r\n\t é".encode("latin-1"))
    (directory / "README.md").write_text("not of the tokenizer")
    return directory


def test_tokenizer_files_are_copied_byte_for_byte(checkpoints, tokenizer_dir, tmp_path):
    config, params = hf.load(checkpoints["qwen3"], dtype=jnp.float32)
    hf.save(tmp_path / "out", config, params, tokenizer_dir=tokenizer_dir)
    copied = {p.name: p.read_bytes() for p in tokenizer_dir.iterdir() if p.name != "README.md"}
    written = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert written.keys() == {*copied, "config.json", "model.safetensors"}
    assert copied.items() <= written.items()


@pytest.mark.parametrize(
    ("model_ids", "expected"),
    [
        # the tokens that tokenizer_config.json names, looked up in tokenizer.json
        (None, {"eos_token_id": 5, "pad_token_id": 3}),
        # the model's own config.json goes first: it may have several stop tokens
        ({"bos_token_id": 1, "eos_token_id": [5, 3]},
         {"bos_token_id": 1, "eos_token_id": [5, 3], "pad_token_id": 3}),
    ],
)  # fmt: skip
def test_the_exported_config_has_the_token_ids_of_the_tokenizer(
    checkpoints, tokenizer_dir, tmp_path, model_ids, expected
):
    if model_ids is not None:
        (tokenizer_dir / "config.json").write_text(json.dumps(model_ids))
    (tokenizer_dir / "generation_config.json").unlink()
    for family in ("qwen3", "llama"):
        config, params = hf.load(checkpoints[family], dtype=jnp.float32)
        hf.save(tmp_path / family, config, params, tokenizer_dir=tokenizer_dir)
        theirs = transformers.AutoConfig.from_pretrained(tmp_path / family)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            found = {**dict.fromkeys([key]), **expected}
            assert theirs.to_dict()[key] == found[key], (family, key)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_without_a_tokenizer_the_exported_config_has_no_token_ids(checkpoints, tmp_path, family):
    config, params = hf.load(checkpoints[family], dtype=jnp.float32)
    hf.save(tmp_path / "out", config, params)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert theirs.bos_token_id is theirs.eos_token_id is theirs.pad_token_id is None


@pytest.mark.parametrize("source", ["vocab.json", "added_tokens.json", "tokenizer_config.json"])
def test_stop_tokens_of_slow_tokenizers_are_found_too(tokenizer_dir, source):
    (tokenizer_dir / "tokenizer.json").unlink()
    settings = {"eos_token": "<|im_end|>"}
    if source == "tokenizer_config.json":
        settings["added_tokens_decoder"] = {"9": {"content": "<|im_end|>"}}
    else:
        (tokenizer_dir / source).write_text('{"<|im_end|>": 9}')
    (tokenizer_dir / "tokenizer_config.json").write_text(json.dumps(settings))
    assert hf_config.find_token_ids(tokenizer_dir, vocab_size=10) == {"eos_token_id": 9}


def test_a_tokenizer_that_does_not_fit_stops_the_save(checkpoints, tokenizer_dir, tmp_path):
    config, params = hf.load(checkpoints["qwen3"], dtype=jnp.float32)
    edit_json(tokenizer_dir / "tokenizer_config.json", eos_token="<eos>")
    with pytest.raises(ValueError, match="eos_token '<eos>' is in none of the vocabulary files"):
        hf.save(tmp_path / "out", config, params, tokenizer_dir=tokenizer_dir)
    (tokenizer_dir / "config.json").write_text('{"eos_token_id": [4, 97]}')
    with pytest.raises(ValueError, match=r"eos_token_id=\[4, 97\] does not fit vocab_size=97"):
        hf.save(tmp_path / "out", config, params, tokenizer_dir=tokenizer_dir)
    (tokenizer_dir / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds none of .*tokenizer\.json"):
        hf.save(tmp_path / "out", config, params, tokenizer_dir=tokenizer_dir)
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer"]
