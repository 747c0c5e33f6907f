"""Which sample is read when: pure functions of (seed, global sample index), numpy only, nothing kept between calls.

A run is an endless row of global sample indices 0, 1, 2, ...: `share` says which of them a rank reads for a micro-batch, and
`positions` which sample of the corpus each index means. Going on from `consumed` samples needs no other state.
"""

from __future__ import annotations

import numpy as np

WORD = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15
# Chi-square over thousands of seeds is clean from 8 rounds on (6 are not enough); halves of one or two bits need 16.
ROUNDS, ROUNDS_SMALL, SMALL_BITS = 8, 24, 8


def share(consumed: int, micro: int, micro_size: int, data_rank: int, data_size: int) -> np.ndarray:
    """Global sample indices (int64 [micro_size]) of micro-batch `micro` on data rank `data_rank`, counted from `consumed`.

    Ranks take turns inside a micro-batch, so the set that an optimizer step reads is the same for every number of ranks,
    micro-batch size and number of accumulation steps with the same product.
    """
    first = consumed + (micro * data_size + data_rank) * micro_size
    return np.arange(first, first + micro_size, dtype=np.int64)


def positions(indices: np.ndarray, length: int, seed: int, shuffle: bool) -> np.ndarray:
    """Position in a corpus of `length` samples of each global sample index (both int64 [n]).

    Index i lies in epoch i // length; each epoch visits every position once, in an order of its own keyed by (seed, epoch).
    """
    epochs, places = np.divmod(indices, length)
    if not shuffle:
        return places
    result = np.empty_like(places)
    for epoch in np.unique(epochs):
        rows = epochs == epoch
        result[rows] = _permute(places[rows].astype(np.uint64), length, seed, int(epoch))
    return result


def _permute(places: np.ndarray, length: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0..length-1 keyed by (seed, epoch), at `places` (uint64 [n]), in constant memory.

    A Feistel network permutes the next power of two; results outside are put through it again until they fall inside
    ("cycle walking": Black & Rogaway 2002, Ciphers with Arbitrary Finite Domains, method 2). Less than two passes on average.
    """
    bits = (length - 1).bit_length()
    keys = _keys(seed, epoch, ROUNDS_SMALL if bits <= SMALL_BITS else ROUNDS)
    result = _feistel(places, bits, keys)
    outside = np.flatnonzero(result >= length)
    while len(outside):
        walked = _feistel(result[outside], bits, keys)
        result[outside] = walked
        outside = outside[walked >= length]
    return result


def _feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of 0..2^bits-1: each round XORs one half with a hash of the other, which undoes itself.

    The hash of a half x is the top bits of a * x + b (multiply-add-shift: Dietzfelbinger 1996), a and b new in every round.
    `keys`: uint64 [rounds / 2, 4], a and b for the low half and for the high half.
    """
    high_bits, low_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    high, low = values >> low_bits, values & np.uint64((1 << int(low_bits)) - 1)
    # A shift by 64 - bits in two parts, because a half may have no bit at all and a shift by 64 is undefined.
    one, high_shift, low_shift = np.uint64(1), np.uint64(63) - high_bits, np.uint64(63) - low_bits
    for low_multiplier, low_addend, high_multiplier, high_addend in keys:
        low = low ^ ((high * low_multiplier + low_addend) >> one >> low_shift)
        high = high ^ ((low * high_multiplier + high_addend) >> one >> high_shift)
    return (high << low_bits) | low


def _keys(seed: int, epoch: int, rounds: int) -> np.ndarray:
    """Random words for each round: uint64 [rounds / 2, 4], a SplitMix64 stream that begins at a hash of (seed, epoch)."""
    start = _mix(_mix(np.array([seed % WORD], np.uint64)) + np.uint64(epoch))
    steps = np.arange(1, 2 * rounds + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return _mix(start + steps).reshape(-1, 4)


def _mix(words: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words in which each bit of the input moves half of the output bits.

    The finaliser of SplitMix64 (Steele, Lea & Flood 2014, Fast Splittable Pseudorandom Number Generators, fig. 20).
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
