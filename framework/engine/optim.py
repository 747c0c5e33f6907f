"""The optimizer over a model's parameters: which update rule, and which parameters decay."""

from __future__ import annotations

import torch
from torch import nn

from framework.config.schema import Optimizer


def make_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """AdamW or SGD, fused, with weight decay on matrices and none on vectors (norms and biases).

    Handed to DeepSpeed as client optimizer, so that the same update rule runs in every engine, stage and offload.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if _dimensions(p) >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if _dimensions(p) < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=True)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True)


def _dimensions(parameter: nn.Parameter) -> int:
    """Number of axes of the whole parameter (ZeRO-3 leaves an empty vector in its place)."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` in the next update of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
