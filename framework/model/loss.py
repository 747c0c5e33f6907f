"""The training loss: a sum over tokens, so that whoever knows the global token count divides, once."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100
"""Target of a position that has no loss."""


class TokenLoss(nn.Module):
    """The end of the model, where logits are no longer of one token alone: a place that a divided vocabulary takes."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """As token_loss_sum."""
        return token_loss_sum(logits, targets)

    def whole(self, logits: Tensor) -> Tensor:
        """The logits [batch, seq, vocab] of the whole vocabulary, on every rank."""
        return logits


def token_loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross entropies, in nats, over the positions whose target is not IGNORE.

    `logits` [..., vocab] of any float type, `targets` [...] of token ids -> fp32 scalar, softmax and sum in fp32.
    With no position left the result is 0 and so is its gradient (a mean would be NaN).
    """
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")
