"""Small engines for the proofs in tests/engine and tests/cases, and what a rank can say of them in plain tensors.

Weights and moments are read through DeepSpeed's own debugging functions, so that engine/state.py is not part of a proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from framework.base.errors import ConfigError
from framework.config.check import check
from framework.config.schema import Batch, Config, Model, Optimizer, Precision, Schedule, Zero
from framework.data.pack import IGNORE, MicroBatch
from framework.engine.dsconfig import deepspeed_config
from framework.engine.engine import PlainEngine
from framework.engine.sharded import DeepSpeedEngine, settler
from framework.model.init import initialise
from framework.model.transformer import Transformer
from framework.topology.grid import Grid
from framework.topology.groups import connect, make_groups

PRECISIONS = ("fp32", "bf16", "fp16", "bf16_autocast", "fp16_autocast")
STAGES = (0, 1, 2, 3)
OFFLOADS = ("none", "cpu")
# Sums come in one order, and ranks on a busy machine do not wait for each other's threads.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

# Odd sizes, so that the parts of the ranks end inside rows and the last one is padded.
LLAMA = Model(hidden_size=12, num_layers=2, num_heads=2, num_kv_heads=1, ffn_hidden_size=20, vocab_size=31, max_positions=16)
GPT2 = Model(
    hidden_size=12, num_layers=2, num_heads=2, ffn_hidden_size=20, vocab_size=31, max_positions=16,
    norm="layernorm", position="learned", mlp="gelu", bias=True, tie_embeddings=False,
)  # fmt: skip

CONSTANT = Schedule(name="constant")
SGD = Optimizer(name="sgd", lr=1.0, weight_decay=0.0)
ADAMW = Optimizer(lr=3e-3)


def precision_of(name: str) -> Precision:
    """The settings of conf/precision/NAME.yaml, with a scaler that halves at every overflow."""
    dtype, _, autocast = name.partition("_")
    return Precision(dtype=dtype, autocast=bool(autocast), hysteresis=1)  # type: ignore[arg-type]


def zero_of(stage: int, offload: str = "none") -> Zero:
    """Buckets and thresholds so small that the tiny model fills several, and that stage 3 divides its matrices."""
    return Zero(stage=stage, offload=offload, persistence_threshold=13, reduce_bucket_size=500, allgather_bucket_size=500)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Form:
    """One way to train: a precision, a ZeRO stage, an offload device."""

    precision: str
    stage: int
    offload: str = "none"

    def __str__(self) -> str:
        return f"{self.precision}-stage{self.stage}" + (f"-offload_{self.offload}" if self.offload != "none" else "")


def allowed_forms(ranks: int) -> list[Form]:
    """Every form that config/check.py lets through: what it allows tomorrow is proved tomorrow."""
    forms = []
    for form in (Form(*parts) for parts in product(PRECISIONS, STAGES, OFFLOADS)):
        config = Config(precision=precision_of(form.precision), zero=zero_of(form.stage, form.offload))
        try:
            check(config, ranks, ranks)
        except ConfigError:
            continue
        forms.append(form)
    return forms


@dataclass(frozen=True)
class Layout:
    """How the samples of a step are divided: ranks x micro-batches of each rank x samples in a micro-batch."""

    ranks: int
    accumulation: int
    micro_size: int = 1

    def config(
        self, form: Form, model: Model = LLAMA, optimizer: Optimizer = SGD, schedule: Schedule = CONSTANT, clip: float = 0.0
    ) -> Config:
        """A whole config for this layout."""
        return Config(
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            clip_grad_norm=clip,
            precision=precision_of(form.precision),
            zero=zero_of(form.stage, form.offload),
            batch=Batch(self.ranks * self.accumulation * self.micro_size, self.micro_size),
        )

    def share(self, samples: Sequence[tuple[Tensor, Tensor]], rank: int) -> list[MicroBatch]:
        """This rank's micro-batches of a global batch of (ids [seq], targets [seq]); all of them with ranks=1."""
        assert len(samples) == self.ranks * self.accumulation * self.micro_size
        micros = []
        for number in range(self.accumulation):
            start = (number * self.ranks + rank) * self.micro_size
            ids, targets = zip(*samples[start : start + self.micro_size], strict=True)
            micros.append(MicroBatch(torch.stack(ids), torch.stack(targets), torch.arange(start, start + self.micro_size)))
        return micros


