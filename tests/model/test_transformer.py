"""The whole model against a float64 one written out here in loops, and what must hold whatever the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from framework.config import schema
from framework.model.loss import IGNORE
from framework.model.places import Places
from framework.model.transformer import Block, Transformer, compile_blocks

Weights = dict[str, Tensor]
Scrambled = Callable[[schema.Model], Transformer]


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def norm(weights: Weights, name: str, x: Tensor, model: schema.Model) -> Tensor:
    if model.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + model.norm_eps).sqrt() * weights[f"{name}.weight"]
    return x + weights[f"{name}.bias"] if f"{name}.bias" in weights else x


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """One head's vector, its halves taken as real and imaginary parts, times exp(i * position * frequency)."""
    half = len(x) // 2
    angles = torch.tensor([position * theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag))


def attend(weights: Weights, name: str, x: Tensor, model: schema.Model) -> Tensor:
    """[seq, hidden] -> [seq, hidden], one head and one position at a time."""
    q, k, v = (linear(weights, f"{name}.{part}_proj", x).split(model.head_width, dim=-1) for part in "qkv")
    heads = []
    for h in range(model.num_heads):
        group = h * model.kv_heads // model.num_heads
        query, key = list(q[h]), list(k[group])
        if model.position == "rope":
            query, key = ([turn(vector, t, model.rope_theta) for t, vector in enumerate(vectors)] for vectors in (query, key))
        rows = []
        for t in range(len(x)):
            scores = torch.stack([query[t] @ key[s] / math.sqrt(model.head_width) for s in range(t + 1)])
            rows.append((scores.exp() / scores.exp().sum()) @ v[group][: t + 1])
        heads.append(torch.stack(rows))
    return linear(weights, f"{name}.o_proj", torch.cat(heads, dim=-1))


def feed(weights: Weights, name: str, x: Tensor, model: schema.Model) -> Tensor:
    up = linear(weights, f"{name}.up_proj", x)
    if model.mlp == "swiglu":
        gate = linear(weights, f"{name}.gate_proj", x)
        return linear(weights, f"{name}.down_proj", gate / (1 + (-gate).exp()) * up)
    bent = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    return linear(weights, f"{name}.down_proj", bent)


def reference(weights: Weights, model: schema.Model, sequence: Tensor) -> Tensor:
    """[seq] ids -> float64 logits [seq, vocab]."""
    x = weights["embed_tokens.weight"][sequence]
    if model.position == "learned":
        x = x + weights["embed_positions.weight"][: len(sequence)]
    for i in range(model.num_layers):
        x = x + attend(weights, f"layers.{i}.attention", norm(weights, f"layers.{i}.attn_norm", x, model), model)
        x = x + feed(weights, f"layers.{i}.mlp", norm(weights, f"layers.{i}.mlp_norm", x, model), model)
    head = "embed_tokens.weight" if model.tie_embeddings else "lm_head.weight"
    return norm(weights, "final_norm", x, model) @ weights[head].T


