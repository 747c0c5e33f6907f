"""The Ledger on paper: what each book of a rank will hold, from the config alone. Pure arithmetic, no torch.

Books follow DeepSpeed as it is (0.19), not as papers have it: ZeRO 1 and 2 keep flat, padded weights and fp32 masters even of fp32
weights; BF16_Optimizer (bf16 at stage 1) keeps whole gradients and whole fp32 sums; textbook.py has the papers' figures.
tests/planner/test_static_books.py holds them against live engines, to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from framework.config import parameters
from framework.config.schema import Config
from framework.planner import activations
from framework.planner.activations import ACCELERATOR, FLOAT, Kernels
from framework.planner.ledger import Ledger
from framework.planner.partition import Bounds, costs, cut
from framework.topology.grid import Grid

ALIGNMENT = 2
"""Elements per data rank to which DeepSpeed pads a flat group of ZeRO 1 and 2."""


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
    def count(self) -> int:
        """Elements of all parameters."""
        return sum(map(sum, self.groups))

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations are there at once (1F1B, Narayanan et al. 2021, section 2.2)."""
        return min(self.micros, len(self.bounds) - self.stage)


def rank_of(config: Config, grid: Grid, stage: int, index: int = 0, bounds: Bounds | None = None) -> Rank:
    """The rank of a pipeline stage that is number `index` of those that share its state; `bounds` where they were measured."""
    method = "uniform" if config.parallel.partition == "uniform" else "parameters"
    found = bounds or tuple(cut(costs(config.model, method), grid.pipeline))
    micros = max(1, config.batch.global_size // (config.batch.micro_size * grid.data))
    matrices, vectors = _local_sizes(config, found, stage)
    return Rank(stage, found, grid.data * grid.context, index, micros, matrices, vectors)


def predict(
    config: Config, grid: Grid, stage: int = 0, index: int = 0, kernels: Kernels = ACCELERATOR, bounds: Bounds | None = None
) -> Ledger:
    """The Ledger of the rank of a pipeline stage that is number `index` of those that share its state (data x context)."""
    rank = rank_of(config, grid, stage, index, bounds)
    return joined(config, rank, static(config, rank), working(config, rank, kernels))


def fullest(config: Config, grid: Grid, kernels: Kernels = ACCELERATOR) -> Ledger:
    """The Ledger of the stage that holds the most on its device."""
    return max((predict(config, grid, stage, kernels=kernels) for stage in range(grid.pipeline)), key=lambda ledger: ledger.total)


def joined(config: Config, rank: Rank, books: Ledger, work: dict[str, int]) -> Ledger:
    """One Ledger of the static books and of those of a step's work."""
    device = {**books.device, **work}
    return Ledger(device, books.host, books.disk, peak=_peak(config, rank, device))


def _local_sizes(config: Config, bounds: Bounds, stage: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements of the matrices and of the vectors of a stage, in the order of the model."""
    blocks, tied, first, last = range(*bounds[stage]), config.model.tie_embeddings, stage == 0, stage == len(bounds) - 1
    matrices: list[int] = []
    vectors: list[int] = []
    for entry in parameters.table(config.model):
        if entry.block is not None:
            here = entry.block in blocks
        elif entry.name.startswith("embed_"):
            here = first
        else:  # a tied head is the embedding, or on another stage than that a copy of it
            here = last and not (entry.name == "lm_head.weight" and tied and first)
        if here:
            (matrices if len(entry.shape) > 1 else vectors).append(prod(entry.local_shape(config.parallel.tensor)))
    return tuple(matrices), tuple(vectors)


def static(config: Config, rank: Rank) -> Ledger:
    """The books that are the same in every step, at their fullest moment: after a backward pass, or before the update."""
    groups = rank.groups
    weight = 2 if config.precision.half_weights else FLOAT
    if config.zero.stage == 0:
        count = rank.count
        books = {"parameters": count * FLOAT, "gradients": count * FLOAT, "moments": _moments(config) * count}
    elif config.zero.stage == 3:
        part = sum(ceil(size / rank.sharers) for sizes in groups for size in sizes)
        sums = "accumulation" if config.precision.half_weights else "gradients"
        books = {"parameters": part * weight, sums: part * FLOAT, "masters": part * FLOAT, "moments": _moments(config) * part}
    else:
        flat = [_aligned(sum(sizes), rank.sharers) for sizes in groups]
        part = sum(flat) // rank.sharers
        books = {"parameters": sum(flat) * weight, "masters": part * FLOAT, "moments": _moments(config) * part}
        books |= _flat_gradients(config, rank, groups, flat)
    return _placed(config, {book: nbytes for book, nbytes in books.items() if nbytes})


def _moments(config: Config) -> int:
    """Bytes per updated element."""
    optimizer = config.optimizer
    return 2 * FLOAT if optimizer.name == "adamw" else FLOAT * (optimizer.momentum > 0)


def _aligned(size: int, sharers: int) -> int:
    return ceil(size / (ALIGNMENT * sharers)) * ALIGNMENT * sharers


def _flat_gradients(config: Config, rank: Rank, groups: Sequence[Sequence[int]], flat: Sequence[int]) -> dict[str, int]:
    """Gradients and their fp32 sums under ZeRO 1 and 2."""
    count, stage, dtype = rank.count, config.zero.stage, config.precision.dtype
    offloaded = config.zero.offload != "none"
    if offloaded:
        return {"accumulation" if config.precision.half_weights else "gradients": sum(flat) // rank.sharers * FLOAT}
    if not config.precision.half_weights:
        mine = sum(_touched(sizes, size // rank.sharers, rank.index) for sizes, size in zip(groups, flat, strict=True))
        whole = stage == 1 and rank.micros > 1  # until the last micro-batch nothing is reduced
        return {"gradients": max(count if whole else 0, mine) * FLOAT}
    if dtype == "bf16" and stage == 1:  # BF16_Optimizer
        return {"gradients": count * 2, "accumulation": sum(flat) * FLOAT}
    if stage == 1 and rank.micros > 1:
        return {"gradients": count * 2, "accumulation": count * FLOAT}
    return {"accumulation": sum(flat) // rank.sharers * FLOAT}


def _touched(sizes: Sequence[int], part: int, index: int) -> int:
    """Elements of the tensors that reach into one part of a flat group, whose gradients are kept whole; and of the zeros at its end."""
    start, stop, position, found = index * part, (index + 1) * part, 0, 0
    for size in sizes:
        if position < stop and position + size > start:
            found += size
        position += size
    return found + max(0, stop - max(position, start))


def _placed(config: Config, books: dict[str, int]) -> Ledger:
    """On the device, or where offload keeps them."""
    away = {"masters", "moments", "accumulation" if config.precision.half_weights else "gradients"}
    if config.zero.offload == "none":
        return Ledger(books, {}, {})
    if config.zero.stage == 3:
        away |= {"parameters"}
    moved = {book: nbytes for book, nbytes in books.items() if book in away}
    return Ledger({book: nbytes for book, nbytes in books.items() if book not in away}, moved, {})


def working(config: Config, rank: Rank, kernels: Kernels = ACCELERATOR) -> dict[str, int]:
    """The books of a step's work. `activations`, `logits` and `temporaries` grow with batch.micro_size, the others do not."""
    micro, blocks = config.batch.micro_size, range(*rank.bounds[rank.stage])
    plain = sum(activations.block(config, kernels).values())
    less = sum(activations.kept(config, kernels, config.recompute).values())
    every = config.recompute.every if config.recompute.granularity == "full" else 1
    each = sum(less if index % every == 0 else plain for index in blocks)
    each += activations.entrance(config, kernels) if rank.first else 0
    each += activations.exit_(config, kernels) if rank.last else 0
    found = {
        "gathered": _gathered(config, rank),
        "buckets": _buckets(config, rank),
        "activations": micro * rank.in_flight * each,
        "logits": micro * activations.logits(config) if rank.last else 0,
        "temporaries": micro * activations.backward(config, kernels),
    }
    return {book: nbytes for book, nbytes in found.items() if nbytes}


def _gathered(config: Config, rank: Rank) -> int:
    """Weights in another form than they are kept in: whole under ZeRO-3, cast under autocast."""
    sizes = [size for group in rank.groups for size in group]
    weight = 2 if config.precision.half_weights else FLOAT
    if config.zero.stage < 3:
        # A cast copy of every matrix of the blocks and of the head lasts from the forward to the backward pass.
        return 2 * sum(rank.matrices) if config.precision.autocast else 0
    small = sum(size for size in sizes if size < config.zero.persistence_threshold)
    large = [size for size in sizes if size >= config.zero.persistence_threshold]
    ahead = max(max(large, default=0), min(config.zero.prefetch_bucket_size, sum(large)))
    live = min(sum(large), config.zero.max_live_parameters, max(large, default=0) + ahead)
    return weight * (small + live)


def _buckets(config: Config, rank: Rank) -> int:
    """Gradients on their way between ranks, in fp32; and the hidden states that pipeline stages hand on."""
    zero, count = config.zero, rank.count
    handed = 0
    if len(rank.bounds) > 1:
        sizes = activations.Sizes.of(config)
        state = config.batch.micro_size * sizes.slice * config.model.hidden_size * activations.stream(config)
        handed = rank.in_flight * state * (not rank.last) + state * (not rank.first)
    if zero.stage == 0:
        return handed + (min(zero.reduce_bucket_size, count) * FLOAT if rank.sharers > 1 else 0)
    overlapping = zero.stage in (1, 2) and zero.overlap_comm and len(rank.bounds) == 1
    if zero.stage == 1 and config.precision.half_weights and config.precision.dtype == "bf16":
        return handed
    return handed + zero.reduce_bucket_size * FLOAT * (2 if overlapping else 1)


def _peak(config: Config, rank: Rank, books: dict[str, int]) -> int:
    """Bytes at the fullest moment of a step: where the loss, or the first block from the end, goes backward; or the update."""
    lasting = sum(books.get(book, 0) for book in ("parameters", "masters", "moments", "gathered"))
    grown = books.get("gradients", 0) + books.get("accumulation", 0)
    held = grown if rank.micros > 1 or config.zero.stage == 3 else books.get("accumulation", 0)
    buckets = books.get("buckets", 0)
    work = max(books.get("logits", 0), books.get("temporaries", 0))
    during = lasting + held + (buckets if config.zero.stage > 0 else 0) + books.get("activations", 0) + work
    return max(during, lasting + grown + buckets)
