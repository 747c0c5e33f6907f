"""Which parameters a model has, as data: the table that the live model, its split and its checkpoints are held against.

Pure functions of the model settings, no torch. The table lists logical tensors: whole, unpadded, whatever the parallel layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from framework.config import schema


@dataclass(frozen=True)
class Parameter:
    """One logical tensor.

    `shape` is in elements, a matrix is [out, in]. `block` is the index of its decoder block, None outside the blocks.
    `split` is the axis that tensor parallelism divides: 0 (column parallel), 1 (row parallel), None (replicated).
    `tied_to` names the tensor whose storage this one shares.
    """

    name: str
    shape: tuple[int, ...]
    block: int | None = None
    split: int | None = None
    decayed: bool = False
    tied_to: str | None = None

    def local_shape(self, degree: int) -> tuple[int, ...]:
        """Of the part that one of `degree` tensor ranks holds: equal parts, so that the last ones of a vocabulary may hold padding."""
        return tuple(-(-length // degree) if axis == self.split else length for axis, length in enumerate(self.shape))


def table(model: schema.Model) -> tuple[Parameter, ...]:
    """Every logical tensor in the order of the forward pass. A tied head is listed, with `tied_to`."""
    width = model.hidden_size
    entries = [Parameter("embed_tokens.weight", (model.vocab_size, width), split=0, decayed=True)]
    if model.position == "learned":
        entries.append(Parameter("embed_positions.weight", (model.max_positions, width), decayed=True))
    for index in range(model.num_layers):
        entries += _block(model, index)
    entries += _norm(model, "final_norm", None)
    tied_to = "embed_tokens.weight" if model.tie_embeddings else None
    entries.append(Parameter("lm_head.weight", (model.vocab_size, width), split=0, decayed=True, tied_to=tied_to))
    return tuple(entries)


def count(model: schema.Model) -> int:
    """Number of trained elements; tied tensors count once. All blocks are alike."""
    outside = sum(prod(entry.shape) for entry in table(replace(model, num_layers=0)) if entry.tied_to is None)
    return outside + model.num_layers * sum(prod(entry.shape) for entry in _block(model, 0))


def _block(model: schema.Model, index: int) -> list[Parameter]:
    prefix, width = f"layers.{index}", model.hidden_size
    queries, keys = model.num_heads * model.head_width, model.kv_heads * model.head_width
    entries = _norm(model, f"{prefix}.attn_norm", index)
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        entries += _linear(f"{prefix}.attention.{name}", (rows, width), index, split=0, bias=model.qkv_bias)
    entries += _linear(f"{prefix}.attention.o_proj", (width, queries), index, split=1, bias=model.out_bias)
    for name in ("q_norm", "k_norm") if model.qk_norm else ():
        entries.append(Parameter(f"{prefix}.attention.{name}.weight", (model.head_width,), index))
    entries += _norm(model, f"{prefix}.mlp_norm", index)
    for name in ("gate_proj", "up_proj") if model.mlp == "swiglu" else ("up_proj",):
        entries += _linear(f"{prefix}.mlp.{name}", (model.ffn_hidden_size, width), index, split=0, bias=model.bias)
    entries += _linear(f"{prefix}.mlp.down_proj", (width, model.ffn_hidden_size), index, split=1, bias=model.bias)
    return entries


def _linear(name: str, shape: tuple[int, int], block: int, split: int, bias: bool) -> list[Parameter]:
    entries = [Parameter(f"{name}.weight", shape, block, split, decayed=True)]
    if bias:
        # The bias of a row-parallel layer is added once, after the sum over ranks: every rank holds all of it.
        entries.append(Parameter(f"{name}.bias", shape[:1], block, 0 if split == 0 else None))
    return entries


def _norm(model: schema.Model, name: str, block: int | None) -> list[Parameter]:
    kinds = ("weight", "bias") if model.norm == "layernorm" and model.bias else ("weight",)
    return [Parameter(f"{name}.{kind}", (model.hidden_size,), block) for kind in kinds]
