"""What two tensor ranks make of two cores: `python -m tests.bench.parallel`.

A model wide enough that products take the time, once on one process with one thread, once on two tensor ranks with one
thread each. The ideal is half of the first. What is lost is told apart: the exchanges of activations, measured by the
same sums over the same numbers of elements with nothing beside them, and the rest. The figures are appended to RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from framework.config import schema
from tests.bench.harness import WARM_UP, Side, alternate, heading, quartiles
from tests.bench.overhead import RESULTS
from tests.ranks import launch

LAYERS, HIDDEN, SEQUENCE, MICRO, VOCABULARY = 2, 1024, 256, 2, 4096
MODEL = schema.Model(
    hidden_size=HIDDEN, num_layers=LAYERS, num_heads=8, ffn_hidden_size=2816, vocab_size=VOCABULARY, max_positions=SEQUENCE
)


@dataclass(frozen=True)
class Exchange:
    """Sums of one step: `count` of them over `elements` fp32 numbers each."""

    count: int
    elements: int


def exchanges() -> list[Exchange]:
    """By hand: each half of a block sums once forward and once backward; so do the embedding forward and the head backward; the
    loss sums two numbers, and takes the peak, of each token."""
    tokens = MICRO * SEQUENCE
    return [Exchange(4 * LAYERS + 2, tokens * HIDDEN), Exchange(2, 2 * tokens)]


def side(name: str, ranks: int | None, extra: list[str], cache: Path) -> Side:
    def words(folder: Path, steps: int) -> list[str]:
        model = [
            f"model.{key}={getattr(MODEL, key)}" for key in ("hidden_size", "num_layers", "num_heads", "ffn_hidden_size", "vocab_size")
        ]
        model += [f"model.max_positions={SEQUENCE}", "model.num_kv_heads=null"]
        run = [f"output_root={folder}", "name=run", "resume=never", f"steps={steps}", "eval.every=-1", "monitor.console=none"]
        run += ["monitor.curve=false", "checkpoint=none", "zero=stage0", "precision=fp32", "launch.threads=1", "data.workers=0"]
        data = ["data=synthetic", f"data.cache={cache}", f"data.seq_length={SEQUENCE}", f"batch.micro_size={MICRO}"]
        return ["framework.train", *run, *data, f"batch.global_size={MICRO}", *model, *extra]

    return Side(name, ranks, words, "run/metrics.jsonl")


def exchange_seconds() -> float:
    """Seconds that the exchanges of one step take on two ranks with nothing beside them."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        report = Path(folder, "report.json")
        given = [json.dumps([(one.count, one.elements) for one in exchanges()]), str(report)]
        done = launch(["tests.bench.exchange", *given], 2, Path(folder), 300.0, {"OMP_NUM_THREADS": "1"})
        assert done.code == 0, done.stderr[-4000:]
        return statistics.median(json.loads(report.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a turn")
    given = parser.parse_args()

    text = heading() + (
        f"\nTensor parallel, {LAYERS} blocks of width {HIDDEN}, {MICRO} x {SEQUENCE} tokens a step, fp32; {given.lives} starts a side, "
        f"{WARM_UP} steps of warm-up, turns of {given.steps} in the order A B B A.\n\n"
        "| tensor ranks | step of two ranks, s | half a step of one process, s | two ranks / ideal | exchanges alone, s | rest, s |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
    )
    alone = exchange_seconds()
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
        one = side("one", None, ["parallel=single"], Path(cache))
        for name, extra in (("whole sequence", ["parallel.tensor=2"]), ("sliced sequence", ["parallel=tensor2_sequence"])):
            pairs = alternate(side("two", 2, extra, Path(cache)), one, given.lives, given.steps)
            ratio = quartiles([two.step / (process.step / 2) for two, process in pairs])
            step, ideal = statistics.median(two.step for two, _ in pairs), statistics.median(process.step / 2 for _, process in pairs)
            text += f"| {name} | {step:.3f} | {ideal:.3f} | {ratio} | {alone:.3f} | {step - ideal - alone:+.3f} |\n"
    print(text)
    with RESULTS.open("a") as file:
        file.write("\n" + text)


if __name__ == "__main__":
    main()
