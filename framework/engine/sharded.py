"""DeepSpeedEngine: the product. One optimizer step under any precision and ZeRO stage.

The loss that goes backward is (sum of this rank's token losses) x data ranks / (trained tokens of the global batch), where
context ranks count as data ranks: DeepSpeed averages gradients over both, so what it ends up with is the token-weighted mean, however the
samples are split over ranks and micro-batches. Read facts about DeepSpeed in tests/engine/ before changing a line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor, nn

from framework.config.schema import Config
from framework.data.pack import MicroBatch
from framework.engine.axes import Axes
from framework.engine.engine import StepOut, clip, do_nothing, evaluation_mode, trained_tokens
from framework.engine.optim import make_optimizer, set_rate
from framework.engine.precision import half_type, make_scaler, prepare_device
from framework.engine.schedule import rate
from framework.topology import collectives
from framework.topology.groups import Groups, accelerator
from framework.topology.timers import timers_for


class DeepSpeedEngine:
    """A model under deepspeed.initialize with our optimizer, our schedule and our token weighting."""

    def __init__(self, model: nn.Module, config: Config, settings: dict[str, Any], groups: Groups) -> None:
        """`settings` is the dict of dsconfig.deepspeed_config."""
        prepare_device(config.precision, accelerator())
        self.config = config
        self.data_group = groups.data
        self.data_ranks = dist.get_world_size(groups.data)
        self.replica_group, self.context_group = groups.replica, groups.context
        if config.zero.stage == 3:
            _lend_weights(model)
        # A pipeline brings its own. DeepSpeed keeps the last one for the whole process: an earlier engine's must not be left there.
        axes = deepspeed.utils.groups.mpu = None if isinstance(model, PipelineModule) else _axes(groups)
        # DeepSpeed's classes change with precision and stage, and their types say little: Any is the honest type.
        self.engine: Any
        self.optimizer: Any
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model,
            optimizer=make_optimizer(model, config.optimizer),
            config=settings,
            mpu=axes,
            dist_init_required=False,
        )
        self.scaler: torch.amp.GradScaler | None = None
        if self.engine.torch_autocast_z0_gradscaler is not None:
            self.scaler = make_scaler(config.precision, accelerator().device_name())
            self.engine.torch_autocast_z0_gradscaler = self.scaler
        if self.data_ranks == 1 and config.zero.stage == 0:
            self.engine.enable_backward_allreduce = False  # a mean over one: two copies of the whole gradient, for nothing
        self.device: torch.device = self.engine.device
        self.applied = 0
        self.hold: Callable[[], None] = do_nothing
        self.veto: Callable[[float], bool] | None = None
        self.timers = timers_for(self.device)

    def step(self, batch: Sequence[MicroBatch], tokens: int) -> StepOut:
        lr = rate(self.config.schedule, self.config.optimizer, self.applied)
        set_rate(self.optimizer, lr)
        scale = self.loss_scale()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        norm: Tensor | float | None = None
        for index, micro in enumerate(batch):
            last = index == len(batch) - 1
            with self.timers.part("forward"):
                loss = self.engine(*micro.inputs)
            loss_sum += loss.detach()
            refused = last and self._refused(loss_sum, tokens)
            with self.timers.part("backward"):
                weighted = loss * (self.data_ranks / max(1, tokens))
                self.engine.backward(weighted * math.nan if refused else weighted, scale_wrt_gas=False)
            with self.timers.part("optimizer"):
                if last:
                    norm = self._clip_whole_gradients() if self.config.zero.stage == 0 else None
                    self.hold()
                self.engine.step()
        dist.all_reduce(loss_sum, group=self.data_group)
        norm = float(self.engine.get_global_grad_norm()) if norm is None else float(norm)
        return self._finished(float(loss_sum) / max(1, tokens), norm, lr, scale)

    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        with torch.no_grad(), evaluation_mode(self.engine):
            for micro in batches:
                total[0] += self.engine(*micro.inputs)
                total[1] += trained_tokens([micro])
        dist.all_reduce(total, group=self.data_group)
        return float(total[0]), int(total[1])

    def logits(self, ids: Tensor) -> Tensor:
        with torch.no_grad(), evaluation_mode(self.engine):
            return self._whole(self.engine(self._share(ids)))[:, : ids.shape[1]]

    def _share(self, ids: Tensor) -> Tensor:
        """What this rank reads of ids [batch, seq], made as long as sliced sequences have to be: what comes after a token does
        not change its logits."""
        parallel = self.config.parallel
        missing = -ids.shape[1] % (parallel.context * (parallel.tensor if parallel.sequence else 1))
        padded = F.pad(ids, (0, missing))
        return padded if self.context_group is None else collectives.own_slice(padded, self.context_group)

    def _whole(self, logits: Tensor) -> Tensor:
        """[batch, seq / context, vocab] -> [batch, seq, vocab], the padding included."""
        return logits if self.context_group is None else collectives.whole_sequence(logits, self.context_group)

    def _finished(self, loss: float, norm: float, lr: float, scale: float) -> StepOut:
        """The end of a step on every rank: whether it was applied, and what that means for the counter and the gradients."""
        skipped = self._overflowed(norm)
        if skipped:
            self._forget_gradients()
        self.applied += not skipped
        return StepOut(loss, norm, lr, scale, skipped, self.applied)

    def _refused(self, loss_sum: Tensor, tokens: int) -> bool:
        """Whether the step is not wanted. Its gradient is made NaN then, which every stage and precision knows how to skip."""
        if self.veto is None:
            return False
        whole = loss_sum.clone()
        dist.all_reduce(whole, group=self.data_group)
        return self.veto(float(whole) / max(1, tokens))

    def loss_scale(self) -> float:
        """The factor in use for the next backward pass."""
        if self.scaler is not None:
            return self.scaler.get_scale()
        if self.config.precision.half_weights and self.config.precision.dtype == "fp16":
            return float(self.optimizer.loss_scale)
        return 1.0

    def _clip_whole_gradients(self) -> Tensor:
        """Stage 0, after the last reduction: every rank holds the whole gradient, and DeepSpeed tells no norm of it."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = clip(self.engine.module, self.config.clip_grad_norm, self.replica_group)
        if not math.isfinite(norm):
            # Stages 1 to 3 skip such a step; here the optimizer passes over a parameter without a gradient.
            self.engine.module.zero_grad(set_to_none=True)
        return norm

    def _overflowed(self, norm: float) -> bool:
        """Whether the last step was skipped; reduced gradients are the same everywhere, so every rank says the same."""
        return not math.isfinite(norm) if self.config.zero.stage == 0 else not self.engine.was_step_applied()

    def _forget_gradients(self) -> None:
        """Drop the fp32 sum of a skipped step.

        With offload at stages 1 and 2, DeepSpeed keeps it beside half weights and adds the next step to it: one infinite
        gradient, and every later step is skipped as well.
        """
        if self.config.zero.offload != "none" and self.config.zero.stage < 3:
            for group in self.optimizer.averaged_gradients:
                self.optimizer.averaged_gradients[group] = None


def settler(config: Config, settings: dict[str, Any], groups: Groups) -> Callable[[nn.Module], None]:
    """What to do with a module once its parameters have their values: at stage 3 divide them over the data ranks at once, so
    that no rank ever holds the whole model."""
    swapper: Any = None  # of nvme: one for all modules, because a new one empties its folder

    def divide(module: nn.Module) -> None:
        nonlocal swapper
        if config.precision.half_weights:
            module.to(half_type(config.precision))  # DeepSpeed casts whole models, and leaves one that is divided as it is
        made = deepspeed.zero.Init(
            module=module, data_parallel_group=groups.data, config_dict_or_path=settings, mpu=_axes(groups), param_swapper=swapper
        )
        swapper = made.param_swapper

    def leave(module: nn.Module) -> None:
        pass

    return divide if config.zero.stage == 3 else leave


def _axes(groups: Groups) -> Axes | None:
    return None if groups.replica is None else Axes(groups)


def _lend_weights(model: nn.Module) -> None:
    """Tell stage 3 of weights that a module reads and another one owns, so that it gathers them for both."""
    for module in model.modules():
        for parameter in getattr(module, "borrowed", ()):
            deepspeed.zero.register_external_parameter(module, parameter)
