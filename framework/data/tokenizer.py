"""Tokenizers that people have, behind one small protocol: texts in, token ids out, and back.

    bytes                    the bytes of UTF-8: 256 ids, nothing to load
    tokenizer.json           Hugging Face's one-file format, or a folder that holds one
    FOLDER, FOLDER/FILE      GPT-2's vocabulary and merges: vocab.json + merges.txt, or encoder.json + vocab.bpe
    *.model, *.model.v3      SentencePiece
    tekken.json, tekken*     Mistral's byte pairs

Reads the files of a tokenizer and nothing else. A library that is not installed is asked for by name. Texts are encoded as
Megatron-LM's tools do it: no token is put before or after them here; the end of a document is the caller's to add.
"""

from __future__ import annotations

import base64
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from framework.base.errors import ConfigError

BYTES = "bytes"
KEY = "data.tokenizer"
GPT2_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""Names of the token that ends a document, the likeliest first, where no tokenizer_config.json says which it is."""
FORMS = "bytes, a tokenizer.json, a folder with vocab.json and merges.txt, a *.model of SentencePiece, or a tekken.json"

TEKKEN_SPECIAL = {"<unk>": 0, "<s>": 1, "</s>": 2}
"""Of the files that do not list theirs."""


class Tokenizer(Protocol):
    """vocab_size: ids are 0 to vocab_size - 1. end: id of the token that ends a document, None where there is none.
    checksum: xxh3_128 of its files, which says whether two are the same."""

    kind: str
    vocab_size: int
    end: int | None
    checksum: str

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text: int64 [tokens] each."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; U+FFFD for bytes that are no whole character, nothing for ids that are no text."""
        ...


def open_tokenizer(path: str | None, end: str = "auto") -> Tokenizer:
    """The tokenizer at `path`, in any of the forms above.

    `end` names the token that ends a document: auto (what the tokenizer itself says), none, or the token's text. Raises
    ConfigError where there is no tokenizer, where its library is missing, and where it has no such token.
    """
    if path is None:
        raise ConfigError(KEY, "nothing", FORMS, f"{KEY}=bytes, or {KEY}=PATH")
    if path == BYTES:
        return _refuse_end(ByteTokenizer(), end)
    place = Path(path)
    if not place.exists():
        raise ConfigError(KEY, f"{path}, which does not exist", FORMS)
    folder = place if place.is_dir() else place.parent
    if place.is_dir():
        place = next((found for name in ("tokenizer.json", "tekken.json") if (found := place / name).is_file()), place)
        place = next(iter(sorted(place.glob("*.model"))), place) if place.is_dir() and _gpt2_files(place) is None else place
    try:
        if ".model" in place.suffixes:
            return SentencePiece(place, end)
        if place.name.startswith("tekken") and place.suffix == ".json":
            return Tekken(place, end)
        pair = _gpt2_files(folder)
        if pair is not None and (place.is_dir() or place in pair):
            return FastTokenizer.from_pair(pair, end)
        if place.suffix == ".json":
            return FastTokenizer.from_json(place, end)
    except ConfigError:
        raise
    except Exception as error:  # the libraries raise no class of their own for a file that they cannot read
        raise ConfigError(KEY, f"{place}, which does not read: {str(error)[:120]}", FORMS) from None
    raise ConfigError(KEY, path, FORMS)


class ByteTokenizer:
    """Each byte of UTF-8 is a token. Nothing is left for an end of document."""

    kind, vocab_size = BYTES, 256
    end: int | None = None
    checksum = xxhash.xxh3_128_hexdigest(BYTES.encode())

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(each for each in ids if each < self.vocab_size).decode(errors="replace")


class FastTokenizer:
    """What the library `tokenizers` reads. Names of special tokens that stand in a text become these tokens, as in transformers."""

    def __init__(self, kind: str, inner: Any, files: Sequence[Path], end: str | None) -> None:
        self.kind, self.checksum = kind, _checksum(files)
        self._inner = inner
        # A file may ask for rows of equal length. Documents have their own.
        inner.no_padding()
        inner.no_truncation()
        ids = inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1  # ids may have holes
        self.end = None if end is None else _known(end, ids.get(end), files[0])

    @classmethod
    def from_json(cls, file: Path, end: str) -> FastTokenizer:
        inner = _library("tokenizers", "prepare").Tokenizer.from_str(file.read_text(encoding="utf-8"))
        return cls("tokenizer.json", inner, [file], _end_of(end, file, inner.token_to_id))

    @classmethod
    def from_pair(cls, files: tuple[Path, Path], end: str) -> FastTokenizer:
        """GPT-2's byte-level byte pairs (Radford et al. 2019): no space before a text, nothing normalised."""
        library = _library("tokenizers", "prepare")
        vocabulary = json.loads(files[0].read_text(encoding="utf-8"))
        lines = files[1].read_text(encoding="utf-8").split("\n")
        merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        inner = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=merges))
        inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = library.decoders.ByteLevel()
        inner.add_special_tokens([token for token in END_TOKENS if token in vocabulary])
        return cls("gpt2", inner, files, _end_of(end, files[0], inner.token_to_id))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        # The fast form leaves out the places of tokens in the text, which nobody asks for.
        return [np.array(each.ids, np.int64) for each in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids))


