"""A window of steps under torch.profiler: what was called, with shapes and types, as plain data; and its files.

The only place that reads torch's own events. Watching changes no number of a step; it makes operators slower, by some microseconds each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, supported_activities

from framework.base.files import write_atomic
from framework.monitor.operators import Call, Span, lay, nest, thinned, within

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kinds of event, by the profiler's word, in which an accelerator is at work."""
POINTS = 2000
"""Of the curve of memory, at most."""
HISTORY = 200_000
"""Allocations that an accelerator's memory history keeps."""


@dataclass(frozen=True)
class Recorded:
    """What a window holds. `calls` are what the device spent its time on: operators on a CPU, kernels on an accelerator. `memory` is
    (nanoseconds, bytes above what lived at the beginning) after each allocation on a CPU; the release of what was allocated before the
    window is not among them, as torch's profiler does not know its size."""

    calls: list[Call]
    memory: list[tuple[int, int]]


class Window:
    """Between `begin` and `end` every operator of this process is noted. `deep` notes FLOP and memory as well."""

    def __init__(self, device: torch.device, deep: bool) -> None:
        self._device, self._deep = device, deep
        self._history = deep and device.type == "cuda"
        self._profile = profile(
            activities=supported_activities(), record_shapes=True, with_flops=deep, profile_memory=deep
        )  # fmt: skip

    def begin(self) -> None:
        """Note everything from now on."""
        if self._history:
            torch.cuda.memory._record_memory_history(max_entries=HISTORY)
        self._wait()
        self._profile.start()

    def end(self) -> None:
        """Note nothing any more."""
        self._wait()
        self._profile.stop()

    def recorded(self, spans: list[Span]) -> Recorded:
        """What was noted inside the spans, in nanoseconds since 1970; after `end`."""
        events = list(self._events())
        operators = [event for event in events if _is_operator(event)]
        kernels = [event for event in events if event.activity_type() in KERNELS]
        if kernels:
            launched = {event.correlation_id(): event for event in operators}
            calls = lay(within((_kernel(event, launched) for event in kernels), spans))
        else:
            calls = nest(within((_call(event) for event in operators), spans))
        return Recorded(calls, list(_memory(events)) if self._deep else [])

    def write(self, folder: Path, rank: int, base: int) -> list[str]:
        """The trace, and the memory over time: `base` is what lived at the beginning [bytes]. Names of the files."""
        folder.mkdir(parents=True, exist_ok=True)
        trace = f"trace_{rank}.json.gz"
        self._profile.export_chrome_trace(str(folder / trace))
        if self._history:
            kept = f"memory_{rank}.pickle"
            torch.cuda.memory._dump_snapshot(str(folder / kept))
            torch.cuda.memory._record_memory_history(enabled=None)
            return [trace, kept]
        kept, points = f"memory_{rank}.json", thinned(list(_memory(list(self._events()))), POINTS)
        began = points[0][0] if points else 0
        page = {"rank": rank, "base_bytes": base, "points": [[(time - began) / 1e9, base + nbytes] for time, nbytes in points]}
        write_atomic(folder / kept, json.dumps(page).encode())
        return [trace, kept]

    def _events(self) -> Iterator[Any]:
        inner = self._profile.profiler
        assert inner is not None, "the window has not ended"
        results = inner.kineto_results
        assert results is not None, "the window has not ended"
        yield from results.events()

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _is_operator(event: Any) -> bool:
    """Not the engine of autograd, nor a node of its graph: these are around operators, and their own time is Python's and the engine's."""
    return event.activity_type() == "cpu_op" and not event.is_async() and event.scope() == 0 and not event.name().startswith("autograd::")


def _call(event: Any) -> Call:
    """A list of tensors counts for as many."""
    shapes: list[tuple[int, ...]] = []
    types: list[str] = []
    for shape, kind in zip(event.structured_input_shapes(), event.dtypes(), strict=False):
        inner = shape if kind == "TensorList" else [shape]
        shapes.extend(map(tuple, inner))
        types.extend([kind] * len(inner))
    began = event.start_ns()
    return Call(
        event.name(), began, began + event.duration_ns(), tuple(shapes), tuple(types), tuple(event.concrete_inputs()),
        event.start_thread_id(), torch_flop=event.flops(),
    )  # fmt: skip


def _kernel(event: Any, launched: dict[int, Any]) -> Call:
    """The operator that launched it lends name and shapes."""
    number, began = event.linked_correlation_id(), event.start_ns()
    origin = launched.get(number)
    ended = began + event.duration_ns()
    if origin is None:
        return Call(event.name(), began, ended, thread=-event.correlation_id(), kernel=event.name())
    call = _call(origin)
    call.began, call.ended, call.kernel, call.thread = began, ended, event.name(), number
    return call


def _memory(events: list[Any]) -> Iterator[tuple[int, int]]:
    """(nanoseconds, bytes) after each allocation and release on the CPU, since the window began."""
    total = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        if event.device_type().name == "CPU":
            total += event.nbytes()
            yield event.start_ns(), total
