"""TensorBoard's files read by TensorBoard, Prometheus' page read by its own parser, letters taken by a small server."""

from __future__ import annotations

import json
import queue
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from framework.base.errors import StartError
from framework.monitor.alerts import Alert
from framework.monitor.dashboards import Prometheus, TensorBoard, Webhook
from framework.monitor.meters import EvalRecord, TrainRecord
from tests.runs import SMALL, events, train

ALERT = Alert("nan", float("nan"), float("inf"), "the loss of step 3 is not finite", "optimizer.lr lower")


def record(step: int, loss: float) -> TrainRecord:
    return TrainRecord(
        step=step, loss=loss, grad_norm=1.5, lr=1e-3, tokens=512, samples=4, loss_scale=1.0, skipped=False, step_time_s=0.25,
        tokens_per_s=2048.0, data_wait_s=0.0, applied=step, consumed_samples=4 * step, memory_bytes=2**30, mfu=None,
        parts={"forward": 0.1, "backward": 0.15},
    )  # fmt: skip


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = event_accumulator.EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(event.step, round(event.value, 6)) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_reads_what_was_written_over_two_starts(tmp_path: Path) -> None:
    for first, steps in ((1, (1, 2, 3)), (3, (3, 4))):  # the first start was killed after a step that is done again
        board = TensorBoard(tmp_path, first)
        for step in steps:
            board.train(record(step, float(10 * first + step)))
        board.evaluation(EvalRecord(steps[-1], 2.5, 10, 1, 0.1))
        board.alert(steps[-1], ALERT, [])
        board.close("done")
    found = scalars(tmp_path)
    assert found["train/loss"] == [(1, 11.0), (2, 12.0), (3, 33.0), (4, 34.0)]
    assert found["train/part_forward_s"][-1] == (4, 0.1)
    assert found["eval/loss"][-1] == (4, 2.5)
    assert "train/mfu" not in found


def samples(address: str) -> dict[str, float]:
    parser = pytest.importorskip("prometheus_client.parser")
    with urllib.request.urlopen(address, timeout=5) as answer:
        families = parser.text_string_to_metric_families(answer.read().decode())
    return {sample.name + sample.labels.get("alert", ""): sample.value for family in families for sample in family.samples}


def test_prometheus_shows_the_newest_numbers() -> None:
    page = Prometheus("127.0.0.1", 0, "run")
    page.train(record(1, 3.0))
    page.train(record(2, 2.0))
    page.evaluation(EvalRecord(2, 2.5, 10, 1, 0.1))
    page.alert(2, ALERT, [])
    found = samples(page.address)
    page.close("done")
    assert (found["framework_train_step"], found["framework_train_loss"], found["framework_eval_loss"]) == (2.0, 2.0, 2.5)
    assert (found["framework_train_step_time_p99_s"], found["framework_alerts_totalnan"]) == (0.25, 1.0)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(page.address, timeout=5)


def test_a_taken_port_is_a_letter() -> None:
    page = Prometheus("127.0.0.1", 0, "run")
    port = int(page.address.rpartition(":")[2].partition("/")[0])
    with pytest.raises(StartError) as caught:
        Prometheus("127.0.0.1", port, "run")
    page.close("done")
    assert caught.value.subject == "monitor.prometheus"


@pytest.fixture
def server() -> Iterator[tuple[str, queue.Queue[Any]]]:
    """Address of a server that takes letters, and the letters."""
    letters: queue.Queue[Any] = queue.Queue()

    class Taking(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            letters.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    made = HTTPServer(("127.0.0.1", 0), Taking)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}/hook", letters
    made.shutdown()
    made.server_close()
    thread.join()


def test_a_letter_is_sent_for_alerts_that_want_one(server: tuple[str, queue.Queue[Any]]) -> None:
    address, letters = server
    hook = Webhook(address, "run", "runs/run")
    hook.alert(3, ALERT, ["rollback"])
    hook.alert(4, ALERT, ["webhook"])
    hook.close("done")
    letter = letters.get(timeout=5)
    assert (letter["step"], letter["alert"], letter["run"]) == (4, "nan", "run")
    assert "Change: optimizer.lr lower" in letter["text"]
    assert letters.empty()


def test_a_dead_server_is_logged_and_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    hook = Webhook("http://127.0.0.1:9/hook", "run", "runs/run")
    hook.alert(3, ALERT, ["webhook"])
    hook.close("done")
    assert "monitor.webhook http://127.0.0.1:9/hook" in caplog.text


def test_a_run_shows_itself_on_all_of_them(server: tuple[str, queue.Queue[Any]], tmp_path: Path) -> None:
    address, letters = server
    words = [*SMALL, "zero=stage0", "steps=12", "checkpoint=none", "monitor.tensorboard=true", "monitor.prometheus=0", "alerts.window=3"]
    train([*words, f"monitor.webhook={address}", "alerts.actions=[all:webhook]", "alerts.memory=0.0001"], tmp_path)
    run = tmp_path / "runs" / "run"
    assert [step for step, _ in scalars(run / "tensorboard")["train/loss"]] == list(range(1, 13))
    assert events(run, "prometheus")[0]["address"].startswith("http://127.0.0.1:")
    assert letters.get(timeout=5)["alert"] == "memory"
