"""Named random streams: pure in their arguments, unrelated to one another, and the training generators are seeded from them."""

from __future__ import annotations

import hashlib
import itertools
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from framework.topology.grid import Place
from framework.topology.random import APART, Streams, seed_training, stream_seed


def test_a_seed_is_half_of_four_bytes_of_sha256() -> None:
    expected = int(hashlib.sha256(b"7/training/3").hexdigest()[:8], 16) // 2
    assert stream_seed(7, "training", 3) == expected


def test_every_argument_counts() -> None:
    arguments = list(itertools.product((0, 1, 12), ("training", "order"), ((), (0,), (1,), (2,), (1, 2), (12,), (21,))))
    seeds = {stream_seed(seed, name, *coordinates) for seed, name, coordinates in arguments}
    assert len(seeds) == len(arguments)
    assert all(0 <= seed < 2**31 for seed in seeds)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_all_three_generators_follow_the_seed_and_the_data_rank() -> None:
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        drawn = []
        for seed, rank in ((1, 0), (1, 0), (1, 1), (2, 0)):
            seed_training(seed, Place(0, rank, 0, 0), Streams(torch))
            drawn.append(draws())
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
    first, again, other_rank, other_seed = drawn
    assert first == again
    for ours, theirs in ((first, other_rank), (first, other_seed), (other_rank, other_seed)):
        assert all(a != b for a, b in zip(ours, theirs, strict=True))


def test_a_stream_of_its_own_leaves_the_default_one_where_it_is() -> None:
    kept = torch.get_rng_state()
    try:
        torch.manual_seed(5)
        undisturbed = torch.rand(4)
        streams = Streams(torch, [APART])
        streams.seed(APART, 9)
        torch.manual_seed(5)
        first = torch.rand(2)
        with streams.drawing(APART):
            apart = torch.rand(3)
        second = torch.rand(2)
        with streams.drawing(APART):
            more = torch.rand(3)
        torch.manual_seed(9)
        expected = torch.rand(6)
    finally:
        torch.set_rng_state(kept)
    assert torch.equal(torch.cat((first, second)), undisturbed)
    assert torch.equal(torch.cat((apart, more)), expected)


def test_tensor_ranks_draw_alike_and_apart_where_they_divide() -> None:
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    drawn: dict[tuple[str, Place], float] = {}
    try:
        for place in (Place(0, 0, 0, 0), Place(0, 0, 0, 1), Place(0, 1, 0, 0), Place(1, 0, 0, 0)):
            streams = Streams(torch, [APART])
            seed_training(3, place, streams)
            drawn["whole", place] = float(torch.rand(()))
            with streams.drawing(APART):
                drawn[APART, place] = float(torch.rand(()))
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
    assert drawn.pop(("whole", Place(0, 0, 0, 1))) == drawn["whole", Place(0, 0, 0, 0)]
    assert len(set(drawn.values())) == len(drawn) == 7


def test_the_same_numbers_twice() -> None:
    """Around a computation and its repetition, with others in between; the streams go on where they were."""
    streams = Streams(torch, ["a"])  # type: ignore[arg-type]
    streams.seed("a", 5)

    def draw() -> Tensor:
        with streams.drawing("a"):
            return torch.rand(3)

    first, second = streams.twice()
    with first:
        once = draw()
    between = draw()
    with second:
        again = draw()
    after = draw()
    streams.seed("a", 5)
    assert torch.equal(again, once)
    assert [draw().tolist() for _ in range(3)] == [once.tolist(), between.tolist(), after.tolist()]


def test_the_second_time_may_end_early() -> None:
    streams = Streams(torch, ["a"])  # type: ignore[arg-type]
    first, second = streams.twice()
    with first, streams.drawing("a"):
        torch.rand(1)
    before = streams.states["a"]
    with pytest.raises(KeyError), second, streams.drawing("a"):
        {}[torch.rand(1)]
    assert torch.equal(streams.states["a"], before)
