"""Sinks for people who watch from elsewhere: event files for TensorBoard, a text page for Prometheus, a letter to a URL at an alert.

Each is made on the first rank, and only where it is asked for. What they need beside Python are extras of this package.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from framework.base.errors import ConfigError, StartError
from framework.monitor.alerts import Alert
from framework.monitor.meters import EvalRecord, Meter, TrainRecord

log = logging.getLogger(__name__)
SEND_S = 5.0
"""How long a letter may take, and how long the end of a run waits for those that are on their way."""


class TensorBoard:
    """Event files in `folder`. A later start writes on from `first_step`: what an earlier one had beyond that is struck out."""

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("monitor.tensorboard", "true", "the package tensorboard", "pip install 'framework[tensorboard]'") from None
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def train(self, record: TrainRecord) -> None:
        for name, value in record.numbers().items():
            self._writer.add_scalar(f"train/{name}", value, record.step)

    def evaluation(self, record: EvalRecord) -> None:
        self._writer.add_scalar("eval/loss", record.loss, record.step)

    def alert(self, step: int, alert: Alert, actions: list[str]) -> None:
        self._writer.add_text(f"alert/{alert.kind}", f"{alert.says}. Change: {alert.change}", step)

    def close(self, status: str) -> None:
        self._writer.close()


class Prometheus:
    """The newest numbers at http://HOST:PORT/metrics; `address` says where that is. Raises StartError where the port is taken."""

    def __init__(self, host: str, port: int, run: str) -> None:
        try:
            import prometheus_client as client
        except ImportError:
            raise ConfigError("monitor.prometheus", port, "the package prometheus-client", "pip install 'framework[prometheus]'") from None
        self._client: Any = client
        self._registry = client.CollectorRegistry()
        self._run, self._meter = run, Meter()
        self._gauges: dict[str, Any] = {}
        self._alerts = client.Counter("framework_alerts", "alerts of this process", ["run", "alert"], registry=self._registry)
        try:
            self._server, self._thread = client.start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            raise StartError("monitor.prometheus", f"{host}:{port}, {error.strerror}", "a free port", "monitor.prometheus=0") from None
        self.address = f"http://{host}:{self._server.server_port}/metrics"

    def train(self, record: TrainRecord) -> None:
        self._meter.add(record.step_time_s, record.tokens)
        self._show("train", {"step": record.step, **record.numbers()})
        self._show("train_step_time", {"p50_s": self._meter.quantile(0.5), "p99_s": self._meter.quantile(0.99)})

    def evaluation(self, record: EvalRecord) -> None:
        self._show("eval", {"step": record.step, "loss": record.loss})

    def alert(self, step: int, alert: Alert, actions: list[str]) -> None:
        self._alerts.labels(self._run, alert.kind).inc()

    def close(self, status: str) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _show(self, kind: str, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            full = f"framework_{kind}_{name}"
            if full not in self._gauges:
                gauge = self._client.Gauge(full, f"{name} of the newest {kind} line", ["run"], registry=self._registry)
                self._gauges[full] = gauge.labels(self._run)
            self._gauges[full].set(float(value))


class Webhook:
    """POSTs a JSON letter for each alert with the action webhook. A thread sends: a slow server holds nobody up, a dead one is logged."""

    def __init__(self, url: str, run: str, folder: str) -> None:
        self._url, self._run, self._folder = url, run, folder
        self._letters: queue.Queue[bytes | None] = queue.Queue()
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._thread.start()

    def train(self, record: TrainRecord) -> None: ...

    def evaluation(self, record: EvalRecord) -> None: ...

    def alert(self, step: int, alert: Alert, actions: list[str]) -> None:
        if "webhook" in actions:
            text = f"{self._run}: {alert.says}. Change: {alert.change}"  # the key that chat services show
            facts = {"run": self._run, "folder": self._folder, "step": step, "alert": alert.kind, "rank": alert.rank}
            self._letters.put(json.dumps({"text": text, **facts, "says": alert.says, "change": alert.change}).encode())

    def close(self, status: str) -> None:
        self._letters.put(None)
        self._thread.join(SEND_S)

    def _send_all(self) -> None:
        while (letter := self._letters.get()) is not None:
            request = urllib.request.Request(self._url, letter, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=SEND_S):
                    pass
            except (urllib.error.URLError, OSError, ValueError) as error:
                log.warning("monitor.webhook %s: %s", self._url, error)
