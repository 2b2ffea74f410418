"""Text to token ids and back, behind one interface: a word-level one for the toy world, HF's else.

Two ways in. `encode` is for outside text (questions, passages, reports): whatever the text holds,
no control token comes out. `encode_template` is for our own template text: control tokens are
recognised. Neither adds anything: in the toy vocabulary a word carries the space before it, so a
text that continues a line begins with a space; a first word without one is spelled in bytes.
Must not know: chat templates of real models, prompts, questions.
"""

import json
import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2 as sp_proto
from tokenizers import decoders, models, pre_tokenizers

from mas_jax.data.world_text import CHAT_ROLES, vocabulary

SPACE = "\u2581"  # how sentencepiece writes a space inside a piece
UNKNOWN = "<unk>"  # id 0: never encoded, thanks to the bytes, but a policy may sample it
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROLS = (
    PAD,
    TURN_START,
    TURN_END,
    *(
        f"<{slash}{name}>"
        for name in ("think", "search", "information", "report", "assign", "select", "answer")
        for slash in ("", "/")
    ),
)
# one line: role and text follow the control token directly; a text begins with a space
TOY_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}{{ message.content }}<|im_end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
REPLACEMENT = "\ufffd"  # stands for an id that no token has; models pad their vocabulary


class Tokenizer(Protocol):
    """What the agents need of a tokenizer."""

    vocab_size: int
    stop_ids: tuple[int, ...]  # each ends an assistant's turn
    pad_id: int
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """Ids of outside text, never one of a control token. Raises: ValueError on surrogates."""

    def encode_template(self, text: str) -> list[int]:
        """Ids of our own text, control tokens recognised. Raises: ValueError on surrogates."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; control tokens as they are written."""

    def token_text(self, token: int) -> str:
        """The text of one token alone; part of a character shows as U+FFFD."""


def check_text(text: str) -> None:
    """Raises ValueError if the text holds a lone surrogate, which has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"lone surrogate {text[error.start]!r} at {error.start}: decode the source with "
            "errors='replace'"
        ) from error


class WordTokenizer:
    """A sentencepiece model whose pieces are whole words, single bytes and control symbols.

    Control symbols have the largest ids. `decode(encode(text)) == text` for every text.
    """

    def __init__(self, model: bytes) -> None:
        self._model = model
        self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._pieces.get_piece_size()
        # <unk> is written out like a control token, but never read as one
        self._controls = {
            i: self._pieces.id_to_piece(i)
            for i in range(self.vocab_size)
            if self._pieces.is_control(i) or self._pieces.is_unknown(i)
        }
        self._control_ids = {
            text: i for i, text in self._controls.items() if self._pieces.is_control(i)
        }
        self._control_pattern = re.compile("|".join(map(re.escape, self._control_ids)))
        self._space_bytes = [self._pieces.piece_to_id(f"<0x{b:02X}>") for b in SPACE.encode()]
        self.stop_ids = (self._control_ids[TURN_END],)
        self.pad_id = self._control_ids[PAD]
        self.fingerprint = blake2b(model, digest_size=16).hexdigest()

    @classmethod
    def from_words(cls, words: Iterable[str], *, bare: Sequence[str] = ()) -> "WordTokenizer":
        """The tokenizer of a word list. bare: words that also stand without a space before them.

        Raises: ValueError for a word that is repeated or holds a space.
        """
        return cls(_build_model([SPACE + word for word in words] + list(bare)))

    @classmethod
    def load(cls, directory: Path) -> "WordTokenizer":
        """The tokenizer that `save` wrote."""
        return cls((directory / "tokenizer.model").read_bytes())

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        check_text(text)
        # sentencepiece would take the character that it writes for a space for a space
        first, *rest = text.split(SPACE)
        ids = self._pieces.encode(first)
        for part in rest:
            ids += self._space_bytes + self._pieces.encode(part)
        return ids

    def encode_template(self, text: str) -> list[int]:
        """See `Tokenizer.encode_template`."""
        ids, end = [], 0
        for match in self._control_pattern.finditer(text):
            ids += [*self.encode(text[end : match.start()]), self._control_ids[match[0]]]
            end = match.end()
        return ids + self.encode(text[end:])

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        text, run = "", []
        for token in ids:
            if token in self._controls or not 0 <= token < self.vocab_size:
                text += self._pieces.decode(run) + self._controls.get(token, REPLACEMENT)
                run = []
            else:
                run.append(int(token))
        return text + self._pieces.decode(run)

    def token_text(self, token: int) -> str:
        """See `Tokenizer.token_text`."""
        return self.decode([token])

    def save(self, directory: Path) -> None:
        """Writes `tokenizer.model`, and what transformers' AutoTokenizer reads to equal ids.

        AutoTokenizer is `encode_template`: it recognises control tokens wherever they stand. Beside
        weights of Qwen2's family name PreTrainedTokenizerFast: AutoTokenizer would take another.
        """
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer.model").write_bytes(self._model)
        self._backend().save(str(directory / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": TOY_CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": TURN_END,
            "pad_token": PAD,
            "bos_token": None,
            "unk_token": None,
            "model_max_length": 1_000_000,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")

    def _backend(self) -> tokenizers.Tokenizer:
        """The same tokenizer for the `tokenizers` library."""
        num_plain = min(self._control_ids.values())
        plain = [(self._pieces.id_to_piece(i), self._pieces.get_score(i)) for i in range(num_plain)]
        backend = tokenizers.Tokenizer(models.Unigram(plain, unk_id=0, byte_fallback=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=SPACE, prepend_scheme="never", split=False
        )
        backend.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        backend.add_special_tokens(
            [
                tokenizers.AddedToken(text, special=True, normalized=False)
                for text in self._control_ids
            ]
        )
        return backend


def make_toy_tokenizer() -> WordTokenizer:
    """The toy world's tokenizer: one token a word, at most 1,024 in all."""
    return WordTokenizer.from_words(vocabulary(), bare=CHAT_ROLES)


