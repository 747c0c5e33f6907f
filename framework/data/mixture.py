"""Several corpora as one row of samples, in exact proportions and in an order that never changes.

Pure functions of (seed, weights, global sample index), as order.py: nothing is kept between calls.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import xxhash

from framework.data.order import WORD, positions
from framework.data.tokens import Corpus

LONGEST_PATTERN = 100_000
"""Samples after which the turns of the corpora must repeat: 2 bytes of table for each."""


def turns_of(weights: Sequence[float]) -> list[int]:
    """How often each corpus has its turn before the turns repeat: the smallest whole numbers in proportion to `weights`, taken as
    the decimals that they are written as (0.1 is a tenth)."""
    written = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in written))
    whole = [int(weight * scale) for weight in written]
    return [number // math.gcd(*whole) for number in whole]


def pattern(turns: Sequence[int]) -> np.ndarray:
    """Whose turn it is: int16 [sum of turns], corpus c in turns[c] of the places, never a whole sample off its share.

    Turn j of a corpus with share w must lie in the places from floor((j - 1) / w) to ceil(j / w) - 1: then at every prefix of n
    places it has had floor(n w) or ceil(n w) turns. Earliest deadline first keeps all such windows (Baruah et al. 1996,
    Proportionate Progress: A Notion of Fairness in Resource Allocation, theorem 1, for one resource that is used at every place).
    """
    length = sum(turns)
    places = np.empty(length, np.int16)
    coming = [(0, corpus, 1) for corpus in range(len(turns))]  # (first place of the window, corpus, number of the turn)
    waiting: list[tuple[int, int, int]] = []  # (last place of the window, corpus, number of the turn)
    heapq.heapify(coming)
    for place in range(length):
        while coming and coming[0][0] <= place:
            _, corpus, turn = heapq.heappop(coming)
            heapq.heappush(waiting, (-(-turn * length // turns[corpus]) - 1, corpus, turn))
        last, corpus, turn = heapq.heappop(waiting)
        assert last >= place, "a turn came too late"
        places[place] = corpus
        if turn < turns[corpus]:
            heapq.heappush(coming, (turn * length // turns[corpus], corpus, turn + 1))
    return places


class Mixture(Corpus):
    """Corpora that take turns in proportion to their weights; each goes through its own epochs in its own shuffled order.

    `weights` has one number above 0 for each of `parts`, none of which is empty. Whose turn a sample is follows from its global
    index alone, so the proportions hold at every prefix of a run, within one sample.
    """

    def __init__(self, parts: Sequence[Corpus], weights: Sequence[float]) -> None:
        files, spans = [file for part in parts for file in part.files], [span for part in parts for span in part.spans]
        super().__init__(files, parts[0].seq_length, spans, parts[0].apart)
        self.parts, self.weights = tuple(parts), tuple(weights)
        self._starts = np.cumsum([0, *map(len, parts)])
        self.turns = turns_of(weights)
        self._pattern = pattern(self.turns)
        # How many turns a corpus has had before each place of the pattern, of those of its own: int64 [places].
        self._had = np.empty(len(self._pattern), np.int64)
        for corpus, count in enumerate(self.turns):
            self._had[self._pattern == corpus] = np.arange(count)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.parts, self.weights)

    def places(self, indices: np.ndarray, seed: int, shuffle: bool) -> np.ndarray:
        """As Corpus.places: each corpus counts its own turns, and the first one alone is in the order that it has without others."""
        rounds, turn = np.divmod(indices, len(self._pattern))
        owners = self._pattern[turn]
        result = np.empty_like(indices)
        for corpus in np.unique(owners):
            rows = owners == corpus
            own = rounds[rows] * self.turns[corpus] + self._had[turn[rows]]
            result[rows] = self._starts[corpus] + positions(own, len(self.parts[corpus]), (seed + int(corpus)) % WORD, shuffle)
        return result

    def taken(self, samples: int) -> list[int]:
        """How many of the first `samples` samples are of each corpus."""
        rounds, rest = divmod(samples, len(self._pattern))
        begun = np.bincount(self._pattern[:rest], minlength=len(self.turns))
        return [rounds * turns + int(more) for turns, more in zip(self.turns, begun, strict=True)]

    def shares(self, samples: int) -> list[tuple[str, float, float]]:
        whole = sum(self.turns)
        return [
            (part.files[0].path, turns / whole, taken / len(part))
            for part, turns, taken in zip(self.parts, self.turns, self.taken(samples), strict=True)
        ]

    def fingerprint(self) -> str:
        """As Corpus.fingerprint; other proportions, or the same files in other parts, are other data."""
        return xxhash.xxh3_128(f"{super().fingerprint()} {self.turns} {[*map(len, self.parts)]}".encode()).hexdigest()
