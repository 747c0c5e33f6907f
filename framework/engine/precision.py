"""What a precision needs from the device and from DeepSpeed beyond its config."""

from __future__ import annotations

import logging
from typing import Any

import torch

from framework.config.schema import Precision

log = logging.getLogger(__name__)


def prepare_device(precision: Precision, accelerator: Any) -> None:
    """Let fp16 run on CPU ranks.

    DeepSpeed refuses fp16 where the processor has no fp16 arithmetic, but torch's CPU kernels compute it. This is the
    one place that says so, for CPU only, so that the fp16 path can be tested everywhere.
    """
    if precision.dtype == "fp16" and accelerator.device_name() == "cpu" and not accelerator.is_fp16_supported():
        log.warning("fp16 on CPU is emulated: slow, and meant for tests")
        accelerator.is_fp16_supported = lambda: True


def half_type(precision: Precision) -> torch.dtype:
    """The type of half weights."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[precision.dtype]


def make_scaler(precision: Precision, device: str) -> torch.amp.GradScaler:
    """The loss scaler of fp16_autocast: doubles after scale_window clean steps, halves at each overflow."""
    return torch.amp.GradScaler(device, init_scale=2.0**precision.initial_scale_power, growth_interval=precision.scale_window)
