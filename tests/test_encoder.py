"""The text encoder: parity with transformers' BertModel, batching, cutting, bad checkpoints."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from shared_data import lines

from mas_jax.benchmarks import serving
from mas_jax.model import packaged, sharding
from mas_jax.records import Passage
from mas_jax.retrieval import bert
from mas_jax.retrieval.corpus import open_corpus
from mas_jax.retrieval.encoder import EncoderConfig, TextEncoder, e5
from mas_jax.retrieval.index import IndexConfig, Retriever

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "red", "fox", "who", "wrote", ":",
         "query", "passage", "a", "##s", "dune", "of", "blue", "whale", "."]  # fmt: skip

torch.set_num_threads(1)


def make_directory(path, *, seed=0, **changes):
    """A random BERT with a word-piece tokenizer of `WORDS`, as transformers saves it."""
    sizes = dict(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=40, type_vocab_size=2,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.BertModel(transformers.BertConfig(**(sizes | changes)))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are 0 and 1 otherwise
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(str(path / "vocab.txt")).save_pretrained(path)
    return model.eval()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(directory, transformers' model)"""
    path = tmp_path_factory.mktemp("bert")
    return path, make_directory(path)


def pooled_by_torch(directory, texts, *, max_length):
    """Mean over tokens, of norm 1, one text at a time: the definition."""
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    rows = []
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt")
        with torch.inference_mode():
            mean = model(**inputs).last_hidden_state[0].mean(dim=0)
        rows.append((mean / mean.norm()).numpy())
    return np.stack(rows)


# --- parity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_attention_heads": 1}, {"hidden_size": 24, "num_attention_heads": 2},
     {"num_hidden_layers": 4, "intermediate_size": 16}, {"layer_norm_eps": 1e-5}],
    ids=["plain", "one-head", "other-width", "deep", "eps"],
)  # fmt: skip
def test_hidden_states_equal_those_of_transformers(tmp_path, changes):
    model = make_directory(tmp_path, seed=1, **changes)
    config, params = bert.load(tmp_path, dtype=jnp.float32, mesh=None)
    rng = np.random.default_rng(0)
    tokens_BT = rng.integers(0, len(WORDS), (3, 17)).astype(np.int32)
    is_token_BT = np.arange(17) < np.array([17, 5, 1])[:, None]
    ours = bert.hidden(params, config, jnp.asarray(tokens_BT), jnp.asarray(is_token_BT))
    with torch.inference_mode():
        theirs = model(
            input_ids=torch.from_numpy(tokens_BT).long(),
            attention_mask=torch.from_numpy(is_token_BT).long(),
        ).last_hidden_state.numpy()
    np.testing.assert_allclose(np.asarray(ours)[is_token_BT], theirs[is_token_BT], atol=1e-5)


def test_what_stands_in_the_padding_changes_nothing(small):
    config, params = bert.load(small[0], dtype=jnp.float32, mesh=None)
    is_token_BT = jnp.arange(12) < jnp.array([[7], [12]])
    one = jnp.ones((2, 12), jnp.int32)
    other = jnp.where(is_token_BT, one, 9)
    first, second = (
        bert.mean_pooled(bert.hidden(params, config, x, is_token_BT), is_token_BT)
        for x in (one, other)
    )
    np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


def test_mean_pooling_by_hand():
    hidden_BTD = jnp.array([[[3.0, 0.0], [3.0, 8.0], [100.0, 100.0]]])  # mean of two: (3, 4)
    pooled = bert.mean_pooled(hidden_BTD, jnp.array([[True, True, False]]))
    np.testing.assert_allclose(np.asarray(pooled), [[0.6, 0.8]], atol=1e-6)
    nothing = bert.mean_pooled(hidden_BTD, jnp.zeros((1, 3), bool))
    np.testing.assert_array_equal(np.asarray(nothing), [[0.0, 0.0]])


