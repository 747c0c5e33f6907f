"""The border between checkpoint/, which knows no users, and the letters that users get."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from framework.base.errors import FrameworkError
from framework.checkpoint.errors import CheckpointError


@contextmanager
def letters(kind: type[FrameworkError]) -> Iterator[None]:
    """Turn a CheckpointError inside the block into a letter of `kind`: ConfigError before training, RunError during it."""
    try:
        yield
    except CheckpointError as error:
        raise kind(error.subject, error.got, error.expected, error.write) from None
