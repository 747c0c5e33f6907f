"""Whether the launcher that started this rank still lives: an orphaned rank has nobody who would end it.

DeepSpeed's launcher is two processes: the outer one that a person starts and signals, and its child that starts the ranks. When the
outer one dies, the inner one lives on and waits; and a sweep stands above both. So a rank watches all of them. No torch.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

MODULES = ("deepspeed.launcher.launch", "deepspeed.launcher.runner", "framework.train", "framework.verify")
"""Programs that start ranks, as `python -m` names them."""


class Launchers:
    """The launchers above this process when it began, the nearest first; none where a person or another program started it."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        above = os.getppid()
        while _launches(above):
            self.pids.append(above)
            above = _parent(above)

    def died(self) -> bool:
        """Whether one of them has gone: its child has another parent then."""
        return any(_parent(child) != parent for child, parent in pairwise([os.getpid(), *self.pids]))


def _launches(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    by_module = any(flag == "-m" and module in MODULES for flag, module in pairwise(words))
    return by_module or any(word.endswith("/deepspeed") for word in words[:2])


def _parent(pid: int) -> int:
    """0 where the process has gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
