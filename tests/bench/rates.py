"""The rates of a CPU for the planner's table: `python -m tests.bench.rates`. Two ranks of one thread each at the same time.

Each rate is the best of many rounds: what else the machine does only ever makes a round slower. Printed, and appended to RESULTS.md;
framework/planner/hardware.py has them as CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from framework.config.schema import Config, Data, Model
from framework.planner.activations import CPU as KERNELS
from framework.planner.cost import UPDATED
from framework.planner.states import rank_of
from framework.planner.work import work_of
from framework.topology.grid import Grid
from tests.bench.harness import heading
from tests.bench.overhead import RESULTS
from tests.ranks import launch

ROUNDS = 30
# Width, and samples of SEQUENCE tokens, of the model that the time beside products is measured on: not the shape of a recipe.
SHAPE = Model(hidden_size=192, num_layers=2, num_heads=6, num_kv_heads=3, ffn_hidden_size=512, vocab_size=512, max_positions=128)
SEQUENCE = 128
Rates = dict[str, float]


def best(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Seconds of the fastest round."""
    work()
    found = float("inf")
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        found = min(found, time.perf_counter() - begun)
    return found


def product(rows: int, width: int, dtype: torch.dtype = torch.float32) -> float:
    """Seconds per FLOP of [rows, width] @ [width, width]."""
    left, right = torch.randn(rows, width, dtype=dtype), torch.randn(width, width, dtype=dtype)
    rounds = ROUNDS if dtype == torch.float32 else 3
    return best(lambda: left @ right, rounds) / (2 * rows * width * width)


def model_seconds(micro: int, sequence: int) -> float:
    """A forward and backward pass of SHAPE."""
    from framework.model.transformer import Transformer

    model = Transformer(SHAPE)
    ids = torch.randint(SHAPE.vocab_size, (micro, sequence))
    return best(lambda: model(ids, ids).backward(), ROUNDS // 2)


def updated() -> float:
    """Bytes per second of a fused AdamW, by the bytes that the planner counts."""
    parameter = torch.nn.Parameter(torch.ones(1_000_000))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return UPDATED["adamw"] * parameter.numel() / best(optimizer.step)


def rates() -> Rates:
    """Of this rank while the other does the same; the links from collectives of both."""
    large, small = product(1024, 1024), product(1024, 64)
    # Both have 1024 rows: large is f (1 + 2 half/1024), small f (1 + half/1024 + half/64).
    half = max(0.0, (small / large - 1) / (1 / 64 + 1 / 1024 - small / large * 2 / 1024))
    rate = (1 + 2 * half / 1024) / large
    micro = 8
    config = replace(Config(), model=SHAPE, data=Data(seq_length=SEQUENCE))
    work = work_of(config, rank_of(config, Grid()), KERNELS)
    products = micro * (work.all + half * work.slim) / rate + work.all / work.tokens * half / rate
    beside = model_seconds(micro, SEQUENCE) - products
    operator = model_seconds(1, 2) / work.operations
    bandwidth = micro * work.touched / max(beside - work.operations * operator, 1e-9)
    bandwidth_of_update = updated()
    few, many = torch.ones(64), torch.ones(2_000_000)
    latency = best(lambda: dist.all_reduce(few))
    link = many.numel() * 4 / max(best(lambda: dist.all_reduce(many)) - latency, 1e-9)  # a ring of two passes 2 (n - 1)/n = 1
    return {
        "products, fp32, FLOP/s": rate,
        "products, bf16, FLOP/s": 1 / product(256, 512, torch.bfloat16),
        "half": half,
        "memory, bytes/s": bandwidth,
        "update, bytes/s": bandwidth_of_update,
        "operation, s": operator,
        "message, s": latency,
        "link, bytes/s": link,
    }


def rank(report: Path) -> None:
    """One rank, under a launcher."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = rates()
    everyone: list[Rates] = [{}, {}]
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        report.write_text(json.dumps({name: sum(one[name] for one in everyone) / len(everyone) for name in found}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="this is a rank, and writes here")
    given = parser.parse_args([word for word in sys.argv[1:] if not word.startswith("--local_rank")])
    if given.report:
        rank(given.report)
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        report = Path(folder, "report.json")
        done = launch(["tests.bench.rates", "--report", str(report)], 2, Path(folder), 300.0, {"OMP_NUM_THREADS": "1"})
        assert done.code == 0, done.stderr[-4000:]
        found: Rates = json.loads(report.read_text())
    text = (
        heading()
        + "\nRates of one core while the other is busy too, for framework/planner/hardware.py.\n\n| what | measured |\n| --- | --- |\n"
    )
    text += "".join(f"| {name} | {value:.4g} |\n" for name, value in found.items())
    print(text)
    with RESULTS.open("a") as file:
        file.write("\n" + text)


if __name__ == "__main__":
    main()
