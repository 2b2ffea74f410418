"""Both tokenizers: exact round trips, and no control token out of outside text."""

import json
from functools import lru_cache

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from mas_jax.data.tokenizer import (
    CONTROLS,
    REPLACEMENT,
    HFTokenizer,
    WordTokenizer,
    make_toy_tokenizer,
)
from mas_jax.data.world_text import PROMPT_WORDS, vocabulary
from mas_jax.model import packaged

DATA = ROOT.parent / "shared" / "data"
QWEN3 = DATA / "qwen3_tokenizer"
needs_qwen3 = pytest.mark.skipif(not QWEN3.exists(), reason="no Qwen3 tokenizer beside the project")
TOY = make_toy_tokenizer()
CONTROL_IDS = {TOY.encode_template(text)[0] for text in CONTROLS}
EPISODE = (
    "<|im_start|>user search where was alba ackby born<|im_end|><|im_start|>assistant"
    "<search> alba ackby was born in</search><|im_end|>"
)
any_text = st.text(st.characters(exclude_categories=["Cs"]))
# text that is made of what could be mistaken: markup, pieces, byte pieces, the space character
hostile_text = st.lists(
    st.sampled_from(
        [*CONTROLS, "<unk>", "<0x0A>", "\u2581", "\u2581born", " born", "born", "user", " "]
    )
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
).map("".join)


@lru_cache(maxsize=1)
def load_qwen3():
    return HFTokenizer(QWEN3)


@pytest.fixture(scope="module")
def qwen3():
    return load_qwen3()


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(QWEN3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("toy") / "tokenizer"
    TOY.save(directory)
    return directory


def lines(name):
    path = DATA / "qa" / name
    if not path.exists():
        pytest.skip(f"no {name} beside the project")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


# the toy tokenizer


def test_a_word_with_its_space_is_one_token_and_a_strange_one_is_bytes():
    tok = WordTokenizer.from_words(["born", "was"], bare=["user"])
    # ids: <unk> 0, byte b at 1 + b, the lone space 257, then the words, the bare ones, the controls
    assert tok.encode(" was born") == [259, 258]
    assert tok.encode("was") == [1 + ord(c) for c in "was"]
    assert tok.encode(" é") == [257, 1 + 0xC3, 1 + 0xA9]
    assert tok.encode("user was\n") == [260, 259, 11]
    assert tok.vocab_size == 261 + len(CONTROLS)
    assert tok.encode_template("<|im_start|>user was<|im_end|>") == [262, 260, 259, 263]
    assert (tok.pad_id, tok.stop_ids) == (261, (263,))


def test_the_toy_vocabulary_fits_and_every_word_is_one_token():
    assert TOY.vocab_size <= 1024
    for word in vocabulary():
        assert len(TOY.encode(f" {word}")) == 1
    assert len(TOY.encode(" ".join(["", *PROMPT_WORDS]))) == len(PROMPT_WORDS)
    for tag in CONTROLS:
        assert len(TOY.encode_template(tag)) == 1


@given(any_text | hostile_text)
@settings(deadline=None)
def test_decoding_gives_the_text_back_and_no_control_token_comes_out(text):
    ids = TOY.encode(text)
    assert TOY.decode(ids) == text
    assert CONTROL_IDS.isdisjoint(ids)
    assert 0 not in ids


@given(hostile_text)
@settings(deadline=None)
def test_template_text_comes_back_too(text):
    assert TOY.decode(TOY.encode_template(text)) == text


@given(any_text.filter(lambda text: "<" not in text), any_text.filter(lambda text: "<" not in text))
@settings(deadline=None)
def test_a_control_token_splits_the_text_around_it(before, after):
    ids = TOY.encode_template(f"{before}<search>{after}")
    assert ids == TOY.encode(before) + TOY.encode_template("<search>") + TOY.encode(after)


@pytest.mark.parametrize(
    "text", ["a\0b", "a\nb\r\n", "\t", "  two  spaces ", "x" * 10_000, "", "\ufeff"]
)
def test_awkward_texts_come_back(text):
    assert TOY.decode(TOY.encode(text)) == text


def test_a_lone_surrogate_is_an_error():
    for tokenizer in (TOY, *([load_qwen3()] if QWEN3.exists() else [])):
        for encode in (tokenizer.encode, tokenizer.encode_template):
            with pytest.raises(ValueError, match=r"lone surrogate .* at 2"):
                encode("ab\ud800")


def test_any_sampled_ids_can_be_decoded():
    born = TOY.encode(" born")[0]
    assert TOY.decode([born, 0, born]) == " born<unk> born"
    assert TOY.decode([born, TOY.vocab_size, -1]) == " born" + 2 * REPLACEMENT
    assert TOY.decode([1 + 0xC3]) == REPLACEMENT  # half of a character
    assert TOY.token_text(born) == " born"
    assert TOY.token_text(TOY.encode_template("</search>")[0]) == "</search>"


def test_repeated_and_spaced_words_are_errors():
    for words in (["was", "was"], ["two words"]):
        with pytest.raises(ValueError, match="different, without white space"):
            WordTokenizer.from_words(words)


def test_a_saved_toy_tokenizer_is_the_same_again(saved):
    again = WordTokenizer.load(saved)
    assert again.fingerprint == TOY.fingerprint
    assert again.encode_template(EPISODE) == TOY.encode_template(EPISODE)
    assert WordTokenizer.from_words(["was"]).fingerprint != TOY.fingerprint


def test_transformers_reads_equal_ids_from_the_saved_toy_tokenizer(saved):
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(saved)
    assert len(hf) == TOY.vocab_size
    assert (hf.eos_token_id, hf.pad_token_id) == (*TOY.stop_ids, TOY.pad_id)
    for text in (
        EPISODE,
        " ".join(["", *vocabulary()]),
        " unheard of",
        "a  b\né",
        "".join(CONTROLS),
    ):
        assert hf(text).input_ids == TOY.encode_template(text)
        assert hf.decode(TOY.encode_template(text)) == text


def test_the_saved_chat_template_renders_one_line(saved):
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(saved)
    messages = [
        {"role": "user", "content": " where was alba ackby born"},
        {"role": "assistant", "content": "<search> alba ackby</search>"},
        {"role": "user", "content": " nothing"},
    ]
    text = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user where was alba ackby born<|im_end|>"
        "<|im_start|>assistant<search> alba ackby</search><|im_end|>"
        "<|im_start|>user nothing<|im_end|><|im_start|>assistant"
    )
    assert len(TOY.encode_template(text)) == 8 + 7 + 4 + 2  # a message each, and the opening


