"""A start of framework.train inside this process: what the entry file makes of words and environment, in milliseconds.

For what is decided before the ranks meet. What only separate processes show is started by tests/ranks.py.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

from framework.launch import entry

LAUNCHER_SETS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Started:
    """How a start went: exit code, stdout and stderr together, and what the task was given (None if it was never reached)."""

    code: int
    text: str
    given: entry.Entry | None


def start(words: Sequence[str], environment: Mapping[str, str] | None = None, task: Callable[[entry.Entry], None] | None = None) -> Started:
    """Run the entry with `words` where only `environment` names a rank; `task` stands in for training. Nothing of it stays behind."""
    given: list[entry.Entry] = []

    def record(entered: entry.Entry) -> None:
        given.append(entered)
        if task is not None:
            task(entered)

    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER_SETS}
    output, handlers, level, argv = io.StringIO(), list(logging.getLogger().handlers), logging.getLogger().level, list(sys.argv)
    try:
        with (
            mock.patch.dict(os.environ, {**kept, **(environment or {})}, clear=True),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            try:
                code = entry.run_entry(words, record)
            except SystemExit as leaving:  # Hydra's way out of --help
                code = int(leaving.code or 0)
    finally:
        logging.getLogger().handlers[:], sys.argv[:] = handlers, argv
        logging.getLogger().setLevel(level)
        logging.captureWarnings(False)
    return Started(code, output.getvalue(), given[0] if given else None)


def letters(text: str) -> int:
    """How many letters stand in `text`: each has exactly one line that says what was given."""
    return len(re.findall(r"^  got       \S", text, re.MULTILINE))


def assert_one_letter(text: str, *parts: str) -> None:
    """One letter, no traceback, and each of `parts` in it."""
    assert letters(text) == 1, text
    assert "Traceback" not in text
    for part in parts:
        assert part in text, f"{part!r} is not in the letter:\n{text}"
