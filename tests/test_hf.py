"""Reading and writing Hugging Face checkpoints: bits, files, shardings, memory and refusals."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import transformers
from conftest import ROOT
from hf_models import FAMILIES, LLAMA3_ROPE, random_model

from mas_jax.model import hf, hf_config, qwen3, safetensors_io, sharding

DTYPES = {
    "float32": (jnp.float32, torch.float32),
    "bfloat16": (jnp.bfloat16, torch.bfloat16),
    "float16": (jnp.float16, torch.float16),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Directory of each family's random model, float32, as transformers saves it."""
    directories = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for name, directory in directories.items():
        random_model(name).save_pretrained(directory)
    return directories


@pytest.fixture
def broken(checkpoints, tmp_path):
    """A copy of the tied Qwen3 checkpoint for a test to damage."""
    return shutil.copytree(checkpoints["qwen3"], tmp_path / "broken")


def read_tensors(directory) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, read by the safetensors library."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= safetensors.torch.load_file(path)
    return tensors


def assert_same_bits(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape, name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


def constant_params(config: qwen3.ModelConfig, dtype: jnp.dtype) -> dict:
    return jax.tree.map(lambda s: jnp.ones(s.shape, dtype), qwen3.param_specs(config))


def assert_same_params(ours: dict, theirs: dict) -> None:
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def edit_json(path, **changes: object) -> None:
    """Sets keys of a JSON file; the value `...` removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def edit_tensors(directory, **changes: torch.Tensor | None) -> None:
    """Sets or (None) removes tensors of a single file; `__` in a name stands for a dot."""
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    tensors = read_tensors(directory) | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    safetensors.torch.save_file(kept, directory / "model.safetensors", {"format": "pt"})


# --- the layout -----------------------------------------------------------------------------------


def test_each_weight_lands_where_the_table_says(checkpoints):
    # the projections of HF are [out, in] with the heads flattened into `out` (or `in` for o_proj)
    config, params = hf.load(checkpoints["qwen3"], dtype=jnp.float32)
    stored, layers = read_tensors(checkpoints["qwen3"]), params["layers"]
    heads, head_dim = config.num_heads, config.head_dim
    layer, n, h, d, f = 2, heads - 1, 3, 7, 11
    prefix = f"model.layers.{layer}."
    q = stored[prefix + "self_attn.q_proj.weight"]
    assert q.shape == (heads * head_dim, config.model_dim)
    assert layers["wq"][layer, d, n, h] == q[n * head_dim + h, d].item()
    o = stored[prefix + "self_attn.o_proj.weight"]
    assert layers["wo"][layer, n, h, d] == o[d, n * head_dim + h].item()
    assert layers["w_gate"][layer, d, f] == stored[prefix + "mlp.gate_proj.weight"][f, d].item()
    assert layers["w_down"][layer, f, d] == stored[prefix + "mlp.down_proj.weight"][d, f].item()
    assert layers["k_norm"][layer, h] == stored[prefix + "self_attn.k_norm.weight"][h].item()
    assert params["embed"][5, d] == stored["model.embed_tokens.weight"][5, d].item()


def test_the_loaded_config_describes_the_model(checkpoints):
    config = hf.load_config(checkpoints["llama3"])
    assert config == qwen3.ModelConfig(
        vocab_size=97, num_layers=3, model_dim=48, ffw_dim=72, num_heads=4, num_kv_heads=1,
        head_dim=32, rope_theta=5e5, max_positions=65536, norm_eps=1e-5, tied=True,
        rope_scaling=qwen3.Llama3Scaling(32.0, 1.0, 4.0, 8192),
    )  # fmt: skip


# --- round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(FAMILIES))
def test_round_trip_keeps_every_bit_and_the_config(checkpoints, tmp_path, family):
    config, params = hf.load(checkpoints[family], dtype=jnp.float32)
    hf.save(tmp_path / "out", config, params)
    assert_same_bits(read_tensors(tmp_path / "out"), read_tensors(checkpoints[family]))
    assert hf.load_config(tmp_path / "out") == config
    assert ("lm_head.weight" in read_tensors(tmp_path / "out")) == (not config.tied)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2-untied"])
def test_round_trip_keeps_every_bit_of_16_bit_checkpoints(tmp_path, family, dtype):
    our_dtype, torch_dtype = DTYPES[dtype]
    random_model(family).to(torch_dtype).save_pretrained(tmp_path / "in")
    hf.save(tmp_path / "out", *hf.load(tmp_path / "in", dtype=our_dtype))
    assert_same_bits(read_tensors(tmp_path / "out"), read_tensors(tmp_path / "in"))
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").dtype == torch_dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_checkpoints_are_exact_in_float32(tmp_path, dtype):
    random_model("qwen2").to(DTYPES[dtype][1]).save_pretrained(tmp_path / "in")
    hf.save(tmp_path / "out", *hf.load(tmp_path / "in", dtype=jnp.float32))
    upcast = {name: x.float() for name, x in read_tensors(tmp_path / "in").items()}
    assert_same_bits(read_tensors(tmp_path / "out"), upcast)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_checkpoints_round_as_torch_does(checkpoints, tmp_path, dtype):
    hf.save(tmp_path / "out", *hf.load(checkpoints["qwen2"], dtype=DTYPES[dtype][0]))
    rounded = {n: x.to(DTYPES[dtype][1]) for n, x in read_tensors(checkpoints["qwen2"]).items()}
    assert_same_bits(read_tensors(tmp_path / "out"), rounded)


def test_shards_of_transformers_load_like_a_single_file(checkpoints, tmp_path):
    random_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    _, sharded = hf.load(tmp_path, dtype=jnp.float32)
    _, single = hf.load(checkpoints["llama"], dtype=jnp.float32)
    assert_same_params(sharded, single)


def test_shards_stay_below_their_size_and_the_index_names_every_tensor(checkpoints, tmp_path):
    config, params = hf.load(checkpoints["llama"], dtype=jnp.float32)
    hf.save(tmp_path / "out", config, params, max_shard_bytes=40_000)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    data_bytes = 0
    for path in shards:
        tensors = safetensors.torch.load_file(path)
        shard_bytes = sum(x.nbytes for x in tensors.values())
        assert shard_bytes <= 40_000
        data_bytes += shard_bytes
        listed = {name for name, file in index["weight_map"].items() if file == path.name}
        assert listed == tensors.keys()
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors" and len(shards) > 2
    assert index["metadata"]["total_size"] == data_bytes == 4 * qwen3.param_count(config)
    assert_same_params(hf.load(tmp_path / "out", dtype=jnp.float32)[1], params)


def test_mixed_dtypes_are_written_aligned(checkpoints, tmp_path):
    config, params = hf.load(checkpoints["qwen3"], dtype=jnp.bfloat16)
    params = params | {"final_norm": params["final_norm"].astype(jnp.float32)}
    hf.save(tmp_path / "out", config, params)
    stored = safetensors_io.read_header(tmp_path / "out" / "model.safetensors")
    for tensor in stored.values():
        assert tensor.offset % safetensors_io.DTYPES[tensor.code].itemsize == 0
    assert read_tensors(tmp_path / "out")["model.norm.weight"].dtype == torch.float32


@pytest.mark.parametrize("family", list(FAMILIES))
def test_transformers_loads_our_export_with_equal_logits(checkpoints, tmp_path, family):
    config, params = hf.load(checkpoints[family], dtype=jnp.float32)
    hf.save(tmp_path / "out", config, params, max_shard_bytes=200_000)  # one file, or two to three
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info  # no missing, unexpected or mismatched tensors
    original = random_model(family)
    tokens_BT = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(model(tokens_BT).logits, original(tokens_BT).logits)
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tied == config.tied == model.config.tie_word_embeddings


def test_a_value_head_is_neither_exported_nor_loaded(checkpoints, tmp_path):
    config, params = hf.load(checkpoints["qwen3"], dtype=jnp.float32)
    critic = dataclasses.replace(config, value_head=True)
    hf.save(tmp_path / "out", critic, params | {"value_head": jnp.ones(config.model_dim)})
    assert_same_bits(read_tensors(tmp_path / "out"), read_tensors(checkpoints["qwen3"]))
    assert hf.load(tmp_path / "out", dtype=jnp.float32)[0] == config


# --- config.json ----------------------------------------------------------------------------------


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


# --- damaged checkpoints --------------------------------------------------------------------------


def test_missing_files_are_named(broken, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        hf.load(tmp_path / "nowhere", dtype=jnp.float32)
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"wanted model\.safetensors .*pytorch_model\.bin"):
        hf.load(broken, dtype=jnp.float32)
    (broken / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        hf.load(broken, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__layers__1__self_attn__q_norm__weight": None},
         r"1 of 35 tensors .* missing: model\.layers\.1\.self_attn\.q_norm\.weight"),
        ({"model__layers__1__self_attn__q_proj__bias": torch.zeros(160)},
         r"1 tensors that config\.json does not imply: model\.layers\.1\.self_attn\.q_proj\.bias"),
        ({"model__layers__3__input_layernorm__weight": torch.zeros(40)}, "num_hidden_layers"),
        ({"model__layers__0__self_attn__k_proj__weight": torch.zeros(40, 32)},
         r"k_proj\.weight has shape \(40, 32\), wanted \(32, 40\)"),
        ({"model__norm__weight": torch.zeros(40, dtype=torch.int8)},
         r"model\.norm\.weight is stored as I8, wanted one of \['BF16', 'F16', 'F32', 'F64'\]"),
        ({"lm_head__weight": torch.zeros(97, 40)},
         r"lm_head\.weight differs from .*tie_word_embeddings=true"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_refused_by_name(broken, changes, message):
    edit_tensors(broken, **changes)
    with pytest.raises(ValueError, match=message) as error:
        hf.load(broken, dtype=jnp.float32)
    assert str(broken) in str(error.value)


def test_an_untied_config_over_a_tied_checkpoint_is_refused(broken):
    edit_json(broken / "config.json", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight.*tie_word_embeddings"):
        hf.load(broken, dtype=jnp.float32)


def test_a_redundant_head_and_old_rotary_buffers_are_accepted(broken, checkpoints):
    embedding = read_tensors(broken)["model.embed_tokens.weight"]
    buffer = torch.ones(8)
    edit_tensors(
        broken,
        lm_head__weight=embedding.clone(),
        model__layers__0__self_attn__rotary_emb__inv_freq=buffer,
    )
    _, params = hf.load(broken, dtype=jnp.float32)
    assert_same_params(params, hf.load(checkpoints["qwen3"], dtype=jnp.float32)[1])


@pytest.mark.parametrize(
    ("kept_bytes", "message"),
    [(-1, "truncated or damaged: its header promises"), (400, "inside the header"), (3, "header")],
)
def test_truncated_files_are_refused(broken, kept_bytes, message):
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ValueError, match=message) as error:
        hf.load(broken, dtype=jnp.float32)
    assert str(path) in str(error.value)


def test_a_damaged_header_is_refused(broken):
    path = broken / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"dtype"', b'"dtyqe"'))
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged header"):
        hf.load(broken, dtype=jnp.float32)
    path.write_bytes(content.replace(b'"shape":[40]', b'"shape":[41]'))
    with pytest.raises(ValueError, match=r"has 160 bytes for F32 \(41,\)"):
        hf.load(broken, dtype=jnp.float32)


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path):
    random_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    weight_map = content["weight_map"]
    last = weight_map["lm_head.weight"]
    edit_json(index, weight_map=weight_map | {"model.norm.weight": "absent.safetensors"})
    with pytest.raises(FileNotFoundError, match=r"absent\.safetensors does not exist.*model\.norm"):
        hf.load(tmp_path, dtype=jnp.float32)
    edit_json(index, weight_map={n: f for n, f in weight_map.items() if n != "lm_head.weight"})
    with pytest.raises((ValueError, FileNotFoundError), match="lm_head"):
        hf.load(tmp_path, dtype=jnp.float32)
    edit_json(index, weight_map=weight_map)
    (tmp_path / last).write_bytes((tmp_path / last).read_bytes()[:-4])
    with pytest.raises(ValueError, match=f"{last} is truncated"):
        hf.load(tmp_path, dtype=jnp.float32)
    edit_json(index, weight_map=...)
    with pytest.raises(ValueError, match="no weight_map"):
        hf.load(tmp_path, dtype=jnp.float32)


def test_params_of_another_config_are_not_saved(checkpoints, tmp_path):
    config, params = hf.load(checkpoints["qwen3"], dtype=jnp.float32)
    wider = dataclasses.replace(config, ffw_dim=80)
    with pytest.raises(ValueError, match=r"'layers/w_gate'\] has shape \(3, 40, 72\), config"):
        hf.save(tmp_path / "out", wider, params)
    untied = dataclasses.replace(config, tied=False)
    with pytest.raises(ValueError, match="missing unembed, extra nothing"):
        hf.save(tmp_path / "out", untied, params)
    with pytest.raises(ValueError, match=r"\['final_norm'\] is int32, wanted a type of"):
        hf.save(tmp_path / "out", config, params | {"final_norm": jnp.zeros(40, jnp.int32)})
    assert not list(tmp_path.iterdir())


# --- the written directory ------------------------------------------------------------------------


def test_an_existing_checkpoint_is_never_replaced(checkpoints, tmp_path):
    config, params = hf.load(checkpoints["llama"], dtype=jnp.float32)
    (tmp_path / "empty").mkdir()
    hf.save(tmp_path / "empty", config, params)
    before = {p.name: p.read_bytes() for p in (tmp_path / "empty").iterdir()}
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        hf.save(tmp_path / "empty", config, params)
    assert {p.name: p.read_bytes() for p in (tmp_path / "empty").iterdir()} == before


def test_a_save_that_fails_leaves_nothing_behind(checkpoints, tmp_path):
    config, params = hf.load(checkpoints["llama"], dtype=jnp.float32)
    params["unembed"].delete()  # comes after the layers, so the first files are written by then
    with pytest.raises(RuntimeError, match="deleted"):
        hf.save(tmp_path / "out", config, params, max_shard_bytes=40_000)
    assert not list(tmp_path.iterdir())


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


# --- devices and memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_loading_onto_eight_devices_gives_the_asked_shardings_and_equal_values(tmp_path, family):
    sizes = {"vocab_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    random_model(family, **sizes).save_pretrained(tmp_path / "in")
    config = hf.load_config(tmp_path / "in")
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    shardings = qwen3.param_shardings(dataclasses.replace(config, value_head=True), mesh)
    _, sharded = hf.load(tmp_path / "in", dtype=jnp.float32, shardings=shardings)
    _, plain = hf.load(tmp_path / "in", dtype=jnp.float32)
    assert_same_params(sharded, plain)
    shardings.pop("value_head")
    assert jax.tree.map(lambda x: x.sharding, sharded) == shardings
    assert not sharded["layers"]["wq"].is_fully_replicated

    hf.save(tmp_path / "out", config, sharded)
    assert_same_bits(read_tensors(tmp_path / "out"), read_tensors(tmp_path / "in"))


def test_shardings_of_another_config_are_refused(checkpoints):
    config = hf.load_config(checkpoints["qwen2"])
    mesh = sharding.make_mesh(data=8)
    shardings = qwen3.param_shardings(dataclasses.replace(config, qkv_bias=False), mesh)
    with pytest.raises(ValueError, match="shardings do not fit the config: missing layers/bk"):
        hf.load(checkpoints["qwen2"], dtype=jnp.float32, shardings=shardings)


def run_script(script: str, *arguments: object, devices: int) -> subprocess.Popen:
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip


def output_of(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


LOAD_AND_SAVE_ON_TWO_PROCESSES = """
    import sys
    import jax, numpy as np
    from mas_jax.model import hf, qwen3, sharding
    process, address, source, target = sys.argv[1:]
    jax.distributed.initialize(address, num_processes=2, process_id=int(process))
    mesh = sharding.make_mesh(fsdp=2, tensor=2)
    shardings = qwen3.param_shardings(hf.load_config(source), mesh)
    config, params = hf.load(source, dtype=np.float32, shardings=shardings)
    _, whole = hf.load(source, dtype=np.float32)
    for x, full in zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True):
        assert len(x.addressable_shards) == 2
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(full)[shard.index])
    assert not params["layers"]["wq"].is_fully_addressable
    hf.save(target, config, params, max_shard_bytes=40_000)
    assert hf.load_config(target) == config
