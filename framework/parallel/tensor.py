"""Tensor parallel layers: each rank has some heads, some columns of the feed-forward layer, some rows of the vocabulary.

Between two of these layers a rank computes with its part alone. What enters a block's half is whole on every rank (or, with
sequence parallel, a slice of the sequence that is gathered first); what leaves is summed over the ranks (or summed and
sliced). Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from framework.model.attention import Attention
from framework.model.fork import Fork
from framework.model.loss import IGNORE, TokenLoss
from framework.model.mlp import GELU, SwiGLU
from framework.model.norm import HeadNorm
from framework.model.transformer import Block, Transformer
from framework.topology import collectives
from framework.topology.random import APART, Streams


@dataclass(frozen=True)
class Split:
    """How the tensor ranks share a model: their group, and whether the sequence is sliced outside the split layers."""

    group: dist.ProcessGroup
    sequence: bool

    @property
    def degree(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def leave(self, partial: Tensor) -> Tensor:
        """The end of a split region: sum [batch, seq, hidden] over the ranks, whole or as this rank's slice."""
        leave = collectives.scatter_sum_over if self.sequence else collectives.sum_over
        return leave(partial, self.group)


def divide(model: Transformer, split: Split) -> None:
    """Put split layers in the places of the plain ones. The model has no storage yet, so nothing is copied."""
    rows = -(-model.settings.vocab_size // split.degree)
    model.embed_tokens = VocabEmbedding(rows, model.settings.hidden_size, split)
    model.lm_head = nn.Linear(model.settings.hidden_size, rows, bias=False)
    model.fork = ColumnFork([model.lm_head], split)
    model.loss = VocabLoss(model.settings.vocab_size, split)
    model.tie()
    for module in model.modules():
        if isinstance(module, Attention):
            module.q_proj, module.k_proj, module.v_proj = (_narrow(linear, split) for linear in module.fork.linears)
            module.fork = ColumnFork([module.q_proj, module.k_proj, module.v_proj], split)
            module.o_proj = _row(module.o_proj, split)
        elif isinstance(module, SwiGLU):
            module.gate_proj, module.up_proj = (_narrow(linear, split) for linear in module.fork.linears)
            module.fork = ColumnFork([module.gate_proj, module.up_proj], split)
            module.down_proj = _row(module.down_proj, split)
        elif isinstance(module, GELU):
            module.up_proj = _narrow(module.up_proj, split)
            module.fork = ColumnFork([module.up_proj], split)
            module.down_proj = _row(module.down_proj, split)


class Apart(nn.Module):
    """A module that draws from the stream of what the tensor ranks have divided among them."""

    def __init__(self, module: nn.Module, streams: Streams) -> None:
        super().__init__()
        self.module, self.streams = module, streams

    def forward(self, *inputs: Any) -> Tensor:
        if not self.training:
            return self.module(*inputs)  # type: ignore[no-any-return]
        with self.streams.drawing(APART):
            return self.module(*inputs)  # type: ignore[no-any-return]


def draw_apart(model: Transformer, streams: Streams, split: Split) -> None:
    """Let what works on a part draw random numbers of its own: attention on some heads, and dropout on a slice of the sequence."""
    if model.settings.dropout == 0:
        return
    for module in [*model.modules()]:
        if isinstance(module, Attention):
            module.core = Apart(module.core, streams)
        elif split.sequence and isinstance(module, (Transformer, Block)):
            module.dropout = Apart(module.dropout, streams)


def mark(module: nn.Module) -> None:
    """Tell DeepSpeed which parameters are parts: it counts the others once in a norm."""
    for parameter in module.parameters():
        logical = parameter.logical  # type: ignore[attr-defined]
        parameter.tensor_model_parallel = logical.size != logical.shape  # type: ignore[attr-defined]


def complete_gradients(model: nn.Module, split: Split) -> None:
    """Sum, over the tensor ranks, the gradient of every parameter that each of them has whole and uses on a part.

    Those are the norms of heads, because a rank has some heads; with sequence parallel all that is whole. The hook runs before
    the gradient is accumulated or handed to an engine. Called once parameters have their `.logical`.
    """
    for name, parameter in model.named_parameters():
        logical = parameter.logical  # type: ignore[attr-defined]
        owner = model.get_submodule(name.rpartition(".")[0])
        if logical.size == logical.shape and (split.sequence or isinstance(owner, HeadNorm)):
            parameter.register_hook(partial(_summed, split=split))


def _summed(grad: Tensor, split: Split) -> Tensor:
    return collectives.begin_sum(grad.clone(), split.group).wait()


def _narrow(linear: nn.Linear, split: Split) -> nn.Linear:
    return nn.Linear(linear.in_features, linear.out_features // split.degree, bias=linear.bias is not None)


def _row(linear: nn.Linear, split: Split) -> RowLinear:
    return RowLinear(linear.in_features // split.degree, linear.out_features, linear.bias is not None, split)


class ColumnFork(Fork):
    """Column-parallel projections of one input: one exchange for all of them, hidden behind the weights' gradients.

    It reads weights that other modules own; `borrowed` names them to an engine that moves weights about.
    """

    def __init__(self, linears: Sequence[nn.Linear], split: Split) -> None:
        super().__init__(*linears)
        self.split = split

    @property
    def borrowed(self) -> list[nn.Parameter]:
        return [parameter for linear in self.linears for parameter in linear.parameters()]

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """[batch, seq, hidden], or this rank's slice of it -> [batch, seq, width of each linear's part]."""
        weights = [_autocast(linear.weight) for linear in self.linears]
        biases = [None if linear.bias is None else _autocast(linear.bias) for linear in self.linears]
        return _Columns.apply(_autocast(hidden), self.split, len(weights), *weights, *biases)  # type: ignore[no-any-return]


class _Columns(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, split: Split, count: int, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.split, ctx.count = split, count
        ctx.save_for_backward(hidden, *weights)  # with sequence parallel the slice: the whole is gathered again
        whole = collectives.begin_gather(hidden, split.group).wait() if split.sequence else hidden
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, *weights = ctx.saved_tensors
        split: Split = ctx.split
        gathering = collectives.begin_gather(hidden, split.group) if split.sequence else None
        inward = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            inward += grad @ weight
        begin = collectives.begin_scatter_sum if split.sequence else collectives.begin_sum
        summing = begin(inward, split.group)
        rows = (hidden if gathering is None else gathering.wait()).flatten(0, -2)
        needs = ctx.needs_input_grad[3:]
        flat = [grad.flatten(0, -2) for grad in grads]
        of_weights = [grad.t() @ rows if need else None for grad, need in zip(flat, needs[: ctx.count], strict=True)]
        of_biases = [grad.sum(dim=0) if need else None for grad, need in zip(flat, needs[ctx.count :], strict=True)]
        return summing.wait(), None, None, *of_weights, *of_biases


class RowLinear(nn.Linear):
    """A row-parallel linear layer: the ranks' products are summed, then the bias is added once."""

    def __init__(self, width: int, out: int, bias: bool, split: Split) -> None:
        """`width` is this rank's part of the input's width."""
        super().__init__(width, out, bias=bias)
        self.split = split

    def forward(self, input: Tensor) -> Tensor:
        """[batch, seq, width] -> [batch, seq, out], or this rank's slice of it."""
        out = self.split.leave(F.linear(input, self.weight))
        return out if self.bias is None else out + self.bias.to(out.dtype)


class VocabEmbedding(nn.Embedding):
    """An embedding whose rows are divided: each rank looks up the ids that it has, and the ranks sum."""

    def __init__(self, rows: int, width: int, split: Split) -> None:
        """`rows` is the number of rows of every rank, padding included."""
        super().__init__(rows, width)
        self.split = split

    def forward(self, input: Tensor) -> Tensor:
        """[batch, seq] -> [batch, seq, width], or this rank's slice of it."""
        local, elsewhere = _local(input, self.split.rank * self.num_embeddings, self.num_embeddings)
        return self.split.leave(F.embedding(local, self.weight).masked_fill(elsewhere[..., None], 0.0))


class VocabLoss(TokenLoss):
    """Cross entropy over a divided vocabulary: no rank ever has all logits of a token."""

    def __init__(self, vocab_size: int, split: Split) -> None:
        super().__init__()
        self.vocab_size, self.split = vocab_size, split

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Logits [batch, seq, vocab / ranks] of this rank, targets [batch, seq] of whole ids -> as TokenLoss, on every rank."""
        return _VocabCrossEntropy.apply(logits.flatten(0, -2), targets.flatten(), self.vocab_size, self.split.group)  # type: ignore[no-any-return]

    def whole(self, logits: Tensor) -> Tensor:
        """[batch, seq, vocab / ranks] -> [batch, seq, vocab] without padding. For evaluation: it has no gradient."""
        parts = [torch.empty_like(logits) for _ in range(self.split.degree)]
        dist.all_gather(parts, logits.detach().contiguous(), group=self.split.group)
        return torch.cat(parts, dim=-1)[..., : self.vocab_size]


class _VocabCrossEntropy(Function):
    """Sum over tokens of log(sum_v exp(logit_v)) - logit_target, in fp32; softmax - onehot as gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, group: dist.ProcessGroup) -> Tensor:
        width = logits.shape[-1]
        start = dist.get_rank(group) * width
        wide = logits.float() if logits.dtype != torch.float32 else logits.clone()
        wide[:, max(0, vocab_size - start) :] = -torch.inf  # padding takes no part
        peak = wide.amax(dim=-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        wide -= peak[:, None]
        local, elsewhere = _local(targets, start, width)
        of_target = wide.gather(-1, local[:, None])[:, 0].masked_fill(elsewhere, 0.0)
        wide.exp_()
        both = torch.stack((wide.sum(dim=-1), of_target))
        dist.all_reduce(both, group=group)
        counted = targets != IGNORE
        wide /= both[0][:, None]
        ctx.save_for_backward(wide, local, elsewhere, counted)
        ctx.dtype = logits.dtype
        return (both[0].log() - both[1]).masked_fill(~counted, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, local, elsewhere, counted = ctx.saved_tensors
        inward = softmax.clone()
        inward.scatter_add_(-1, local[:, None], -(~elsewhere).to(inward.dtype)[:, None])
        inward *= (counted * grads[0])[:, None]
        return inward.to(ctx.dtype), None, None, None


def _local(ids: Tensor, start: int, rows: int) -> tuple[Tensor, Tensor]:
    """(row of each id among `rows` rows from `start`, or 0; whether the id is not among them)."""
    elsewhere = (ids < start) | (ids >= start + rows)
    return (ids - start).masked_fill(elsewhere, 0), elsewhere


def _autocast(value: Tensor) -> Tensor:
    """`value` in the type that autocast, where it is on, would give a matrix product: inside a Function it does not look."""
    device = value.device.type
    return value.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else value
