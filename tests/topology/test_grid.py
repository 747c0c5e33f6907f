"""The grid against brute force: every product of small degrees, every rank."""

from __future__ import annotations

import itertools

import pytest

from framework.topology.grid import AXES, Grid, Place

GRIDS = [Grid(*degrees) for degrees in itertools.product((1, 2, 3), repeat=4)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_places_are_counted_off_with_tensor_innermost(grid: Grid) -> None:
    loops = itertools.product(range(grid.pipeline), range(grid.data), range(grid.context), range(grid.tensor))
    places = [Place(pipeline, data, context, tensor) for pipeline, data, context, tensor in loops]
    assert grid.size == len(places)
    assert [grid.place(rank) for rank in range(grid.size)] == places
    assert [grid.rank(place) for place in places] == list(range(grid.size))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_groups_are_the_ranks_that_differ_on_the_named_axes_only(grid: Grid) -> None:
    for count in range(len(AXES) + 1):
        for axes in itertools.combinations(AXES, count):
            groups = grid.groups(*axes)
            assert sorted(itertools.chain(*groups)) == list(range(grid.size)), "a partition"
            for rank in range(grid.size):
                mine = grid.place(rank)
                others = (grid.place(other) for other in range(grid.size))
                peers = [grid.rank(p) for p in others if all(getattr(p, a) == getattr(mine, a) for a in AXES if a not in axes)]
                assert grid.peers(rank, *axes) == sorted(peers)
                assert grid.peers(rank, *axes) in groups


def test_a_tensor_group_is_a_run_of_neighbours() -> None:
    assert Grid(pipeline=2, data=2, tensor=4).groups("tensor") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


def test_the_largest_recipe_keeps_tensor_groups_inside_hosts_of_eight() -> None:
    grid = Grid(pipeline=16, tensor=8)
    assert grid.size == 128
    assert all(len({rank // 8 for rank in group}) == 1 for group in grid.groups("tensor"))


def test_a_rank_outside_is_our_mistake() -> None:
    for rank in (-1, 8):
        with pytest.raises(AssertionError):
            Grid(data=8).place(rank)
