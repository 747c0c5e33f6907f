"""The floor for one process: a training loop of torch and nothing else.

python -m tests.bench.bare_torch --steps 25 --lines FILE
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from tests.bench import workload


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lines", type=Path, required=True)
    given = parser.parse_args()

    model = workload.make_model()
    optimizer = workload.make_optimizer(model)
    batches = workload.micro_batches(seed=0)
    lines = workload.StepLines(given.lines)
    tokens = workload.MICRO_SIZE * workload.SEQ_LENGTH * workload.ACCUMULATION
    for step in range(1, given.steps + 1):
        total = 0.0
        for _ in range(workload.ACCUMULATION):
            ids, targets = next(batches)
            loss = model(ids, targets) / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), workload.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        lines.step(step, total)


if __name__ == "__main__":
    main()
