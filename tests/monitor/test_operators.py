"""Calls with known times: own time, work counted once, kernels of an accelerator, gaps, thinning."""

from __future__ import annotations

from typing import Any

import pytest

from framework.monitor.operators import Call, gap_facts, gaps, kernel_rows, lay, nest, ops_rows, thinned, totals, within
from framework.monitor.roofline import Roof

MM: dict[str, Any] = {"shapes": ((3, 4), (4, 5)), "types": ("float", "float")}


def test_own_time_and_work_of_nested_calls() -> None:
    linear = Call("aten::linear", 0, 100, ((3, 4), (5, 4)), ("float", "float"))
    product = Call("aten::mm", 10, 70, ((3, 4), (4, 5)), ("float", "float"))
    inside = Call("aten::copy_", 20, 30, ((3, 4), (3, 4)), ("float", "float"))
    other = Call("aten::mul", 40, 60, ((2,), ()), ("float", "Scalar"), thread=1)
    after = Call("aten::mean", 100, 150, ((3, 4),), ("float",))
    part = Call("aten::sum", 110, 120, ((3, 4),), ("float",))
    found = nest([part, after, other, inside, product, linear])
    assert [call.name for call in found] == ["aten::linear", "aten::mm", "aten::copy_", "aten::mul", "aten::mean", "aten::sum"]
    assert [call.own for call in found] == [40, 50, 10, 20, 40, 10]
    assert [call.flop for call in found] == [0, 120, 0, 0, 0, 0]
    assert [call.bytes for call in found] == [0, 4 * 47, 4 * 36, 4 * 4, 0, 4 * 12]


def test_a_linear_without_a_product_inside_counts_itself() -> None:
    (call,) = nest([Call("aten::linear", 0, 9, ((3, 4), (5, 4)), ("float", "float"))])
    assert (call.flop, call.bytes) == (120, 4 * 47)


def test_kernels_count_for_the_operator_that_launched_them() -> None:
    """Of two kernels of one product the longest has its work; the same operator again is another launch."""
    calls = [Call("aten::mm", began, ended, thread=launch, kernel=kernel, **MM)
             for began, ended, launch, kernel in ((0, 50, 1, "gemm"), (50, 60, 1, "reduce"), (70, 120, 2, "gemm"))]  # fmt: skip
    gemm, reduce = totals(lay(calls), by_kernel=True)
    assert (gemm.kernel, gemm.calls, gemm.flop, gemm.bytes) == ("gemm", 2, 240, 2 * 4 * 47)
    assert (reduce.kernel, reduce.calls, reduce.flop, reduce.bytes) == ("reduce", 1, 0, 0)
    (both,) = totals(calls, by_kernel=False)
    assert both.seconds == pytest.approx(110e-9)
    assert [gap.seconds for gap in gaps(calls, [(0, 120)])] == [pytest.approx(10e-9)]


def test_rows() -> None:
    found = totals(nest([Call("aten::mm", 0, 10**9, **MM), Call("aten::mm", 10**9, 2 * 10**9, **MM)]), by_kernel=False)
    assert ops_rows(found, 2, 8.0) == [{"name": "aten::mm", "shapes": [[3, 4], [4, 5]], "calls": 1.0, "self_s": 1.0, "share": 0.25}]
    (row,) = kernel_rows(found, Roof({"fp32": 240.0}, 1e9, "made up"))
    assert (row["flop_per_s"], row["bytes_per_s"], row["bound"]) == (120.0, 188.0, "compute")
    assert row["intensity"] == pytest.approx(120 / 188)
    assert row["share_of_roofline"] == 0.5
    (row,) = kernel_rows(found, None)
    assert (row["flop_per_s"], row["share_of_roofline"], row["bound"]) == (120.0, None, None)
    many = totals([Call("aten::_fused_adamw_", 0, 1, ((2,),) * 40, ("TensorList",) * 40)], by_kernel=False)
    assert ops_rows(many, 1, 1.0)[0]["shapes"] == [[2]] * 8 + ["and 32 more"]


def test_gaps_are_inside_steps_and_over_all_threads() -> None:
    calls = [Call("a", 10, 30), Call("inner", 12, 14), Call("b", 25, 40, thread=1), Call("c", 55, 60), Call("late", 95, 120),
             Call("d", 205, 210)]  # fmt: skip
    found = gaps(calls, [(0, 100), (200, 220)])
    assert [(gap.began, round(gap.seconds * 1e9), gap.before, gap.after) for gap in found] == [
        (0, 10, "", "a"), (40, 15, "b", "c"), (60, 35, "c", "late"), (200, 5, "", "d"), (210, 10, "d", ""),
    ]  # fmt: skip
    facts = gap_facts(found, [(0, 100), (200, 220)], longest=2)
    assert facts["count"] == 5
    assert facts["seconds"] == pytest.approx(75e-9)
    assert [(round(gap["at_s"] * 1e9), gap["after"]) for gap in facts["longest"]] == [(60, "late"), (40, "c")]
    assert gap_facts([], [])["seconds"] == 0


def test_only_what_begins_inside_a_step_counts() -> None:
    calls = [Call("before", 5, 15), Call("in", 10, 30), Call("between", 20, 25), Call("second", 30, 31), Call("after", 40, 41)]
    assert [call.name for call in within(calls, [(10, 20), (30, 40)])] == ["in", "second"]


def test_thinning_keeps_peaks() -> None:
    points = [(time, time % 97) for time in range(10_000)]
    few = thinned(points, 300)
    assert len(few) <= 300
    assert max(few, key=lambda point: point[1])[1] == 96
    assert thinned(points[:5], 300) == points[:5]
    assert thinned([], 300) == []
