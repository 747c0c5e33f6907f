"""What a window of steps was spent on, from the calls that a profiler has noted: own time, the dearest operators, gaps. No torch.

Times are nanoseconds of one clock. A call inside another one of the same thread is a part of it; its own time is what its parts leave.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from framework.monitor.roofline import PRECISION, Roof, Shape, flop, nbytes, standing

Span = tuple[int, int]
NANO = 1e9
SHOWN = 8
"""Shapes of one call that are written; a fused optimizer has as many as there are weights."""


@dataclass
class Call:
    """One call of an operator: shapes and types of its inputs, values of those that are no tensors. `kernel` is the name of what ran
    on the accelerator for it, and began and ended are that one's; empty on a CPU. `thread` is where it ran; of a kernel, the number of
    the call that launched it. `nest` or `lay` set what it spent, computed [FLOP] and moved [bytes] itself."""

    name: str
    began: int
    ended: int
    shapes: tuple[Shape, ...] = ()
    types: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()
    thread: int = 0
    kernel: str = ""
    torch_flop: int = 0
    own: int = 0
    flop: int = 0
    bytes: int = 0


@dataclass
class Total:
    """All calls of one operator with the same shapes. `seconds` of own time; `bytes` and `flop` of all calls."""

    name: str
    shapes: tuple[Shape, ...]
    types: tuple[str, ...]
    kernel: str
    calls: int = 0
    seconds: float = 0.0
    flop: int = 0
    torch_flop: int = 0
    bytes: int = 0

    @property
    def precision(self) -> str | None:
        """Of its first input that is a number with a fraction."""
        return next((PRECISION[kind] for kind in self.types if kind in PRECISION), None)

    @property
    def shown(self) -> list[Any]:
        """The shapes for a file; of many, the first ones and how many more."""
        more = len(self.shapes) - SHOWN
        return [*map(list, self.shapes[:SHOWN]), *([f"and {more} more"] if more > 0 else [])]


@dataclass
class Gap:
    """A time in which nothing ran, and the names of what ran before and after; empty at the edge of a step."""

    began: int
    seconds: float
    before: str
    after: str


@dataclass
class _Open:
    """A call that has not ended yet, and whether a part of it computes and moves what it does."""

    call: Call
    computes: bool = False
    moves: bool = False


def within(calls: Iterable[Call], spans: Sequence[Span]) -> list[Call]:
    """The calls that begin inside one of the spans, which follow each other: what a run does between steps does not count."""
    starts = [began for began, _ in spans]
    found = []
    for call in calls:
        index = bisect_right(starts, call.began) - 1
        if index >= 0 and call.began < spans[index][1]:
            found.append(call)
    return found


def nest(calls: Iterable[Call]) -> list[Call]:
    """The calls of a CPU with what they spent, computed and moved set; in order of beginning. Work is counted once, in the innermost
    call that does it: linear calls mm, mean calls sum."""
    ordered = sorted(calls, key=lambda call: (call.thread, call.began, -call.ended))
    stack: list[_Open] = []
    thread: int | None = None
    for call in ordered:
        call.own = call.ended - call.began
        while stack and (call.thread != thread or stack[-1].call.ended <= call.began):
            _close(stack)
        thread = call.thread
        if stack:
            stack[-1].call.own -= min(call.ended, stack[-1].call.ended) - call.began
        stack.append(_Open(call))
    while stack:
        _close(stack)
    return sorted(ordered, key=lambda call: call.began)


def _close(stack: list[_Open]) -> None:
    done = stack.pop()
    call, counted = done.call, flop(done.call.name, done.call.shapes, done.call.values)
    if counted is not None and not done.computes:
        call.flop, call.bytes, done.computes = counted, nbytes(call.name, call.shapes, call.types), True
    elif not done.computes and not done.moves:
        call.bytes = nbytes(call.name, call.shapes, call.types)
    if stack:
        stack[-1].computes |= done.computes
        stack[-1].moves |= done.moves or call.bytes > 0


def lay(calls: Iterable[Call]) -> list[Call]:
    """The kernels of an accelerator with the same set; what their operator computes and moves counts for the longest of them."""
    ordered = sorted(calls, key=lambda call: call.began)
    longest: dict[int, Call] = {}
    for call in ordered:
        call.own = call.ended - call.began
        if call.own > (longest[call.thread].own if call.thread in longest else -1):
            longest[call.thread] = call
    for call in longest.values():
        call.flop, call.bytes = flop(call.name, call.shapes, call.values) or 0, nbytes(call.name, call.shapes, call.types)
    return ordered


def totals(calls: Iterable[Call], by_kernel: bool) -> list[Total]:
    """The dearest first."""
    found: dict[tuple[Any, ...], Total] = {}
    for call in calls:
        kernel = call.kernel if by_kernel else ""
        key = (call.name, call.shapes, call.types, kernel)
        total = found.setdefault(key, Total(call.name, call.shapes, call.types, kernel))
        total.calls += 1
        total.seconds += call.own / NANO
        total.flop += call.flop
        total.torch_flop += call.torch_flop
        total.bytes += call.bytes
    return sorted(found.values(), key=lambda total: -total.seconds)


def gaps(calls: Sequence[Call], spans: Sequence[Span]) -> list[Gap]:
    """Times inside the spans in which no call runs on any thread, in order."""
    ordered = sorted(calls, key=lambda call: call.began)
    found = []
    position, before = 0, ""
    for began, ended in spans:
        free, before = began, ""
        while position < len(ordered) and ordered[position].began < ended:
            call = ordered[position]
            if call.began > free:
                found.append(Gap(free, (call.began - free) / NANO, before, label(call)))
            if call.ended > free:
                free, before = call.ended, label(call)
            position += 1
        if free < ended:
            found.append(Gap(free, (ended - free) / NANO, before, ""))
    return found


def label(call: Call) -> str:
    """What a reader of a trace would look for."""
    return call.kernel or call.name


def thinned(points: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """At most `most` of the points (time, bytes): of as many neighbours as it takes, the highest, so that no peak is lost."""
    width = -(-len(points) // most)
    return [max(points[first : first + width], key=lambda point: point[1]) for first in range(0, len(points), max(1, width))]


# ---------------------------------------------------------------- as they are written


def ops_rows(found: Sequence[Total], steps: int, wall_s: float) -> list[dict[str, Any]]:
    """Rows of ops.json, of one step; `share` is of the steps' time [s]."""
    return [
        {"name": total.name, "shapes": total.shown, "calls": total.calls / steps,
         "self_s": total.seconds / steps, "share": total.seconds / wall_s}
        for total in found
    ]  # fmt: skip


