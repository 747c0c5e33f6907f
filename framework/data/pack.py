"""A micro-batch out of rows of tokens: inputs and targets, a context rank's slice of them, and where documents end in them.

Pure functions of arrays. What loader processes do is numpy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

IGNORE = -100

Rows = tuple[np.ndarray, ...]
"""What one context rank reads of samples: tokens [micro, seq / context + 1], in the type of their file. Where documents are apart also
starts, int32 [micro, seq] of the whole row, and whether each token is its document's last one, bool [micro, seq / context]."""


@dataclass
class MicroBatch:
    """The samples of one forward pass on one rank; of each its share, where context ranks divide the sequence.

    ids: int64 [micro, seq / context]; targets: as many, the token after each id, or IGNORE where there is no loss;
    indices: int64 [micro], global sample indices, always on the CPU; starts: None where documents are joined, else int64 [micro, seq],
    for each token of the whole row the place in it at which its document begins (0 if that was before the row).
    """

    ids: Tensor
    targets: Tensor
    indices: Tensor
    starts: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What a model is given to compute the loss."""
        return (self.ids, self.targets) if self.starts is None else (self.ids, self.targets, self.starts)


def rows_of(tokens: np.ndarray, starts: np.ndarray | None, context_rank: int, context_size: int) -> Rows:
    """What a context rank reads of whole samples: `tokens`, and where documents are apart `starts`, both [micro, seq + 1]."""
    own = _slice(tokens, context_rank, context_size)
    if starts is None:
        return (own,)
    begins = starts == np.arange(starts.shape[1])
    return own, starts[:, :-1].copy(), _slice(begins, context_rank, context_size)[:, 1:].copy()


def micro_batch(rows: Sequence[Tensor], indices: np.ndarray) -> MicroBatch:
    """From the tensors of Rows, which become int64 here, where they are needed, because until here they are copied from process to
    process and to the device. Targets in memory of their own: who ignores some must not change an id (a file of int64 is not
    converted, and of one row both slices are contiguous as they are)."""
    tokens, *apart = rows
    made = MicroBatch(_int64(tokens[:, :-1]), _int64(tokens[:, 1:]), torch.from_numpy(indices))
    if apart:
        starts, last = apart
        made.starts = _int64(starts)
        made.targets.masked_fill_(last, IGNORE)
    return made


def _int64(part: Tensor) -> Tensor:
    return part.to(torch.int64, copy=True, memory_format=torch.contiguous_format)


def _slice(whole: np.ndarray, context_rank: int, context_size: int) -> np.ndarray:
    """Of [micro, seq + 1] what a context rank reads: its slice of the sequence and the place after it."""
    length = (whole.shape[1] - 1) // context_size
    start = context_rank * length
    return whole[:, start : start + length + 1]
