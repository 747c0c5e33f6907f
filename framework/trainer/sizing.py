"""Memory of this machine: how much a rank may take, the micro-batch that fits into it, and the limit that holds it to that."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from framework.base.errors import ConfigError
from framework.config.schema import Config
from framework.planner import memory, sizing
from framework.planner.activations import ACCELERATOR, CPU, Kernels
from framework.topology.grid import Grid
from framework.topology.groups import Groups, accelerator
from framework.trainer.folder import resolved

RESOLVED = "batch.micro_size"
GIB = 2**30
SHARE = 0.8
"""Of what there is: the rest is for what no book has, and for pieces that the allocator cannot use."""


BESIDE = 0.25, 96 * 2**20
"""On a CPU, a share of the limit and bytes."""


def kernels_of(device: torch.device) -> Kernels:
    """What the device's kernels keep."""
    return CPU if device.type == "cpu" else ACCELERATOR


def room(config: Config, device: torch.device, ranks_per_host: int) -> float:
    """Bytes that a rank may take for its model and its steps: limits.memory_gib, or a share of what the device or this host has."""
    if config.limits.memory_gib is not None:
        return config.limits.memory_gib * GIB
    if device.type != "cpu":
        return SHARE * accelerator().total_memory()
    return SHARE * _available() / ranks_per_host


def resolve(config: Config, groups: Groups, grid: Grid, device: torch.device, ranks_per_host: int) -> Config:
    """`config` with a number in the place of batch.micro_size=auto, the same on every rank; what an earlier start found holds while
    it divides the ranks' share. Raises ConfigError, on every rank, if not even one sample fits."""
    if config.batch.micro_size != "auto":
        return config
    kept = resolved(config, groups, RESOLVED)
    if kept in sizing.candidates(config, grid):
        return sizing.with_micro(config, kept)
    there = min(groups.gather(room(config, device, ranks_per_host)))
    found = sizing.largest(config, grid, there, kernels_of(device))
    if found is None:
        need = memory.fullest(config, grid, kernels_of(device)).peak
        got = f"auto, where one sample takes {need / GIB:.3g} GiB and a rank has {there / GIB:.3g}"
        raise ConfigError(RESOLVED, got, "a layout that fits", "python -m framework.plan says which line to change")
    return sizing.with_micro(config, found)


def limit(config: Config, device: torch.device, held: int) -> None:
    """From now on this process may take limits.memory_gib of the device, and no more. On a CPU, where `held` bytes of it are taken
    already, the kernel counts data and anonymous mappings (RLIMIT_DATA), and BESIDE is for what is no book's: stacks of threads,
    workspaces of libraries, and pieces that malloc keeps."""
    wanted = config.limits.memory_gib
    if wanted is None:
        return
    if device.type != "cpu":
        torch.get_device_module(device).set_per_process_memory_fraction(min(1.0, wanted * GIB / accelerator().total_memory()), device)
        return
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    bound = int(_data() - held + wanted * GIB * (1 + BESIDE[0]) + BESIDE[1])
    resource.setrlimit(resource.RLIMIT_DATA, (bound if most == resource.RLIM_INFINITY else min(bound, most), most))


def _data() -> int:
    """Bytes that count for RLIMIT_DATA."""
    return _kib("/proc/self/status", "VmData:") * 1024


def whole(device: torch.device, ranks_per_host: int) -> float:
    """Bytes of memory that a rank has, used or not: its device's, or its share of this host's."""
    return accelerator().total_memory() if device.type != "cpu" else _kib("/proc/meminfo", "MemTotal:") * 1024 / ranks_per_host


def _available() -> int:
    """Bytes of the host that nobody uses."""
    return _kib("/proc/meminfo", "MemAvailable:") * 1024


def _kib(path: str, name: str) -> int:
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