class SentencePiece:
    """A model of the library `sentencepiece`."""

    kind = "sentencepiece"

    def __init__(self, file: Path, end: str) -> None:
        self._inner = _library("sentencepiece", "sentencepiece").SentencePieceProcessor(model_file=str(file))
        self.checksum = _checksum([file])
        self.vocab_size = int(self._inner.get_piece_size())
        own = int(self._inner.eos_id())
        if end in ("auto", "none"):
            self.end = own if end == "auto" and own >= 0 else None
        else:
            number = int(self._inner.piece_to_id(end))
            self.end = _known(end, None if number == self._inner.unk_id() else number, file)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(ids, np.int64) for ids in self._inner.encode(list(texts), out_type=int, num_threads=1)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode([each for each in ids if each < self.vocab_size])


class Tekken:
    """Mistral's tekken.json, by the library `tiktoken`: ranks of byte strings behind a block of special tokens, which no text makes."""

    kind = "tekken"

    def __init__(self, file: Path, end: str) -> None:
        content = json.loads(file.read_text(encoding="utf-8"))
        settings = content["config"]
        self._special = int(settings["default_num_special_tokens"])
        self.vocab_size = int(settings["default_vocab_size"])
        ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in content["vocab"]}
        # The file may hold more than the vocabulary takes: the last ranks are not in use then.
        ranks = {text: rank for text, rank in ranks.items() if rank < self.vocab_size - self._special}
        names = {entry["token_str"]: int(entry["rank"]) for entry in content.get("special_tokens") or ()} or TEKKEN_SPECIAL
        self._inner = _library("tiktoken", "tekken").Encoding(
            file.stem, pat_str=settings["pattern"], mergeable_ranks=ranks, special_tokens={}
        )
        self.checksum = _checksum([file])
        wanted = "</s>" if end == "auto" else end
        self.end = None if end == "none" else _known(wanted, names.get(wanted), file)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(self._inner.encode_ordinary(text), np.int64) + self._special for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        known = [each - self._special for each in ids if self._special <= each < self.vocab_size]
        return self._inner.decode_bytes(known).decode(errors="replace")


def _gpt2_files(folder: Path) -> tuple[Path, Path] | None:
    """Vocabulary and merges in `folder`."""
    for names in GPT2_FILES:
        first, second = (folder / name for name in names)
        if first.is_file() and second.is_file():
            return first, second
    return None


def _end_of(end: str, file: Path, id_of: Any) -> str | None:
    """The text of the token that ends a document: for auto what tokenizer_config.json beside `file` says, or a name that is usual."""
    if end != "auto":
        return None if end == "none" else end
    beside = file.with_name("tokenizer_config.json")
    said = json.loads(beside.read_text(encoding="utf-8")).get("eos_token") if beside.is_file() else None
    said = said.get("content") if isinstance(said, dict) else said
    found = said or next((token for token in END_TOKENS if id_of(token) is not None), None)
    if found is None:
        got = f"auto, and {file} has none of {', '.join(END_TOKENS)}"
        raise ConfigError("prepare.end_of_document", got, "a token of the vocabulary, or none", "prepare.end_of_document=none")
    return found


def _known(token: str, number: int | None, file: Path) -> int:
    if number is None:
        got = f"{token}, which {file} does not have"
        raise ConfigError("prepare.end_of_document", got, "a token of the vocabulary, auto or none", "prepare.end_of_document=auto")
    return number


def _refuse_end(tokenizer: ByteTokenizer, end: str) -> ByteTokenizer:
    if end in ("auto", "none"):
        return tokenizer
    got = f"{end} with {KEY} bytes, which are all in use"
    raise ConfigError("prepare.end_of_document", got, "auto or none", "prepare.end_of_document=none")


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(KEY, f"a tokenizer that needs the package {name}", "that package", f"pip install '.[{extra}]'") from None


def _checksum(files: Sequence[Path]) -> str:
    """xxh3_128 over the files' content."""
    digest = xxhash.xxh3_128()
    for file in files:
        content = file.read_bytes()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()
