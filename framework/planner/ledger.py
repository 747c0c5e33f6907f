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
    "gathered": "ZeRO-3: weights that are whole on this rank for as long as they are used",
    "buckets": "gradients on their way between ranks, and updated weights on their way back",
    "activations": "what the forward pass keeps for the backward pass, of all micro-batches in flight",
    "logits": "scores of the vocabulary and what the loss makes of them",
}
"""Name of each book, and what stands in it. The order is the order in which they are shown."""

STATIC = ("parameters", "gradients", "accumulation", "masters", "moments")
"""Books that are the same in every step, to the byte."""

Where = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class Ledger:
    """Bytes of one rank by book, and where each lies. A book that is not there is empty."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    disk: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes on the device at the fullest moment of a step."""
        return sum(self.device.values())

    def rows(self) -> dict[str, int]:
        """Every book that is not empty, wherever it lies: bytes."""
        found = {book: self.device.get(book, 0) + self.host.get(book, 0) + self.disk.get(book, 0) for book in BOOKS}
        return {book: nbytes for book, nbytes in found.items() if nbytes}
