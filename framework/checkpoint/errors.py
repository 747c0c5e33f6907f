"""What can be wrong with a checkpoint, in the four parts of a letter. The room stands alone; trainer/letters.py makes letters of these."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint is damaged, incomplete, of another model, or from a newer version.

    `subject` is the file or tensor that it is about, then what was found, what was expected, what to do instead.
    """

    def __init__(self, subject: str, got: object = None, expected: str = "", write: str = "") -> None:
        self.subject, self.got, self.expected, self.write = subject, got, expected, write
        super().__init__(self.letter())

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Survive the way from another process with the parts intact."""
        return type(self), (self.subject, self.got, self.expected, self.write)

    def letter(self) -> str:
        """The parts in a line."""
        parts = [self.subject, *(f"{word} {part}" for word, part in (("got", self.got), ("expected", self.expected)) if part)]
        return "; ".join(parts)


class SaveError(CheckpointError):
    """A checkpoint could not be written: a full disk, a folder without write permission, a rank that failed."""


def said(error: Exception) -> str:
    """What an error of a disk, or of the driver behind a URL, says of itself, for a letter."""
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
