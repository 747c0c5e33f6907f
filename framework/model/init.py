"""Initial weights that do not depend on how the model is laid out over ranks.

The values of a matrix are a pure function of (seed, its logical name, block of rows): a rank that keeps some rows draws
only the blocks that hold them. torch's global random numbers are not touched.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from framework.checkpoint.shards import Logical
from framework.config import schema

ROWS_PER_BLOCK = 256
"""Part of the definition of the values: another number gives other weights."""


def initialise(module: nn.Module, model: schema.Model, seed: int, parts: Mapping[str, Logical] | None = None) -> None:
    """Fill every parameter of `module` in place, on its device and in its type: a whole logical tensor, or the part of it
    that `parts` names; and let each parameter carry that as `.logical`.

    Matrices are normal(0, init_std); those that write to the residual stream (o_proj, down_proj) get
    init_std / sqrt(2 * num_layers) (Radford et al. 2019, section 2.3); norm weights are 1, biases 0.
    """
    tag(module, parts)
    with torch.no_grad():
        for parameter in module.parameters():
            logical: Logical = parameter.logical  # type: ignore[attr-defined]
            assert tuple(parameter.shape) == logical.size, f"{logical.name}: {tuple(parameter.shape)} is not {logical.size}"
            if len(logical.shape) == 1:
                parameter.fill_(1.0 if logical.name.endswith("norm.weight") else 0.0)
            else:
                _fill_matrix(parameter, logical, standard_deviation(logical.name, model), seed)


def tag(module: nn.Module, parts: Mapping[str, Logical] | None = None) -> None:
    """Give every parameter its `.logical`: the part of the named tensor that it is, by `parts`, or else the whole of it.

    Called before an engine is made: engines put other things in the place of a parameter's data. Names are those of
    named_parameters, so that a tied parameter has its first one.
    """
    for name, parameter in module.named_parameters():
        parameter.logical = Logical.whole(name, parameter.shape) if parts is None else parts[name]  # type: ignore[attr-defined]


def _fill_matrix(parameter: Tensor, logical: Logical, std: float, seed: int) -> None:
    """The columns and the rows that it has, block by block: a second embedding of fp32 would be slow and large. Padding is 0."""
    first, (left, width) = logical.offset[0], (logical.offset[1], logical.size[1])
    end = min(first + logical.size[0], logical.shape[0])
    parameter[max(0, end - first) :] = 0.0
    for start in range(first, end, ROWS_PER_BLOCK):
        stop = min(start + ROWS_PER_BLOCK, end)
        drawn = rows(logical.name, logical.shape, start, stop, std, seed)
        parameter[start - first : stop - first] = drawn[:, left : left + width]


def standard_deviation(name: str, model: schema.Model) -> float:
    """Of the initial values of the matrix called `name`."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return model.init_std / math.sqrt(2 * model.num_layers)
    return model.init_std


def rows(name: str, shape: tuple[int, ...], start_row: int, stop_row: int, std: float, seed: int) -> Tensor:
    """Rows start_row to stop_row (not included) of the initial matrix `name` of `shape` [rows, columns].

    Returns fp32 on the CPU, [stop_row - start_row, columns], normal(0, std).
    """
    assert 0 <= start_row <= stop_row <= shape[0], f"{name}: rows {start_row} to {stop_row} of {shape}"
    wanted = torch.empty(stop_row - start_row, shape[1])
    for block in range(start_row // ROWS_PER_BLOCK, math.ceil(stop_row / ROWS_PER_BLOCK)):
        # A block is always drawn whole: the kernel's last few values depend on how many are drawn.
        drawn = torch.empty(ROWS_PER_BLOCK, shape[1]).normal_(0.0, std, generator=_generator(seed, name, block))
        first = block * ROWS_PER_BLOCK
        start, stop = max(start_row, first), min(stop_row, first + ROWS_PER_BLOCK)
        wanted[start - start_row : stop - start_row] = drawn[start - first : stop - first]
    return wanted


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    # 4 bytes, because torch's CPU generator drops the rest of a longer seed.
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
