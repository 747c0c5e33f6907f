"""The only maker of process groups, and the only room outside launch/ that knows how ranks find each other."""

from __future__ import annotations

import datetime
import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from framework.base.errors import FrameworkError, StartError
from framework.topology.grid import Grid, Place

T = TypeVar("T")

# What a launcher would have said to a single process.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@dataclass(frozen=True)
class Groups:
    """This rank's place and its groups.

    `data` is the group over data x context, which averages gradients; `tensor` shares each matrix, `context` each sequence, and
    `replica`, tensor x pipeline, one copy of the model. `control` spans all ranks and always runs on the host (gloo), so that
    ranks can agree on a number without waiting for an accelerator. None stands for a group of one (of `data` only where
    there is no process group at all).
    """

    rank: int
    place: Place
    data: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    replica: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None

    def agree(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum of `values` over all ranks, on the host."""
        if self.control is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return total.tolist()

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, in rank order: small plain data."""
        if self.control is None:
            return [value]
        everyone: list[Any] = [None] * dist.get_world_size(self.control)
        dist.all_gather_object(everyone, value, group=self.control)
        return everyone

    def raise_together(self, error: FrameworkError | None) -> None:
        """Raise on every rank the error that the first rank with one has met; nothing if no rank has."""
        for found in self.gather(error):
            if found is not None:
                raise found


def accelerator() -> Any:
    """DeepSpeed's interface to this machine's devices; the CPU counts as one."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def connect(timeout_s: float, shm_comm: bool) -> None:
    """Start torch.distributed through DeepSpeed from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    `shm_comm` lets DeepSpeed compile its shared-memory collectives for CPU ranks; without it they talk through gloo.
    Raises StartError if the port is taken or the other ranks do not come within `timeout_s` seconds.
    """
    import deepspeed

    for name, alone in ALONE.items():
        os.environ.setdefault(name, alone)
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(_free_port())
    if not shm_comm:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            deepspeed.init_distributed(timeout=datetime.timedelta(seconds=timeout_s), auto_mpi_discovery=False, verbose=False)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise StartError("MASTER_PORT", "a port in use", "a free port", "deepspeed --master_port PORT ...") from None
        raise StartError("the meeting of the ranks", str(error).splitlines()[0], f"all ranks within {timeout_s:.0f} s") from None


def make_groups(grid: Grid, rank: int, timeout_s: float) -> Groups:
    """All groups of the grid, made once, by every rank in the same order."""
    place = grid.place(rank)
    if not dist.is_initialized():
        return Groups(rank, place)
    wait = datetime.timedelta(seconds=timeout_s)
    made: dict[tuple[int, ...], Any] = {}

    def own(*axes: str) -> Any:
        """This rank's group over `axes`. Every rank makes every group; equal ones are made once."""
        for ranks in map(tuple, grid.groups(*axes)):
            if ranks not in made:
                # Who needs everybody gets the group that is there: each gloo group has a thread that wakes 100 times a second.
                made[ranks] = _world() if len(ranks) == dist.get_world_size() else dist.new_group([*ranks], timeout=wait)
        return made[tuple(grid.peers(rank, *axes))]

    data = own("data", "context")
    control: Any = _world() if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", timeout=wait)
    tensor = own("tensor") if grid.tensor > 1 else None
    replica = own("tensor", "pipeline") if grid.tensor * grid.pipeline > 1 else None
    context = own("context") if grid.context > 1 else None
    return Groups(rank, place, data, control, tensor, replica, context)


@contextmanager
def pretended(grid: Grid, rank: int) -> Iterator[Groups]:
    """Groups of a rank of the grid in this one process, where no other rank is: for models that are built and not run."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "a rank of a run cannot pretend to be another"
    dist.init_process_group("fake", rank=rank, world_size=grid.size, store=FakeStore())
    try:
        made: dict[str, Any] = {axis: dist.new_group(grid.peers(rank, axis)) for axis in ("tensor", "context") if getattr(grid, axis) > 1}
        yield Groups(rank, grid.place(rank), tensor=made.get("tensor"), context=made.get("context"))
    finally:
        dist.destroy_process_group()


def _world() -> Any:
    return dist.group.WORLD


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
