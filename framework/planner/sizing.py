"""batch.micro_size=auto: the most samples at once that fit, with the same global batch. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from framework.config.schema import Config
from framework.planner import memory
from framework.planner.activations import Kernels
from framework.topology.grid import Grid


def candidates(config: Config, grid: Grid) -> Iterator[int]:
    """Micro-batches that divide a data rank's share of the global batch, the largest first."""
    share = config.batch.global_size // grid.data
    return (size for size in range(share, 0, -1) if share % size == 0)


def with_micro(config: Config, size: int) -> Config:
    """The same config with micro-batches of `size` samples."""
    return replace(config, batch=replace(config.batch, micro_size=size))


def largest(config: Config, grid: Grid, room: float, kernels: Kernels) -> int | None:
    """The most samples with which the fullest rank takes at most `room` bytes on its device; None if not even one fits."""
    fitting = (size for size in candidates(config, grid) if memory.fullest(with_micro(config, size), grid, kernels).peak <= room)
    return next(fitting, None)
