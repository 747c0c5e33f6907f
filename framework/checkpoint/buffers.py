"""From live tensors to what a writer reads: reused host memory for asynchronous saves, live memory for synchronous ones."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from framework.checkpoint.errors import SaveError
from framework.checkpoint.manifest import FilePlan
from framework.checkpoint.save import Source
from framework.checkpoint.scaling import pack
from framework.checkpoint.shards import Shard
from framework.checkpoint.state import DTYPES, State


class Buffers:
    """Shared host memory that holds the data of a checkpoint's files, byte for byte as they will be written.

    Made once; it gets its size in `prepare`, or at the first copy, and again only if the state grows. With `pin` the memory
    is registered with CUDA, so that a copy from the accelerator runs beside its computations.
    """

    def __init__(self, memory: int, pin: bool = False) -> None:
        """`memory` is a Writer's file of shared memory."""
        self.memory, self.pin = memory, pin
        self.map: mmap.mmap | None = None
        self.layout: list[Shard] = []
        self.views: list[Tensor] = []
        self.stream: torch.Stream | None = None
        self.thread = ThreadPoolExecutor(1, "checkpoint-copy")  # starts with its first copy
        self.finish: Callable[[], object] | None = None
        self.copy_s = 0.0  # the processor's seconds of the last copy
        self.sources: list[Tensor] = []  # kept until the copy is complete: freed memory would be given to others at once

    def copy(self, state: State, files: Sequence[FilePlan]) -> None:
        """Copy every shard to its place in `files`, as `manifest.arrange` planned them.

        The copy is only begun, beside the work that follows: the tensors must not change before `wait`. From an accelerator
        it runs on a stream of its own and after the work queued so far, from the CPU in a thread. Raises SaveError if the
        host has too little memory.
        """
        self.prepare([shard for shard, _ in state.shards], files)
        order = [at for plan in files for at in plan.members]
        shards, tensors = [state.shards[at][0] for at in order], [state.shards[at][1].detach() for at in order]
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
        self.sources = tensors
        if device is None:
            self.finish = self.thread.submit(self._copy, shards, tensors).result
            return
        self.stream = self.stream or torch.Stream(device=device)
        self.stream.wait_stream(torch.accelerator.current_stream(device))
        with self.stream:
            self._copy(shards, tensors)
        self.finish = self.stream.record_event().synchronize

    def wait(self) -> None:
        """Wait until a copy that was begun is complete."""
        if self.finish is not None:
            self.finish()
            self.finish, self.sources = None, []

    def _copy(self, shards: list[Shard], tensors: list[Tensor]) -> None:
        begun = time.thread_time()
        for view, shard, tensor in zip(self.views, shards, tensors, strict=True):
            view.copy_(pack(shard, tensor), non_blocking=True)
        self.copy_s = time.thread_time() - begun

    def prepare(self, shards: list[Shard], files: Sequence[FilePlan]) -> None:
        """Have the memory ready, so that the first copy takes no longer than the others. Raises as `copy` does."""
        if shards == self.layout:
            return
        size = max((plan.start + plan.nbytes for plan in files), default=0)
        if self.map is None or len(self.map) < size:
            self._grow(size)
        self.layout, self.views = shards, []
        for plan in files:
            at = plan.start
            for shard in (shards[member] for member in plan.members):
                assert self.map is not None
                self.views.append(torch.frombuffer(self.map, dtype=DTYPES[shard.dtype], count=shard.length, offset=at))
                at += shard.nbytes

    def _grow(self, size: int) -> None:
        """Have `size` bytes of touched memory: a first touch in the middle of a copy would cost more than the copy."""
        free = free_memory() + (0 if self.map is None else len(self.map))
        expected = f"{size} bytes of memory for a copy of this rank's state"
        if free < size:
            raise SaveError("checkpoint.mode", f"{free} bytes", expected, "checkpoint=sync")
        try:
            os.posix_fallocate(self.memory, 0, max(size, 1))
        except OSError as error:
            raise SaveError("checkpoint.mode", error.strerror, expected, "checkpoint=sync") from error
        self.map = mmap.mmap(self.memory, max(size, 1), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        if self.pin:
            whole = torch.frombuffer(self.map, dtype=torch.uint8)
            cudart = torch.cuda.cudart()
            assert cudart is not None, "pin without CUDA"
            torch.cuda.check_error(int(cudart.cudaHostRegister(whole.data_ptr(), whole.numel(), 0)))


def live(state: State) -> Source:
    """The data of files straight from the state's tensors, for a save that the training waits for."""

    def data(plan: FilePlan) -> Iterator[memoryview]:
        for member in plan.members:
            shard, tensor = state.shards[member]
            yield as_bytes(pack(shard, tensor.detach()).cpu())

    return data


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a flat, contiguous CPU tensor; writing to it writes to the tensor."""
    assert tensor.is_contiguous(), "a shard is a flat, contiguous view"
    return tensor.view(torch.uint8).numpy().data


def free_memory() -> int:
    """Bytes that the host can still give without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise AssertionError("/proc/meminfo without MemAvailable")
