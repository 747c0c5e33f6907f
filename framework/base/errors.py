"""Errors that a user can cause, as small letters, and the exit codes that they become.

Nothing else is raised on purpose for a user; `assert` is for our own mistakes.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAULT = 1
EXIT_REFUSED = 2
EXIT_STOPPED = 75


class FrameworkError(Exception):
    """A letter to the user: what is wrong, what was given, what was expected, what to write instead.

    `subject` is the key, file or part that the letter is about. Parts left empty are left out.
    """

    exit_code = EXIT_FAULT

    def __init__(self, subject: str, got: object = None, expected: str = "", write: str = "") -> None:
        self.subject, self.got, self.expected, self.write = subject, got, expected, write
        super().__init__(self.letter())

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Survive the way from a worker process with the parts intact."""
        return type(self), (self.subject, self.got, self.expected, self.write)

    def letter(self) -> str:
        """The letter as lines, without a final newline."""
        rows = [self.subject]
        if self.got is not None:
            rows.append(f"  got       {self.got}")
        if self.expected:
            rows.append(f"  expected  {self.expected}")
        if self.write:
            rows.append(f"  write     {self.write}")
        return "\n".join(rows)


class ConfigError(FrameworkError):
    """A setting, or a combination of settings, is refused before anything starts."""

    exit_code = EXIT_REFUSED


class DataError(FrameworkError):
    """A data file is missing, damaged, or holds what the model cannot read."""

    exit_code = EXIT_REFUSED


class StartError(FrameworkError):
    """The machine does not let the run start: a port, a lock, disagreeing environment variables."""

    exit_code = EXIT_REFUSED


class Stopped(FrameworkError):
    """A run has stopped because it was asked to; a later start goes on."""

    exit_code = EXIT_STOPPED


class RunError(FrameworkError):
    """Something outside this process broke a run under way: a lost rank, a full disk."""


class MemoryShort(RunError):
    """A rank needs more memory than it can have."""
