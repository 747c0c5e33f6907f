"""The benchmark's fairness: both sides train the same thing, and the observer sees lines when they come."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest

from framework.config.compose import compose
from tests.bench import checkpoint, harness, overhead, wide, workload


@pytest.mark.parametrize("ranks", [None, 2])
def test_our_side_is_given_the_workload_of_the_bare_side(ranks: int | None, tmp_path: Path) -> None:
    config = compose(overhead.ours(ranks, tmp_path / "cache").words(tmp_path, 25)[1:])
    bare = workload.make_optimizer(workload.make_model()).param_groups
    assert config.model == workload.MODEL
    assert config.data.seq_length == workload.SEQ_LENGTH
    assert config.batch.global_size == workload.MICRO_SIZE * workload.ACCUMULATION * (ranks or 1)
    assert (config.optimizer.lr, config.clip_grad_norm) == (bare[0]["lr"], workload.CLIP)
    assert (config.optimizer.beta1, config.optimizer.beta2) == bare[0]["betas"]
    assert (config.optimizer.weight_decay, 0.0) == (bare[0]["weight_decay"], bare[1]["weight_decay"])
    assert (config.steps, config.precision.dtype, config.eval.every) == (25, "fp32", -1)


def test_the_model_has_ten_million_parameters() -> None:
    # By hand: per block 4 x 320^2 attention, 3 x 320 x 864 feed-forward, 2 x 320 norms; one tied embedding 4096 x 320; final norm 320.
    by_hand = 7 * (4 * 320**2 + 3 * 320 * 864 + 2 * 320) + 4096 * 320 + 320
    assert sum(parameter.numel() for parameter in workload.make_model().parameters()) == by_hand


@pytest.mark.slow
def test_sides_take_turns(tmp_path: Path) -> None:
    """Two clocks: each ticks in its own turns only, in the order A B B A after both have started."""

    def side(name: str) -> harness.Side:
        def words(folder: Path, steps: int) -> list[str]:
            return ["tests.bench.clock", "--steps", str(steps), "--ticks", str(tmp_path / name), "--lines", str(folder / "lines")]

        return harness.Side(name, None, words, "lines")

    pairs = harness.alternate(side("A"), side("B"), lives=1, steps=25)
    assert len(pairs) == 2
    assert all(block.step * 25 >= 0.02 * 23 for pair in pairs for block in pair)  # two ticks may be begun in the turn before
    ticks = {name: [float(line) for line in (tmp_path / name).read_text().split()][-(harness.WARM_UP + 50) :] for name in "AB"}
    last_life = sorted((tick, name) for name in "AB" for tick in ticks[name])
    turns = [name for name, _ in itertools.groupby(name for _, name in last_life)]
    assert "".join(turns) == "ABABA"  # the start of A, the start of B, a turn of A, two of B, one of A


def test_the_observer_notes_when_lines_appear(tmp_path: Path) -> None:
    path, gap = tmp_path / "lines", 0.2
    began = time.monotonic()

    def write() -> None:
        lines = workload.StepLines(path)
        for step in range(3):
            time.sleep(gap)
            lines.step(step, 0.0)

    writer = threading.Thread(target=write)
    writer.start()
    times = harness.watch(path, 3, lambda: True, began + 30)
    writer.join()
    assert len(times) == 3
    for step, seen in enumerate(times):
        assert seen - began >= gap * (step + 1)  # never before it was written
    assert times[2] - began < 10


def test_the_observer_stops_when_the_writer_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("one\ntwo\n")
    assert len(harness.watch(path, 5, lambda: False, time.monotonic() + 30)) == 2


def test_rows_give_the_ratio_of_neighbouring_blocks(tmp_path: Path) -> None:
    pairs = [(harness.Block(5.0, ours), harness.Block(4.0, floor)) for ours, floor in ((1.1, 1.0), (2.2, 2.0), (3.6, 3.0))]
    step, first = overhead.rows("x", overhead.comparisons(tmp_path)["two_ranks"], pairs)
    assert "| 2.200 | 2.000 | 1.100 (1.100 to 1.150) | <= 1.03 |" in step  # ratios 1.1, 1.1, 1.2
    assert "| 5.00 | 4.00 | +1.00 s | <= +2 s |" in first


def test_the_wide_model_has_a_hundred_million_parameters() -> None:
    # By hand: per block 4 x 1024^2 attention, 3 x 1024 x 2816 feed-forward, 2 norms; one tied embedding; the final norm.
    by_hand = 6 * (4 * 1024**2 + 3 * 1024 * 2816 + 2 * 1024) + 32768 * 1024 + 1024
    assert wide.parameters("110M") == by_hand >= 100_000_000


def test_checkpoint_figures_with_a_goal() -> None:
    """Blocked 0.2 and 0.3 s, beside memcpy of 0.1 s and sync saves of 4 s; 1212 bytes where 1200 and a manifest of 10 are due."""
    cycle = lambda blocked: {"blocked": blocked, "steps": 1.0}  # noqa: E731
    report = {
        "cycles": {"async": [cycle(9.0), cycle(0.2), cycle(0.3)], "sync": [cycle(9.0), cycle(4.0), cycle(4.0)]},
        "memcpy": [0.1, 0.1],
        "bytes": {"manifest": 10, "ours": 1222},
        "loads": {"cached": {"plain": [9.0, 1.0, 2.0], "load": [9.0, 1.5, 2.5], "resume": [9.0, 3.0, 3.0]}},
    }
    found = [row.split("|")[2].strip() for row in checkpoint.goal_rows(report, 100)]
    assert found == ["2.50", "0.062", f"{1222 / 1210:.4f}", "1.38"]  # the medians of 2, 3; of 0.05, 0.075; of 1.5, 1.25


def test_runs_with_checkpoints_are_compared_with_their_neighbours() -> None:
    none, ours = checkpoint.Timed(100.0, 80.0, 0, None), checkpoint.Timed(105.0, 82.0, 5, 7)
    slow = [checkpoint.Timed(timed.command * 3, timed.steps * 3, timed.saves, timed.every) for timed in (ours, none)]
    command, steps = checkpoint.auto_rows([(ours, none), (slow[0], slow[1])])
    assert "| 1.050 |" in command
    assert "| 1.025 |" in steps
