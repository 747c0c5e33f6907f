"""FLOP and bytes against closed forms and against torch's own counter; the roofline of Williams et al. at its two limits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from framework.monitor.roofline import Roof, flop, nbytes, spanned, standing

QKV = ((2, 3, 8, 4), (2, 3, 6, 4), (2, 3, 6, 5))
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("aten::mm", ((3, 4), (4, 5)), 2 * 3 * 4 * 5),
        ("aten::addmm", ((5,), (3, 4), (4, 5)), 2 * 3 * 4 * 5),
        ("aten::bmm", ((7, 3, 4), (7, 4, 5)), 7 * 2 * 3 * 4 * 5),
        ("aten::baddbmm", ((7, 3, 5), (7, 3, 4), (7, 4, 5)), 7 * 2 * 3 * 4 * 5),
        ("aten::linear", ((2, 3, 4), (5, 4), (5,)), 2 * 2 * 3 * 4 * 5),
        ("aten::add", ((3, 4), (3, 4)), None),
    ],
)
def test_products(name: str, shapes: tuple[tuple[int, ...], ...], expected: int | None) -> None:
    assert flop(name, shapes) == expected


def test_attention_forward_and_backward() -> None:
    scores, mixture = 2 * 2 * 3 * 8 * 6 * 4, 2 * 2 * 3 * 8 * 6 * 5
    assert flop(FLASH, QKV, (None, None, None, 0.0, False)) == scores + mixture
    assert flop(FLASH, QKV, (None, None, None, 0.0, True)) == (scores + mixture) // 2
    backward = ((2, 3, 8, 5), *QKV, (2, 3, 8, 5), (2, 3, 8))
    assert flop(f"{FLASH}_backward", backward, (*(None,) * 6, 0.0, False)) == 3 * scores + 2 * mixture
    assert flop(f"{FLASH}_backward", backward, (*(None,) * 6, 0.0, True)) == (3 * scores + 2 * mixture) // 2


def test_products_are_what_torch_counts() -> None:
    """torch.utils.flop_counter, on tensors without memory."""
    left, right, bias = (torch.empty(shape, device="meta") for shape in ((3, 4), (4, 5), (5,)))
    with FlopCounterMode(display=False) as counter:
        torch.addmm(bias, left, right)
    assert counter.get_total_flops() == flop("aten::addmm", ((5,), (3, 4), (4, 5)))
    with FlopCounterMode(display=False) as counter:
        torch.bmm(left.expand(7, 3, 4), right.expand(7, 4, 5))
    assert counter.get_total_flops() == flop("aten::bmm", ((7, 3, 4), (7, 4, 5)))
    with FlopCounterMode(display=False) as counter:
        F.linear(torch.empty(2, 3, 4, device="meta"), right.t())
    assert counter.get_total_flops() == flop("aten::linear", ((2, 3, 4), (5, 4)))


@pytest.mark.parametrize(
    ("name", "shapes", "types", "expected"),
    [
        ("aten::mm", ((3, 4), (4, 5)), ("float", "float"), 4 * (12 + 20 + 15)),
        ("aten::mm", ((3, 4), (4, 5)), ("c10::BFloat16", "c10::BFloat16"), 2 * (12 + 20 + 15)),
        ("aten::addmm", ((5,), (3, 4), (4, 5), (), ()), ("float", "float", "float", "Scalar", "Scalar"), 4 * (5 + 12 + 20 + 15)),
        ("aten::linear", ((2, 3, 4), (5, 4), ()), ("float", "float", ""), 4 * (24 + 20 + 30)),
        ("aten::add", ((2, 1, 4), (3, 1)), ("float", "float"), 4 * (8 + 3 + 24)),
        ("aten::add_", ((2, 4), (4,)), ("float", "float"), 4 * (8 + 4 + 8)),
        ("aten::sum", ((2, 4), ()), ("float", "ScalarList"), 4 * 8),
        ("aten::cat", ((2, 4), (2, 4), ()), ("TensorList", "TensorList", "Scalar"), 4 * 32),
        ("aten::embedding", ((100, 8), (2, 3)), ("float", "long int"), 6 * (8 + 2 * 8 * 4)),
        ("aten::_fused_adamw_", ((3, 2),) * 4 + ((),), ("TensorList",) * 5, 4 * (4 * 6 + 1 + 3 * 6)),
        (FLASH, QKV, ("float",) * 3, 4 * (192 + 144 + 180 + 240)),
        ("aten::transpose", ((3, 4), (), ()), ("float", "Scalar", "Scalar"), 0),
        ("c10d::allreduce_", ((1000,),), ("TensorList",), 0),
        ("aten::empty", ((), ()), ("ScalarList", "Scalar"), 0),
    ],
)
def test_bytes(name: str, shapes: tuple[tuple[int, ...], ...], types: tuple[str, ...], expected: int) -> None:
    assert nbytes(name, shapes, types) == expected


def test_spanned_is_what_torch_broadcasts() -> None:
    for shapes in (((2, 1, 4), (3, 1)), ((5,), (4, 5)), ((), (2, 2)), ((1, 1), (1,))):
        assert spanned(shapes) == tuple(torch.broadcast_shapes(*shapes))
    assert spanned(((3, 4), (4, 5))) == (4, 5)


def test_both_sides_of_the_ridge() -> None:
    """Peak 100 FLOP/s, 10 bytes/s: the ridge is at 10 FLOP per byte."""
    roof = Roof({"fp32": 100.0, "bf16": 400.0}, 10.0, "made up")
    below = standing(2.0, 50.0, 10.0, "fp32", roof)
    assert below is not None
    assert (below.intensity, below.ridge, below.bound) == (5.0, 10.0, "memory")
    assert below.share == pytest.approx(25.0 / 50.0)
    above = standing(1.0, 80.0, 4.0, "fp32", roof)
    assert above is not None
    assert (above.bound, above.share) == ("compute", 0.8)
    half = standing(1.0, 80.0, 4.0, "bf16", roof)
    assert half is not None
    assert (half.bound, half.share) == ("memory", 0.4)
    copied = standing(2.0, 0, 10.0, "fp32", roof)
    assert copied is not None
    assert (copied.bound, copied.share) == ("memory", 0.5)
    assert standing(1.0, 80.0, 4.0, "fp8", roof) is None
    assert standing(1.0, 0, 0, "fp32", roof) is None
