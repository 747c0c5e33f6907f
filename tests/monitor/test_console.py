"""What people see in both looks, at several widths: which lines come, that they align, and that none is wider than the screen."""

from __future__ import annotations

import io
import re
import threading
from pathlib import Path

import pytest
from rich.console import Console as Screen

from framework.config.schema import Batch, Config, Data, Monitor
from framework.monitor.console import Console
from framework.monitor.meters import EvalRecord, TrainRecord
from framework.monitor.page import Facts
from framework.monitor.sinks import JsonLines

WIDTHS = [60, 80, 120]
FACTS = Facts(parameters=434816, ranks=2, device="cpu", tokens=421_337, held_out_tokens=46_815)


def config(look: str, **monitor: int) -> Config:
    return Config(name="tiny", steps=30, batch=Batch(32, 4), data=Data(text="bytes"), monitor=Monitor(console=look, every=10, **monitor))  # type: ignore[arg-type]


def step(number: int, skipped: bool = False) -> TrainRecord:
    return TrainRecord(
        step=number, loss=6.0 - number / 10, grad_norm=1.25, lr=1e-3, tokens=4096, samples=32, loss_scale=8192.0, skipped=skipped,
        step_time_s=0.5, tokens_per_s=8192.0, data_wait_s=0.0, applied=number, consumed_samples=32 * number, memory_bytes=2**29,
    )  # fmt: skip


def play(screen: Screen, settings: Config, folder: Path, status: str = "done", first_step: int = 1) -> None:
    """A run of 30 steps with two overflows, two evaluations and a text."""
    metrics = JsonLines(folder / "metrics.jsonl")
    console = Console(settings, Facts(**{**vars(FACTS), "first_step": first_step}), screen, metrics.path)
    console.begin()
    for number in range(first_step, 31):
        for sink in (metrics, console):
            sink.train(step(number, skipped=number in (12, 13)))
            if number % 15 == 0:
                sink.evaluation(EvalRecord(step=number, loss=4.0 if number == 30 else 3.5, tokens=100, samples=25, time_s=1.25))
    console.passage("the model writes", "The thing\nis done.")
    console.close(status)


def plain(width: int, tmp_path: Path, **run: object) -> list[str]:
    paper = io.StringIO()
    play(Screen(file=paper, width=width), config("auto"), tmp_path, **run)  # type: ignore[arg-type]
    return paper.getvalue().splitlines()


@pytest.mark.parametrize("width", WIDTHS)
def test_no_plain_line_is_wider_than_the_screen_or_coloured(tmp_path: Path, width: int) -> None:
    lines = plain(width, tmp_path)
    assert max(map(len, lines)) <= width
    assert not any("\x1b" in line or "..." in line or "\N{HORIZONTAL ELLIPSIS}" in line for line in lines)


def test_plain_lines_come_for_the_first_every_tenth_and_the_last_step(tmp_path: Path) -> None:
    rows = [line for line in plain(80, tmp_path) if re.match(r" *\d+/30 .*MiB", line)]
    assert [row.split()[:2] for row in rows] == [["1/30", "5.9000"], ["10/30", "5.0000"], ["20/30", "4.0000"], ["30/30", "3.0000"]]
    assert len({len(row) for row in rows}) == 1


def test_a_start_in_the_middle_begins_with_its_first_step(tmp_path: Path) -> None:
    lines = plain(80, tmp_path, first_step=17)
    rows = [line.split()[0] for line in lines if re.match(r" *\d+/30 .*MiB", line)]
    assert rows == ["17/30", "20/30", "30/30"]
    assert any("14 of 30 steps left" in line for line in lines)


def test_skipped_steps_are_told_with_the_next_line(tmp_path: Path) -> None:
    lines = plain(80, tmp_path)
    [at] = [number for number, line in enumerate(lines) if line.startswith("skipped")]
    assert lines[at] == "skipped 2 steps: gradients overflowed, loss scale 8,192"
    assert lines[at - 1].split()[0] == "20/30"


def test_the_page_reads_from_name_to_folder(tmp_path: Path) -> None:
    text = "\n".join(plain(80, tmp_path))
    parts = [
        "tiny\n",
        "435k parameters",
        "4 micro x 2 data x 4 accumulation",
        "nats/byte",
        "15/30      3.5000  held out, 25 samples",
        "The thing\nis done.",
        "loss in nats per byte",
        "\ndone\n",
        "3.0000 nats per byte, step 30",
        "4.0000 nats per byte, step 30, best 3.5000 at step 15",
        "runs/tiny",
    ]
    at = 0
    for part in parts:
        assert part in text[at:], f"{part!r} is missing, or comes too early"
        at = text.index(part, at) + len(part)
    assert text[at:] == ""


