"""Rates and medians against sums done by hand; peak memory against an allocation of known size."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from framework.monitor.meters import Meter, TrainRecord, peak_memory_bytes, rate

CONTRACT = ["step", "loss", "grad_norm", "lr", "tokens", "samples", "loss_scale", "skipped", "step_time_s", "tokens_per_s"]


def test_keys_come_in_the_order_of_the_contract() -> None:
    assert [field.name for field in dataclasses.fields(TrainRecord)][: len(CONTRACT)] == CONTRACT


def test_rate_is_amount_over_time_and_zero_without_time() -> None:
    assert rate(4096, 0.5) == 8192.0
    assert rate(4096, 0.0) == 0.0


def test_a_slow_first_step_is_outvoted_by_the_second() -> None:
    meter = Meter()
    meter.add(8.0, 4096)
    meter.add(0.5, 4096)
    assert meter.step_time_s == 0.5
    assert meter.tokens_per_s == 8192.0
    assert meter.eta_s(60) == 30.0


def test_only_the_window_counts() -> None:
    meter = Meter(window=3)
    for seconds in (100.0, 100.0, 100.0, 1.0, 4.0, 2.0):
        meter.add(seconds, 8)
    assert meter.step_time_s == 2.0
    assert meter.tokens_per_s == 4.0


def test_nothing_is_known_before_the_first_step() -> None:
    assert (Meter().step_time_s, Meter().tokens_per_s, Meter().eta_s(10)) == (0.0, 0.0, 0.0)


def test_peak_memory_grows_by_what_is_allocated_and_stays() -> None:
    device = torch.device("cpu")
    before = peak_memory_bytes(device)
    # Larger than all that was ever in use: only then must the peak rise.
    count = before + 64 * 2**20
    block = torch.ones(count, dtype=torch.uint8)
    during = peak_memory_bytes(device)
    del block
    assert count <= during < before + count + 64 * 2**20
    # The kernel counts pages per thread and in batches, hence the mebibyte.
    assert peak_memory_bytes(device) == pytest.approx(during, abs=2**20)
