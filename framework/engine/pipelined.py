"""PipelinedEngine: one optimizer step over pipeline stages, by DeepSpeed's PipelineEngine (1F1B, Narayanan et al. 2019).

DeepSpeed runs a list of instructions for each step. Two of them are ours: the sum of the tied embeddings' gradients, which
DeepSpeed leaves out where gradients are accumulated beside `.grad` (fp16), and the update, before which the whole
gradient is clipped at ZeRO stage 0 and whoever still reads the old state is waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor

from framework.config.schema import Config
from framework.data.pack import MicroBatch
from framework.engine.engine import StepOut, evaluation_mode, trained_tokens
from framework.engine.instructions import Instructions, Recorder, bubble
from framework.engine.optim import set_rate
from framework.engine.schedule import rate
from framework.engine.sharded import DeepSpeedEngine
from framework.topology.groups import Groups
from framework.topology.timers import Part

log = logging.getLogger(__name__)

TIMED: dict[type, Part] = {
    schedule.ForwardPass: "forward",
    schedule.BackwardPass: "backward",
    schedule.ReduceTiedGrads: "optimizer",
    schedule.ReduceGrads: "optimizer",
    schedule.OptimizerStep: "optimizer",
}
EVALUATED_AT_ONCE = 32
"""Micro-batches of an evaluation that go through the pipeline before its bubble comes again; they are in memory together."""


class PipelinedEngine(DeepSpeedEngine):
    """This rank's stage. Every stage of a pipeline is given the same micro-batches, and gives the same results."""

    def __init__(
        self, module: PipelineModule, bounds: tuple[tuple[int, int], ...], config: Config, settings: dict[str, Any], groups: Groups
    ) -> None:
        """`module` is made by parallel/pipeline.assemble with the blocks `bounds`, `settings` by dsconfig.deepspeed_config."""
        super().__init__(module, config, settings, groups)
        self.bounds = bounds
        self.loss: Any = module.loss_fn
        self.stage: Any = next(part for part in module.modules() if hasattr(part, "starts"))  # a parallel/pipeline.Stage
        self.counts = self.engine.is_last_stage() and groups.place.tensor == 0
        self._norm: Tensor | None = None
        self._shape: torch.Size | None = None
        self.engine.pipeline_enable_backward_allreduce = self.data_ranks > 1 or config.zero.stage > 0  # else a mean over one
        ours: Instructions = {schedule.ReduceTiedGrads: self._sum_tied, schedule.OptimizerStep: self._update}
        self._instructions: Instructions = self._timed({**self.engine._INSTRUCTION_MAP, **ours})
        self.engine._INSTRUCTION_MAP = self._instructions
        self.stages, self.micros = self.engine.num_stages, self.engine.micro_batches
        if self.micros < self.stages and groups.rank == 0:
            share = 100 * bubble(self.stages, self.micros)
            log.warning("%d micro-batches for %d stages: %.0f %% of each step is bubble", self.micros, self.stages, share)

    def step(self, batch: Sequence[MicroBatch], tokens: int) -> StepOut:
        lr = rate(self.config.schedule, self.config.optimizer, self.applied)
        set_rate(self.optimizer, lr)
        scale = self.loss_scale()
        # DeepSpeed takes the mean over micro-batches and over data ranks.
        self.loss.begin(self.data_ranks * len(batch) / max(1, tokens), self.device)
        self._announce(batch)
        self.engine.train_batch(_pairs(batch))
        loss_sum = self._over_all(self.loss.total)
        norm = float(self.engine.get_global_grad_norm() if self._norm is None else self._norm)
        return self._finished(float(loss_sum) / max(1, tokens), norm, lr, scale)

    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        self.loss.begin(1.0, self.device)
        tokens, left = 0, iter(batches)
        with evaluation_mode(self.engine.module):
            while micros := list(islice(left, EVALUATED_AT_ONCE)):
                self._announce(micros)
                self.engine.eval_batch(_pairs(micros), reduce_output=None, bcast_loss=False, num_micro_batches=len(micros))
                tokens += trained_tokens(micros)
        total = self._over_all(torch.stack((self.loss.total, self.loss.total.new_tensor(tokens))))
        return float(total[0]), int(total[1])

    def logits(self, ids: Tensor) -> Tensor:
        share = self._share(ids)
        given = MicroBatch(share, share, torch.arange(len(ids)))
        self.loss.begin(1.0, self.device)
        with evaluation_mode(self.engine.module), torch.no_grad():
            self._announce([given])
            # The loss is computed too, for nothing: without it DeepSpeed would add logits to its sum of losses.
            _, own = self.engine.eval_batch(_pairs([given]), return_logits=True, reduce_output=None, bcast_loss=False, num_micro_batches=1)
            shape = (*given.ids.shape, self.config.model.vocab_size)
            last = self.engine.is_last_stage()
            whole = self.loss.whole(own).float().contiguous() if last else torch.empty(shape, device=self.device)
        source = self.engine.grid.stage_to_global(self.engine.num_stages - 1)
        dist.broadcast(whole, source, group=self.engine.grid.get_pipe_parallel_group())
        return self._whole(whole)[:, : ids.shape[1]]

    def record(self) -> Recorder:
        """Time the instructions of the next step; they are in the recorder after it, until `stop_recording`."""
        recorder = Recorder()
        self.engine._INSTRUCTION_MAP = recorder.watch(self._instructions)
        return recorder

    def after_backward(self, call: Callable[[], None]) -> None:
        """Call it after each backward pass of a micro-batch, until `stop_recording`."""
        run = self._instructions[schedule.BackwardPass]

        def watched(engine: PipelineEngine, buffer_id: int) -> None:
            run(engine, buffer_id)
            call()

        self.engine._INSTRUCTION_MAP = {**self._instructions, schedule.BackwardPass: watched}

    def stop_recording(self) -> None:
        """Watch nothing any more."""
        self.engine._INSTRUCTION_MAP = self._instructions

    def _timed(self, instructions: Instructions) -> Instructions:
        """The same, each noted as a part of the step while it runs."""
        return {**instructions, **{kind: self._as_part(name, instructions[kind]) for kind, name in TIMED.items()}}

    def _as_part(self, name: Part, run: Callable[..., None]) -> Callable[..., None]:
        def noted(engine: PipelineEngine, buffer_id: int | None = None) -> None:
            with self.timers.part(name):
                run(engine) if buffer_id is None else run(engine, buffer_id)

        return noted

    def _announce(self, batch: Sequence[MicroBatch]) -> None:
        """What this stage has to know of the micro-batches that will come through it: where documents begin in each, and their shapes.

        Stages tell each other the shape of what they send once; again if it changes, and each time where it differs inside a batch.
        """
        self.stage.starts = iter([micro.starts for micro in batch])
        shapes = {micro.ids.shape for micro in batch}
        self.engine.dynamic_shape = len(shapes) > 1
        if shapes != {self._shape}:
            self.engine.reset_activation_shape()
        self._shape = None if len(shapes) > 1 else shapes.pop()

    def _over_all(self, value: Tensor) -> Tensor:
        """The sum over all data ranks of what the last stage has, on every rank."""
        value = value if self.counts else torch.zeros_like(value)
        dist.all_reduce(value)
        return value

    def _sum_tied(self, engine: PipelineEngine) -> None:
        """Sum the gradients of the embedding and of its copy, before the mean over the data ranks is taken."""
        module: Any = engine.module
        for weight, group in module.get_tied_weights_and_groups():
            dist.all_reduce(self._accumulated(weight), group=group)

    def _accumulated(self, weight: Any) -> Tensor:
        """Where DeepSpeed adds up the micro-batches' gradients: beside half weights, in fp32."""
        if self.engine.using_bf16_optimizer:
            return weight._hp_grad
        return weight.grad_accum if getattr(self.optimizer, "use_grad_accum_attribute", False) else weight.grad

    def _update(self, engine: PipelineEngine) -> None:
        self._norm = self._clip_whole_gradients() if self.config.zero.stage == 0 else None
        self.hold()
        PipelineEngine._exec_optimizer_step(engine)


def _pairs(batch: Sequence[MicroBatch]) -> Iterator[tuple[Tensor, Tensor]]:
    return iter([(micro.ids, micro.targets) for micro in batch])
