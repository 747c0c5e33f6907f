"""The big model on paper: llama2_70b at tensor 8 x pipeline 16, every stage built on the meta device with a fake process group."""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist

from framework.config import parameters
from framework.config.compose import compose
from framework.parallel.apply import outline
from framework.parallel.pipeline import Cut
from framework.parallel.plan import plan
from framework.planner.partition import costs, cut
from framework.topology.grid import Grid
from framework.topology.groups import Groups
from framework.topology.random import APART, Streams
from tests.ranks import run_ranks

GRID = Grid(pipeline=16, tensor=8)
WORDS = ["recipe=llama2_70b", f"parallel.tensor={GRID.tensor}", f"parallel.pipeline={GRID.pipeline}", "parallel.sequence=true"]
Shapes = dict[str, tuple[int, ...]]


def local_shapes(rank: int, ranks: int, tensor_rank: int) -> list[Shapes]:
    """For each stage the shapes that its rank `tensor_rank` holds, by the plain model's names."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config = compose(WORDS)
    bounds = tuple(cut(costs(config.model, "parameters"), GRID.pipeline))
    found = []
    for stage in range(GRID.pipeline):
        place = GRID.place(stage * GRID.tensor + tensor_rank)
        number = GRID.rank(place)
        dist.init_process_group("fake", rank=number, world_size=GRID.size, store=FakeStore())
        groups = Groups(number, place, tensor=dist.new_group(GRID.peers(number, "tensor")))
        model = outline(config, groups, Streams(torch, [APART]), Cut(bounds, stage))
        assert all(parameter.is_meta for parameter in model.parameters())
        found.append({name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
        dist.destroy_process_group()
    return found


def test_the_parts_of_all_ranks_are_the_model() -> None:
    config = compose(WORDS)
    whole = {entry.name: entry for entry in parameters.table(config.model)}
    first, last = (run_ranks(local_shapes, 1, tensor_rank, timeout=120)[0] for tensor_rank in (0, GRID.tensor - 1))
    names = [name for stage in first for name in stage]
    assert sorted(names) == sorted(whole)  # each tensor on exactly one stage (this model's head is not tied)
    assert all(len(stage) >= 9 for stage in first)  # a whole block at least
    total = 0
    for tensor_rank, stages in ((0, first), (GRID.tensor - 1, last)):
        parts = plan(config.model, GRID.tensor, tensor_rank)
        assert {name: shape for stage in stages for name, shape in stage.items()} == {name: part.size for name, part in parts.items()}
    for name, shape in ((name, shape) for stage in first for name, shape in stage.items()):
        split = whole[name].split is not None
        total += prod(shape) * (GRID.tensor if split else 1)
    # The vocabulary of 32,000 divides by 8, so no row is padding. Touvron et al. 2023: 80 blocks, 8192 wide, 8 key heads, 28,672 inside.
    by_hand = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192) + 2 * 32000 * 8192 + 8192
    assert total == parameters.count(config.model) == by_hand
