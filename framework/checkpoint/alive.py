"""Who a process is: Linux says when each began, so that a number that was given out again is not taken for the old process."""

from __future__ import annotations

from pathlib import Path


def began(pid: int) -> int | None:
    """When the process began, in the kernel's ticks since the machine did; None where no such process lives.

    One that has ended, and whose parent has not asked how, does not live.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
