"""Numbers as people write them, and texts that fit their width."""

from __future__ import annotations

import math

import pytest

from framework.config.schema import Batch, Config, Data, Model, Parallel, Precision, Zero
from framework.monitor import page
from framework.monitor.meters import EvalRecord, Meter, TrainRecord
from framework.monitor.page import Facts, MemoryRow, Moment


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (7, "7"), (950, "950"), (999.4, "999"), (1000, "1.00k"), (19500, "19.5k"), (434816, "435k"), (999_700, "1.00M"),
     (8_030_261_248, "8.03B"), (1.5e13, "15.0T")],
)  # fmt: skip
def test_counts(number: float, text: str) -> None:
    assert page.short(number) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (2048, "2.00 KiB"), (512 * 2**20, "512 MiB"), (1.5 * 2**30, "1.50 GiB"), (99.96 * 2**30, "100 GiB")],
)
def test_bytes(count: float, text: str) -> None:
    assert page.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (42.4, "0:42"), (59.6, "1:00"), (725, "12:05"), (12345, "3:25:45"), (2 * 86400 + 12345, "2d 03:25")]
)
def test_durations(seconds: float, text: str) -> None:
    assert page.span(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.10344, "2.1034"), (0.0, "0.0000"), (153.204, "153.20"), (1532000.0, "1.532e+06"), (math.nan, "nan"), (math.inf, "inf")],
)
def test_losses(value: float, text: str) -> None:
    assert page.number(value) == text


def everything(config: Config, facts: Facts, width: int = 200) -> str:
    return "\n".join(page.lay_out(page.head(config, facts), width))


FACTS = Facts(parameters=434816, ranks=8, device="cpu", tokens=421_337, held_out_tokens=46_815)


def test_the_head_does_the_batch_arithmetic() -> None:
    """64 samples over 8 / (2 x 2) = 2 data ranks, 4 at a time: 8 accumulation steps; 64 x 128 = 8192 tokens a step, 100 steps."""
    config = Config(batch=Batch(64, 4), parallel=Parallel(tensor=2, pipeline=2), zero=Zero(stage=1), data=Data(text="bytes"))
    text = everything(config, FACTS)
    assert "64 samples = 4 micro x 2 data x 8 accumulation" in text
    assert "8 = 2 data x 2 tensor x 2 pipeline, cpu, fp32, ZeRO 1" in text
    assert "100 steps, 8,192 tokens each, 819k tokens in all" in text
    assert "128 bytes a sample" in text


def test_the_head_names_what_differs_from_plain() -> None:
    config = Config(precision=Precision(dtype="bf16", autocast=True), zero=Zero(stage=2, offload="cpu"), model=Model(num_kv_heads=2))
    text = everything(config, Facts(1, 1, "cpu", 1, 1, first_step=41))
    assert "bf16 autocast, ZeRO 2, offload to cpu" in text
    assert "4 heads, 2 kv heads" in text
    assert "60 of 100 steps left" in text
    assert "plain engine" in everything(Config(engine="plain"), Facts(1, 1, "cpu", 1, 1))


def test_parts_that_do_not_fit_go_below_one_another() -> None:
    rows = [("model", ["aaaaaaaaaa", "bbbbbbbbbb", "cccc"]), ("folder", ["x" * 40])]
    assert page.lay_out(rows, 28) == [
        "  model     aaaaaaaaaa,",
        "            bbbbbbbbbb, cccc",
        "  folder    " + "x" * 13 + "...",
    ]


def moment(step: int, steps: int, **changes: float) -> Moment:
    numbers = {
        "loss": 2.5, "grad_norm": 1.25, "lr": 1e-3, "tokens": 4096, "samples": 32, "loss_scale": 1.0, "skipped": False,
        "step_time_s": 0.5, "tokens_per_s": 8192.0, "data_wait_s": 0.0, "applied": step, "consumed_samples": 32 * step,
        "memory_bytes": 512 * 2**20,
    }  # fmt: skip
    meter = Meter()
    meter.add(0.5, 4096)
    return Moment(TrainRecord(step=step, **{**numbers, **changes}), steps, meter)  # type: ignore[arg-type]


def test_a_line_says_what_was_measured() -> None:
    table = page.columns(Config(steps=300, data=Data(text="bytes")), 80)
    assert page.table_line(table, None).split() == ["step", "nats/byte", "lr", "grad", "norm", "tokens/s", "s/step", "memory", "eta"]
    line = page.table_line(table, moment(180, 300))
    assert line.split() == ["180/300", "2.5000", "1.00e-03", "1.2500", "8.19k", "0.500", "512", "MiB", "1:00"]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("steps", [9, 300, 100_000])
