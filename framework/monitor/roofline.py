"""What an operator computes and moves, counted from the shapes and types of its inputs; and what a device could do in that time.

Pure functions of what a profiler notes of a call; no torch. FLOP of matrix products only: 2 m n k for [m, k] x [k, n]. The roofline is
that of Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model", section 3:
attainable FLOP/s = min(peak FLOP/s, peak bytes/s x FLOP per byte).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

Shape = tuple[int, ...]

TYPE_BYTES = {
    "float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "long": 8, "int": 4, "short": 2,
    "signed char": 1, "unsigned char": 1, "bool": 1, "TensorList": 4,
}  # fmt: skip
"""Bytes of an element, by the profiler's word for its type; what has no type here is no tensor. Of a list of tensors the profiler does
not say the type: lists are the optimizer's, which are fp32."""
PRECISION = {"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16"}
"""The words of planner/hardware.py."""

VIEWS = frozenset((
    "view", "_unsafe_view", "reshape", "_reshape_alias", "t", "transpose", "permute", "expand", "as_strided", "as_strided_", "slice",
    "select", "narrow", "split", "unsqueeze", "squeeze", "detach", "detach_", "set_", "alias", "unbind", "chunk", "flatten", "unflatten",
    "empty", "empty_like", "empty_strided", "resize_", "resolve_conj", "resolve_neg", "item", "_local_scalar_dense", "to", "matmul",
    "scaled_dot_product_attention", "lift_fresh", "result_type",
))  # fmt: skip
"""Operators that move nothing themselves: they only look at the same memory, or leave the work to others."""
WIRES = ("c10d::", "gloo:", "nccl:", "record_param_comms")
"""Communication: its limit is the wire, not the memory."""
REDUCTIONS = frozenset((
    "sum", "mean", "amax", "amin", "max", "min", "norm", "linalg_vector_norm", "nll_loss_forward", "all", "any", "var_mean",
))  # fmt: skip
"""Operators whose output is taken for nothing beside their input."""


class Attention(NamedTuple):
    """One kind of fused attention: where its query and its `is_causal` stand among its inputs, and whether it is the backward pass."""

    query: int
    causal: int
    backward: bool


ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": Attention(0, 4, False),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Attention(1, 7, True),
    "_scaled_dot_product_flash_attention": Attention(0, 4, False),
    "_scaled_dot_product_flash_attention_backward": Attention(1, 11, True),
    "_scaled_dot_product_efficient_attention": Attention(0, 6, False),
    "_scaled_dot_product_efficient_attention_backward": Attention(1, 11, True),
    "_scaled_dot_product_cudnn_attention": Attention(0, 6, False),
    "_scaled_dot_product_cudnn_attention_backward": Attention(1, 14, True),
}
"""As torch declares them (native_functions.yaml). The backward pass makes five products where the forward pass makes two: it computes
the scores again (Dao et al. 2022, appendix B)."""


def bare(name: str) -> str:
    """The name without its room: mm of aten::mm."""
    return name.removeprefix("aten::")


def flop(name: str, shapes: Sequence[Shape], values: Sequence[Any] = ()) -> int | None:
    """FLOP of one call of a matrix product or of attention; None of anything else. `values` are the inputs that are no tensors, None
    in the places of those that are. Causal attention counts half, as kernels leave the other half out."""
    product = PRODUCTS.get(bare(name))
    if product is not None:
        return product(shapes)
    kind = ATTENTION.get(bare(name))
    if kind is None:
        return None
    whole = _attention(shapes[kind.query], shapes[kind.query + 1], shapes[kind.query + 2], kind.backward)
    causal = len(values) > kind.causal and values[kind.causal] in (True, "True", 1)
    return whole // 2 if causal else whole


def _mm(shapes: Sequence[Shape]) -> int:
    (rows, inner), (_, columns) = shapes[:2]
    return 2 * rows * inner * columns


def _bmm(shapes: Sequence[Shape]) -> int:
    (batch, rows, inner), (_, _, columns) = shapes[:2]
    return 2 * batch * rows * inner * columns


def _after_bias(product: Callable[[Sequence[Shape]], int]) -> Callable[[Sequence[Shape]], int]:
    """addmm and baddbmm take what is added first. The addition is not counted."""
    return lambda shapes: product(shapes[1:])


def _linear(shapes: Sequence[Shape]) -> int:
    """[..., in] x [out, in]."""
    return 2 * prod(shapes[0]) * shapes[1][0]


def _attention(query: Shape, key: Shape, value: Shape, backward: bool) -> int:
    """query [batch, heads, q, d], key [batch, heads, k, d], value [batch, heads, k, e]: the scores are a product over d, the mixture one
    over k. Backward: the scores again, the gradients of query and of key like the scores; those of value and of the weights like the
    mixture."""
    outer, length = prod(query[:-2]), query[-2] * key[-2]
    scores, mixture = 2 * outer * length * query[-1], 2 * outer * length * value[-1]
    return 3 * scores + 2 * mixture if backward else scores + mixture


