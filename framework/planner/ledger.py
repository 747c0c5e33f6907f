"""The Ledger: what one rank keeps in memory, book by book, in bytes. Predicted here (memory.py), measured by monitor/memory.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

BOOKS: dict[str, str] = {
    "parameters": "weights that the forward pass reads, in their own type",
    "gradients": "of the backward pass, as they lie before the update",
    "accumulation": "fp32 sums of the micro-batches' gradients, beside half gradients",
    "masters": "fp32 weights that the optimizer updates, where they are not the parameters themselves",
    "moments": "of the optimizer",
    "gathered": "weights in another form than they are kept in: whole under ZeRO-3, cast under autocast",
    "buckets": "gradients on their way between ranks, and hidden states between pipeline stages",
    "activations": "what the forward pass keeps for the backward pass, of all micro-batches in flight",
    "logits": "scores of the vocabulary and what the loss makes of them",
    "temporaries": "what one block's backward pass works with, recomputed activations included",
}
"""Name of each book, and what stands in it. The order is the order in which they are shown."""

STATIC = ("parameters", "gradients", "accumulation", "masters", "moments")
"""Books that are the same in every step, to the byte."""

Where = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class Ledger:
    """Bytes of one rank by book, each at its fullest, and where it lies. A book that is not there is empty.

    `peak` is the most on the device at one time: not all books are full at once.
    """

    device: Mapping[str, int]
    host: Mapping[str, int]
    disk: Mapping[str, int]
    peak: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device at the fullest moment of a step."""
        return self.peak

    def rows(self) -> dict[str, int]:
        """Every book that is not empty, wherever it lies: bytes."""
        found = {book: self.device.get(book, 0) + self.host.get(book, 0) + self.disk.get(book, 0) for book in BOOKS}
        return {book: nbytes for book, nbytes in found.items() if nbytes}
