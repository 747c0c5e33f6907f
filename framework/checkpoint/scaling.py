"""Moments in half the bytes: cut into blocks, each scaled by a power of two and rounded. Only where the user asks for it.

Of a block whose largest magnitude is a, the exponent e is such that a / 2^e lies in [2^14, 2^15). It is kept as x / 2^e in the
smaller type, with e beside it, and read back as kept x 2^e. The scaling is exact, so the error is that of rounding to nearest:

    bf16   |error| <= 2^-8 |x|    where |x| >= 2^-140 a
    fp16   |error| <= 2^-11 |x|   where |x| >= 2^-28 a, and at most 2^-39 a below

Blocks whose largest magnitude is below 2^-98 are scaled as if it were that. A second moment that is not zero is never
kept as zero, but as the smallest number of the type (fp16: at most 2^-38 a): Adam divides by its root, and a root that
is too small makes an update too large, while one that is too large only makes it smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from framework.checkpoint.shards import Shard
from framework.checkpoint.state import DTYPES

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum")
"""Kinds of shards that may be rounded. Masters never are."""
BLOCK = 1 << 18
"""Elements of a block at most: it stays in the processor's cache between scaling and rounding."""
LARGEST_POWER, LOWEST_EXPONENT = 15, -112
"""The largest of a block comes out below 2^15, which both types hold; 2^112 is a factor that fp32 holds with room to spare."""


def halve(shards: Sequence[tuple[Shard, Tensor]], dtype: str) -> list[tuple[Shard, Tensor]]:
    """The moments among `shards` as blocks that are to be kept in `dtype`, BF16 or F16; the tensors are views of the same memory.

    Reads every moment once for its largest magnitude, and from an accelerator waits for the answer.
    """
    others = [(shard, tensor) for shard, tensor in shards if shard.kind not in MOMENTS]
    blocks = [
        (replace(shard, start=shard.start + at, length=min(BLOCK, shard.length - at), dtype=dtype), tensor[at : at + BLOCK])
        for shard, tensor in shards
        if shard.kind in MOMENTS
        for at in range(0, shard.length, BLOCK)
    ]
    if not blocks:
        return others
    largest = torch.stack([torch.stack(tensor.detach().aminmax()) for _, tensor in blocks]).abs().amax(1).tolist()
    return others + [(replace(shard, scale=_exponent(a)), tensor) for (shard, tensor), a in zip(blocks, largest, strict=True)]


def _exponent(largest: float) -> int:
    if largest == 0 or not math.isfinite(largest):
        return 0
    return max(math.frexp(largest)[1] - LARGEST_POWER, LOWEST_EXPONENT)


def pack(shard: Shard, tensor: Tensor) -> Tensor:
    """`tensor` in the type of `shard`, scaled by its exponent; the tensor itself where it has that type already."""
    dtype = DTYPES[shard.dtype]
    if tensor.dtype == dtype:
        return tensor
    scaled = tensor * 2.0**-shard.scale
    if shard.kind == "exp_avg_sq":
        kind = torch.finfo(dtype)
        scaled = torch.where(tensor > 0, scaled.clamp(min=kind.tiny * kind.eps), scaled)
    return scaled.to(dtype)


def unpack(shard: Shard, kept: Tensor) -> Tensor:
    """The inverse of `pack` but for the rounding, in fp32 where there is something to scale."""
    return kept.float() * 2.0**shard.scale if shard.scale else kept
