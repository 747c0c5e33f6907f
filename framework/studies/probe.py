"""A layout really run for a few steps on this machine, in processes of its own. Launches and reads; no torch."""

from __future__ import annotations

import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path

from framework.base.errors import RunError
from framework.config.schema import Config, Eval, Launch, Monitor
from framework.launch.command import places
from framework.launch.frozen import freeze
from framework.launch.tree import PORT_TRIES, Tree, free_port, port_taken
from framework.monitor.sinks import read_lines
from framework.studies.supervise import start_command

PROBE_STEPS = 12
WARM_UP = 3
"""Steps that are not counted: DeepSpeed makes its buffers, the processor its clock."""
PATIENCE_S = 600.0
LOOK_S = 0.1
TAIL_LINES = 15


def measure(config: Config, ranks: int, name: str, steps: int = PROBE_STEPS) -> float:
    """Median seconds of a step of `config` on `ranks` processes of this host, from its metrics.jsonl. Raises RunError."""
    root = Path(config.output_root) / ".plan"
    ours = replace(config, name=name, output_root=str(root), steps=steps, resume="never", eval=Eval(every=-1))
    ours = replace(ours, monitor=Monitor(console="none", curve=False), checkpoint=replace(config.checkpoint, mode="none", memory_every=0))
    ours = replace(ours, launch=Launch(num_procs=ranks, threads=config.launch.threads))
    shutil.rmtree(ours.run_dir, ignore_errors=True)
    output = root / "output" / f"{name}.txt"
    for _ in range(PORT_TRIES):
        _run(ours, output)
        if not port_taken(output):
            break
    metrics = Path(ours.run_dir, "metrics.jsonl")
    took = [line["step_time_s"] for line in (read_lines(metrics) if metrics.exists() else ()) if line["kind"] == "train"]
    if len(took) < steps:
        said = "\n".join(output.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        raise RunError(f"plan.probe: {name}", f"{len(took)} of {steps} steps\n{said}", "a run to its end", f"less {output}")
    return statistics.median(took[WARM_UP:])


def _run(config: Config, output: Path) -> None:
    """One start, until its processes have ended."""
    command = start_command(config, freeze(config), places(config.launch, 1), free_port())
    began = time.monotonic()
    with Tree(command, output) as tree:
        while (tree.code() is None or tree.pids()) and time.monotonic() - began < PATIENCE_S:
            time.sleep(LOOK_S)