def test_lines_of_extreme_numbers_keep_to_their_columns(width: int, steps: int) -> None:
    table = page.columns(Config(steps=steps), width)
    extreme = [{"loss": math.nan}, {"loss": 1e30, "grad_norm": math.inf}, {"grad_norm": 3e38, "memory_bytes": 99.9 * 2**30}, {"lr": 0.0}]
    lines = [page.table_line(table, moment(step, steps, **changes)) for step in (1, steps) for changes in extreme]
    titles = page.table_line(table, None)
    assert {len(line) for line in lines} == {len(titles)}
    assert len(titles) <= width


def test_room_decides_which_columns_stay() -> None:
    titles = {width: [column.title for column in page.columns(Config(steps=300), width)] for width in (40, 60, 80)}
    assert titles[40] == ["step", "nats/token", "tokens/s", "eta"]
    assert titles[60] == ["step", "nats/token", "lr", "grad norm", "tokens/s", "eta"]
    assert len(titles[80]) == 8


def test_an_evaluation_stands_under_the_columns_of_step_and_loss() -> None:
    table = page.columns(Config(steps=300), 80)
    line, train = page.eval_line(table, EvalRecord(180, 2.25, 46720, 365, 1.23), 300), page.table_line(table, moment(180, 300))
    assert line == "180/300      2.2500  held out, 365 samples in 1.2 s"
    assert line.index("2.2500") == train.index("2.5000")


def test_the_foot_names_the_best_evaluation_and_never_a_nan() -> None:
    rows = page.foot(moment(300, 300), {100: math.nan, 200: 1.9, 300: 2.0}, "byte", 61.0, "runs/tiny")
    assert page.lay_out(rows, 80) == [
        "  train     2.5000 nats per byte, step 300",
        "  held out  2.0000 nats per byte, step 300, best 1.9000 at step 200",
        "  speed     8.19k tokens/s, 0.500 s a step, P99 0.500 s, 512 MiB at most",
        "  time      1:01",
        "  folder    runs/tiny",
    ]


def test_the_foot_of_a_start_that_had_nothing_to_do() -> None:
    assert page.lay_out(page.foot(None, {}, "byte", 1.26, "runs/tiny"), 80) == ["  time      1.3 s", "  folder    runs/tiny"]


def test_skipped_steps_are_counted_in_words() -> None:
    assert page.skip_line(1, 32768.0) == "skipped 1 step: gradients overflowed, loss scale 32,768"
    assert page.skip_line(3, 8192.0) == "skipped 3 steps: gradients overflowed, loss scale 8,192"


def test_the_ledger_as_a_table() -> None:
    rows = [MemoryRow("parameters", 2048, 2048), MemoryRow("activations", 1100, 1000), MemoryRow("logits", 3000)]
    lines = page.memory_lines(3, rows, 6000, {"resident": 2**29, "resident_peak": 2**30})
    assert lines == [
        "memory of rank 3   predicted    measured  error",
        "  parameters        2.00 KiB    2.00 KiB  exact",
        "  activations       1.07 KiB      1000 B  +10.0 %",
        "  logits            2.93 KiB           -",
        "  peak              5.86 KiB           -",
        "  resident 512 MiB, at most 1.00 GiB, with Python and its libraries",
    ]


def test_the_ledger_of_an_accelerator_says_what_its_allocator_says() -> None:
    machine = {"allocated_peak": 5000, "reserved_peak": 8192, "fragmented": 1024, "retries": 2}
    lines = page.memory_lines(0, [], 6000, machine)
    assert lines[1:] == ["  peak              5.86 KiB    4.88 KiB", "  reserved 8.00 KiB, of it 1.00 KiB in pieces, 2 retries"]


@pytest.mark.parametrize(("predicted", "measured", "error"), [(5, None, None), (5, 5, 0.0), (110, 100, 0.1), (7, 0, 1.0)])
def test_the_error_of_a_book(predicted: int, measured: int | None, error: float | None) -> None:
    assert MemoryRow("x", predicted, measured).error == (None if error is None else pytest.approx(error))


def test_operators_as_a_table() -> None:
    rows = [{"name": "aten::mm", "shapes": [[3, 4], [4, 5], []], "calls": 2.5, "self_s": 0.00125, "share": 0.25}]
    title, line = page.operator_lines(1, 3, rows)
    assert title.split() == ["operators", "of", "rank", "1,", "a", "step", "of", "3", "calls", "ms", "share", "shapes"]
    assert line.split() == ["aten::mm", "2", "1.25", "25.0%", "[3,4]", "[4,5]"]
    assert title.index("share") + len("share") == line.index("%") + 1
