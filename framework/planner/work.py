"""What one rank does for one micro-batch, counted: products, bytes through memory, operations, messages. Per pipeline stage.

Everything grows linearly with the samples of the micro-batch, so it is counted for one sample and, once, for what does not grow.
Products as in Narayanan et al. 2021, appendix, but causal attention counts half, as kernels leave the other half out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from framework.config.schema import Config
from framework.planner import activations
from framework.planner.activations import FLOAT, Kernels, Sizes
from framework.planner.states import Rank

BACKWARD, CORE_BACKWARD = 2.0, 2.5
"""Products of the backward pass for one of the forward pass; attention computes its scores again (Dao et al. 2022)."""
TOUCHES = 4
"""How often what is kept passes through memory: written and read in the forward pass, its gradient written and read in the backward."""
OPERATIONS, OPERATIONS_OUTSIDE = 90, 60
"""Operations of a block, forward and backward, and of all that is outside the blocks: counted in a profile of model/."""


class Product(NamedTuple):
    """FLOP of one sample in the forward pass, and the smaller dimension of the weight (of attention: of a head)."""

    flop: float
    dimension: int


@dataclass(frozen=True)
class Ring:
    """Messages of one micro-batch on one axis: `count` of them, which carry `nbytes` of one sample past each rank; `hidden` is the
    share that the code begins before, and waits for after, products of its own."""

    count: float = 0.0
    nbytes: float = 0.0
    hidden: float = 0.0


@dataclass(frozen=True)
class Work:
    """Of one rank. `forward` and `all` are FLOP of one sample, `slim` those of `all` divided by the smaller dimension of their
    matrices; `tokens` of one sample; `touched` bytes of one sample; the rings of three axes."""

    forward: float
    all: float
    slim: float
    tokens: int
    touched: float
    operations: float
    tensor: Ring
    context: Ring
    pipeline: Ring


def block_products(config: Config) -> dict[str, Product]:
    """By recompute's names: projections, core and out of attention; the first and the last matrices of the feed-forward layer."""
    sizes, model = Sizes.of(config), config.model
    hidden, tensor = model.hidden_size, config.parallel.tensor
    keys = model.kv_heads * model.head_width // tensor
    first = (2 if model.mlp == "swiglu" else 1) * sizes.wide
    return {
        "projections": Product(2 * sizes.tokens * hidden * (sizes.queries + 2 * keys), min(hidden, keys)),
        "core": Product(2 * sizes.tokens * sizes.sequence * sizes.queries, model.head_width),
        "out": Product(2 * sizes.tokens * hidden * sizes.queries, min(hidden, sizes.queries)),
        "first": Product(2 * sizes.tokens * hidden * first, min(hidden, sizes.wide)),
        "last": Product(2 * sizes.tokens * hidden * sizes.wide, min(hidden, sizes.wide)),
    }


def again(config: Config) -> frozenset[str]:
    """Products of a block that are computed again. The second computation stops before the last one (model/recompute.py)."""
    recompute = config.recompute
    if recompute.granularity == "full":
        return frozenset(("projections", "core", "out", "first"))
    if recompute.granularity != "selective":
        return frozenset()
    found: set[str] = set()
    for kind in recompute.modules:
        found |= {"attention": {"projections", "core"}, "core": {"core"}, "mlp": {"first"}, "ffn_in": {"first"}}.get(kind, set())
    return frozenset(found)


def recomputed_blocks(config: Config, rank: Rank) -> int:
    """Blocks of the stage of which something is computed again."""
    blocks, recompute = range(*rank.bounds[rank.stage]), config.recompute
    if recompute.granularity in ("none", "auto"):
        return 0
    return sum(index % recompute.every == 0 for index in blocks) if recompute.granularity == "full" else len(blocks)


def work_of(config: Config, rank: Rank, kernels: Kernels) -> Work:
    """The work of a rank of a pipeline stage."""
    blocks, more = len(range(*rank.bounds[rank.stage])), recomputed_blocks(config, rank)
    forward = everything = slim = 0.0
    twice = again(config)
    for name, (flop, dimension) in block_products(config).items():
        passes = blocks * (1 + (CORE_BACKWARD if name == "core" else BACKWARD)) + more * (name in twice)
        forward += blocks * flop
        everything += passes * flop
        slim += passes * flop / dimension
    if rank.last:
        flop, dimension = head_product(config)
        passes = 1 + BACKWARD + ("head" in config.recompute.modules)
        forward, everything, slim = forward + flop, everything + passes * flop, slim + passes * flop / dimension
    touched, operations = _elementwise(config, rank, kernels, more)
    tokens = Sizes.of(config).tokens
    return Work(
        forward, everything, slim, tokens, touched, operations, _tensor(config, rank, more), _context(config, blocks, more),
        _pipeline(config, rank),
    )  # fmt: skip


