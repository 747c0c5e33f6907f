"""What the forward pass keeps for the backward pass, tensor by tensor: bytes of one sample on one rank, from the settings alone.

The parts are those of the plain model (framework/model/): residual stream, norms, attention, feed-forward, head. A tensor that
several operations keep counts once. Korthikanti et al. 2022, section 4.1, counts likewise, for other kernels (textbook.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from framework.config.schema import Config, Recompute

FLOAT = 4
"""Bytes of an fp32 number."""


@dataclass(frozen=True)
class Kernels:
    """What differs between devices: whether a norm is one kernel (which keeps its input and the root, no normalised copy), bytes
    of one element of a dropout mask (None: a number of the masked type), and whether attention with dropout keeps no weights."""

    fused_norm: bool
    mask: int | None
    flash_dropout: bool


CPU = Kernels(fused_norm=False, mask=None, flash_dropout=False)
ACCELERATOR = Kernels(fused_norm=True, mask=1, flash_dropout=True)


@dataclass(frozen=True)
class Sizes:
    """Numbers of one sample on one rank: `tokens` it computes with, `slice` of them between the split layers, widths of its parts;
    whether model/attention.py repeats grouped heads."""

    tokens: int
    slice: int
    sequence: int
    queries: int
    keys: int
    heads: int
    wide: int
    vocabulary: int
    repeated: bool

    @staticmethod
    def of(config: Config) -> Sizes:
        model, parallel = config.model, config.parallel
        tensor, context = parallel.tensor, parallel.context
        tokens = config.data.seq_length // context
        keys = model.kv_heads // tensor
        copies = context // math.gcd(keys, context)  # parallel/context.py: of heads that are too few to share
        return Sizes(
            tokens=tokens,
            slice=tokens // tensor if parallel.sequence else tokens,
            sequence=config.data.seq_length,
            queries=model.num_heads * model.head_width // tensor,
            keys=keys * copies * model.head_width,
            heads=model.num_heads // (tensor * context),
            wide=model.ffn_hidden_size // tensor,
            vocabulary=-(-model.vocab_size // tensor),
            repeated=model.num_heads // tensor > keys * copies and (config.precision.dtype == "fp32" or apart(config)),
        )


def apart(config: Config) -> bool:
    """Whether the documents in one sample know nothing of each other."""
    return config.data.documents == "apart"


def element(config: Config) -> int:
    """Bytes of one number where matrices are multiplied."""
    return FLOAT if config.precision.dtype == "fp32" else 2


def stream(config: Config) -> int:
    """Bytes of one number of the residual stream."""
    return element(config) if config.precision.half_weights else FLOAT


def block(config: Config, kernels: Kernels) -> dict[str, int]:
    """Bytes that one block keeps of one sample, by part, with nothing recomputed."""
    attention = {**_attention(config, kernels), **_head_norms(config, kernels)}
    return {**_norms(config, kernels), **attention, **_feed_forward(config), **_masks(config, kernels)}


def _norms(config: Config, kernels: Kernels) -> dict[str, int]:
    """`residual`: what the two norms read; `norm`: what they keep beside it; `normed_1`, `normed_2`: what they give to the forks."""
    model, sizes = config.model, Sizes.of(config)
    numbers = sizes.slice * model.hidden_size
    fused = kernels.fused_norm and model.norm == "rmsnorm"
    statistics = sizes.slice * FLOAT * (2 if model.norm == "layernorm" else 1)
    copy = 0 if fused or model.norm == "layernorm" else numbers * FLOAT  # x / root, before the weight
    # Autocast gives each projection a half copy of its own; a column-parallel fork makes one for all.
    apart = config.precision.autocast and config.parallel.tensor == 1
    forks = (3, 2 if model.mlp == "swiglu" else 1) if apart else (1, 1)
    return {
        "residual": 2 * numbers * (stream(config) if fused else FLOAT),  # other kernels keep a half input in fp32
        "norm": 2 * (statistics + copy),
        "normed_1": forks[0] * numbers * element(config),
        "normed_2": forks[1] * numbers * element(config),
    }


def _attention(config: Config, kernels: Kernels) -> dict[str, int]:
    """`heads`: queries, keys and values; `scores`: of the softmax; `mixed`: what the output projection reads."""
    sizes, size = Sizes.of(config), element(config)
    queries, keys = sizes.tokens * sizes.queries, sizes.tokens * sizes.keys
    exchanged = config.parallel.context > 1
    mixed = queries * size
    if config.model.dropout > 0 and not kernels.flash_dropout:
        weights = sizes.heads * sizes.sequence**2 * FLOAT
        return {"heads": 3 * queries * FLOAT, "scores": 3 * weights, "mixed": mixed}  # softmax, mask, and what is left
    if sizes.repeated:  # what context ranks have exchanged is kept whole beside that
        heads = 3 * queries + (2 * keys if exchanged else 0)
    else:
        heads = queries + 2 * keys
    scores = sizes.heads * sizes.sequence * FLOAT + (mixed if exchanged else 0)
    return {"heads": heads * size, "scores": scores, "mixed": mixed}


def _head_norms(config: Config, kernels: Kernels) -> dict[str, int]:
    """What the norms of query and key heads keep: what they read, its roots, and the normalised copy where there is one."""
    model, tensor, tokens = config.model, config.parallel.tensor, Sizes.of(config).tokens
    if not model.qk_norm:
        return {}
    heads = tokens * (model.num_heads + model.kv_heads) // tensor
    each = model.head_width * (element(config) if kernels.fused_norm else 2 * FLOAT)  # other kernels read in fp32, and keep a copy
    return {"head_norms": heads * (each + FLOAT)}


def _feed_forward(config: Config) -> dict[str, int]:
    """`wide`: what the first matrices give; `activated`: the gate's activation; `product`: what the last matrix reads."""
    sizes = Sizes.of(config)
    numbers = sizes.tokens * sizes.wide * element(config)
    gated = config.model.mlp == "swiglu"
    return {"wide": (2 if gated else 1) * numbers, "activated": numbers if gated else 0, "product": numbers}


