"""JSON lines: exact floats, NaN, torn lines, and what a reader makes of a file that a crash went through."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest

from framework.base.errors import RunError
from framework.monitor.meters import EvalRecord, TrainRecord
from framework.monitor.sinks import JsonLines, loss_history, read_lines

STEP = TrainRecord(
    step=1, loss=5.54, grad_norm=1.2, lr=1e-4, tokens=4096, samples=32, loss_scale=65536.0, skipped=False, step_time_s=0.21,
    tokens_per_s=19500.0, data_wait_s=0.001, applied=1, consumed_samples=32, memory_bytes=512,
)  # fmt: skip


def strict(line: str) -> dict[str, object]:
    """Read as every other language reads JSON: NaN and Infinity are no words of it."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(line, parse_constant=refuse)


def step(number: int, loss: float) -> TrainRecord:
    return TrainRecord(**{**vars(STEP), "step": number, "loss": loss})


def test_train_and_eval_lines_are_those_of_the_contract(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.train(STEP)
    sink.evaluation(EvalRecord(step=1, loss=5.5, tokens=100, samples=2, time_s=0.5))
    train, evaluation = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert train.startswith(
        '{"kind": "train", "step": 1, "loss": 5.54, "grad_norm": 1.2, "lr": 0.0001, "tokens": 4096, "samples": 32, '
        '"loss_scale": 65536.0, "skipped": false, "step_time_s": 0.21, "tokens_per_s": 19500.0, '
    )
    assert strict(evaluation) == {"kind": "eval", "step": 1, "loss": 5.5, "tokens": 100, "samples": 2, "time_s": 0.5}


def test_a_line_can_be_read_as_soon_as_write_returns(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "events.jsonl")
    sink.write({"kind": "signal", "name": "SIGTERM"})
    assert (tmp_path / "events.jsonl").read_bytes() == b'{"kind": "signal", "name": "SIGTERM"}\n'


def test_floats_read_back_to_the_last_bit(tmp_path: Path) -> None:
    values = [0.1, 1 / 3, 2.0**-1074, 1.7976931348623157e308, -0.0, 1e-4, math.pi, struct.unpack("<f", b"\x12\x34\x56\x3f")[0]]
    sink = JsonLines(tmp_path / "x.jsonl")
    for value in values:
        sink.write({"value": value})
    back = [strict(line)["value"] for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [struct.pack("<d", value) for value in back] == [struct.pack("<d", value) for value in values]


def test_nan_and_infinity_are_strings_that_float_takes_back(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "x.jsonl")
    sink.write({"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": 1.0})
    line = strict((tmp_path / "x.jsonl").read_text())
    assert line == {"a": "nan", "b": ["inf", {"c": "-inf"}], "d": 1.0}
    assert math.isnan(float(line["a"]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tail",
    [b'{"kind": "tr', b'{"kind": "train"}', b"\x00" * 300, b"\x00" * 300 + b"\n", b'{"kind"\n', b"x"],
    ids=["half", "no newline", "zeros", "zeros and newline", "half and newline", "one byte"],
)
def test_a_torn_last_line_is_cut_at_the_next_start(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + tail)
    JsonLines(path).write({"step": 3})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


@pytest.mark.parametrize("content", [b"", b"{", b'{"step": 1}', b"\n"])
def test_a_file_without_one_whole_line_starts_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    JsonLines(path).write({"step": 3})
    assert path.read_bytes() == b'{"step": 3}\n'


def test_whole_lines_are_never_touched(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    whole = b'{"step": 1}\n' * 5000
    path.write_bytes(whole)
    JsonLines(path).close("done")
    assert path.read_bytes() == whole


def test_a_reader_skips_a_line_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2')
    assert list(read_lines(path)) == [{"step": 1}]
    assert list(read_lines(tmp_path / "absent.jsonl")) == []


def test_of_steps_done_again_the_last_line_holds(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    for record in (step(1, 5.0), step(2, 4.0), step(3, 3.9), step(2, 4.5), step(3, math.nan)):
        sink.train(record)
    sink.evaluation(EvalRecord(step=3, loss=3.5, tokens=1, samples=1, time_s=0.1))
    train, held_out = loss_history(path)
    assert list(train) == [1, 2, 3]
    assert (train[1], train[2]) == (5.0, 4.5)
    assert math.isnan(train[3])
    assert held_out == {3: 3.5}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_a_letter(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(RunError, match="No space left"):
        JsonLines(path).train(STEP)
