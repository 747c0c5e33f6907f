"""All layouts of a number of ranks: what the rules and the Ledger leave of them, ranked by time. Pure arithmetic.

A layout is degrees, sequence parallel, ZeRO, offload, recompute and the micro-batch. They are walked as a tree: the rules of
framework/config look at a branch once, its static books are reckoned once, its moving books and its pace once per recompute
choice for one sample, and micro-batches are multiplied out. A branch that is left out counts with all its leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from framework.base.errors import ConfigError
from framework.config.case import Case
from framework.config.check import check
from framework.config.rules_layout import global_batch
from framework.config.schema import Config, Parallel, Recompute
from framework.planner import activations, memory
from framework.planner.cost import Pace, Sharing, kernels_of, pace_of, sharing_of, whole_step
from framework.planner.hardware import SHARE, Site
from framework.planner.ledger import Ledger
from framework.planner.partition import Bounds
from framework.planner.states import Rank, alike, bounds_of, rank_of, static
from framework.topology.grid import Grid

ZEROS = ((0, "none"), (1, "none"), (2, "none"), (3, "none"), (1, "cpu"), (2, "cpu"), (3, "cpu"))
RECOMPUTES = (
    Recompute(),
    Recompute("selective", modules=("activation",)),
    Recompute("selective", modules=("norm", "activation")),
    Recompute("selective", modules=("attention",)),
    Recompute("selective", modules=("attention", "activation")),
    Recompute("full", every=4),
    Recompute("full", every=2),
    Recompute("full"),
)
"""From the least computed again to the most."""


@dataclass(frozen=True)
class Layout:
    """One leaf. `micro` is batch.micro_size; `stage` and `offload` are ZeRO's."""

    grid: Grid
    sequence: bool
    stage: int
    offload: str
    recompute: Recompute
    micro: int

    def of(self, config: Config) -> Config:
        """`config` in this layout; the number of data ranks is left to be derived."""
        grid = self.grid
        parallel = replace(
            config.parallel, data=None, tensor=grid.tensor, sequence=self.sequence, pipeline=grid.pipeline, context=grid.context
        )
        zero = replace(config.zero, stage=self.stage, offload=self.offload)  # type: ignore[arg-type]
        return replace(config, parallel=parallel, zero=zero, recompute=self.recompute, batch=replace(config.batch, micro_size=self.micro))


@dataclass(frozen=True)
class Found:
    """A layout that the rules allow and that fits: seconds per step, bytes of its fullest rank on the device and on the host."""

    layout: Layout
    seconds: float
    device: int
    host: int


class Rejected(NamedTuple):
    """A branch that was left out: its first leaf, how much of that describes it (as in `describe`), how many layouts it has, and the
    letter of the rule or the book that is too large."""

    layout: Layout
    depth: int
    layouts: int
    reason: str


@dataclass
class Findings:
    """What a search has come to; `found` the fastest first."""

    found: list[Found] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)

    @property
    def layouts(self) -> int:
        """All that were looked at."""
        return len(self.found) + sum(branch.layouts for branch in self.rejected)


@dataclass(frozen=True)
class Books:
    """Of one stage and one choice of recompute: bytes that one sample adds (`shared`: a micro-batch), and its pace."""

    each: int
    shared: int
    logits: int
    work: int
    state: int
    blocks: memory.Each
    pace: Pace


@dataclass
class Stem:
    """What the branches of a grid that compute every k-th block again have in common: its different stages, these with so many
    micro-batches in a step, and their books."""

    stages: list[Rank]
    books: dict[Recompute, list[Books]] = field(default_factory=dict)
    at: dict[int, list[Rank]] = field(default_factory=dict)

    def ranks(self, micros: int) -> list[Rank]:
        if micros not in self.at:
            self.at[micros] = [replace(rank, micros=micros) for rank in self.stages]
        return self.at[micros]