def _masks(config: Config, kernels: Kernels) -> dict[str, int]:
    """Of dropout on the two residual branches, whose numbers are of the products' type."""
    return {"masks": 2 * mask(config, kernels, element(config))}


def mask(config: Config, kernels: Kernels, size: int) -> int:
    """Bytes of the dropout mask of one residual stream of numbers of `size` bytes."""
    if config.model.dropout == 0:
        return 0
    return Sizes.of(config).slice * config.model.hidden_size * (size if kernels.mask is None else kernels.mask)


def kept(config: Config, kernels: Kernels, recompute: Recompute) -> dict[str, int]:
    """`block` after `recompute` has taken away what is computed again (model/recompute.py); of a full one, a block that is."""
    parts = block(config, kernels)
    if recompute.granularity == "full":
        return {"residual": _input(config)}
    kinds = set(recompute.modules) if recompute.granularity == "selective" else set()
    if "attention" in kinds:
        parts |= {"heads": 0, "head_norms": 0, "scores": 0, "mixed": 0, "normed_1": _input(config)}
    elif "core" in kinds:
        sizes = Sizes.of(config)
        keys = sizes.tokens * config.model.kv_heads // config.parallel.tensor * config.model.head_width
        parts |= {"heads": (sizes.tokens * sizes.queries + 2 * keys) * element(config), "scores": 0}
    parts |= _without_feed_forward(kinds)
    if "mlp" in kinds or "ffn_in" in kinds:
        parts |= {"normed_2": _input(config)}
    if "norm" in kinds:
        parts |= {"norm": 0, "residual": 2 * _input(config)}
        # What a norm gives is computed again where a region or a projection would keep it; autocast's copy of it is another tensor.
        fed = {"normed_1": "attention" in kinds, "normed_2": bool(kinds & {"mlp", "ffn_in"})}
        parts |= {part: 0 for part, by_region in fed.items() if by_region or not config.precision.autocast}
    return parts


