"""What recompute saves and costs: `python -m tests.bench.recompute`.

One process, 12 blocks, PlainEngine's model. Peak bytes are those of live tensors made in a step (gradients are there before it),
step times are of runs that take turns; theory stands beside both. The figures are appended to RESULTS.md.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from dataclasses import dataclass

import torch

from framework.config.compose import compose
from framework.config.schema import Config
from framework.data.pack import MicroBatch
from framework.engine.optim import make_optimizer
from framework.model.places import Places
from framework.model.transformer import Transformer
from framework.parallel.apply import make_model
from framework.parallel.probe import Meter, plain_block
from framework.topology.grid import Grid
from framework.topology.groups import Groups, accelerator
from framework.topology.random import Streams
from framework.trainer import recomputing
from tests.bench.harness import heading, quartiles
from tests.bench.pipeline import RESULTS
from tests.memory import LiveBytes

CHOICES = ("none", "full", "every_2", "selective", "auto")
BLOCKS = 12
WORDS = ["engine=plain", f"model.num_layers={BLOCKS}", "model.hidden_size=256", "model.num_heads=8", "model.num_kv_heads=2",
         "model.ffn_hidden_size=896", "model.vocab_size=256", "data=synthetic", "data.seq_length=256", "batch.micro_size=4"]  # fmt: skip
CPU = torch.device("cpu")


class Side:
    """A model with one choice of recompute."""

    def __init__(self, choice: str, folder: str) -> None:
        streams = Streams(accelerator())
        config = compose([*WORDS, f"recompute={choice}", f"output_root={folder}", f"name={choice}"])
        groups = Groups(0, Grid().place(0))
        self.config = recomputing.resolve(config, groups, streams, CPU)
        self.model = make_model(self.config, groups, streams, CPU, lambda module: None)
        self.optimizer = make_optimizer(self.model, config.optimizer)
        ids = torch.randint(256, (config.batch.micro_size, config.data.seq_length), generator=torch.Generator().manual_seed(1))
        self.batch = MicroBatch(ids, ids.roll(-1, dims=1), torch.arange(len(ids)))

    def step(self) -> float:
        """Seconds of forward pass, backward pass and update."""
        began = time.perf_counter()
        self.model(self.batch.ids, self.batch.targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # gradients stay where they are, and are no part of a step's bytes
        return time.perf_counter() - began

    def peak(self) -> int:
        gc.collect()
        with LiveBytes() as live:
            self.model(self.batch.ids, self.batch.targets).backward()
        self.optimizer.zero_grad(set_to_none=False)
        return live.peak


@dataclass(frozen=True)
class Theory:
    """Of one block: bytes that it holds for its backward pass, and of its input; share of its forward pass that is computed again."""

    block: int
    input: int
    again: float

    def peak(self, config: Config) -> float | None:
        """Where the backward pass begins, or in the first block from the end that is computed again."""
        recompute = config.recompute
        if recompute.granularity == "selective":
            return None
        if recompute.granularity == "none":
            return BLOCKS * self.block
        times = -(-BLOCKS // recompute.every)
        last_one = (BLOCKS - 1) % recompute.every == 0
        return times * self.input + (BLOCKS - times + last_one) * self.block

    def extra(self, config: Config) -> float | None:
        """A backward pass takes twice as long as a forward pass."""
        recompute = config.recompute
        if recompute.granularity == "selective":
            return None
        return 0.0 if recompute.granularity == "none" else self.again / 3 / recompute.every


def theory(config: Config) -> Theory:
    model: Transformer = plain_block(config, CPU)
    tokens, width, wide = config.batch.micro_size * config.data.seq_length, config.model.hidden_size, config.model.ffn_hidden_size
    hidden = torch.zeros(config.batch.micro_size, config.data.seq_length, width, requires_grad=True)
    places = Places(model.rotation(model.positions(config.data.seq_length, CPU)), None)
    meter = Meter(model.layers[0], model)
    meter(hidden, places)
    nbytes = 4 * tokens * width
    attention = 2 * config.data.seq_length * width  # q k^T and the mix, for a token
    forward = 4 * width * width + 3 * width * wide + attention
    return Theory(meter.nbytes + nbytes, nbytes, 1 - width * wide / forward)


def rows(rounds: int) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        sides = {choice: Side(choice, folder) for choice in CHOICES}
    for side in sides.values():
        side.step()
    peaks = {choice: side.peak() for choice, side in sides.items()}
    times: dict[str, list[float]] = {choice: [] for choice in CHOICES}
    for turn in range(rounds):
        for choice in CHOICES[:: 1 if turn % 2 == 0 else -1]:
            times[choice].append(sides[choice].step())
    expected = theory(sides["none"].config)
    found = []
    for choice, side in sides.items():
        ratios = [mine / none - 1 for mine, none in zip(times[choice], times["none"], strict=True)]
        saved, kept, extra = 1 - peaks[choice] / peaks["none"], expected.peak(side.config), expected.extra(side.config)
        theory_saved = None if kept is None else 1 - kept / (BLOCKS * expected.block)
        what = ", ".join(side.config.recompute.modules) if choice in ("auto", "selective") else ""
        found.append(
            f"| {choice} | {what} | {peaks[choice] / 1e6:.1f} | {saved:.1%} | {_share(theory_saved)} "
            f"| {quartiles(times[choice])} | {statistics.median(ratios):+.1%} | {_share(extra)} |"
        )
    return found


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    head = heading()
    table = "\n".join([
        head,
        f"Recompute, {BLOCKS} blocks of width 256, heads and feed-forward in llama_8b's proportions, 4 x 256 tokens, fp32, "
        f"{given.rounds} steps of each in turns.",
        "Goals: full saves >= 60 % at <= 40 % more time, every_2 lies between, auto saves >= 30 % at <= 12 %.\n",
        "| recompute | kinds | peak, MB | saved | theory | step, s | more time | theory |",
        "|---|---|---|---|---|---|---|---|",
        *rows(given.rounds),
    ])  # fmt: skip
    print(table)
    with RESULTS.open("a") as results:
        results.write(f"\n{table}\n")


if __name__ == "__main__":
    main()