class Search:
    """A search over `ranks` ranks; what branches have in common is reckoned once and kept."""

    def __init__(self, config: Config, ranks: int, site: Site) -> None:
        self.config, self.ranks, self.site = config, ranks, site
        self.kernels = kernels_of(site)
        self.findings = Findings()
        self.micros = _divisors(config.batch.global_size)
        own = config.recompute
        self.recomputes = RECOMPUTES if own.granularity == "auto" or own in RECOMPUTES else (*RECOMPUTES, own)
        # The memory of a CPU's rank is the host's: there is nowhere to move anything to.
        self.zeros = tuple(zero for zero in ZEROS if zero[1] == "none" or not site.hardware.shared)
        self.every = sorted({recompute.every for recompute in self.recomputes})
        self.leaves = len(self.recomputes) * len(self.micros)
        self._bounds: dict[int, Bounds] = {}
        self._ranks: dict[tuple[int, int, int], Rank] = {}
        self._static: dict[tuple[int, int, int, int, int, str, bool], tuple[Ledger, int]] = {}
        self._offences: dict[tuple[int, int], str] = {}

    def run(self) -> Findings:
        """Walk all branches."""
        for grid in grids(self.ranks):
            for sequence in (False, True) if grid.tensor > 1 else (False,):
                self._grid(grid, sequence)
        self.findings.found.sort(key=_order)
        return self.findings

    def _grid(self, grid: Grid, sequence: bool) -> None:
        stems: dict[int, Stem] = {}
        for stage, offload in self.zeros:
            layout = Layout(grid, sequence, stage, offload, self.recomputes[0], 1)
            config = layout.of(self.config)
            try:
                check(config, self.ranks, self.site.ranks_per_host)
            except ConfigError as error:
                self._leave_out(layout, 3, self.leaves, f"{error.subject}: {error.got}")
                continue
            stems = stems or {every: Stem(self._stages(grid, every)) for every in self.every}
            self._zero(layout, config, stems)

    def _zero(self, layout: Layout, config: Config, stems: Mapping[int, Stem]) -> None:
        """One branch of ZeRO: what it keeps in every step decides over all its leaves, or each choice of recompute is walked."""
        for stage in stems[1].ranks(1):
            reason = self._too_large(*self._fixed(config, layout, stage))
            if reason:
                self._leave_out(layout, 3, self.leaves, reason)
                return
        sharings = {
            every: [[sharing_of(config, rank, self.site) for rank in stem.ranks(micros)] for micros in (1, 2)]
            for every, stem in stems.items()
        }
        for recompute in self.recomputes:
            stem = stems[recompute.every]
            if recompute not in stem.books:
                again = replace(config, recompute=recompute)
                stem.books[recompute] = [self._books(again, rank) for rank in stem.ranks(1)]
            self._micros(replace(layout, recompute=recompute), config, stem, sharings[recompute.every])

    def _micros(self, layout: Layout, config: Config, stem: Stem, sharings: Sequence[Sequence[Sharing]]) -> None:
        """Micro-batches from small to large. What is too large once stays so, but for the last: of one micro-batch nothing is summed."""
        grid, books, full = layout.grid, stem.books[layout.recompute], False
        paces = [one.pace for one in books]
        total = self.config.batch.global_size // grid.data
        for micro in self.micros:
            if offence := self._offence(config, grid.data, micro):
                self._leave_out(replace(layout, micro=micro), 5, 1, offence)
                continue
            micros, leaf = total // micro, replace(layout, micro=micro)
            if full and micros > 1:
                self._leave_out(leaf, 5, 1, "larger than a micro-batch that does not fit")
                continue
            device, host, reason = self._fullest(leaf, config, stem.ranks(micros), books)
            if reason:
                full = True
                self._leave_out(leaf, 5, 1, reason)
                continue
            time = whole_step(paces, sharings[min(micros, 2) - 1], grid.pipeline, micros, micro)
            self.findings.found.append(Found(leaf, time, device, host))

    def _fullest(self, leaf: Layout, config: Config, stages: Sequence[Rank], books: Sequence[Books]) -> tuple[int, int, str]:
        """Bytes on the device and on the host of the fullest stage; and why it does not fit."""
        device = host = 0
        for rank, one in zip(stages, books, strict=True):
            ledger, fixed = self._fixed(config, leaf, rank)
            work = {
                **ledger.device,
                "buckets": fixed + leaf.micro * memory.handed(rank, one.state),
                "activations": rank.in_flight * (leaf.micro * one.each + one.shared),
                "logits": leaf.micro * one.logits,
                "temporaries": leaf.micro * one.work,
            }
            peak, away = memory.peak(work, rank, leaf.stage, one.blocks, leaf.micro), sum(ledger.host.values())
            reason = too_large(Ledger(work, ledger.host, {}, peak), self.site)
            if reason:
                return peak, away, reason
            device, host = max(device, peak), max(host, away)
        return device, host, ""

    def _too_large(self, ledger: Ledger, fixed: int) -> str:
        """Whether what is there in every step is too much already."""
        lasting = sum(ledger.device.get(book, 0) for book in ("parameters", "masters", "moments"))
        return too_large(replace(ledger, peak=lasting), self.site)

    def _fixed(self, config: Config, layout: Layout, rank: Rank) -> tuple[Ledger, int]:
        """The static books and `gathered` of a rank, and the bytes of its reductions."""
        key = (layout.grid.tensor, len(rank.bounds), rank.stage, rank.sharers, layout.stage, layout.offload, rank.micros > 1)
        if key not in self._static:
            ledger = static(config, rank)
            books = {**ledger.device, "gathered": memory.gathered(config, rank)}
            self._static[key] = Ledger(books, ledger.host, {}), memory.reductions(config, rank)
        return self._static[key]

    def _books(self, config: Config, rank: Rank) -> Books:
        work = memory.moving(config, rank, self.kernels)
        state, blocks = memory.state(config), memory.each_of(config, rank, self.kernels)
        pace, shared = pace_of(config, rank, self.site), activations.shared(config)
        return Books(work["activations"], shared, work["logits"], work["temporaries"], state, blocks, pace)

    def _offence(self, config: Config, data: int, micro: int) -> str:
        """What the rule of the global batch says of a micro-batch."""
        if (data, micro) not in self._offences:
            offence = global_batch(Case(replace(config, batch=replace(config.batch, micro_size=micro)), self.ranks, 1))
            self._offences[data, micro] = f"{offence.key}  [global_batch]: {offence.got}" if offence else ""
        return self._offences[data, micro]

    def _stages(self, grid: Grid, every: int) -> list[Rank]:
        """Of stages that are alike when every k-th block is computed again the first one, which has the most micro-batches in flight."""
        if grid.pipeline not in self._bounds:
            self._bounds[grid.pipeline] = bounds_of(self.config, grid.pipeline)
        bounds = self._bounds[grid.pipeline]
        found = []
        for stage in alike(bounds, every):
            key = (grid.tensor, grid.pipeline, stage)
            if key not in self._ranks:
                parallel = Parallel(tensor=grid.tensor, pipeline=grid.pipeline)
                self._ranks[key] = rank_of(replace(self.config, parallel=parallel), grid, stage, bounds=bounds)
            found.append(replace(self._ranks[key], sharers=grid.data * grid.context))
        return found

    def _leave_out(self, layout: Layout, depth: int, layouts: int, reason: str) -> None:
        self.findings.rejected.append(Rejected(layout, depth, layouts, reason))