def _without_feed_forward(kinds: Iterable[str]) -> dict[str, int]:
    if "mlp" in kinds or {"activation", "ffn_in"} <= set(kinds):
        return {"wide": 0, "activated": 0, "product": 0}
    if "activation" in kinds:
        return {"activated": 0, "product": 0}
    return {"wide": 0, "activated": 0} if "ffn_in" in kinds else {}


def _input(config: Config) -> int:
    """The residual stream as it is."""
    return Sizes.of(config).slice * config.model.hidden_size * stream(config)


def entrance(config: Config, kernels: Kernels) -> int:
    """Bytes that the embedding keeps."""
    return mask(config, kernels, stream(config))


def cast_block(config: Config, recompute: Recompute) -> int:
    """Bytes of the half copies of one block's matrices that autocast makes and the backward pass waits for."""
    model, sizes = config.model, Sizes.of(config)
    kinds = set(recompute.modules) if recompute.granularity == "selective" else set()
    keys = model.kv_heads * model.head_width // config.parallel.tensor
    attention = 0 if "attention" in kinds else 2 * sizes.queries + 2 * keys
    first = 0 if kinds & {"mlp", "ffn_in"} else (2 if model.mlp == "swiglu" else 1) * sizes.wide
    last = 0 if kinds & {"mlp", "activation"} else sizes.wide
    return 0 if recompute.granularity == "full" else element(config) * model.hidden_size * (attention + first + last)


def cast_head(config: Config) -> int:
    """Bytes of the half copy of the output head's matrix."""
    return 0 if "head" in config.recompute.modules else element(config) * config.model.hidden_size * Sizes.of(config).vocabulary


def shared(config: Config) -> int:
    """Bytes of what all samples of a micro-batch and all blocks share: the rotation, where all positions count from the row's start."""
    return 0 if apart(config) else _rotation(config)


def places(config: Config) -> int:
    """Bytes of what all blocks share of one sample (model/places.py): where documents are apart its rotation, and the mask, which is
    of the whole sequence on every context rank."""
    return _rotation(config) + Sizes.of(config).sequence ** 2 * element(config) if apart(config) else 0


def _rotation(config: Config) -> int:
    """Cosines and sines of half a head each."""
    return 0 if config.model.position == "learned" else Sizes.of(config).tokens * config.model.head_width * FLOAT


def exit_(config: Config, kernels: Kernels) -> int:
    """Bytes that the final norm and the head keep, without logits."""
    if "head" in config.recompute.modules:
        return _input(config)
    norms, size = _norms(config, kernels), Sizes.of(config).slice * config.model.hidden_size * element(config)
    if "norm" in config.recompute.modules:
        return _input(config) + (size if config.precision.autocast else 0)
    return norms["residual"] // 2 + norms["norm"] // 2 + size


def logits(config: Config) -> int:
    """Bytes of scores of the vocabulary at their fullest moment: where the loss begins to go backward, in fp32, there are the
    softmax, its gradient, and the gradient of the logits; a divided vocabulary (parallel/tensor.py) makes its gradient in one."""
    sizes = Sizes.of(config)
    return (3 if config.parallel.tensor == 1 else 2) * sizes.tokens * sizes.vocabulary * FLOAT


def backward(config: Config, kernels: Kernels) -> int:
    """Bytes beside what is kept while one block goes backward: gradients under way, and what is computed again just then."""
    sizes, size, parts = Sizes.of(config), element(config), block(config, kernels)
    wide = (3 if config.model.mlp == "swiglu" else 2) * sizes.tokens * sizes.wide * size
    mixed, between = 4 * sizes.tokens * sizes.queries * size, 2 * _input(config)
    if config.recompute.granularity == "full":
        return max(wide, mixed) + between + sum(parts.values()) - parts["residual"] // 2
    after = kept(config, kernels, config.recompute)
    freed = {part: parts[part] - after.get(part, 0) for part in parts}
    attention = mixed + sum(freed[part] for part in ("heads", "scores", "mixed", "normed_1"))
    feed_forward = wide + sum(freed[part] for part in ("wide", "activated", "product", "normed_2"))
    return between + max(attention, feed_forward)