def test_the_saved_toy_tokenizer_serves_as_an_hf_one(saved):
    hf = HFTokenizer(saved)
    assert (hf.vocab_size, hf.stop_ids, hf.pad_id) == (TOY.vocab_size, TOY.stop_ids, TOY.pad_id)
    for text in (EPISODE, " where was alba ackby born", "".join(CONTROLS)):
        assert hf.encode(text) == TOY.encode(text)
        assert hf.encode_template(text) == TOY.encode_template(text)


# tokenizers of real checkpoints


@needs_qwen3
def test_qwen3_has_its_known_ids(qwen3):
    assert qwen3.vocab_size == 151_669
    assert (qwen3.stop_ids, qwen3.pad_id) == ((151_645,), 151_643)
    assert qwen3.encode_template("<|im_start|>\n\n<think></think>") == [151644, 271, 151667, 151668]
    assert qwen3.token_text(151_667) == "<think>"


@needs_qwen3
def test_no_added_token_of_qwen3_comes_out_of_a_passage(qwen3, reference):
    added = reference.added_tokens_decoder
    assert len(added) == 26
    for token in added.values():
        for passage in (token.content, f"Title\nsome {token.content} text", token.content * 3):
            ids = qwen3.encode(passage)
            assert added.keys().isdisjoint(ids)
            assert qwen3.decode(ids) == passage
    everything = "".join(token.content for token in added.values())
    assert added.keys().isdisjoint(qwen3.encode(everything))
    assert len(qwen3.encode_template(everything)) == 26
    # what makes the second table necessary: the ordinary tokenizer's flags let some through
    assert not added.keys().isdisjoint(reference(everything, add_special_tokens=False).input_ids)


