"""What to change where a layout does not fit, in the order of what it costs; and what is faster where it does. Pure.

Every entry is a whole config of its own that the rules accept, so what it saves and costs is the difference of two plans.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from framework.config.check import accepted
from framework.config.identity import changes
from framework.config.schema import Config, Recompute
from framework.planner import memory
from framework.planner.cost import estimate, kernels_of, seconds
from framework.planner.hardware import Site
from framework.planner.ledger import Ledger
from framework.planner.partition import Bounds
from framework.planner.search import too_large
from framework.planner.states import bounds_of
from framework.topology.grid import Grid

WORTH = 0.02
"""Share of a step that a change must save to be worth a line where everything fits."""


@dataclass(frozen=True)
class Advice:
    """One change. `saves` bytes on the fullest rank's device, `costs` seconds per step (less than none: it is faster)."""

    what: str
    write: str
    saves: int
    costs: float
    fits: bool


@dataclass(frozen=True)
class Judged:
    """A config on paper: the Ledger of its fullest rank, seconds of a step by part, and why it does not fit (empty: it does)."""

    config: Config
    grid: Grid
    ledger: Ledger
    time: dict[str, float]
    reason: str


def grid_of(config: Config, ranks: int) -> Grid:
    """The grid of a config that has passed check()."""
    p = config.parallel
    return Grid(p.pipeline, p.data or ranks // p.model_ranks, p.context, p.tensor)


class Judge:
    """Of configs on so many ranks of a site; keeps what their plans have in common."""

    def __init__(self, ranks: int, site: Site) -> None:
        self.ranks, self.site = ranks, site
        self._bounds: dict[tuple[int, str], Bounds] = {}

    def judge(self, config: Config) -> Judged:
        """A config that has passed check()."""
        grid, key = grid_of(config, self.ranks), (config.parallel.pipeline, config.parallel.partition)
        if key not in self._bounds:
            self._bounds[key] = bounds_of(config, grid.pipeline)
        ledger = memory.fullest(config, grid, kernels_of(self.site), self._bounds[key])
        return Judged(config, grid, ledger, estimate(config, grid, self.site, self._bounds[key]), too_large(ledger, self.site))

    def advise(self, now: Judged) -> list[Advice]:
        """Savers of memory where it does not fit, in the order of their cost: mixed precision, recompute, ZeRO, offload, tensor
        parallel inside the host, pipeline across hosts. Where it fits, what fits too and is faster; often that is nothing."""
        found = []
        for what, config in savers(now.config) if now.reason else _faster(now.config):
            moves = config.zero.offload not in ("none", now.config.zero.offload)
            nowhere = moves and self.site.hardware.shared  # a CPU's rank has the host's memory already
            if nowhere or not accepted(config, self.ranks, self.site.ranks_per_host):
                continue
            then = self.judge(config)
            saves, costs = now.ledger.total - then.ledger.total, seconds(then.time) - seconds(now.time)
            helps = saves > 0 if now.reason else not then.reason and costs < -WORTH * seconds(now.time)
            if helps:
                found.append(Advice(what, written(now.config, config), saves, costs, not then.reason))
        return found


def savers(config: Config) -> Iterator[tuple[str, Config]]:
    """(what, config) of every change that takes less memory, in the order of its cost; not all of them are allowed."""
    zero, parallel = config.zero, config.parallel
    if config.precision.dtype == "fp32":
        half = replace(config.precision, dtype="bf16", autocast=False)
        yield "mixed precision", replace(config, precision=half, zero=replace(zero, stage=max(1, zero.stage)))  # type: ignore[arg-type]
    if config.recompute.granularity == "none":
        some = Recompute("selective", modules=("attention", "activation"))
        yield "recompute attention and activation", replace(config, recompute=some)
    if config.recompute != Recompute("full"):
        yield "recompute whole blocks", replace(config, recompute=Recompute("full"))
    for stage in range(zero.stage + 1, 4):
        yield f"ZeRO stage {stage}", replace(config, zero=replace(zero, stage=stage))  # type: ignore[arg-type]
    if zero.offload == "none":
        yield "offload to the host", replace(config, zero=replace(zero, stage=max(1, zero.stage), offload="cpu"))  # type: ignore[arg-type]
    degree = 2 * parallel.tensor
    yield f"tensor parallel over {degree} ranks of a host", replace(config, parallel=replace(parallel, data=None, tensor=degree))
    less, stages = replace(zero, stage=min(1, zero.stage)), 2 * parallel.pipeline  # type: ignore[arg-type]
    yield f"pipeline of {stages} stages", replace(config, zero=less, parallel=replace(parallel, data=None, pipeline=stages))


def _faster(config: Config) -> Iterator[tuple[str, Config]]:
    zero, parallel, batch = config.zero, config.parallel, config.batch
    if config.precision.dtype == "fp32":
        half = replace(config.precision, dtype="bf16", autocast=False)
        yield "mixed precision", replace(config, precision=half, zero=replace(zero, stage=max(1, zero.stage)))  # type: ignore[arg-type]
    if config.recompute.granularity != "none":
        yield "nothing computed again", replace(config, recompute=Recompute())
    if zero.offload != "none":
        yield "no offload", replace(config, zero=replace(zero, offload="none"))
    for stage in range(zero.stage):
        yield f"ZeRO stage {stage}", replace(config, zero=replace(zero, stage=stage))  # type: ignore[arg-type]
    yield "a larger micro-batch", replace(config, batch=replace(batch, micro_size=2 * batch.micro))
    if parallel.tensor > 1:
        half_degree, sliced = parallel.tensor // 2, parallel.sequence and parallel.tensor > 2
        yield "less tensor parallel", replace(config, parallel=replace(parallel, data=None, tensor=half_degree, sequence=sliced))
    if parallel.tensor > 1 and not parallel.sequence:
        yield "slices of the sequence between tensor ranks", replace(config, parallel=replace(parallel, sequence=True))
    if parallel.pipeline > 1:
        yield "a shorter pipeline", replace(config, parallel=replace(parallel, data=None, pipeline=parallel.pipeline // 2))


def written(old: Config, new: Config) -> str:
    """The words of a command line, or lines of a recipe, that make `new` of `old`."""
    return " ".join(f"{change.key}={_value(change.new)}" for change in changes(old, new))


def _value(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(value)}]"
    return value if isinstance(value, str) else json.dumps(value)
