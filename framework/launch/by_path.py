"""`python by_path.py MODULE WORD...` is `python -m MODULE WORD...`, for launchers that can start files only."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    del sys.path[0], sys.argv[0]  # this folder, whose files must not stand in for other modules; and this file's name
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