def kernel_rows(found: Sequence[Total], roof: Roof | None) -> list[dict[str, Any]]:
    """Rows of kernels.json, of the whole window. The rates of what is not counted, and the roofline without a roof, are null."""
    rows = []
    for total in found:
        place = None if roof is None else standing(total.seconds, total.flop, total.bytes, total.precision, roof)
        rows.append({
            "name": total.kernel or total.name, "operator": total.name, "shapes": total.shown,
            "types": list(total.types[:SHOWN]), "calls": total.calls, "seconds": total.seconds, "flop": total.flop,
            "torch_flop": total.torch_flop, "bytes": total.bytes,
            "flop_per_s": total.flop / total.seconds if total.seconds else None,
            "bytes_per_s": total.bytes / total.seconds if total.seconds else None,
            "intensity": total.flop / total.bytes if total.bytes else None,
            "ridge": None if place is None else place.ridge,
            "share_of_roofline": None if place is None else place.share,
            "bound": None if place is None else place.bound,
        })  # fmt: skip
    return rows


def gap_facts(found: Sequence[Gap], spans: Sequence[Span], longest: int = 5) -> dict[str, Any]:
    """Of the whole window; `at_s` counts from its beginning."""
    first = spans[0][0] if spans else 0
    most = sorted(found, key=lambda gap: -gap.seconds)[:longest]
    return {
        "seconds": sum(gap.seconds for gap in found),
        "count": len(found),
        "longest": [
            {"at_s": (gap.began - first) / NANO, "seconds": gap.seconds, "before": gap.before, "after": gap.after} for gap in most
        ],
    }
