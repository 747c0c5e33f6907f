"""Which blocks each pipeline stage has: pure arithmetic on costs, no torch.

A cut is exact: no other one has a faster slowest stage, and the slowest stage sets the pace of a pipeline.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Literal

from framework.config import parameters, schema

Bounds = tuple[tuple[int, int], ...]
"""For each stage its first block and the one past its last."""


def cut(costs: Sequence[float], stages: int) -> list[tuple[int, int]]:
    """The blocks of each of `stages` stages, in order, at least one each; `costs` are of the blocks, in any one unit.

    Of all cuts with the smallest greatest stage it is the most even one (the smallest sum of squared stages); of those, the
    one with the shortest first stage, then second, and so on: in 1F1B the first stages keep the most activations.
    """
    blocks = len(costs)
    assert 1 <= stages <= blocks, f"{stages} stages for {blocks} blocks"
    ends = [0.0, *accumulate(costs)]
    limit = _rest(ends, stages, lambda cost: cost, max)[stages][0]

    def squared(cost: float) -> float:
        return cost * cost if cost <= limit else math.inf

    squares = _rest(ends, stages, squared, operator.add)
    bounds, start = [], 0
    for left in range(stages - 1, -1, -1):
        options = {stop: squared(ends[stop] - ends[start]) + squares[left][stop] for stop in range(start + 1, blocks + 1)}
        stop = min(options, key=lambda stop: (options[stop], stop))
        bounds.append((start, stop))
        start = stop
    return bounds


def _rest(ends: Sequence[float], stages: int, price: Callable[[float], float], join: Callable[[float, float], float]) -> list[list[float]]:
    """[number of stages][first block] -> the least joined price of cutting the blocks from there on into that many stages."""
    blocks = len(ends) - 1
    table = [[math.inf] * blocks + [0.0]]
    for _ in range(stages):
        after = table[-1]
        row = [min(join(price(ends[stop] - ends[start]), after[stop]) for stop in range(start + 1, blocks + 1)) for start in range(blocks)]
        table.append([*row, math.inf])
    return table


def joined(entrance: float, blocks: Sequence[float], exit_: float) -> list[float]:
    """Costs of the blocks with the embedding's added to the first and the head's to the last: they are never apart."""
    costs = list(blocks)
    costs[0] += entrance
    costs[-1] += exit_
    return costs


def costs(model: schema.Model, method: Literal["uniform", "parameters"]) -> list[float]:
    """What each block counts for: one, or its number of parameters (a tied head has a copy of its own, and counts)."""
    if method == "uniform":
        return [1.0] * model.num_layers
    sizes = [0.0] * model.num_layers
    outside = {True: 0.0, False: 0.0}  # by whether it comes before the blocks
    for entry in parameters.table(model):
        if entry.block is None:
            outside[entry.name.startswith("embed_")] += prod(entry.shape)
        else:
            sizes[entry.block] += prod(entry.shape)
    return joined(outside[True], sizes, outside[False])
