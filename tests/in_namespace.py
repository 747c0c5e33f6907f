"""`python -m tests.in_namespace NAME MODULE WORD...`: `python -m MODULE WORD...` inside the network namespace NAME, a host of its own."""

from __future__ import annotations

import ctypes
import os
import runpy
import sys

NETWORK = 0x40000000  # CLONE_NEWNET

if __name__ == "__main__":
    name, module = sys.argv[1:3]
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NETWORK):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    sys.argv[:3] = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
