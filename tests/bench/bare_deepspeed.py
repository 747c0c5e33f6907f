"""The floor for several ranks: the shortest training loop that a DeepSpeed user would write, ZeRO stage 1, fp32.

deepspeed --num_gpus 2 --module tests.bench.bare_deepspeed --steps 25 --lines FILE
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import deepspeed
import torch

from tests.bench import workload


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=0)
    given = parser.parse_args()

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or the start compiles it; ours does not either
    deepspeed.init_distributed("gloo")
    model = workload.make_model()
    config = {
        "train_micro_batch_size_per_gpu": workload.MICRO_SIZE,
        "gradient_accumulation_steps": workload.ACCUMULATION,
        "gradient_clipping": workload.CLIP,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=workload.make_optimizer(model), config=config)
    batches = workload.micro_batches(seed=rank)
    lines = workload.StepLines(given.lines if rank == 0 else None)
    tokens = workload.MICRO_SIZE * workload.SEQ_LENGTH
    for step in range(1, given.steps + 1):
        total = 0.0
        for _ in range(workload.ACCUMULATION):
            ids, targets = next(batches)
            loss = engine(ids, targets) / tokens
            engine.backward(loss)
            engine.step()
            total += loss.item()
        lines.step(step, total / workload.ACCUMULATION)
    # No destroy_process_group: gloo's threads sometimes abort the process in it, after the work is done.


if __name__ == "__main__":
    main()
