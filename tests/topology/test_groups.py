"""Groups on real gloo ranks: who is in the data group, and what ranks agree on."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist

from framework.base.errors import StartError
from framework.topology.grid import Grid
from framework.topology.groups import connect, make_groups
from tests.ranks import run_ranks

GRIDS = [Grid(data=4), Grid(data=2, tensor=2), Grid(data=2, context=2), Grid(pipeline=2, tensor=2)]


def made(rank: int, world_size: int) -> list[dict[str, Any]]:
    seen = []
    for grid in GRIDS:
        groups = make_groups(grid, rank, 30.0)
        assert groups.data is not None
        summed = torch.tensor([10.0**rank])
        dist.all_reduce(summed, group=groups.data)
        seen.append(
            {
                "data group": dist.get_process_group_ranks(groups.data),
                "sum": float(summed),
                "agreed": groups.agree([rank, 0.5]),
                "gathered": groups.gather(f"rank {rank}"),
                "place": groups.place,
            }
        )
    return seen


def test_the_data_group_spans_data_and_context_and_control_spans_all() -> None:
    results = run_ranks(made, 4, init=True)
    for rank, seen in enumerate(results):
        for grid, one in zip(GRIDS, seen, strict=True):
            mine = grid.place(rank)
            peers = [p for p in range(4) if (grid.place(p).pipeline, grid.place(p).tensor) == (mine.pipeline, mine.tensor)]
            assert one["data group"] == peers
            assert one["sum"] == sum(10.0**peer for peer in peers)
            assert one["agreed"] == [0 + 1 + 2 + 3, 2.0]
            assert one["gathered"] == ["rank 0", "rank 1", "rank 2", "rank 3"]
            assert one["place"] == mine


def test_one_process_needs_no_group() -> None:
    groups = make_groups(Grid(), 0, 1.0)
    assert (groups.data, groups.control) == (None, None)
    assert groups.agree([1.5, -2.0]) == [1.5, -2.0]
    assert groups.gather("me") == ["me"]


def alone(rank: int, world_size: int) -> tuple[int, datetime.timedelta]:
    connect(77.0, shm_comm=False)
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    return dist.get_world_size(), backend.options._timeout


def test_a_start_reaches_the_process_group() -> None:
    assert run_ranks(alone, 1) == [(1, datetime.timedelta(seconds=77))]


def never_met(rank: int, world_size: int) -> str:
    import os

    os.environ.update(WORLD_SIZE="2")
    with pytest.raises(StartError) as caught:
        connect(1.0, shm_comm=False)
    return caught.value.letter()


def test_ranks_that_do_not_come_are_a_letter() -> None:
    [letter] = run_ranks(never_met, 1)
    assert "all ranks within 1 s" in letter