def too_large(ledger: Ledger, site: Site) -> str:
    """Why a rank's books are more than SHARE of what it has; empty if they are not."""
    device, host = ledger.total, sum(ledger.host.values())
    if site.hardware.shared:  # one memory
        device, host = device + host, 0
    for where, books, need, has in (("device", ledger.device, device, site.memory), ("host", ledger.host, host, site.host_memory)):
        if need > SHARE * has:
            book = max(books, key=books.__getitem__)
            return f"{where}: {need / 1e9:.1f} GB of {SHARE * has / 1e9:.1f} GB, most of it {book} ({books[book] / 1e9:.1f} GB)"
    return ""


def grids(ranks: int) -> Iterator[Grid]:
    """Every way to write `ranks` as a product of four degrees."""
    for tensor in _divisors(ranks):
        for pipeline in _divisors(ranks // tensor):
            for context in _divisors(ranks // tensor // pipeline):
                yield Grid(pipeline, ranks // tensor // pipeline // context, context, tensor)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def describe(layout: Layout, depth: int = 5) -> str:
    """A layout in a line; `depth` 3 is a branch without recompute and micro-batch."""
    grid = layout.grid
    words = [
        f"data {grid.data} tensor {grid.tensor}{' sequence' if layout.sequence else ''} pipeline {grid.pipeline} context {grid.context}"
    ]
    words.append(f"zero {layout.stage}{' offload' if layout.offload != 'none' else ''}")
    return ", ".join([*words, *([f"recompute {recompute_words(layout.recompute)}", f"micro {layout.micro}"] if depth > 3 else [])])


def recompute_words(recompute: Recompute) -> str:
    """A choice of recompute in a word."""
    if recompute.granularity == "selective":
        return "+".join(recompute.modules)
    return f"every {recompute.every}" if recompute.every > 1 else recompute.granularity


def _order(found: Found) -> tuple[float, int, int, int, bool, bool, int]:
    """By time; of equals the plainest."""
    layout, grid = found.layout, found.layout.grid
    return found.seconds, grid.pipeline, grid.tensor, layout.stage, layout.offload != "none", layout.sequence, found.device
