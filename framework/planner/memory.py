"""The Ledger on paper: what each book of a rank will hold, from the config alone. Pure arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from framework.config.schema import Config, Recompute
from framework.planner import activations
from framework.planner.activations import ACCELERATOR, FLOAT, Kernels
from framework.planner.ledger import Ledger
from framework.planner.partition import Bounds
from framework.planner.states import Rank, alike, bounds_of, bucket, rank_of, static, weight
from framework.topology.grid import Grid


def predict(
    config: Config, grid: Grid, stage: int = 0, index: int = 0, kernels: Kernels = ACCELERATOR, bounds: Bounds | None = None
) -> Ledger:
    """The Ledger of the rank of a pipeline stage that is number `index` of those that share its state (data x context)."""
    rank = rank_of(config, grid, stage, index, bounds)
    return joined(config, rank, static(config, rank), working(config, rank, kernels), kernels)


def fullest(config: Config, grid: Grid, kernels: Kernels = ACCELERATOR, bounds: Bounds | None = None) -> Ledger:
    """The Ledger of the stage that holds the most on its device."""
    bounds = bounds or bounds_of(config, grid.pipeline)
    ledgers = (predict(config, grid, stage, kernels=kernels, bounds=bounds) for stage in alike(bounds, config.recompute.every))
    return max(ledgers, key=lambda ledger: ledger.total)


def joined(config: Config, rank: Rank, books: Ledger, work: dict[str, int], kernels: Kernels = ACCELERATOR) -> Ledger:
    """One Ledger of the static books and of those of a step's work."""
    device = {**books.device, **work}
    fullest_moment = peak(device, rank, config.zero.stage, each_of(config, rank, kernels), config.batch.micro)
    return Ledger(device, books.host, books.disk, peak=fullest_moment)


def working(config: Config, rank: Rank, kernels: Kernels = ACCELERATOR) -> dict[str, int]:
    """The books of a step's work."""
    found = {"gathered": gathered(config, rank), "buckets": _buckets(config, rank)}
    found |= {book: config.batch.micro * nbytes for book, nbytes in moving(config, rank, kernels).items()}
    found["activations"] += rank.in_flight * activations.shared(config)
    return {book: nbytes for book, nbytes in found.items() if nbytes}


def moving(config: Config, rank: Rank, kernels: Kernels = ACCELERATOR) -> dict[str, int]:
    """The books that grow with batch.micro_size (activations but for what its samples share), of micro-batches of one sample."""
    blocks = range(*rank.bounds[rank.stage])
    plain = sum(activations.block(config, kernels).values())
    less = sum(activations.kept(config, kernels, config.recompute).values())
    every = config.recompute.every if config.recompute.granularity == "full" else 1
    each = sum(less if index % every == 0 else plain for index in blocks) + activations.places(config)
    each += activations.entrance(config, kernels) if rank.first else 0
    each += activations.exit_(config, kernels) if rank.last else 0
    return {
        "activations": rank.in_flight * each,
        "logits": activations.logits(config) if rank.last else 0,
        "temporaries": activations.backward(config, kernels),
    }


def gathered(config: Config, rank: Rank) -> int:
    """Weights in another form than they are kept in: whole under ZeRO-3, cast under autocast."""
    sizes = [size for group in rank.groups for size in group]
    if config.zero.stage < 3:
        return _cast(config, rank) if config.precision.autocast else 0
    if rank.sharers == 1:
        return 0  # the part of a single rank is the whole
    small = sum(size for size in sizes if size < config.zero.persistence_threshold)
    large = [size for size in sizes if size >= config.zero.persistence_threshold]
    ahead = max(max(large, default=0), min(config.zero.prefetch_bucket_size, sum(large)))
    live = min(sum(large), config.zero.max_live_parameters, max(large, default=0) + ahead)
    return weight(config) * (small + live)