"""


def test_two_processes_load_their_own_shards_and_write_one_checkpoint(tmp_path):
    sizes = {"vocab_size": 96, "num_key_value_heads": 2, "num_hidden_layers": 2}
    random_model("llama", **sizes).save_pretrained(tmp_path / "in")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    arguments = (address, tmp_path / "in", tmp_path / "out")
    script = LOAD_AND_SAVE_ON_TWO_PROCESSES
    processes = [run_script(script, i, *arguments, devices=2) for i in range(2)]
    for process in processes:
        output_of(process)
    assert_same_bits(read_tensors(tmp_path / "out"), read_tensors(tmp_path / "in"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


PEAK_MEMORY_OF_LOAD = """
    import sys
    import jax
    from mas_jax.model import hf, qwen3, sharding

    def status_bytes(key):
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

    source, devices = sys.argv[1], jax.devices()
    shardings = None
    if len(devices) > 1:
        mesh = sharding.make_mesh(fsdp=len(devices))
        shardings = qwen3.param_shardings(hf.load_config(source), mesh)
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
    before = status_bytes("VmRSS")
    _, params = hf.load(source, dtype="bfloat16", shardings=shardings)
    print(status_bytes("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory):
    """A bfloat16 checkpoint of 220 MB in three files, and the sizes of all and of one parameter."""
    config = qwen3.ModelConfig(
        vocab_size=32768, num_layers=6, model_dim=1024, ffw_dim=3072, num_heads=8, num_kv_heads=4,
        head_dim=128, rope_theta=1e6, max_positions=4096, qk_norm=True,
    )  # fmt: skip
    params = constant_params(config, jnp.bfloat16)
    directory = tmp_path_factory.mktemp("large") / "model"
    hf.save(directory, config, params, max_shard_bytes=100_000_000)
    sizes = [x.nbytes for x in jax.tree.leaves(params)]
    return directory, sum(sizes), max(sizes)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
@pytest.mark.parametrize("devices", [1, 4])
def test_loading_takes_the_memory_of_the_result_and_one_parameter(large_checkpoint, devices):
    directory, result_bytes, largest_bytes = large_checkpoint
    output = output_of(run_script(PEAK_MEMORY_OF_LOAD, directory, devices=devices))
    peak_bytes = int(output.split()[-1])
    # 30 MB for the code that loading brings in; the file or the model once more would be 220 MB
    assert result_bytes > 200e6
    assert 0.9 * result_bytes < peak_bytes < result_bytes + largest_bytes + 30e6