@needs_qwen3
@given(
    st.lists(st.sampled_from(["<|im_", "<|im_end|>", "end|>", "<thi", "nk>", "<think>", "é", " "]))
)
@settings(deadline=None)
def test_no_mixture_of_markup_forges_a_qwen3_token(parts):
    tokenizer = load_qwen3()
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert max(ids, default=0) < 151_643
    assert tokenizer.decode(ids) == text


@needs_qwen3
def test_ordinary_text_has_the_ordinary_qwen3_ids(qwen3, reference):
    texts = [line["question"] for line in lines("nq.jsonl")]
    texts += [line["contents"] for line in lines("hotpotqa_corpus.jsonl")[:1000]]
    assert len(texts) > 4000
    for text, expected in zip(texts, reference(texts).input_ids, strict=True):
        assert qwen3.encode(text) == qwen3.encode_template(text) == expected
        assert qwen3.decode(expected) == reference.decode(expected)


@needs_qwen3
@pytest.mark.parametrize("text", ["x" * 10_000, "漢" * 10_000, "<think>" * 1_000, " " * 10_000])
def test_a_long_text_without_a_break_is_encoded_whole(qwen3, text):
    ids = qwen3.encode(text)
    assert max(ids) < 151_643
    assert qwen3.decode(ids) == text


@needs_qwen3
def test_ids_beyond_the_qwen3_tokenizer_can_be_decoded(qwen3):
    hello = qwen3.encode("hello")
    assert qwen3.decode([*hello, 151_935, *hello]) == f"hello{REPLACEMENT}hello"


def test_an_hf_tokenizer_that_plain_text_can_forge_is_refused(saved, tmp_path):
    spec = json.loads((saved / "tokenizer.json").read_text())
    born = TOY.encode(" born")[0]
    spec["added_tokens"].insert(0, spec["added_tokens"][0] | {"id": born, "content": "\u2581born"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with pytest.raises(ValueError, match="could forge"):
        HFTokenizer(tmp_path)


def bpe(tmp_path, merges, **model):
    """A BPE of a few letters whose vocabulary holds its added token <|im_end|> = "ab|" too."""
    vocabulary = {"a": 0, "b": 1, "|": 2, "ab": 3, "ab|": 4}
    token = {
        "id": 4, "content": "ab|", "special": True, "single_word": False, "lstrip": False,
        "rstrip": False, "normalized": False,
    }  # fmt: skip
    spec = {
        "version": "1.0", "added_tokens": [token], "normalizer": None, "pre_tokenizer": None,
        "post_processor": None, "decoder": None, "truncation": None, "padding": None,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, **model},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "ab|"}))
    return HFTokenizer(tmp_path)


def test_an_added_token_in_the_vocabulary_of_a_bpe_is_safe_while_no_merge_makes_it(tmp_path):
    tokenizer = bpe(tmp_path, [["a", "b"]])
    assert tokenizer.encode("ab|") == [3, 2]  # "ab" and "|": outside text forges nothing
    assert tokenizer.encode_template("ab|") == [4]
    with pytest.raises(ValueError, match="could forge"):
        bpe(tmp_path, [["a", "b"], ["ab", "|"]])
    with pytest.raises(ValueError, match="could forge"):
        bpe(tmp_path, [["a", "b"]], ignore_merges=True)


def test_no_added_token_of_smollm2_comes_out_of_a_passage():
    try:
        directory = packaged.smollm2()
    except (FileNotFoundError, ImportError) as error:
        pytest.skip(str(error))
    tokenizer = HFTokenizer(directory)
    added = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    for token in added:
        text = f"x{token['content']}y {token['content']}"
        assert {t["id"] for t in added}.isdisjoint(tokenizer.encode(text))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_stop_ids_come_from_both_configs_and_none_is_an_error(saved, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((saved / "tokenizer.json").read_bytes())
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [*TOY.stop_ids, 5]})
    )
    tokenizer = HFTokenizer(tmp_path)
    assert tokenizer.stop_ids == (*TOY.stop_ids, 5)
    assert tokenizer.pad_id == TOY.stop_ids[0]  # no pad is named
    (tmp_path / "generation_config.json").unlink()
    config.write_text("{}")
    with pytest.raises(ValueError, match="names no token"):
        HFTokenizer(tmp_path)
