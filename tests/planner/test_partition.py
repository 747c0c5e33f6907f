"""The cut, held against every cut there is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from framework.config import parameters
from framework.config.schema import Model
from framework.planner.partition import costs, cut, joined

Bounds = list[tuple[int, int]]


def every_cut(blocks: int, stages: int) -> list[Bounds]:
    return [list(pairwise((0, *inner, blocks))) for inner in combinations(range(1, blocks), stages - 1)]


def sums(given: Sequence[float], bounds: Bounds) -> list[float]:
    return [sum(given[start:stop]) for start, stop in bounds]


@pytest.mark.parametrize("seed", range(40))
def test_no_other_cut_is_better(seed: int) -> None:
    """By the slowest stage, then evenness, then the shortest first stages: the documented order, on whole numbers with many ties."""
    draw = random.Random(seed)
    given = [draw.randint(0, 5) for _ in range(draw.randint(1, 9))]
    for stages in range(1, len(given) + 1):
        cuts = every_cut(len(given), stages)
        best = min(cuts, key=lambda bounds: (max(sums(given, bounds)), sum(cost**2 for cost in sums(given, bounds)), bounds))
        assert cut(given, stages) == best


@pytest.mark.parametrize("seed", range(10))
def test_nor_with_costs_that_are_times(seed: int) -> None:
    draw = random.Random(seed)
    given = [draw.lognormvariate(0, 1) for _ in range(10)]
    for stages in range(1, 11):
        slowest = max(sums(given, cut(given, stages)))
        assert slowest == pytest.approx(min(max(sums(given, bounds)) for bounds in every_cut(10, stages)), rel=1e-12)


@pytest.mark.parametrize(("blocks", "stages"), [(4, 2), (5, 2), (10, 4), (7, 7), (80, 16)])
def test_uniform_stages_differ_by_one_block_at_most(blocks: int, stages: int) -> None:
    sizes = [stop - start for start, stop in cut(costs(Model(num_layers=blocks), "uniform"), stages)]
    assert sum(sizes) == blocks
    assert sizes == sorted(sizes)
    assert sizes[-1] - sizes[0] <= 1


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_parameters_count_everything_once_and_the_copy_too(tied: bool, position: str) -> None:
    model = replace(Model(num_layers=3, vocab_size=1000, tie_embeddings=tied), position=position)
    copy = model.vocab_size * model.hidden_size if tied else 0
    given = costs(model, "parameters")
    assert sum(given) == parameters.count(model) + copy
    head = model.hidden_size * (model.vocab_size + 1)
    ahead = model.hidden_size * (model.vocab_size + (model.max_positions if position == "learned" else 0))
    assert given == [given[1] + ahead, given[1], given[1] + head]


def test_a_large_vocabulary_moves_blocks_to_the_middle() -> None:
    bounds = cut(costs(Model(num_layers=8, vocab_size=4000), "parameters"), 4)
    assert bounds == [(0, 1), (1, 4), (4, 7), (7, 8)]


def test_joined_where_there_is_one_block() -> None:
    assert joined(1.0, [2.0], 4.0) == [7.0]