def _cast(config: Config, rank: Rank) -> int:
    every = config.recompute.every if config.recompute.granularity == "full" else 1
    again = activations.cast_block(config, config.recompute)
    plain = activations.cast_block(config, Recompute())
    blocks = sum(again if index % every == 0 else plain for index in range(*rank.bounds[rank.stage]))
    return blocks + (activations.cast_head(config) if rank.last else 0)


def _buckets(config: Config, rank: Rank) -> int:
    """Gradients on their way between ranks, in fp32; and the hidden states that pipeline stages hand on."""
    return config.batch.micro * handed(rank, state(config)) + reductions(config, rank)


def state(config: Config) -> int:
    """Bytes of one sample's hidden state, as stages hand it on."""
    return activations.Sizes.of(config).slice * config.model.hidden_size * activations.stream(config)


def handed(rank: Rank, state_bytes: int) -> int:
    """Bytes of hidden states that a stage keeps for its neighbours, of micro-batches of one sample."""
    if len(rank.bounds) == 1:
        return 0
    return rank.in_flight * state_bytes * (not rank.last) + state_bytes * (not rank.first)


def reductions(config: Config, rank: Rank) -> int:
    """Bytes of gradients on their way between the ranks that share a state."""
    zero = config.zero
    if zero.stage == 0:
        return min(bucket(config), rank.count) * FLOAT if rank.sharers > 1 else 0
    overlapping = zero.stage in (1, 2) and zero.overlap_comm and len(rank.bounds) == 1
    if zero.stage == 1 and config.precision.half_weights and config.precision.dtype == "bf16":
        return 0
    return bucket(config) * FLOAT * (2 if overlapping else 1)


class Each(NamedTuple):
    """Bytes that one block keeps of one sample: with nothing computed again, and as the first block does it; and how many blocks
    stand behind the last one that is computed again. `bucket`: bytes of one gradient reduction."""

    block: int
    first: int
    behind: int
    bucket: int


def each_of(config: Config, rank: Rank, kernels: Kernels = ACCELERATOR) -> Each:
    """What `peak` has to know of a stage's blocks."""
    block = sum(activations.block(config, kernels).values())
    first = sum(activations.kept(config, kernels, config.recompute).values())
    return Each(block, first, _after_the_last(config, rank), bucket(config) * FLOAT)


def peak(books: Mapping[str, int], rank: Rank, zero_stage: int, each: Each, micro: int) -> int:
    """Bytes at the fullest moment of a step, which is one of four: the loss goes backward; the last block that is computed again
    does; the first block does, when the other gradients are there; the update. `books` are those of micro-batches of `micro`."""
    lasting = sum(books.get(book, 0) for book in ("parameters", "masters", "moments"))
    whole, blocks = books.get("gathered", 0), len(range(*rank.bounds[rank.stage]))
    grown = books.get("gradients", 0) + books.get("accumulation", 0)
    held = grown if rank.micros > 1 or zero_stage == 3 else books.get("accumulation", 0)
    buckets, kept = books.get("buckets", 0), books.get("activations", 0)
    # Stage 0 and a pipeline reduce when everything has gone backward.
    later = each.bucket if len(rank.bounds) > 1 else buckets
    reducing = buckets - (later if zero_stage == 0 or len(rank.bounds) > 1 else 0)
    work, others = books.get("temporaries", 0), (rank.in_flight - 1) * kept // rank.in_flight
    return lasting + max(
        held + reducing + whole + kept + books.get("logits", 0),
        held + reducing + whole + kept - each.behind * micro * each.block + work,
        max(held, grown - grown // blocks) + reducing + whole // (blocks if zero_stage < 3 else 1) + others + micro * each.first + work,
        grown + buckets + (whole if zero_stage == 3 else 0),
    )


def _after_the_last(config: Config, rank: Rank) -> int:
    """Blocks of this stage behind its last one that is computed again: these have gone backward before that is."""
    blocks, recompute = range(*rank.bounds[rank.stage]), config.recompute
    if recompute.granularity != "full":
        return 0
    return next((behind for behind, index in enumerate(reversed(blocks)) if index % recompute.every == 0), 0)
