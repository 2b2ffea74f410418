"""Reading and writing Hugging Face checkpoints: bits, files and refusals."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import pytest
import safetensors
import safetensors.torch
import torch
import transformers
from hf_models import (
    FAMILIES,
    assert_same_bits,
    assert_same_params,
    edit_json,
    random_model,
    read_tensors,
    save_families,
)

from mas_jax.model import hf, qwen3, safetensors_io

DTYPES = {
    "float32": (jnp.float32, torch.float32),
    "bfloat16": (jnp.bfloat16, torch.bfloat16),
    "float16": (jnp.float16, torch.float16),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Directory of each family's random model, float32, as transformers saves it."""
    return save_families(tmp_path_factory.mktemp("families"))


@pytest.fixture
def broken(checkpoints, tmp_path):
    """A copy of the tied Qwen3 checkpoint for a test to damage."""
    return shutil.copytree(checkpoints["qwen3"], tmp_path / "broken")


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
