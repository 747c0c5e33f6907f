"""framework/data/order.py: permutations, their statistics, and independence of the layout."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from framework.data.order import _mix, positions, share


def chi_square(counts: np.ndarray) -> float:
    """Pearson's statistic in standard deviations from its mean, for cells of equal chance."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 10, 16, 17, 255, 256, 257, 1000, 4097, 100_003])
def test_each_epoch_visits_everything_once(length: int) -> None:
    for seed in (0, 1, 2**63 + 11, -5):
        order = positions(np.arange(3 * length), length, seed, True)
        for epoch in order.reshape(3, length):
            assert np.array_equal(np.sort(epoch), np.arange(length))


def test_without_shuffle_the_files_order_repeats() -> None:
    assert positions(np.arange(7), 3, 1, False).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    length = 1000
    orders = [positions(np.arange(2 * length), length, seed, True) for seed in range(20)]
    rows = np.concatenate(orders).reshape(40, length)
    # Two independent permutations agree in one place on average, and in more than ten with chance 1e-8.
    agreements = [int((a == b).sum()) for a, b in itertools.combinations(rows, 2)]
    assert max(agreements) <= 10
    assert 0.8 < np.mean(agreements) < 1.2


def test_answers_do_not_depend_on_what_is_asked_together() -> None:
    indices = np.array([25, 3, 14, 3, 99, 10**12])
    together = positions(indices, 10, 4, True)
    assert together.tolist() == [int(positions(np.array([index]), 10, 4, True)[0]) for index in indices]


@pytest.mark.parametrize("length", [2, 3, 4])
def test_small_orders_are_equally_likely(length: int) -> None:
    epochs = 6000
    orders = positions(np.arange(epochs * length), length, 12, True).reshape(epochs, length)
    numbers = {order: number for number, order in enumerate(itertools.permutations(range(length)))}
    counts = np.bincount([numbers[tuple(order)] for order in orders.tolist()], minlength=len(numbers))
    assert abs(chi_square(counts)) < 5


@pytest.mark.parametrize("length", [10, 33, 1000])
def test_places_and_neighbours_are_uniform_over_seeds(length: int) -> None:
    orders = np.stack([positions(np.arange(length), length, seed, True) for seed in range(2000)])
    for place in (0, 1, length // 2, length - 1):
        assert abs(chi_square(np.bincount(orders[:, place], minlength=length))) < 5
    for distance in (1, 2, 8):
        steps = (orders[:, distance:] - orders[:, :-distance]) % length
        assert abs(chi_square(np.bincount(steps.ravel(), minlength=length)[1:])) < 5


def test_a_trillion_samples() -> None:
    length = 2**40 + 7
    indices = np.concatenate([np.arange(50_000), length - 50_000 + np.arange(100_000)])
    order = positions(indices, length, 3, True)
    assert order.min() >= 0
    assert order.max() < length
    assert len(np.unique(order[:100_000])) == 100_000  # the last 50,000 lie in the second epoch
    assert abs(chi_square(np.bincount(order * 100 // length, minlength=100))) < 5


def test_mix_is_splitmix64() -> None:
    # The published outputs for seed 1234567 (Rosetta Code, "Pseudo-random numbers/Splitmix64").
    states = np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert _mix(states).tolist() == expected


def test_a_step_is_the_same_set_under_every_layout() -> None:
    for consumed in (0, 7, 24):
        for ranks, micro in itertools.product((1, 2, 4), (1, 2, 3, 6)):
            accumulation = 24 // (ranks * micro)
            shares = [share(consumed, m, micro, rank, ranks) for m in range(accumulation) for rank in range(ranks)]
            assert sorted(np.concatenate(shares).tolist()) == list(range(consumed, consumed + 24))


def test_micro_batches_go_on_over_steps() -> None:
    # Micro-batch 5 with 2 per step is the second of step 2, which begins after 2 x 2 x 3 ranks x 4 samples.
    assert np.array_equal(share(10, 5, 4, 1, 3), share(10 + 48, 1, 4, 1, 3))
