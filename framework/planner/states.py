"""The books that are the same in every step, on paper: to the byte what a rank keeps of weights, gradients, masters and moments.

They follow DeepSpeed as it is (0.19), not as papers have it: ZeRO 1 and 2 keep flat, padded weights and fp32 masters even of fp32
weights; BF16_Optimizer (bf16 at stage 1) keeps whole gradients and whole fp32 sums; textbook.py has the papers' figures.
tests/planner/test_static_books.py holds them against live engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from framework.config import parameters
from framework.config.schema import Config
from framework.planner.activations import FLOAT
from framework.planner.ledger import Ledger
from framework.planner.partition import Bounds, costs, cut
from framework.topology.grid import Grid

ALIGNMENT = 2
"""Elements per data rank to which DeepSpeed pads a flat group of ZeRO 1 and 2."""

SWAPPABLE = 2**20
"""Bytes of the smallest part that DeepSpeed keeps on a disk: a block of its asynchronous reading and writing."""


@dataclass(frozen=True)
class Rank:
    """What the books of a rank depend on beside the config: its blocks, ranks that share its state, its index among them, and
    micro-batches per step. `bounds` are the blocks of all pipeline stages; `matrices` and `vectors` the elements of this rank's
    parameters, in the order of the model."""

    stage: int
    bounds: Bounds
    sharers: int
    index: int
    micros: int
    matrices: tuple[int, ...]
    vectors: tuple[int, ...]

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == len(self.bounds) - 1

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """As the optimizer has them: those that decay, and those that do not."""
        return [sizes for sizes in (self.matrices, self.vectors) if sizes]

    @property
    def flat(self) -> list[int]:
        """Elements of each group's flat tensor under ZeRO 1 and 2, whose parts are alike."""
        step = ALIGNMENT * self.sharers
        return [ceil(sum(sizes) / step) * step for sizes in self.groups]

    @property
    def touched(self) -> int:
        """Elements of the tensors that reach into this rank's part, and of the zeros at its end: these gradients are kept whole."""
        return sum(_touched(sizes, size // self.sharers, self.index) for sizes, size in zip(self.groups, self.flat, strict=True))

    @property
    def count(self) -> int:
        """Elements of all parameters."""
        return sum(map(sum, self.groups))

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations are there at once (1F1B, Narayanan et al. 2021, section 2.2)."""
        return min(self.micros, len(self.bounds) - self.stage)


def rank_of(config: Config, grid: Grid, stage: int = 0, index: int = 0, bounds: Bounds | None = None) -> Rank:
    """The rank of a pipeline stage that is number `index` of those that share its state; `bounds` where they were measured."""
    found = bounds or bounds_of(config, grid.pipeline)
    micros = max(1, config.batch.global_size // (config.batch.micro * grid.data))
    matrices, vectors = _local_sizes(config, found, stage)
    return Rank(stage, found, grid.data * grid.context, index, micros, matrices, vectors)


def bounds_of(config: Config, stages: int) -> Bounds:
    """The blocks of each stage, where nothing was measured."""
    return tuple(cut(costs(config.model, "uniform" if config.parallel.partition == "uniform" else "parameters"), stages))


def alike(bounds: Bounds, every: int) -> dict[int, int]:
    """Of pipeline stages that have equally many blocks and ends, and compute the same of every k-th block again, the first: how
    many they are. The first keeps the most micro-batches."""
    firsts: dict[tuple[int, int, bool, bool], int] = {}
    counts: dict[int, int] = {}
    for stage, (start, stop) in enumerate(bounds):
        first = firsts.setdefault((stop - start, start % every, stage == 0, stage == len(bounds) - 1), stage)
        counts[first] = counts.get(first, 0) + 1
    return counts


def _local_sizes(config: Config, bounds: Bounds, stage: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements of the matrices and of the vectors of a stage, in the order of the model. All blocks are alike."""
    blocks, tied, first, last = len(range(*bounds[stage])), config.model.tie_embeddings, stage == 0, stage == len(bounds) - 1
    parts: dict[str, list[parameters.Parameter]] = {"before": [], "block": [], "after": []}
    for entry in parameters.table(replace(config.model, num_layers=1)):
        if entry.block is not None:
            parts["block"].append(entry)
        elif entry.name.startswith("embed_"):
            parts["before"] += [entry] if first else []
        elif last and not (entry.name == "lm_head.weight" and tied and first):
            parts["after"].append(entry)  # a tied head is the embedding, or on another stage than that a copy of it
    sizes = {
        (part, matrix): [prod(entry.local_shape(config.parallel.tensor)) for entry in entries if (len(entry.shape) > 1) == matrix]
        for part, entries in parts.items()
        for matrix in (True, False)
    }
    matrices, vectors = (sizes["before", kind] + blocks * sizes["block", kind] + sizes["after", kind] for kind in (True, False))
    return tuple(matrices), tuple(vectors)


def static(config: Config, rank: Rank) -> Ledger:
    """The books that are the same in every step, at their fullest moment: after a backward pass, or before the update."""
    size = weight(config)
    if config.zero.stage == 0:
        count = rank.count
        books = {"parameters": count * FLOAT, "gradients": count * FLOAT, "moments": _moments(config) * count}
    elif config.zero.stage == 3:
        part = sum(ceil(length / rank.sharers) for lengths in rank.groups for length in lengths)
        sums = "accumulation" if config.precision.half_weights else "gradients"
        books = {"parameters": part * size, sums: part * FLOAT, "masters": part * FLOAT, "moments": _moments(config) * part}
    else:
        flat, part = sum(rank.flat), sum(rank.flat) // rank.sharers
        books = {"parameters": flat * size, "masters": part * FLOAT, "moments": _moments(config) * part}
        books |= _flat_gradients(config, rank)
    return _placed(config, rank, {book: nbytes for book, nbytes in books.items() if nbytes})


def bucket(config: Config) -> int:
    """Elements of one gradient reduction: DeepSpeed makes room for all of them, so no more than the model has."""
    return min(config.zero.reduce_bucket_size, parameters.count(config.model))


def weight(config: Config) -> int:
    """Bytes of an element of the weights that the forward pass reads."""
    return 2 if config.precision.half_weights else FLOAT


def _moments(config: Config) -> int:
    """Bytes per updated element."""
    optimizer = config.optimizer
    return 2 * FLOAT if optimizer.name == "adamw" else FLOAT * (optimizer.momentum > 0)


def _flat_gradients(config: Config, rank: Rank) -> dict[str, int]:
    """Gradients and their fp32 sums on the device, under ZeRO 1 and 2."""
    count, stage, offloaded = rank.count, config.zero.stage, config.zero.offload != "none"
    whole = stage == 1 and rank.micros > 1  # until the last micro-batch nothing is reduced
    if not config.precision.half_weights:
        mine = 0 if offloaded else rank.touched
        return {"gradients": max(count if whole else 0, mine) * FLOAT}
    if config.precision.dtype == "bf16" and stage == 1 and not offloaded:  # BF16_Optimizer
        return {"gradients": count * 2, "accumulation": sum(rank.flat) * FLOAT}
    # Each half gradient is added to its fp32 sum as soon as it is there.
    return {"accumulation": (count if whole else sum(rank.flat) // rank.sharers) * FLOAT}


def _touched(sizes: Sequence[int], part: int, index: int) -> int:
    start, stop, position, found = index * part, (index + 1) * part, 0, 0
    for size in sizes:
        if position < stop and position + size > start:
            found += size
        position += size
    return found + max(0, stop - max(position, start))


def _placed(config: Config, rank: Rank, books: dict[str, int]) -> Ledger:
    """On the device, or where offload keeps them. It needs a second copy of the gradients there, which the update reads."""
    if config.zero.offload == "none":
        return Ledger(books, {}, {})
    sums = "accumulation" if config.precision.half_weights else "gradients"
    host = {book: books[book] for book in ("masters", "moments") if book in books}
    if config.zero.stage == 3:
        host |= {"parameters": books["parameters"], sums: 2 * books[sums]}
    else:
        largest = max(max(sizes) for sizes in rank.groups)
        apart = config.zero.stage == 2 and not config.precision.half_weights and rank.micros > 1
        copies = (books["masters"] // FLOAT + largest) * weight(config)  # of this rank's weights, and of one gradient
        host |= {sums: books["masters"] + (rank.touched * FLOAT if apart else 0), "buckets": copies}
    moved = {"masters", "moments"} | ({"parameters", sums} if config.zero.stage == 3 else set())
    disk = _swapped(config, rank) if config.zero.offload == "nvme" else {}
    host = {book: nbytes - disk.get(book, 0) for book, nbytes in host.items() if nbytes > disk.get(book, 0)}
    return Ledger({book: nbytes for book, nbytes in books.items() if book not in moved}, host, disk)


def _swapped(config: Config, rank: Rank) -> dict[str, int]:
    """Bytes of this rank's files under zero.nvme_path: parts of SWAPPABLE bytes and more, of weights and gradients parameter by
    parameter, of masters and moments group by group."""
    groups = [[ceil(size / rank.sharers) for size in sizes] for sizes in rank.groups]
    parts = [part for sizes in groups for part in sizes]
    updated = sum(sum(sizes) for sizes in groups if sum(sizes) * FLOAT >= SWAPPABLE)
    return {
        "parameters": sum(part * weight(config) for part in parts if part * weight(config) >= SWAPPABLE),
        "accumulation" if config.precision.half_weights else "gradients": sum(part * FLOAT for part in parts if part * FLOAT >= SWAPPABLE),
        "masters": updated * FLOAT,
        "moments": updated * _moments(config),
    }
