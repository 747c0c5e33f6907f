"""What a region keeps and what it computes again: against counts of bytes and of floating-point operations by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from framework.base.errors import ConfigError
from framework.config import schema
from framework.config.schema import Recompute
from framework.model import recompute
from framework.model.places import Places
from framework.model.recompute import KINDS
from framework.model.transformer import Transformer
from framework.topology.random import Streams
from tests.memory import LiveBytes
from tests.model.conftest import LLAMA

BATCH, SEQUENCE = 2, 16


def with_regions(model: schema.Model, settings: Recompute) -> Transformer:
    torch.manual_seed(3)
    net = Transformer(model)
    recompute.apply(net, settings, Streams(torch))  # type: ignore[arg-type]
    return net


def ids(model: schema.Model) -> Tensor:
    return torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % model.vocab_size


def backward_flops(model: schema.Model, settings: Recompute) -> int:
    """Of the matrix products of a backward pass, with what it computes again."""
    net = with_regions(model, settings)
    loss = net(ids(model), ids(model))
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return counter.get_total_flops()


def again(model: schema.Model, *modules: str) -> int:
    return backward_flops(model, Recompute("selective", modules=modules)) - backward_flops(model, Recompute())


TOKENS = BATCH * SEQUENCE


def products(*matrices: tuple[int, int]) -> int:
    """Operations of all tokens times matrices [in, out], in every block: 2 for each multiplication and addition."""
    return LLAMA.num_layers * sum(2 * TOKENS * rows * columns for rows, columns in matrices)


H, F, Q, K = LLAMA.hidden_size, LLAMA.ffn_hidden_size, 32, 16  # widths: hidden, feed-forward, queries, keys
WIDE, NARROW, PROJECTIONS = (H, F), (F, H), [(H, Q), (H, K), (H, K)]


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (["activation"], 0),
        (["norm"], 0),
        (["ffn_in"], products(WIDE, WIDE)),
        (["mlp"], products(WIDE, WIDE)),  # the last product is not needed again
        (["activation", "ffn_in"], products(WIDE, WIDE)),
        (["layers.0.mlp"], products(WIDE, WIDE) // LLAMA.num_layers),
        (["layers.*.attention.q_proj"], 0),  # nothing comes after the tensor that it saves
    ],
)
def test_what_is_computed_again_ends_with_what_was_saved(modules: list[str], expected: int) -> None:
    assert again(LLAMA, *modules) == expected


def test_a_whole_block_is_computed_again_up_to_its_last_product() -> None:
    """The counter does not know the CPU's attention kernel, so that counts as nothing on both sides."""
    full = backward_flops(LLAMA, Recompute("full")) - backward_flops(LLAMA, Recompute())
    assert full == products(WIDE, WIDE, *PROJECTIONS, (Q, H))
    every_2 = backward_flops(LLAMA, Recompute("full", every=2)) - backward_flops(LLAMA, Recompute())
    assert every_2 == full // 2  # of two blocks


@contextmanager
def watching() -> Iterator[dict[int, int]]:
    """Bytes of the memory that is saved for the backward pass, by address."""
    found: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with saved_tensors_hooks(pack, lambda value: value):
        yield found


def test_a_block_keeps_its_input_alone() -> None:
    net = with_regions(LLAMA, Recompute("full"))
    hidden = torch.randn(BATCH, SEQUENCE, H, requires_grad=True)
    places = Places(net.rotation(torch.arange(SEQUENCE)), None)
    with watching() as found:
        net.layers[0](hidden, places)
    found.pop(hidden.untyped_storage().data_ptr())
    assert sum(found.values()) == 0


def test_the_output_of_a_norm_is_not_kept(gpt2: schema.Model) -> None:
    """A LayerNorm keeps its input, which the region keeps too, and for each token mean and root; its output is kept by who reads it."""
    kept = []
    for settings in (Recompute(), Recompute("selective", modules=("norm",))):
        net = with_regions(gpt2, settings)
        with LiveBytes() as live:
            loss = net(ids(gpt2), ids(gpt2))
            kept.append(live.now)
        loss.backward()
    norms = 2 * gpt2.num_layers + 1
    assert kept[0] - kept[1] == norms * TOKENS * 4 * (gpt2.hidden_size + 2)


def test_nothing_is_kept_without_gradients(llama: schema.Model) -> None:
    net = with_regions(llama, Recompute("full"))
    with torch.no_grad():
        assert not net(ids(llama)).requires_grad


def gradients(model: schema.Model, settings: Recompute) -> list[Tensor]:
    net = with_regions(model, settings)
    torch.manual_seed(5)
    net(ids(model), ids(model)).backward()
    return [*(parameter.grad for parameter in net.parameters() if parameter.grad is not None), torch.get_rng_state()]


@pytest.mark.parametrize("modules", [*((kind,) for kind in KINDS), KINDS], ids=" ".join)
def test_gradients_are_the_same_bits(family: schema.Model, modules: tuple[str, ...]) -> None:
    dropping = schema.Model(**{**vars(family), "dropout": 0.1})
    pairs = zip(gradients(dropping, Recompute("selective", modules=modules)), gradients(dropping, Recompute()), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


class Own(nn.Module):
    """A module of a user's, with blocks of its own names and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 8)) for _ in range(3))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.encoder:
            values = values + block(values)
        return values.square().sum()


def own_gradients(change: Callable[[Own], None]) -> list[Tensor]:
    torch.manual_seed(1)
    net = Own()
    change(net)
    torch.manual_seed(2)
    net(torch.ones(4, 8)).backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def test_a_users_module_by_name() -> None:
    found: list[str] = []

    def change(net: Own) -> None:
        recompute.apply(net, Recompute("selective", modules=("encoder.[02]",)), Streams(torch))  # type: ignore[arg-type]
        found.extend(name for name, module in net.named_modules() if "forward" in vars(module))

    assert all(torch.equal(*pair) for pair in zip(own_gradients(change), own_gradients(lambda net: None), strict=True))
    assert found == ["encoder.0", "encoder.2"]


def test_a_pattern_without_a_module_is_a_letter() -> None:
    with pytest.raises(ConfigError, match=r"atention\n  expected  attention, core, .*pattern"):
        with_regions(LLAMA, Recompute("selective", modules=("mlp", "atention")))


def test_full_without_blocks_is_a_letter() -> None:
    with pytest.raises(ConfigError, match=r"full\n  expected  a model of our blocks"):
        recompute.apply(Own(), Recompute("full"), Streams(torch))  # type: ignore[arg-type]