def test_devices_of_every_mesh_give_the_same_vectors(small):
    texts = ["the red fox", "a blue whale of dune", "who wrote dune"] * 5
    config = EncoderConfig(str(small[0]), max_tokens=16)
    one = TextEncoder(config, mesh=sharding.make_mesh(devices=jax.devices()[:1]))
    expected = one.encode_passages(texts)
    for sizes in ({"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}):
        many = TextEncoder(config, mesh=sharding.make_mesh(**sizes))
        np.testing.assert_allclose(many.encode_passages(texts), expected, atol=1e-5)


# --- texts ----------------------------------------------------------------------------------------


def test_texts_of_all_lengths_get_the_vectors_of_transformers(small):
    rng = np.random.default_rng(3)
    texts = [" ".join(rng.choice(WORDS[5:], n)) for n in (*range(1, 36), 60, 200)]
    encoder = TextEncoder(EncoderConfig(str(small[0]), max_tokens=32, batch_tokens=128))
    expected = pooled_by_torch(small[0], texts, max_length=32)
    np.testing.assert_allclose(encoder.encode_queries(texts), expected, atol=2e-6)
    order = rng.permutation(len(texts))
    shuffled = encoder.encode_queries([texts[i] for i in order])
    np.testing.assert_allclose(shuffled, expected[order], atol=2e-6)


def test_prefixes_are_those_of_the_kind_of_text(small):
    encoder = TextEncoder(e5(str(small[0]), max_tokens=32))
    query, passage = encoder.encode_queries(["red fox"]), encoder.encode_passages(["red fox"])
    expected = pooled_by_torch(small[0], ["query: red fox", "passage: red fox"], max_length=32)
    np.testing.assert_allclose(np.concatenate([query, passage]), expected, atol=2e-6)
    assert np.abs(query - passage).max() > 1e-3


def test_no_texts_and_an_empty_text(small):
    encoder = TextEncoder(EncoderConfig(str(small[0]), max_tokens=16))
    assert encoder.encode_queries([]).shape == (0, 32)
    assert np.isfinite(encoder.encode_queries([""])).all()  # [CLS] [SEP]


def test_the_fingerprint_names_all_that_vectors_depend_on(small, tmp_path):
    config = EncoderConfig(str(small[0]), max_tokens=16)
    same = TextEncoder(dataclasses.replace(config, batch_tokens=64)).fingerprint
    assert same == TextEncoder(config).fingerprint
    copy = tmp_path / "copy"
    shutil.copytree(small[0], copy)
    assert TextEncoder(dataclasses.replace(config, directory=str(copy))).fingerprint == same
    for change in ({"max_tokens": 17}, {"query_prefix": "query: "}, {"dtype": "bfloat16"}):
        assert TextEncoder(dataclasses.replace(config, **change)).fingerprint != same
    other = tmp_path / "other"
    make_directory(other, seed=5)
    assert TextEncoder(dataclasses.replace(config, directory=str(other))).fingerprint != same


@pytest.mark.slow
def test_the_index_of_a_bfloat16_encoder_is_served(small, tmp_path, monkeypatch):
    monkeypatch.setenv("MAS_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("XLA_FLAGS")  # one device is enough for a server
    serving.write_corpus([Passage("1", "fox", "the red fox")], tmp_path / "c.jsonl")
    corpus = open_corpus(tmp_path / "c.jsonl")
    encoder = TextEncoder(EncoderConfig(str(small[0]), max_tokens=16, dtype="bfloat16"))
    Retriever.build(corpus, encoder, IndexConfig(backend="exact")).save(tmp_path / "index")
    flags = [f"--encoder={small[0]}", "--max_tokens=16", "--dtype=bfloat16", "--backend=exact"]
    process = serving.start_server(  # raises if it ends
        corpus.path, serving.free_port(), f"--index={tmp_path / 'index'}", *flags
    )
    process.kill()
    process.wait()


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [({"model_type": "roberta"}, "model_type='roberta'"), ({"hidden_act": "relu"}, "hidden_act"),
     ({"num_attention_heads": 5}, "not a multiple of num_attention_heads=5"),
     ({"hidden_size": 16}, "has shape"), ({"num_hidden_layers": 3}, "missing")],
)  # fmt: skip
def test_another_architecture_is_one_clear_error(small, tmp_path, change, message):
    copy = tmp_path / "copy"
    shutil.copytree(small[0], copy)
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(ValueError, match=message):
        bert.load(copy, dtype=jnp.float32, mesh=None)


def test_more_tokens_than_positions_is_an_error(small):
    with pytest.raises(ValueError, match=r"max_tokens=41 must be in 3\.\.40"):
        TextEncoder(EncoderConfig(str(small[0]), max_tokens=41))


def test_a_directory_without_a_model_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        TextEncoder(EncoderConfig(str(tmp_path)))


# --- real weights ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minilm():
    """The directory of the real all-MiniLM-L6-v2."""
    try:
        return packaged.minilm()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_minilm_embeds_real_passages_as_transformers_does(minilm):
    passages = [line["contents"] for line in lines("qa/2wikimultihopqa_corpus.jsonl", 200)]
    ours = TextEncoder(EncoderConfig(str(minilm), max_tokens=128)).encode_passages(passages)
    expected = pooled_by_torch(minilm, passages, max_length=128)
    np.testing.assert_allclose(ours, expected, atol=1e-4)
