"""How fast samples are read, in one process: `python -m tests.bench.data [--peer FOLDER]`.

Ours is the stream of a training, from the token file to the micro-batch that the engine is given, without loader processes. Beside it
megatron-core's GPTDataset, which is what `pip install --no-deps --target FOLDER megatron-core==0.16.1` makes importable, and the least
that a reader can do: copies of windows at random places of a bare memory map. All read the same file, warm in the page cache, in
turns, batches of 8 samples of 1,024 tokens as int64. Then what it costs to open a large corpus. Figures are appended to RESULTS.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from tests.bench.harness import heading
from tests.bench.overhead import RESULTS

TOKENS, DOCUMENT, VOCABULARY = 20_000_000, 1_000, 4_096
SEQUENCE, BATCH = 1_024, 8
OPENED_TOKENS, OPENED_DOCUMENTS = 1 << 31, 2_000_000
Reader = Callable[[], object]


def write_corpus(prefix: Path) -> None:
    """Random tokens in documents of equal length."""
    from framework.data.tokens import write_tokens

    tokens = np.random.default_rng(1234).integers(0, VOCABULARY, TOKENS, dtype=np.uint16)
    write_tokens(prefix, tokens.reshape(-1, DOCUMENT), np.dtype("<u2"))


def write_sparse(prefix: Path, tokens: int, documents: int) -> None:
    """Zeros that take no place on the disk, as uint16, and an index of equal documents (the last one has what is left)."""
    from framework.data.tokens import write_index

    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * tokens)
    lengths = np.full(documents, tokens // documents, np.int32)
    lengths[-1] += tokens - int(lengths.sum())
    with open(f"{prefix}.idx", "wb") as file:
        write_index(file, lengths, np.dtype("<u2"))


def our_stream(prefix: Path, sequence: int, batch: int) -> Iterator[object]:
    """Micro-batches of a shuffled training on one rank."""
    from framework.data.stream import StreamSettings, TrainingStream
    from framework.data.tokens import Corpus, TokenFile

    settings = StreamSettings(
        seed=7, shuffle=True, micro_size=batch, accumulation=1, data_rank=0, data_size=1, workers=0, prefetch=4, vocab_size=VOCABULARY
    )
    return TrainingStream(Corpus([TokenFile(str(prefix))], sequence), settings, torch.device("cpu")).start(0)


def ours(prefix: Path) -> Reader:
    steps = our_stream(prefix, SEQUENCE, BATCH)
    return lambda: next(steps)


def memory_map(prefix: Path) -> Reader:
    tokens = np.memmap(f"{prefix}.bin", np.uint16, "r")
    random = np.random.default_rng(7)

    def batch() -> object:
        starts = random.integers(0, len(tokens) - SEQUENCE - 1, BATCH)
        return torch.stack([torch.from_numpy(tokens[start : start + SEQUENCE + 1].astype(np.int64)) for start in starts])

    return batch


def gpt_dataset(prefix: Path) -> Reader:
    """Samples in the order of the dataset's own shuffling, collated by torch."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    class Tokenizer:
        eod, pad, vocab_size, unique_identifiers = 0, -1, VOCABULARY, {"class": "none"}

    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=SEQUENCE, blend=([str(prefix)], None), split="1,0,0", tokenizer=Tokenizer(),
        path_to_cache=str(prefix.parent / "cache"), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False, mmap_bin_files=True,
    )  # fmt: skip
    indexed = IndexedDataset(str(prefix), mmap=True)
    dataset = GPTDataset(indexed, str(prefix), np.arange(len(indexed), dtype=np.int32), 4 * TOKENS // SEQUENCE, Split.train, config)
    numbers = itertools.cycle(range(len(dataset) - len(dataset) % BATCH))
    return lambda: torch.utils.data.default_collate([dataset[next(numbers)] for _ in range(BATCH)])


def rate(read: Reader, seconds: float) -> float:
    """Samples per second."""
    count, began = 0, time.perf_counter()
    while (now := time.perf_counter() - began) < seconds:
        read()
        count += BATCH
    return count / now


def rates(prefix: Path, peer: bool, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Of each reader, one value a round; the order of the readers turns round from one round to the next."""
    readers = {"the stream": ours(prefix), "a bare memory map": memory_map(prefix)}
    if peer:
        readers["GPTDataset of megatron-core"] = gpt_dataset(prefix)
    found: dict[str, list[float]] = {name: [] for name in readers}
    for read in readers.values():
        rate(read, seconds)  # not counted
    for number in range(rounds):
        for name in [*readers][:: -1 if number % 2 else 1]:
            found[name].append(rate(readers[name], seconds))
    return found


def opening(prefix: Path) -> dict[str, float]:
    """In this process: seconds to open a corpus and read a first shuffled micro-batch, and MB that it took."""
    import psutil

    with tempfile.TemporaryDirectory() as folder:  # imports and first calls are not what is measured
        write_sparse(Path(folder, "small"), 100_000, 100)
        next(our_stream(Path(folder, "small"), SEQUENCE, BATCH))
    process = psutil.Process()
    before, began = process.memory_info().rss, time.perf_counter()
    next(our_stream(prefix, SEQUENCE, BATCH))
    return {"seconds": time.perf_counter() - began, "megabytes": (process.memory_info().rss - before) / 1e6}


def opened(folder: Path) -> dict[str, float]:
    """`opening` in a fresh process, of a sparse file."""
    write_sparse(folder / "sparse", OPENED_TOKENS, OPENED_DOCUMENTS)
    words = [sys.executable, "-m", "tests.bench.data", "--opening", str(folder / "sparse")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(peer: bool, rounds: int, seconds: float) -> str:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        write_corpus(Path(folder, "corpus"))
        found = rates(Path(folder, "corpus"), peer, rounds, seconds)
        first = [opened(Path(folder)) for _ in range(3)]
    text = f"\nSamples of {SEQUENCE:,} tokens, micro-batches of {BATCH}, {TOKENS:,} tokens, {rounds} rounds of {seconds:g} s in turns, "
    text += "one process.\n\n| what | samples/s | the stream over it | goal |\n| --- | --- | --- | --- |\n"
    goals = {"a bare memory map": ">= 0.6", "GPTDataset of megatron-core": ">= 5"}
    for name, values in found.items():
        ratios = [mine / other for mine, other in zip(found["the stream"], values, strict=True)]
        over = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if name in goals else ""
        text += f"| {name} | {statistics.median(values):,.0f} | {over} | {goals.get(name, '')} |\n"
    if not peer:
        text += "| GPTDataset of megatron-core | not installed | | >= 5 |\n"
    for key, unit, goal in (("seconds", "s", "< 1"), ("megabytes", "MB", "< 100")):
        value = statistics.median(one[key] for one in first)
        text += f"| opening {OPENED_TOKENS:,} tokens in {OPENED_DOCUMENTS:,} documents, {unit} | {value:.3f} | | {goal} |\n"
    return text


def has_megatron() -> bool:
    try:
        import megatron.core.datasets.gpt_dataset  # noqa: F401
    except ImportError:
        return False
    return True


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="few and short rounds")
    parser.add_argument("--peer", type=Path, help="a folder in which megatron-core is installed")
    parser.add_argument("--opening", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    if given.opening is not None:
        sys.stdout.write(json.dumps(opening(given.opening)) + "\n")
        return
    if given.peer is not None:
        sys.path.append(str(given.peer))
    text = heading() + table(has_megatron(), *((3, 0.5) if given.small else (9, 2.0)))
    with RESULTS.open("a") as results:
        results.write("\n" + text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1:])
