"""The grid of ranks: pure arithmetic between a rank and its place on the four axes. No torch.

Axes from the slowest to the fastest: pipeline, data, context, tensor. Tensor is innermost, so that the ranks that
talk most are neighbours and stay inside one host. DeepSpeed is handed (pipe, data x context, model = tensor).
"""

from __future__ import annotations

from dataclasses import dataclass

AXES = ("pipeline", "data", "context", "tensor")


@dataclass(frozen=True)
class Place:
    """Where one rank stands."""

    pipeline: int
    data: int
    context: int
    tensor: int


@dataclass(frozen=True)
class Grid:
    """Degrees of the four axes."""

    pipeline: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pipeline * self.data * self.context * self.tensor

    def place(self, rank: int) -> Place:
        """The place of `rank`, 0 <= rank < size."""
        assert 0 <= rank < self.size, f"rank {rank} outside a grid of {self.size}"
        coordinates = []
        for axis in reversed(AXES):
            rank, coordinate = divmod(rank, getattr(self, axis))
            coordinates.append(coordinate)
        return Place(*reversed(coordinates))

    def rank(self, place: Place) -> int:
        """The rank at `place`; the inverse of `place`."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + getattr(place, axis)
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """The ranks divided into groups that differ on `axes` only, each in rank order; the groups by their first rank."""
        buckets: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            place = self.place(rank)
            key = tuple(getattr(place, axis) for axis in AXES if axis not in axes)
            buckets.setdefault(key, []).append(rank)
        return sorted(buckets.values())

    def peers(self, rank: int, *axes: str) -> list[int]:
        """The group of `groups(*axes)` that holds `rank`."""
        return next(group for group in self.groups(*axes) if rank in group)