def samples(step: int, count: int, sequence: int, vocab_size: int) -> list[tuple[Tensor, Tensor]]:
    """`count` samples by seed alone, about a third of their targets without a loss: every micro-batch has its own token count."""
    generator = torch.Generator().manual_seed(7919 * step + 1)
    tokens = torch.randint(vocab_size, (count, sequence + 1), generator=generator)
    targets = tokens[:, 1:].masked_fill(torch.rand(count, sequence, generator=generator) < 0.3, IGNORE)
    return list(zip(tokens[:, :-1], targets, strict=True))


def tokens_of(samples: Sequence[tuple[Tensor, Tensor]]) -> int:
    return sum(int((targets != IGNORE).sum()) for _, targets in samples)


class Bigram(nn.Module):
    """The next token from the current one: so small that a float64 copy by hand is beyond doubt."""

    def __init__(self, vocab_size: int, hidden_size: int, seed: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size)
        for parameter in self.parameters():
            parameter.data.normal_(0.0, 0.5, generator=generator)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """[batch, seq] -> logits [batch, seq, vocab], or with targets the sum of the tokens' cross entropies."""
        logits = self.head(self.embedding(ids))
        if targets is None:
            return logits
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def transformer(model: Model) -> Transformer:
    """With biases that are not zero: a key bias has no gradient in exact arithmetic, and rounding is no measure for rounding."""
    module = Transformer(model)
    initialise(module, model, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0.0, 0.1, generator=generator)
    return module


def plain(config: Config, module: nn.Module | None = None) -> PlainEngine:
    return PlainEngine(transformer(config.model) if module is None else module, config)


def sharded(config: Config, layout: Layout, rank: int, module: nn.Module | None = None) -> DeepSpeedEngine:
    """An engine on this rank, through the same functions as trainer/build.py."""
    connect(60.0, shm_comm=False)
    groups = make_groups(Grid(data=layout.ranks), rank, 60.0)
    module = transformer(config.model) if module is None else module
    settings = deepspeed_config(config, layout.ranks, layout.accumulation)
    settle = settler(config, settings, groups)
    for part in module.modules():  # as parallel/apply.make_model does it: part by part, a tied one once
        if any(not hasattr(parameter, "ds_id") for parameter in part.parameters(recurse=False)):
            settle(part)
    return DeepSpeedEngine(module, config, settings, groups)


def live_weights(engine: DeepSpeedEngine | PlainEngine) -> dict[str, Tensor]:
    """The weights as the forward pass sees them, whole, in their own type. A collective at stage 3."""
    module = engine.model if isinstance(engine, PlainEngine) else engine.engine.module
    whole = {}
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            whole[name] = parameter.detach().clone()
    return whole


def masters(engine: DeepSpeedEngine | PlainEngine) -> dict[str, Tensor]:
    """The weights as the optimizer sees them, whole. A collective."""
    if isinstance(engine, PlainEngine) or engine.config.zero.stage == 0:
        return live_weights(engine)
    whole: dict[str, Any] = {name: safe_get_full_fp32_param(parameter) for name, parameter in engine.engine.module.named_parameters()}
    return {name: tensor.clone() for name, tensor in whole.items()}


def moments(engine: DeepSpeedEngine | PlainEngine) -> dict[str, Tensor]:
    """Both Adam moments of this rank's part, as they lie in torch's optimizer; none before the first applied update makes them."""
    states = enumerate(_inner_optimizer(engine).state.values())
    return {f"{number} {kind}": state[kind].clone() for number, state in states for kind in ("exp_avg", "exp_avg_sq") if kind in state}


def adam_counts(engine: DeepSpeedEngine | PlainEngine) -> set[int]:
    """The step counts inside torch's AdamW on this rank; more than one number would be a fault."""
    return {int(state["step"]) for state in _inner_optimizer(engine).state.values() if "step" in state}


def _inner_optimizer(engine: DeepSpeedEngine | PlainEngine) -> torch.optim.Optimizer:
    """torch's own, inside DeepSpeed's at stages 1 to 3."""
    optimizer: Any = engine.optimizer
    return optimizer if engine.config.zero.stage == 0 else optimizer.optimizer


def distance(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest norm-relative difference over the tensors."""
    assert got.keys() == want.keys()
    return max(float((got[name].double() - want[name].double()).norm() / want[name].double().norm().clamp_min(1e-30)) for name in want)
