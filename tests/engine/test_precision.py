"""What is computed, kept and sent in which type, read from engines at work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from framework.config.schema import Precision
from framework.engine.precision import make_scaler, prepare_device
from tests.engine import tiny
from tests.engine.tiny import LLAMA, Form, Layout
from tests.ranks import run_ranks

LAYOUT = Layout(ranks=2, accumulation=2)
SEQUENCE = 8
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
SENDS = ("allreduce_", "allreduce_coalesced_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")
FAST = {Form("fp32", 3), Form("bf16", 1), Form("bf16", 3), Form("fp16", 2), Form("bf16_autocast", 0), Form("bf16_autocast", 2)}


class Wire(TorchDispatchMode):
    """Notes the types of all float tensors that go into a reducing collective, with the number of their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        if space == "c10d" and name in SENDS:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.sent += [(tensor.dtype, tensor.numel()) for tensor in tensors if tensor.is_floating_point()]
        return func(*args, **(kwargs or {}))


@dataclass
class Seen:
    """One step on one rank. `norm`: (input, output) of the final norm; `loss`: (logits, targets, loss) of the first micro-batch."""

    live: set[torch.dtype]
    masters: set[torch.dtype]
    moments: set[torch.dtype]
    products: set[torch.dtype]
    norm: tuple[Tensor, Tensor]
    loss: tuple[Tensor, Tensor, Tensor]
    sent: list[tuple[torch.dtype, int]]


def step(rank: int, ranks: int, form: Form) -> Seen:
    module = tiny.transformer(LLAMA)
    engine = tiny.sharded(LAYOUT.config(form, optimizer=tiny.ADAMW, clip=1.0), LAYOUT, rank, module)
    products: list[torch.dtype] = []
    norms: list[tuple[Tensor, Tensor]] = []
    logits: list[Tensor] = []
    losses: list[Tensor] = []
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_hook(lambda _, inputs, output: products.append(output.dtype))
    module.final_norm.register_forward_hook(lambda _, inputs, output: norms.append((inputs[0].detach(), output.detach())))
    module.lm_head.register_forward_hook(lambda _, inputs, output: logits.append(output.detach()))
    module.register_forward_hook(lambda _, inputs, output: losses.append(output.detach()))
    batch = tiny.samples(0, ranks * LAYOUT.accumulation, SEQUENCE, LLAMA.vocab_size)
    share = LAYOUT.share(batch, rank)
    with Wire() as wire:
        engine.step(share, tiny.tokens_of(batch))
    return Seen(
        live=types_of(tiny.live_weights(engine)),
        masters=types_of(tiny.masters(engine)),
        moments=types_of(tiny.moments(engine)),
        products=set(products),
        norm=norms[0],
        loss=(logits[0], share[0].targets, losses[0]),
        sent=wire.sent,
    )


def types_of(tensors: dict[str, Tensor]) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors.values()}


@pytest.fixture(
    scope="module", params=[pytest.param(form, marks=() if form in FAST else pytest.mark.slow) for form in tiny.allowed_forms(2)], ids=str
)
def seen(request: pytest.FixtureRequest) -> tuple[Form, list[Seen]]:
    return request.param, run_ranks(step, 2, request.param)


def product_type(form: Form) -> torch.dtype:
    return HALF.get(form.precision.partition("_")[0], torch.float32)


def test_products_are_in_the_type_that_was_asked_for(seen: tuple[Form, list[Seen]]) -> None:
    form, ranks = seen
    for rank in ranks:
        assert rank.products == {product_type(form)}


def test_weights_are_half_only_beside_fp32_masters(seen: tuple[Form, list[Seen]]) -> None:
    form, ranks = seen
    for rank in ranks:
        assert rank.live == {torch.float32 if form.precision.endswith("autocast") else product_type(form)}
        assert rank.masters == {torch.float32}
        assert rank.moments == {torch.float32}


def test_the_loss_is_fp32_from_the_logits_on(seen: tuple[Form, list[Seen]]) -> None:
    for rank in seen[1]:
        logits, targets, loss = rank.loss
        assert loss.dtype == torch.float32
        exact = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        assert float(loss) == pytest.approx(float(exact), rel=1e-6)


def test_norms_are_fp32_inside(seen: tuple[Form, list[Seen]]) -> None:
    """One rounding, at the end: half a unit in the last place (the weights are ones here)."""
    for rank in seen[1]:
        hidden, normed = rank.norm
        exact = hidden.double() * (hidden.double().pow(2).mean(-1, keepdim=True) + LLAMA.norm_eps).rsqrt()
        # fp32's own arithmetic costs a few of its last places
        bound = exact.abs() * torch.finfo(normed.dtype).eps / 2 * (1 + 1e-3) + 1e-6
        assert bool(((normed.double() - exact).abs() <= bound).all())


def test_gradients_travel_in_fp32(seen: tuple[Form, list[Seen]]) -> None:
    parameters = sum(parameter.numel() for parameter in tiny.transformer(LLAMA).parameters())
    for rank in seen[1]:
        assert {dtype for dtype, _ in rank.sent} <= {torch.float32, torch.float64}  # float64: the sum of the losses
        assert sum(size for dtype, size in rank.sent if dtype == torch.float32) >= parameters


# ---------------------------------------------------------------- what precision.py does to a device


class Device:
    """As much of DeepSpeed's accelerator as is asked."""

    def __init__(self, name: str, fp16: bool) -> None:
        self.device_name = lambda: name
        self.is_fp16_supported = lambda: fp16


@pytest.mark.parametrize(
    ("dtype", "name", "able", "allowed"),
    [
        ("fp16", "cpu", False, True),
        ("fp16", "cpu", True, True),
        ("fp16", "cuda", False, False),
        ("bf16", "cpu", False, False),
        ("fp32", "cpu", False, False),
    ],
)
def test_fp16_is_let_through_on_cpu_alone(dtype: str, name: str, able: bool, allowed: bool, caplog: pytest.LogCaptureFixture) -> None:
    device = Device(name, able)
    prepare_device(Precision(dtype=dtype), device)  # type: ignore[arg-type]
    assert device.is_fp16_supported() == allowed
    assert ("emulated" in caplog.text) == (allowed and not able)


def test_the_scaler_of_fp16_autocast_has_the_settings() -> None:
    scaler = make_scaler(Precision("fp16", autocast=True, initial_scale_power=7, scale_window=2), "cpu")
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = []
    for gradient in (1.0, 1.0, 1.0, torch.inf, 1.0, 1.0):
        scales.append(scaler.get_scale())
        scaler.scale((weight * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scales == [2.0**7, 2.0**7, 2.0**8, 2.0**8, 2.0**7, 2.0**7]