def test_the_end_looks_at_all_starts_of_the_run(tmp_path: Path) -> None:
    """Step 15 belongs to a start before this one, and is the best."""
    plain(80, tmp_path)
    text = "\n".join(plain(80, tmp_path, first_step=17))
    assert "best 3.5000 at step 15" in text
    assert text.index("loss in nats per byte") < text.index("\ndone\n")


@pytest.mark.parametrize(("status", "drawn"), [("stopped", True), ("failed", False)])
def test_a_failed_run_ends_without_a_curve(tmp_path: Path, status: str, drawn: bool) -> None:
    text = "\n".join(plain(80, tmp_path, status=status))
    assert f"\n{status}\n" in text
    assert ("loss in nats per byte" in text) == drawn


def test_no_curve_where_none_is_wanted(tmp_path: Path) -> None:
    paper = io.StringIO()
    play(Screen(file=paper, width=80), config("plain", curve=False), tmp_path)
    assert "loss in" not in paper.getvalue()
    assert "\ndone\n" in paper.getvalue()


def test_none_is_silent(tmp_path: Path) -> None:
    paper = io.StringIO()
    play(Screen(file=paper, width=80), config("none"), tmp_path)
    assert paper.getvalue() == ""


def test_an_ascii_log_file_takes_every_line(tmp_path: Path) -> None:
    raw = io.BytesIO()
    paper = io.TextIOWrapper(raw, encoding="ascii")
    play(Screen(file=paper, width=80), config("plain"), tmp_path)
    paper.flush()
    assert b"\ndone\n" in raw.getvalue()


def test_what_the_model_writes_cannot_command_the_terminal(tmp_path: Path) -> None:
    paper = io.StringIO()
    console = Console(config("plain"), FACTS, Screen(file=paper, width=80), tmp_path / "metrics.jsonl")
    console.passage("the model writes", "a\x1b[2Jb\x07\x00[bold]c\n\u00e9")
    assert paper.getvalue() == "\nthe model writes\na\ufffd[2Jb\ufffd\ufffd[bold]c\n\u00e9\n"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_live_look_keeps_to_the_width_and_cleans_up(tmp_path: Path, width: int) -> None:
    paper = io.StringIO()
    threads = threading.active_count()
    play(Screen(file=paper, width=width, force_terminal=True, color_system="standard", legacy_windows=False), config("auto"), tmp_path)
    assert threading.active_count() == threads
    text = paper.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor is hidden and shown again"
    bare = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert max(len(line) for part in bare.split("\r") for line in part.split("\n")) <= width
    for part in ("435k parameters", "30/30", "100%", "held out, 25 samples in 1.2 s", "loss in nats per byte", "best 3.5000 at step 15"):
        assert part in bare


def test_the_live_look_is_redrawn_four_times_a_second_and_for_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes 0.1 s per step: steps 1, 4, 7, ... are drawn, and the thirtieth."""
    now = [1000.0]
    monkeypatch.setattr("framework.monitor.console.time.monotonic", lambda: now[0])
    paper = io.StringIO()
    console = Console(config("rich"), FACTS, Screen(file=paper, width=80, force_terminal=True, color_system=None), tmp_path / "none.jsonl")
    console.begin()
    for number in range(1, 31):
        now[0] += 0.1
        console.train(step(number))
    console.close("done")
    drawn = [int(found) for found in re.findall(r" *(\d+)/30 +\d\.\d{4} ", paper.getvalue())]
    assert list(dict.fromkeys(drawn)) == [*range(1, 31, 3), 30]


@pytest.mark.parametrize(("terminal", "term", "live"), [(True, "xterm", True), (True, "dumb", False), (False, "xterm", False)])
def test_auto_is_live_on_a_terminal_only(tmp_path: Path, terminal: bool, term: str, live: bool) -> None:
    paper = io.StringIO()
    screen = Screen(file=paper, width=80, force_terminal=terminal, _environ={"TERM": term})
    play(screen, config("auto"), tmp_path)
    assert ("\x1b[?25l" in paper.getvalue()) == live
