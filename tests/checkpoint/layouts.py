"""States of small logical tensors, divided as tensor and data ranks divide them."""

from __future__ import annotations

from math import prod

import torch

from framework.checkpoint.shards import Logical, Shard, equal_parts
from framework.checkpoint.state import State


def local_tensors(shapes: dict[str, tuple[int, ...]], tensor_ranks: int, rank: int) -> list[Logical]:
    """Matrices split on axis 0, padded up to a multiple of the ranks; vectors are replicas that tensor rank 0 writes."""
    found = []
    for name, shape in shapes.items():
        if len(shape) < 2:
            found.append(Logical(name, shape, (0,) * len(shape), shape, primary=rank == 0))
        else:
            rows = -(-shape[0] // tensor_ranks)
            found.append(Logical(name, shape, (rows * rank, *(0 for _ in shape[1:])), (rows, *shape[1:])))
    return found


def state_of(tensors: dict[str, torch.Tensor], tensor_ranks: int, data_ranks: int, rank: int) -> State:
    """The part of rank `rank` of the logical `tensors`: kind master as they are, kind exp_avg twice as much."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shards = []
    for logical in local_tensors(shapes, tensor_ranks, rank // data_ranks):
        start, length = equal_parts(prod(logical.size), data_ranks, rank % data_ranks)
        padded = torch.full(logical.size, -1.0)
        rows = slice(logical.offset[0], logical.offset[0] + logical.size[0])
        kept = tensors[logical.name][rows]
        padded[: len(kept)] = kept
        for kind, factor in (("master", 1), ("exp_avg", 2)) if logical.primary else ():
            shards.append((Shard(kind, logical, start, length, "F32"), (padded * factor).flatten()[start : start + length].clone()))
    return State(shards, {"step": 0}, {"rank": rank})
