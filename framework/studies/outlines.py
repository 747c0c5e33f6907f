"""The model of every rank built without memory, and held against the Ledger: `plan.build=true`. The only part of a plan with torch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from framework.base.errors import RunError
from framework.config.schema import Config
from framework.parallel.apply import outline
from framework.parallel.pipeline import Cut
from framework.planner.states import bounds_of, rank_of
from framework.topology.grid import Grid
from framework.topology.groups import pretended
from framework.topology.random import APART, Streams


def hold_against_ledger(config: Config, grid: Grid) -> dict[str, Any]:
    """Bytes of parameters by stage, as built; raises RunError where they or a shape's size are not the Ledger's."""
    bounds = bounds_of(config, grid.pipeline)
    nbytes: list[int] = []
    for stage in range(grid.pipeline):
        number = grid.groups("data", "context", "tensor")[stage][0]
        paper = rank_of(config, grid, stage, bounds=bounds)
        with pretended(grid, number) as groups:
            cut = Cut(bounds, stage) if grid.pipeline > 1 else None
            model = outline(config, groups, Streams(torch, [APART]), cut)  # type: ignore[arg-type]
        built = [(tuple(parameter.shape), parameter.numel()) for parameter in model.parameters()]
        assert all(parameter.is_meta for parameter in model.parameters())
        there, expected = Counter(size for _, size in built), Counter((*paper.matrices, *paper.vectors))
        if there != expected:
            got = f"elements {sorted((there - expected).elements())} more, {sorted((expected - there).elements())} fewer"
            raise RunError(f"plan.build: stage {stage}", got, "the parameters of the Ledger")
        element = 2 if config.precision.half_weights else 4
        nbytes.append(sum(size for _, size in built) * element)
    text = f"{grid.pipeline} stages without memory: every parameter as in the Ledger, at most {max(nbytes) / 1e9:.3f} GB of weights"
    return {"parameter_bytes": nbytes, "text": text}