def variants(model: schema.Model) -> list[schema.Model]:
    """The family as it is, untied, and with the other family's parts mixed in."""
    return [
        model,
        replace(model, tie_embeddings=False),
        replace(model, mlp="gelu", norm="layernorm", bias=False),
        replace(model, mlp="swiglu", norm="rmsnorm", bias=True),
    ]


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return ((got.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("variant", range(4))
def test_logits_loss_and_gradients(family: schema.Model, variant: int, scrambled: Scrambled, ids: Tensor) -> None:
    model = variants(family)[variant]
    net = scrambled(model)
    weights = {name: parameter.detach().double().requires_grad_() for name, parameter in net.named_parameters()}
    targets = ids.roll(-1, dims=1)
    targets[0, 4:7] = IGNORE

    wanted = torch.stack([reference(weights, model, sequence) for sequence in ids])
    counted = targets != IGNORE
    chosen = wanted.log_softmax(-1)[counted].gather(-1, targets[counted][:, None])
    (-chosen.sum()).backward()
    loss = net(ids, targets)
    loss.backward()

    assert relative_error(net(ids), wanted.detach()) < 1e-6
    assert loss.item() == pytest.approx(-chosen.sum().item(), rel=1e-6)
    for name, parameter in net.named_parameters():
        gradient, exact = parameter.grad, weights[name].grad
        assert gradient is not None, name
        assert exact is not None, name
        # A key bias moves all scores of a query alike: without RoPE its true gradient is 0, so it is held absolutely.
        assert (gradient.double() - exact).norm() < 3e-6 * exact.norm() + 1e-5, name


@pytest.mark.parametrize("changed", [0, 3, 8])
def test_no_token_sees_the_future(family: schema.Model, changed: int, scrambled: Scrambled, ids: Tensor) -> None:
    net, other = scrambled(family), ids.clone()
    other[:, changed] = (other[:, changed] + 1) % family.vocab_size
    before, after = net(ids), net(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert (before[:, changed:] != after[:, changed:]).any(-1).all()


def test_positions(llama: schema.Model, gpt2: schema.Model, scrambled: Scrambled, ids: Tensor) -> None:
    counted = torch.arange(9)
    for model in (llama, gpt2):
        net = scrambled(model)
        assert torch.equal(net(ids), net(ids, positions=counted))
        assert torch.equal(net(ids), net(ids, positions=counted.expand(2, 9)))
    shifted = {model.position: scrambled(model)(ids, positions=counted + 5) - scrambled(model)(ids) for model in (llama, gpt2)}
    assert shifted["rope"].abs().max() < 1e-4  # rotary positions are relative
    assert shifted["learned"].abs().max() > 0.1


def test_tied_head_is_one_parameter(family: schema.Model) -> None:
    tied, untied = Transformer(family), Transformer(replace(family, tie_embeddings=False))
    assert {name for name, _ in untied.named_parameters()} - {name for name, _ in tied.named_parameters()} == {"lm_head.weight"}
    assert tied.bfloat16().lm_head.weight is tied.embed_tokens.weight


def test_pieces_make_the_whole(family: schema.Model, scrambled: Scrambled, ids: Tensor) -> None:
    """What a pipeline stage will run."""
    net, positions = scrambled(family), torch.arange(9)
    hidden = net.embed(ids, positions)
    for layer in net.layers:
        hidden = layer(hidden, Places(net.rotation(positions), None))
    assert torch.equal(net.lm_head(net.final_norm(hidden)), net(ids))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_half_weights(family: schema.Model, dtype: torch.dtype, tolerance: float, scrambled: Scrambled, ids: Tensor) -> None:
    half = scrambled(family).to(dtype)
    exact = {name: parameter.detach().double() for name, parameter in half.named_parameters()}
    wanted = torch.stack([reference(exact, family, sequence) for sequence in ids])
    assert half(ids).dtype == dtype
    assert relative_error(half(ids).detach(), wanted) < tolerance
    assert half(ids, ids).dtype == torch.float32


def test_autocast(family: schema.Model, scrambled: Scrambled, ids: Tensor) -> None:
    net = scrambled(family)
    whole = net(ids, ids)
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(ids, ids)
    assert loss.dtype == torch.float32
    assert loss.item() != whole.item()
    assert loss.item() == pytest.approx(whole.item(), rel=2e-2)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in net.parameters())


def test_no_buffers(family: schema.Model) -> None:
    """module.bfloat16() would cast a table of angles with the weights."""
    assert list(Transformer(family).buffers()) == []


def test_dropout_is_for_training_only(family: schema.Model, scrambled: Scrambled, ids: Tensor) -> None:
    net, without = scrambled(replace(family, dropout=0.3)), scrambled(family)
    assert torch.equal(net(ids), net(ids))
    assert torch.equal(net(ids), without(ids))
    assert torch.equal(without.train()(ids), without.eval()(ids))
    net.train()
    assert not torch.equal(net(ids), net(ids))


def test_dropout_on_the_embedding(family: schema.Model) -> None:
    torch.manual_seed(0)
    net = Transformer(replace(family, hidden_size=96, dropout=0.25))
    ids, positions = torch.randint(0, 31, (40, 16)), torch.arange(16)
    dropped, whole = net.embed(ids, positions), net.eval().embed(ids, positions)
    alive = dropped != 0
    torch.testing.assert_close(dropped[alive], whole[alive] / 0.75)
    assert alive.float().mean().item() == pytest.approx(0.75, abs=5 * math.sqrt(0.25 * 0.75 / alive.numel()))


class Ones(nn.Module):
    def forward(self, hidden: Tensor, rotation: None = None) -> Tensor:
        return torch.ones_like(hidden)


def test_dropout_on_both_residual_branches(family: schema.Model) -> None:
    """Branches that give 1, on an empty stream: an element is the number of branches kept / 0.75."""
    torch.manual_seed(0)
    block = Block(replace(family, dropout=0.25))
    block.attention = block.mlp = Ones()  # type: ignore[assignment]
    kept = (block(torch.zeros(50, 40, family.hidden_size), None) * 0.75).round().long()
    shares = kept.flatten().bincount(minlength=3) / kept.numel()
    torch.testing.assert_close(shares, torch.tensor([1 / 16, 6 / 16, 9 / 16]), rtol=0, atol=5 * 0.5 / math.sqrt(kept.numel()))


@pytest.mark.slow
def test_compiled_blocks(family: schema.Model, scrambled: Scrambled, ids: Tensor) -> None:
    net, plain = scrambled(family), scrambled(family)
    compile_blocks(net)
    for either in (net, plain):
        either(ids, ids).backward()
    torch.testing.assert_close(net(ids), plain(ids), rtol=1e-4, atol=1e-4)
    for (name, compiled), (plain_name, parameter) in zip(net.named_parameters(), plain.named_parameters(), strict=True):
        assert name == plain_name
        torch.testing.assert_close(compiled.grad, parameter.grad, rtol=1e-4, atol=1e-4)