def head_product(config: Config) -> Product:
    """The output head."""
    sizes, hidden = Sizes.of(config), config.model.hidden_size
    return Product(2 * sizes.tokens * hidden * sizes.vocabulary, min(hidden, sizes.vocabulary))


def _elementwise(config: Config, rank: Rank, kernels: Kernels, more: int) -> tuple[float, float]:
    """Bytes of one sample through memory, and operations of a micro-batch. What is computed again is written and read once more."""
    blocks = len(range(*rank.bounds[rank.stage]))
    plain = sum(activations.block(config, kernels).values())
    less = sum(activations.kept(config, kernels, config.recompute).values())
    touched = float(TOUCHES * blocks * plain + 2 * more * (plain - less))
    if rank.last:
        touched += 2 * activations.logits(config) + TOUCHES * activations.exit_(config, kernels)
    share = 0.0 if plain == 0 else (plain - less) / plain
    operations = blocks * OPERATIONS + more * share * OPERATIONS / 3 + (rank.first + rank.last) * OPERATIONS_OUTSIDE / 2
    return touched, operations


def _tensor(config: Config, rank: Rank, more: int) -> Ring:
    """Sums of [tokens, hidden] (model/ and parallel/tensor.py): each half of a block one forward and one backward; with sequence
    parallel they are gathers and scattering sums, and what a fork has read is gathered again in the backward pass. A ring sum
    passes 2 (n - 1)/n of the bytes by each rank, a gather or a scattering sum half of that (Thakur et al. 2005, section 4)."""
    degree, sliced, twice = config.parallel.tensor, config.parallel.sequence, config.recompute
    if degree == 1:
        return Ring()
    sizes, blocks = Sizes.of(config), len(range(*rank.bounds[rank.stage]))
    one = sizes.tokens * config.model.hidden_size * activations.element(config) * (degree - 1) / degree
    regions = sum(kind in ("attention", "mlp", "ffn_in") for kind in twice.modules) if twice.granularity == "selective" else 0
    if sliced:  # in units of `one`; of the ten of a block, fork's backward gather and sum are begun early
        units = 10 * blocks + more * (3 if twice.granularity == "full" else regions)
        count, early = float(units), 4 * blocks
    else:
        sums = 4 * blocks + more * (twice.granularity == "full")
        units, count, early = 2 * sums, float(sums), 4 * blocks
    edges = (2 if rank.first else 0) + (2 if rank.last else 0)
    scores = 2 * 3 * sizes.tokens * FLOAT * (degree - 1) / degree if rank.last else 0.0  # peak, sum, target of each token
    nbytes = (units + edges) * one + scores
    return Ring(count + edges / 2 + 2 * rank.last, nbytes, early * one / nbytes)


def _context(config: Config, blocks: int, more: int) -> Ring:
    """Exchanges of all with all (parallel/context.py): queries, keys and values in one, the mixed heads in one; the same backward."""
    degree = config.parallel.context
    if degree == 1:
        return Ring()
    sizes, kinds = Sizes.of(config), config.recompute
    away = sizes.tokens * activations.element(config) * (degree - 1) / degree
    inward, outward = (sizes.queries + 2 * sizes.keys) * away, sizes.queries * away
    nbytes, count = 2 * blocks * (inward + outward), 4 * blocks
    if kinds.granularity == "full":
        nbytes, count = nbytes + more * (inward + outward), count + 2 * more
    elif {"attention", "core"} & set(kinds.modules):
        nbytes, count = nbytes + more * inward, count + more
    return Ring(count, nbytes)


def _pipeline(config: Config, rank: Rank) -> Ring:
    """The hidden state to the next stage, its gradient back: a stage waits for what it sends, and for what it is sent."""
    if len(rank.bounds) == 1:
        return Ring()
    state = Sizes.of(config).slice * config.model.hidden_size * activations.stream(config)
    neighbours = (not rank.first) + (not rank.last)
    return Ring(2 * neighbours, 2 * neighbours * state)


def model_flop(config: Config) -> float:
    """FLOP of the model for one sample, forward and backward, nothing computed again: what utilisation is reckoned by
    (Chowdhery et al. 2022, appendix B), attention as a causal kernel computes it."""
    model, length = config.model, config.data.seq_length
    queries, keys = model.num_heads * model.head_width, model.kv_heads * model.head_width
    columns = 2 * queries + 2 * keys + (3 if model.mlp == "swiglu" else 2) * model.ffn_hidden_size
    matrices = 2.0 * length * model.hidden_size * (model.num_layers * columns + model.vocab_size)
    return 3 * (matrices + 2.0 * length * length * queries * model.num_layers)
