"""Faults inside ranks of whole runs, whoever starts them: with this folder on PYTHONPATH every Python process reads this file first.

FAULT_RANK is the rank that is struck, FAULT_STEP the step of its start before whose computation it happens, FAULT_KIND what:
    crash  an exception          kill  SIGKILL          hang  a call into C that does not come back and keeps Python's lock
    stop   SIGSTOP, as a machine that freezes
    disk   from then on no file can be written that is longer than a page, as on a full disk
FAULT_ONCE is a file; where it exists nothing happens, and it is made when something does, if it can be.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


def strike(kind: str) -> None:
    with contextlib.suppress(OSError):
        Path(os.environ["FAULT_ONCE"]).touch()
    if kind == "crash":
        raise ArithmeticError("a planted fault")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "hang":
        ctypes.PyDLL(None).sleep(600)
    if kind == "disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def plant() -> None:
    """Wait for the engine's class, and count its steps."""
    name = "framework.engine.sharded"
    while not hasattr(sys.modules.get(name), "DeepSpeedEngine"):
        time.sleep(0.005)
    engine, steps = sys.modules[name].DeepSpeedEngine, [0]
    method = engine.step

    def step(self: Any, *args: Any) -> Any:
        steps[0] += 1
        if steps[0] == int(os.environ["FAULT_STEP"]) and not Path(os.environ["FAULT_ONCE"]).exists():
            strike(os.environ["FAULT_KIND"])
        return method(self, *args)

    engine.step = step


if os.environ.get("RANK") == os.environ.get("FAULT_RANK") and "RANK" in os.environ:
    threading.Thread(target=plant, daemon=True).start()