PRODUCTS: dict[str, Callable[[Sequence[Shape]], int]] = {
    "mm": _mm, "addmm": _after_bias(_mm), "_addmm_activation": _after_bias(_mm), "bmm": _bmm, "baddbmm": _after_bias(_bmm),
    "linear": _linear,
}  # fmt: skip


def nbytes(name: str, shapes: Sequence[Shape], types: Sequence[str]) -> int:
    """Bytes that one call reads and writes at least: every input once, every output once. An output has the type of the first input.

    Of products and attention the outputs' shapes are known. What ends in `_` writes its first input, of lists all of them; what joins
    its inputs writes as much; Adam writes weights and moments; a reduction's output is left out. Any other operator is taken for one
    element by element, with an output as large as its inputs together span.
    """
    if bare(name) in VIEWS or name.startswith(WIRES):
        return 0
    tensors = [(shape, TYPE_BYTES[kind]) for shape, kind in zip(shapes, types, strict=False) if kind in TYPE_BYTES]
    if not tensors:
        return 0
    read, width = sum(prod(shape) * width for shape, width in tensors), tensors[0][1]
    if bare(name) == "embedding":  # reads the rows that it writes, and not the others
        table, indices = (shape for shape, _ in tensors[:2])
        return prod(indices) * (tensors[1][1] + 2 * table[-1] * width)
    return read + width * sum(prod(shape) for shape in outputs(bare(name), [shape for shape, _ in tensors]))


def outputs(name: str, shapes: Sequence[Shape]) -> list[Shape]:
    """Shapes of what an operator writes. `name` is bare, `shapes` those of its tensors."""
    if name == "linear":
        return [(*shapes[0][:-1], shapes[1][0])]
    if name in PRODUCTS:
        left, right = shapes[:2] if name in ("mm", "bmm") else shapes[1:3]
        return [(*left[:-1], right[-1])]
    kind = ATTENTION.get(name)
    if kind is not None:
        query, key, value = shapes[kind.query : kind.query + 3]
        return [query, key, value] if kind.backward else [(*query[:-1], value[-1])]
    if name in REDUCTIONS:
        return []
    if name.startswith("_fused_adam"):  # weights, gradients, two moments, and a counter each
        large = [shape for shape in shapes if shape]
        return large[: len(large) // 4] * 3
    if name in ("cat", "stack") or (name.startswith("_foreach") and name.endswith("_")):
        return list(shapes)
    return [shapes[0]] if name.endswith("_") else [spanned(shapes)]


def spanned(shapes: Sequence[Shape]) -> Shape:
    """What shapes span together, as torch broadcasts them; the largest one where they do not go together."""
    length = max(len(shape) for shape in shapes)
    padded = [(1,) * (length - len(shape)) + shape for shape in shapes]
    columns = [set(column) - {1} for column in zip(*padded, strict=True)]
    if any(len(sizes) > 1 for sizes in columns):
        return max(shapes, key=prod)
    return tuple(sizes.pop() if sizes else 1 for sizes in columns)


@dataclass(frozen=True)
class Roof:
    """What one rank has at most: FLOP/s by precision, bytes/s of its memory; and what says so."""

    products: dict[str, float]
    bandwidth: float
    source: str


@dataclass(frozen=True)
class Standing:
    """Where an operator stands below the roof. `intensity` is FLOP per byte, `ridge` the intensity at which both limits meet.

    `share` is what is reached of the attainable: FLOP/s of a product, bytes/s of anything else. It can be above 1 where what is counted
    as moved through memory was in a cache.
    """

    flop_per_s: float
    bytes_per_s: float
    intensity: float
    ridge: float | None
    share: float
    bound: str


def standing(seconds: float, flops: float, moved: float, precision: str | None, roof: Roof) -> Standing | None:
    """Of work that took `seconds`; None where it did nothing that is counted, or the roof has no FLOP/s for its precision."""
    if seconds <= 0 or (flops == 0 and moved == 0):
        return None
    rate, traffic = flops / seconds, moved / seconds
    if flops == 0:
        return Standing(0.0, traffic, 0.0, None, traffic / roof.bandwidth, "memory")
    peak = roof.products.get(precision or "")
    if peak is None or moved == 0:
        return None
    intensity, ridge = flops / moved, peak / roof.bandwidth
    attainable = min(peak, roof.bandwidth * intensity)
    return Standing(rate, traffic, intensity, ridge, rate / attainable, "compute" if intensity >= ridge else "memory")
