"""Where the tokens of a micro-batch stand, made once in a forward pass for all blocks: the turns of their positions, and what they see."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from framework.model.rope import Rotation


class Places(NamedTuple):
    """What every block is told. `rotation`, as made by rope.rotation: None where positions are learned. `mask`, as made by
    `document_mask`: None where every token sees all that come before it.

    A tuple, so that who looks through the inputs of a module finds the tensors; and not the tensors themselves, because a region
    with offload would move one mask to the host for each block.
    """

    rotation: Rotation | None
    mask: Tensor | None


def document_mask(starts: Tensor, dtype: torch.dtype) -> Tensor:
    """What attention adds to its scores so that no token sees another document: [batch, 1, seq, seq] of 0, and -inf where it does not look.

    `starts` [batch, seq] has for each token the place at which its document begins: token i sees tokens starts[i] to i. `dtype`
    is the type of the queries. Of booleans torch would make these numbers anew in every block, and keep them all.
    """
    places = torch.arange(starts.shape[-1], device=starts.device)
    unseen = (places < starts[..., None]) | (places > places[:, None])
    return torch.zeros(unseen.shape, dtype=dtype, device=starts.device).masked_fill_(unseen, -torch.inf)[:, None]
