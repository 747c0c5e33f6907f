"""A run as something to submit: a Slurm batch script, or a Kubernetes job. Pure; the text is printed, nothing is sent.

Both stop in time and go on: Slurm sends SIGUSR1 before the limit and the script requeues a run that ended with code 75; the
Kubernetes job starts a pod again that ended with 75, and does not count it as a failure.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from framework.base.errors import EXIT_STOPPED
from framework.config.schema import Config
from framework.launch.command import MANY_HOSTS_PORT, RANKS_FROM, TRAIN, Places

NOTICE_S = 120
"""Seconds before the limit at which a run is told to stop."""


def submission(config: Config, words: Sequence[str], there: Places) -> str:
    """What launch.print asks for, for the run that `words` stand for."""
    kept = [word for word in words if not word.startswith(("launch.hostfile=", "launch.include=", "launch.exclude="))]
    return (_sbatch if config.launch.print == "sbatch" else _k8s)(config, kept, there)


def _sbatch(config: Config, words: Sequence[str], there: Places) -> str:
    hosts = len(there.hosts) or 1
    port = config.launch.master_port or MANY_HOSTS_PORT
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={config.name}",
        f"#SBATCH --nodes={hosts}",
        f"#SBATCH --ntasks-per-node={there.ranks_per_host}",
        f"#SBATCH --gpus-per-node={there.ranks_per_host}  # without accelerators: take this line out",
        *([f"#SBATCH --cpus-per-task={config.launch.threads}"] if config.launch.threads else []),
        *([f"#SBATCH --time={_minutes(config.limits.wall_time)}"] if config.limits.wall_time else []),
        f"#SBATCH --signal=USR1@{NOTICE_S}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={config.output_root}/{config.name}.slurm",
        "",
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"export MASTER_PORT={port} {RANKS_FROM}=slurm",
        f"srun --kill-on-bad-exit=0 --export=ALL {shlex.join(['python', '-u', '-m', TRAIN, *words])}",
        "code=$?",
        f'[ $code -ne {EXIT_STOPPED} ] || scontrol requeue "$SLURM_JOB_ID"  # stopped with a complete checkpoint: go on later',
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _minutes(seconds: float) -> int:
    """Slurm's limit: the run's own, and the time of the notice."""
    return math.ceil((seconds + NOTICE_S) / 60)


def _k8s(config: Config, words: Sequence[str], there: Places) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in config.name.lower()).strip("-") or "run"
    hosts = len(there.hosts) or 1
    pods = [f"{name}-{number}.{name}" for number in range(hosts)]
    command = ["python", "-m", TRAIN, *words]
    if hosts > 1:
        command += ["launch.hostfile=/etc/framework/hosts", "launch.launcher=no_ssh", "launch.node_rank=$(JOB_COMPLETION_INDEX)"]
        command += [f"launch.master_addr={pods[0]}"]
    elif there.ranks > 1 and not any(word.startswith("launch.num_procs=") for word in words):
        command += [f"launch.num_procs={there.ranks}"]
    container = {
        "name": "train",
        "image": "framework:cuda",
        "command": command,
        "resources": {"limits": {"nvidia.com/gpu": there.ranks_per_host}},
        "volumeMounts": [{"name": each, "mountPath": path} for each, path in MOUNTS.items()],
    }
    spec: dict[str, Any] = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": NOTICE_S,
        "containers": [container],
        "volumes": [
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}},
            {"name": "hosts", "configMap": {"name": name}},
        ],
    }
    stopped = {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [EXIT_STOPPED]}}
    job = {
        "completionMode": "Indexed",
        "completions": hosts,
        "parallelism": hosts,
        "backoffLimit": config.launch.restarts,
        "podFailurePolicy": {"rules": [stopped]},
        "template": {"metadata": {"labels": {"run": name}}, "spec": spec},
    }
    listed = "".join(f"{pod} slots={there.ranks_per_host}\n" for pod in pods)
    parts = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"hosts": listed}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {"clusterIP": "None", "selector": {"run": name}}},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job},
    ]
    return yaml.safe_dump_all(parts, sort_keys=False)


MOUNTS = {"shared-memory": "/dev/shm", "runs": "/framework/runs", "hosts": "/etc/framework"}
"""Volume -> where a pod finds it; the run's output_root is to lie below the second."""