def _build_model(pieces: Sequence[str]) -> bytes:
    """A sentencepiece model of exactly these pieces, besides bytes and control symbols."""
    if len(set(pieces)) < len(pieces) or any(re.search(r"\s", piece) for piece in pieces):
        raise ValueError("words must be different, without white space in them")
    kind = sp_proto.ModelProto.SentencePiece
    model = sp_proto.ModelProto()
    model.pieces.add(piece=UNKNOWN, score=0.0, type=kind.UNKNOWN)
    for byte in range(256):
        model.pieces.add(piece=f"<0x{byte:02X}>", score=0.0, type=kind.BYTE)
    # one score for all: the segmentation with the fewest pieces wins
    for piece in (SPACE, *pieces):
        model.pieces.add(piece=piece, score=-1.0, type=kind.NORMAL)
    for text in CONTROLS:
        model.pieces.add(piece=text, score=0.0, type=kind.CONTROL)
    ids = {piece.piece: index for index, piece in enumerate(model.pieces)}
    trainer = model.trainer_spec
    trainer.model_type = sp_proto.TrainerSpec.UNIGRAM
    trainer.vocab_size = len(model.pieces)
    trainer.byte_fallback = True
    trainer.unk_id, trainer.bos_id = 0, -1
    trainer.eos_id, trainer.pad_id = ids[TURN_END], ids[PAD]
    trainer.eos_piece, trainer.pad_piece = TURN_END, PAD
    normalizer = model.normalizer_spec
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = False
    normalizer.remove_extra_whitespaces = False
    normalizer.escape_whitespaces = True
    return model.SerializeToString(deterministic=True)


class HFTokenizer:
    """The tokenizer of a Hugging Face checkpoint directory, read by the `tokenizers` library.

    Outside text goes through a copy whose table of added tokens is empty; flags of the ordinary
    one do not suffice: without special tokens added, a text still forges `<|im_end|>`, and with
    special tokens split, still `<think>`. pad_id: a stop id where the checkpoint names no pad.
    Raises: ValueError if an added token can come out of plain text, or no end of turn is named.
    """

    def __init__(self, directory: Path) -> None:
        directory = Path(directory)
        full = (directory / "tokenizer.json").read_bytes()
        spec = json.loads(full)
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        self._full = _backend_of(full)
        plain = spec | {"added_tokens": [], "post_processor": None}  # the latter may add tokens
        self._plain = _backend_of(json.dumps(plain).encode())
        self._added = {token["id"]: token["content"] for token in spec["added_tokens"]}
        reachable = self._added.keys() & _from_text(spec["model"], self._plain.get_vocab())
        if reachable:
            raise ValueError(
                f"{directory}: added tokens {sorted(self._added[i] for i in reachable)} are in the "
                "vocabulary of plain text, which could forge them; this kind is not supported"
            )
        self.vocab_size = max(self._full.get_vocab().values()) + 1
        self.stop_ids = self._read_stop_ids(directory, config)
        pad = config.get("pad_token")
        self.pad_id = self._full.token_to_id(_content(pad)) if pad else self.stop_ids[0]
        ends = repr((self.stop_ids, self.pad_id)).encode()
        self.fingerprint = blake2b(full + ends, digest_size=16).hexdigest()

    def _read_stop_ids(self, directory: Path, config: dict) -> tuple[int, ...]:
        """The end-of-sequence token of the config, then those of the generation config."""
        ids = (
            [self._full.token_to_id(_content(config["eos_token"]))]
            if config.get("eos_token")
            else []
        )
        generation = directory / "generation_config.json"
        if generation.exists():
            more = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id", [])
            ids += more if isinstance(more, list) else [more]
        if not ids or None in ids:
            raise ValueError(
                f"{directory}: eos_token names no token; set it in tokenizer_config.json"
            )
        return tuple(dict.fromkeys(ids))

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        check_text(text)
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_template(self, text: str) -> list[int]:
        """See `Tokenizer.encode_template`."""
        check_text(text)
        return self._full.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        text, run = "", []
        for token in ids:
            if 0 <= token < self.vocab_size:
                run.append(int(token))
            else:
                text += self._full.decode(run, skip_special_tokens=False) + REPLACEMENT
                run = []
        return text + self._full.decode(run, skip_special_tokens=False)

    def token_text(self, token: int) -> str:
        """See `Tokenizer.token_text`."""
        return self.decode([token])


def _from_text(model: dict, vocabulary: dict[str, int]) -> set[int]:
    """Ids of a vocabulary that plain text can give. In a BPE whose merges are followed, an entry of
    several characters comes out only if a merge makes it."""
    if model["type"] != "BPE" or model.get("ignore_merges"):
        return set(vocabulary.values())
    pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
    made = {left + right for left, right in pairs}
    return {id_ for text, id_ in vocabulary.items() if len(text) == 1 or text in made}


def _backend_of(spec: bytes) -> tokenizers.Tokenizer:
    """A tokenizer of the library from its JSON; it neither truncates nor pads."""
    backend = tokenizers.Tokenizer.from_buffer(spec)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _content(token: str | dict) -> str:
    """The text of a token as configs write it: plain, or with its flags."""
    return token["content"] if isinstance(token, dict) else token
