"""The plain model, changed for its place on the grid, in the one fixed order: tensor, sequence, context, recompute, pipeline cut;
then storage and values.

Everything up to storage happens without memory (torch's meta device), so a rank only ever holds what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from framework.config.schema import Config
from framework.model import recompute
from framework.model.init import initialise
from framework.model.pretrained import Pretrained
from framework.model.transformer import Transformer, compile_blocks
from framework.parallel import context, pipeline, sequence, tensor
from framework.parallel.pipeline import Cut
from framework.parallel.plan import plan
from framework.topology.groups import Groups
from framework.topology.random import Streams

Settle = Callable[[nn.Module], None]


def outline(config: Config, groups: Groups, streams: Streams, cut: Cut | None = None) -> Transformer:
    """This rank's part of the model without storage. `cut` says which blocks this pipeline stage has; None: all of them."""
    split = _split(config, groups)
    with torch.device("meta"):
        model = Transformer(config.model)
        if split is not None:
            tensor.divide(model, split)
            tensor.draw_apart(model, streams, split)
        if split is not None and split.sequence:
            sequence.slice_(model, split)
        if groups.context is not None:
            context.divide(model, groups.context)
        recompute.apply(model, config.recompute, streams, whole=cut is None)
        if cut is not None:
            pipeline.keep(model, cut)
    return model


def make_model(
    config: Config, groups: Groups, streams: Streams, device: torch.device, settle: Settle, cut: Cut | None = None
) -> Transformer:
    """This rank's part of the model, with its initial values; as `outline`. Draws no global random number.

    `settle` is called with each module that owns parameters, once they have their values: ZeRO-3 divides them there.
    """
    model, split = outline(config, groups, streams, cut), _split(config, groups)
    parts = plan(config.model, config.parallel.tensor, groups.place.tensor)
    given = Pretrained(config.model) if config.model.init_from else None
    if cut is not None:
        parts = pipeline.with_copy(parts)
    for prefix, module in model.named_modules():
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            module.to_empty(device=device, recurse=False)
            if cut is None:
                model.tie()  # the embedding has a new parameter now, which the head takes before its turn comes
            own = {name: parts[f"{prefix}.{name}"] for name, _ in module.named_parameters(recurse=False)}
            if given is None:
                initialise(module, config.model, config.seed, own)
            else:
                given.fill(module, own)
            if split is not None:
                tensor.mark(module)
            settle(module)
    if split is not None:
        tensor.complete_gradients(model, split)
    if config.compile == "blocks":
        compile_blocks(model)
    return model


def _split(config: Config, groups: Groups) -> tensor.Split | None:
    return None if groups.tensor is None else tensor.Split(groups.tensor, config.parallel.sequence)
