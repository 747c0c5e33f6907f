"""Pipeline parallel: each stage has some blocks in a row; the first one also embeds, the last one also reads out.

Nothing but the hidden state travels between stages (Huang et al. 2019): positions follow from its length, and where documents
begin each stage reads in its own copy of the micro-batch. Tied embeddings are two copies, one on each end: both carry the
embedding's name in `.logical`, the last stage's is not the primary one. DeepSpeed's PipelineModule is given one layer for each
stage, which is cut by us.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import repeat

import torch
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from framework.checkpoint.shards import Logical
from framework.model.loss import TokenLoss
from framework.model.transformer import Transformer
from framework.planner.partition import Bounds
from framework.topology.grid import Grid

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Cut:
    """The blocks of all stages, and which stage this rank is."""

    bounds: Bounds
    stage: int

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == len(self.bounds) - 1

    @property
    def blocks(self) -> range:
        return range(*self.bounds[self.stage])


def keep(model: Transformer, cut: Cut) -> None:
    """Take from the model, which has no storage yet, what other stages have. What stays keeps its name."""
    for index in range(len(model.layers)):
        if index not in cut.blocks:
            model.layers[index] = nn.Identity()  # an empty place, so that the others keep their numbers
    if not cut.first:
        del model.embed_tokens, model.embed_positions
    if not cut.last:
        del model.final_norm, model.lm_head, model.fork, model.loss


def with_copy(parts: Mapping[str, Logical]) -> dict[str, Logical]:
    """`parts` of a whole model, and which part the last stage's copy of a tied embedding is."""
    return {HEAD: replace(parts[EMBEDDING], primary=False), **parts}


class Stage(nn.Module):
    """What one rank computes: ids or hidden state in, hidden state or logits out."""

    def __init__(self, model: Transformer, cut: Cut, slices: int) -> None:
        """`model` has been through `keep`; `slices` is the number of ranks that share a sequence between split layers."""
        super().__init__()
        self.model, self.cut, self.slices = model, cut, slices
        self.starts: Iterator[Tensor | None] = repeat(None)
        """Those of the micro-batches to come, as of MicroBatch: every schedule of a pipeline sends them forward in their order."""

    def forward(self, received: Tensor) -> Tensor:
        """First stage: ids [batch, seq]; others: hidden state [batch, seq / slices, hidden].

        Returns the hidden state, or on the last stage the logits, as this rank has them.
        """
        model = self.model
        length = received.shape[1] * (1 if self.cut.first else self.slices)
        starts = next(self.starts)
        positions = model.positions(length, received.device, starts)
        hidden = model.embed(received, positions) if self.cut.first else received
        places = model.places(positions, starts, hidden.dtype)
        for index in self.cut.blocks:
            hidden = model.layers[index](hidden, places)
        return model.head(hidden) if self.cut.last else hidden


class WeightedLoss:
    """What goes backward: the sum of a micro-batch's token losses times `weight`. `total` adds up the sums without it."""

    def __init__(self, loss: TokenLoss | None) -> None:
        """None on a stage that has no loss."""
        self._loss = loss
        self.begin(1.0, torch.device("cpu"))

    def begin(self, weight: float, device: torch.device) -> None:
        """Forget what was added up."""
        self.weight, self.total = weight, torch.zeros((), dtype=torch.float64, device=device)

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        assert self._loss is not None, "the loss is the last stage's"
        loss = self._loss(logits, targets)
        self.total += loss.detach()
        return loss * self.weight

    def whole(self, logits: Tensor) -> Tensor:
        """As TokenLoss.whole."""
        assert self._loss is not None, "the loss is the last stage's"
        return self._loss.whole(logits)


def assemble(model: Transformer, cut: Cut, grid: Grid, slices: int) -> PipelineModule:
    """DeepSpeed's form of this rank's stage; its `loss_fn` is a WeightedLoss. Makes process groups: every rank calls it."""
    tied = model.settings.tie_embeddings

    def layer(stage: int) -> LayerSpec:
        """A layer is built where it runs only. Between the tied ones DeepSpeed makes a group."""
        if tied and stage in (0, grid.pipeline - 1):
            weight = f"model.{EMBEDDING}" if stage == 0 else f"model.{HEAD}"
            return TiedLayerSpec("embedding", Stage, model, cut, slices, tied_weight_attr=weight)
        return LayerSpec(Stage, model, cut, slices)

    topology = PipeModelDataParallelTopology(num_pp=grid.pipeline, num_mp=grid.tensor, num_dp=grid.data * grid.context)
    loss = WeightedLoss(model.loss if cut.last else None)
    # It prints its layout on the run's screen, and sends the tied weight as if that had a gradient.
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        layers = [layer(stage) for stage in range(grid.pipeline)]
        module = PipelineModule(layers, topology=topology, loss_fn=loss, partition_method="uniform")
    for parameter in module.parameters():
        # DeepSpeed means the whole tied layer, which is our whole stage; what is left out of a norm is the copy.
        parameter.ds_pipe_replicated = not parameter.logical.primary  # type: ignore[attr-defined]
    return module
