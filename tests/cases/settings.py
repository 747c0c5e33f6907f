"""Every setting in a live run: for each leaf of the schema a value that is not the default, and how it is found again.

A reader looks at what runs (modules, DeepSpeed's own objects, loader, process group, files, screen), never at the config.
Settings that get on with one another share a start; each start is a whole single-process training in a process of its own.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from framework.launch.environment import age_s
from framework.model.recompute import Region
from framework.monitor.alerts import Told
from framework.monitor.dashboards import Prometheus, Webhook
from framework.monitor.sinks import Wandb
from framework.topology.random import stream_seed
from framework.trainer.alerting import WARM, Alerting
from framework.trainer.hooks import Evaluation
from framework.trainer.records import Records
from framework.trainer.saving import Saver
from framework.trainer.stopping import Stopping
from tests.cases.live import SWITCH, Seen, drive

STAGE_0 = ["batch.global_size=4", "batch.micro_size=2", "data=synthetic", "data.synthetic_tokens=4000", "data.seq_length=8"]
STAGE_0 += ["data.workers=0", "model.hidden_size=32", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=2"]
STAGE_0 += ["model.ffn_hidden_size=32", "eval.every=-1", "checkpoint=none", "monitor.console=plain", "steps=2"]


@dataclass(frozen=True)
class Start:
    """A command line that settings are added to. `before` are words of an earlier run in the same folder; `trains`: or only built."""

    words: list[str]
    before: list[str] | None = None
    trains: bool = True


STARTS = {
    "llama": Start(["zero=stage1"]),
    "gpt2": Start(["zero=stage3", "steps=7", "schedule.total_steps=5", "model.position=learned"]),
    "fp16": Start(["zero=stage1"]),
    "autocast": Start(["precision.dtype=bf16"]),
    "plain": Start(["data=tokens", "eval.every=0"]),
    "bytes": Start([]),
    "compiled": Start([], trains=False),
    "named": Start([]),
    "again": Start(["resume=auto"], before=["seed=5"]),
    "anew": Start([], before=[]),
    "changed": Start(["checkpoint=sync", "steps=3", "seed=2"], before=["checkpoint=sync", "steps=1", "schedule.total_steps=3"]),
    "tracked": Start([]),
    "kept": Start(["steps=6", "eval.every=1", "optimizer.lr=0"]),
    "memory": Start(["checkpoint=sync", "steps=5", "checkpoint.every=4", "verify.hash_every=3"]),
    "busy": Start(["checkpoint=async", "steps=4", "checkpoint.every=1"]),
    "recomputed": Start(["model.num_layers=4"]),
    "selective": Start(["recompute.granularity=selective"]),
    "probed": Start(["recompute=auto"]),
    "choosy": Start(["recompute=auto"]),
    "watched": Start(["steps=9"]),
    "twice": Start(["steps=9", "recompute=full", "alerts.window=3"]),
    "auto": Start(["checkpoint=sync", "checkpoint.every=auto", "steps=16"]),
}


@dataclass(frozen=True)
class Leaf:
    """A value that is not the default, the start that it is given to, and what finds it again."""

    value: Any
    start: str
    read: Callable[[Seen], Any]

    def word(self, key: str, folder: Path) -> str:
        text = json.dumps(self.value) if isinstance(self.value, (bool, list)) else str(self.value)
        return f"{key}={text}".replace("TMP", str(folder)).replace('"', "")


# ---------------------------------------------------------------- readers that take more than a line


def memory_is_limited() -> bool:
    return resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY


def warmup(seen: Seen) -> int:
    return round(max(seen.rates) / seen.rates[0])


def total_steps(seen: Seen) -> int:
    return next(step for step, rate in enumerate(seen.rates) if math.isclose(rate, seen.rates[-1]))


def schedule_name(seen: Seen) -> str:
    """Flat, then falling: that is wsd, and none of the others."""
    return "wsd" if seen.rates[0] == seen.rates[2] == seen.rates[3] > seen.rates[4] > seen.rates[5] == seen.rates[6] else "other"


def decay_steps(seen: Seen) -> int:
    return round((seen.rates[3] - seen.rates[6]) / (seen.rates[3] - seen.rates[4]))


def in_order(seen: Seen) -> bool:
    """Whether the first two samples are the first two of the file, each with the eight tokens after the last one's."""
    ids = seen.watch.turns[0].batch[0].ids
    length = ids.shape[1]
    return ids[:2].flatten().tolist() == seen.corpora.files[0].tokens[: 2 * length].tolist()


def turns_as_llama3(seen: Seen) -> bool:
    """Whether the live frequencies are those that factor 8, low 0.5, high 2 and length 64 give, one by one in Python's own floats."""
    cos, sin = seen.model.rotation(torch.tensor([1]))
    wanted = []
    for index in range(cos.numel()):
        plain = 10000.0 ** (-index / cos.numel())
        waves = 64 * plain / (2 * math.pi)
        share = min(1.0, max(0.0, (waves - 0.5) / 1.5))
        wanted.append(share * plain + (1 - share) * plain / 8)
    return torch.allclose(torch.atan2(sin, cos).flatten(), torch.tensor(wanted), rtol=1e-5)


def attention_bias(seen: Seen) -> str:
    attention = seen.block.attention
    return {(True, False): "qkv", (True, True): "all"}.get((attention.k_proj.bias is not None, attention.o_proj.bias is not None), "none")


def rope_theta(seen: Seen) -> float:
    cos, sin = seen.model.rotation(torch.tensor([1]))
    angle = float(torch.atan2(sin, cos).flatten()[1])
    return round(angle ** (-seen.block.attention.head_dim / 2), 1)


def seed(seen: Seen) -> int:
    """The seed whose training stream is the one that torch was given."""
    return next(n for n in range(100) if stream_seed(n, "training", 0, 0, 0) == torch.initial_seed())


def logged(seen: Seen) -> bool:
    """Whether samples.jsonl names the samples that each turn read."""
    read = [(turn.step, micro.indices.tolist()) for turn in seen.watch.turns for micro in turn.batch]
    return [(line["step"], line["ids"]) for line in seen.lines("samples.jsonl")] == read


def evaluations(seen: Seen) -> list[dict[str, Any]]:
    return [line for line in seen.lines("metrics.jsonl") if line["kind"] == "eval"]


def saved_steps(seen: Seen, tier: str) -> list[int]:
    return [line["step"] for line in seen.lines("events.jsonl") if line["event"] == "checkpoint" and line["kind"].endswith(tier)]


def survivors(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))


def moment_type(seen: Seen) -> str:
    """The type of the moments on disk."""
    [file] = next(seen.run.folder.parents[1].glob("states/step_*")).glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        kinds = {str(tensors.get_slice(key).get_dtype()).lower() for key in tensors.keys() if "exp_avg" in key}  # noqa: SIM118
    assert len(kinds) == 1, kinds
    return kinds.pop()


def kept_last(seen: Seen) -> int:
    """Of the saves 1 to 6, how many at the end stand without a gap."""
    left = survivors(seen.run.folder / "checkpoints")
    return next(n for n in range(1, 7) if 6 - n not in left)


def shown_step(seen: Seen) -> int:
    """The step of the second plain line; the first is always that of step 1."""
    lines = [line for line in seen.screen.splitlines() if re.match(r" *\d+/\d+ ", line) and "held out" not in line]
    return int(lines[1].split("/")[0])


def held_out(seen: Seen) -> Any:
    """The corpus that evaluation reads."""
    return seen.hook(Evaluation).batches().gi_frame.f_locals["corpus"]


def regions(seen: Seen) -> list[str]:
    """Names of the modules that are computed again."""
    return [name for name, module in seen.model.named_modules() if isinstance(vars(module).get("forward"), Region)]


def chosen(seen: Seen) -> list[str]:
    """The kinds that auto has chosen."""
    return json.loads((seen.run.folder / "run.json").read_text())["resolved"]["recompute.modules"]


def wait_s(group: Any) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def alert_of(seen: Seen, kind: str) -> dict[str, Any]:
    return next(line for line in seen.lines("events.jsonl") if line.get("alert") == kind)


def told(step: int, loss: float, norm: float, skipped: bool = False) -> Told:
    return Told(step, loss, norm, 1024.0, skipped)


def spike_limit(seen: Seen, of_loss: bool) -> float:
    """The height, in quarters of a standard deviation, from which on the live hook calls a value a spike, among 0 to 9."""
    course = seen.hook(Alerting).course
    for spikes in (course.losses, course.norms):
        spikes.values.clear()
        spikes.values.extend(float(value) for value in range(10))
    sigma = 1.4826 * 2.5  # the median of the distances from 4.5 is 2.5
    for quarter in range(100):
        value = 4.5 + quarter / 4 * sigma + 1e-9
        if course._spike(told(99, value if of_loss else 4.5, 4.5 if of_loss else value)) is not None:
            return quarter / 4
    return math.inf


def nan_is_told(seen: Seen) -> bool:
    return bool(seen.hook(Alerting).course.step(told(99, math.nan, math.nan)))


def skips_until_told(seen: Seen) -> int:
    course = seen.hook(Alerting).course
    course.skips = 0
    return next(count for count in range(1, 50) if course.step(told(count, 2.0, math.inf, skipped=True)))


def sink(seen: Seen, kind: type) -> Any:
    return next((sink for sink in seen.hook(Records).sinks if isinstance(sink, kind)), None)


def profiled(seen: Seen) -> dict[str, Any]:
    return next(line for line in seen.lines("events.jsonl") if line["event"] == "profile")


# fmt: off
TABLE: dict[str, Leaf] = {
    "name": Leaf("other", "named", lambda s: s.run.folder.name),
    "output_root": Leaf("TMP/elsewhere", "named", lambda s: str(s.run.folder.parent)),
    "seed": Leaf(7, "llama", seed),
    "steps": Leaf(7, "llama", lambda s: len(s.watch.turns)),
    "engine": Leaf("plain", "plain", lambda s: {"PlainEngine": "plain"}.get(type(s.run.engine).__name__)),
    "compile": Leaf("blocks", "compiled", lambda s: "blocks" if all(b._compiled_call_impl for b in s.model.layers) else "none"),
    "clip_grad_norm": Leaf(0.5, "llama", lambda s: s.zero.clip_grad),
    "resume": Leaf("never", "anew", lambda s: "never" if (s.run.folder.parent / "run.old-1/metrics.jsonl").exists() else "auto"),
    "resume_changes": Leaf("allow", "changed", lambda s: {2: "allow"}.get(s.watch.turns[0].step)),
    "batch.global_size": Leaf(6, "llama", lambda s: sum(len(micro.ids) for micro in s.watch.turns[0].batch)),
    "batch.micro_size": Leaf(3, "llama", lambda s: len(s.watch.turns[0].batch[0].ids)),
    "eval.every": Leaf(3, "llama", lambda s: evaluations(s)[0]["step"]),
    "eval.samples": Leaf(5, "llama", lambda s: evaluations(s)[0]["tokens"] // 12),
    "model.hidden_size": Leaf(48, "llama", lambda s: s.model.embed_tokens.embedding_dim),
    "model.num_layers": Leaf(3, "llama", lambda s: len(s.model.layers)),
    "model.num_heads": Leaf(6, "llama", lambda s: s.block.attention.q_proj.out_features // 10),
    "model.num_kv_heads": Leaf(3, "llama", lambda s: s.block.attention.k_proj.out_features // 10),
    "model.head_dim": Leaf(10, "llama", lambda s: s.block.attention.head_dim),
    "model.ffn_hidden_size": Leaf(40, "llama", lambda s: s.block.mlp.down_proj.in_features),
    "model.vocab_size": Leaf(96, "llama", lambda s: s.model.lm_head.out_features),
    "model.max_positions": Leaf(77, "gpt2", lambda s: s.model.embed_positions.num_embeddings),
    "model.norm": Leaf("layernorm", "gpt2", lambda s: type(s.model.final_norm).__name__.lower()),
    "model.norm_eps": Leaf(0.001, "gpt2", lambda s: s.block.attn_norm.eps),
    "model.position": Leaf("learned", "named", lambda s: "rope" if s.model.rotation(torch.tensor([1])) is not None else "learned"),
    "model.rope_theta": Leaf(500.0, "llama", rope_theta),
    "model.rope_scaling": Leaf("llama3", "bytes", lambda s: "llama3" if turns_as_llama3(s) else "none"),
    "model.rope_factor": Leaf(8.0, "bytes", lambda s: 8.0 if turns_as_llama3(s) else None),
    "model.rope_low_freq": Leaf(0.5, "bytes", lambda s: 0.5 if turns_as_llama3(s) else None),
    "model.rope_high_freq": Leaf(2.0, "bytes", lambda s: 2.0 if turns_as_llama3(s) else None),
    "model.rope_original_positions": Leaf(64, "bytes", lambda s: 64 if turns_as_llama3(s) else None),
    "model.mlp": Leaf("gelu", "gpt2", lambda s: type(s.block.mlp).__name__.lower()),
    "model.bias": Leaf(True, "gpt2", lambda s: None not in (s.block.mlp.up_proj.bias, s.block.attention.q_proj.bias)),
    "model.attention_bias": Leaf("qkv", "llama", attention_bias),
    "model.qk_norm": Leaf(True, "llama", lambda s: s.block.attention.q_norm is not None),
    "model.tie_embeddings": Leaf(False, "llama", lambda s: s.model.lm_head.weight is s.model.embed_tokens.weight),
    "model.dropout": Leaf(0.25, "gpt2", lambda s: max({s.model.dropout.p, s.block.dropout.p, s.block.attention.core.dropout})),
    "model.init_std": Leaf(0.05, "llama", lambda s: round(s.first_std, 2)),
    "data.kind": Leaf("kjv", "bytes", lambda s: Path(s.corpora.files[0].path).name.partition("1-")[0]),
    "data.files": Leaf(["TMP/one", "TMP/two"], "plain", lambda s: [file.path for file in s.corpora.files]),
    "data.weights": Leaf([1, 2], "plain", lambda s: s.corpora.turns),
    "data.val_files": Leaf(["TMP/two"], "plain", lambda s: [f.path for f in held_out(s).files]),
    "data.val_fraction": Leaf(0.25, "llama", lambda s: 1 - s.corpora.spans[0][1] / s.corpora.files[0].num_tokens),
    "data.seq_length": Leaf(12, "llama", lambda s: s.watch.turns[0].batch[0].targets.shape[1]),
    "data.documents": Leaf("apart", "llama", lambda s: "joined" if s.watch.turns[0].batch[0].starts is None else "apart"),
    "data.shuffle": Leaf(False, "llama", lambda s: not in_order(s)),
    "data.text": Leaf("bytes", "bytes", lambda s: {"byte": "bytes", "token": "none"}[re.findall(r"nats/(\w+)", s.screen)[0]]),
    "data.synthetic_tokens": Leaf(8000, "llama", lambda s: s.corpora.files[0].num_tokens),
    "data.cache": Leaf("TMP/cached", "llama", lambda s: str(Path(s.corpora.files[0].path).parent)),
    "data.workers": Leaf(1, "llama", lambda s: s.loader._num_workers),
    "data.prefetch": Leaf(3, "llama", lambda s: s.loader._prefetch_factor),
    "data.log_samples": Leaf(True, "llama", logged),
    "precision.dtype": Leaf("fp16", "fp16", lambda s: {torch.float16: "fp16"}.get(s.block.mlp.up_proj.weight.dtype)),
    "precision.autocast": Leaf(True, "autocast", lambda s: s.watch.activation != s.block.attention.q_proj.weight.dtype),
    "precision.initial_scale_power": Leaf(10, "fp16", lambda s: math.log2(s.watch.turns[0].out.loss_scale)),
    "precision.scale_window": Leaf(3, "fp16", lambda s: s.zero.loss_scaler.scale_window),
    "precision.hysteresis": Leaf(1, "fp16", lambda s: s.zero.loss_scaler.delayed_shift),
    "precision.min_scale": Leaf(2, "fp16", lambda s: s.zero.loss_scaler.min_scale),
    "zero.stage": Leaf(2, "llama", lambda s: 2 if s.zero.partition_gradients else None),
    "zero.offload": Leaf("cpu", "gpt2", lambda s: "cpu" if s.zero.offload_optimizer and s.zero.offload_param else "none"),
    "zero.overlap_comm": Leaf(False, "llama", lambda s: s.zero.overlap_comm),
    "zero.reduce_bucket_size": Leaf(12345, "llama", lambda s: s.zero.reduce_bucket_size),
    "zero.allgather_bucket_size": Leaf(23456, "llama", lambda s: s.zero.allgather_bucket_size),
    "zero.prefetch_bucket_size": Leaf(1111, "gpt2", lambda s: s.zero.parameter_offload._prefetch_bucket_sz),
    "zero.persistence_threshold": Leaf(222, "gpt2", lambda s: s.zero.parameter_offload.param_numel_persistence_threshold),
    "zero.max_live_parameters": Leaf(33333, "gpt2", lambda s: s.zero.parameter_offload._max_available_parameters_in_numel),
    "zero.max_reuse_distance": Leaf(444, "gpt2", lambda s: s.zero.parameter_offload._max_reuse_distance_in_numel),
    "parallel.data": Leaf(1, "llama", lambda s: dist.get_world_size(s.run.engine.data_group)),
    "recompute.granularity": Leaf("full", "recomputed", lambda s: "full" if "layers.0" in regions(s) else "none"),
    "recompute.every": Leaf(3, "recomputed", lambda s: int(regions(s)[1].removeprefix("layers."))),
    "recompute.modules": Leaf(["layers.0.mlp_norm"], "selective", regions),
    "recompute.offload": Leaf(True, "recomputed", lambda s: s.model.layers[0].forward.offload),
    "recompute.max_extra_time": Leaf(1000, "probed", lambda s: 1000 if {"attention", "mlp"} <= {*chosen(s)} else 0.1),
    "recompute.min_share": Leaf(1.0, "choosy", lambda s: 0.15 if chosen(s) else 1.0),
    "optimizer.name": Leaf("sgd", "gpt2", lambda s: type(s.zero.optimizer).__name__.lower()),
    "optimizer.lr": Leaf(0.004, "llama", lambda s: max(s.rates)),
    "optimizer.weight_decay": Leaf(0.03, "llama", lambda s: s.group["weight_decay"]),
    "optimizer.beta1": Leaf(0.8, "llama", lambda s: s.group["betas"][0]),
    "optimizer.beta2": Leaf(0.97, "llama", lambda s: s.group["betas"][1]),
    "optimizer.eps": Leaf(1e-06, "llama", lambda s: s.group["eps"]),
    "optimizer.momentum": Leaf(0.5, "gpt2", lambda s: s.group["momentum"]),
    "schedule.name": Leaf("wsd", "gpt2", schedule_name),
    "schedule.warmup_steps": Leaf(2, "llama", warmup),
    "schedule.total_steps": Leaf(5, "llama", total_steps),
    "schedule.min_ratio": Leaf(0.25, "llama", lambda s: round(s.rates[-1] / max(s.rates), 6)),
    "schedule.decay_steps": Leaf(2, "gpt2", decay_steps),
    "checkpoint.mode": Leaf("sync", "kept", lambda s: "sync" if s.hook(Saver).writer is None and saved_steps(s, "disk") else "other"),
    "checkpoint.every": Leaf(1, "kept", lambda s: {(1, 2, 3, 4, 5, 6): 1}.get(tuple(saved_steps(s, "disk")))),
    "checkpoint.memory_every": Leaf(3, "memory", lambda s: saved_steps(s, "memory")[0]),
    "checkpoint.mtbf_hours": Leaf(2.5, "auto", lambda s: s.hook(Saver).interval.mtbf_hours),
    "checkpoint.busy": Leaf("skip", "busy", lambda s: "skip" if "checkpoint_skipped" in str(s.lines("events.jsonl")) else "wait"),
    "checkpoint.keep_last": Leaf(2, "kept", kept_last),
    "checkpoint.keep_every": Leaf(3, "kept", lambda s: 3 if 3 in survivors(s.run.folder / "checkpoints") else 0),
    "checkpoint.keep_best": Leaf(1, "kept", lambda s: sum(1 for step in survivors(s.run.folder / "checkpoints") if step in (1, 2, 4))),
    "checkpoint.optimizer_dtype": Leaf("bf16", "memory", moment_type),
    "checkpoint.root": Leaf("TMP/states", "memory", lambda s: str(next(Path(s.run.folder.parents[1]).glob("states/step_*")).parent)),
    "verify.hash_every": Leaf(2, "again", lambda s: s.lines("hashes.jsonl")[0]["step"]),
    "verify.tensors": Leaf(True, "again", lambda s: "tensors" in s.lines("hashes.jsonl")[0]),
    "monitor.console": Leaf("rich", "fp16", lambda s: {"LiveBar": "rich"}.get(type(s.hook(Records).console._steps).__name__)),
    "monitor.every": Leaf(4, "llama", shown_step),
    "monitor.curve": Leaf(False, "llama", lambda s: "┤" in s.screen),
    "monitor.sample_tokens": Leaf(9, "bytes", lambda s: len(s.windows)),
    "monitor.sample_prompt": Leaf("And it", "bytes", lambda s: bytes(s.windows[0]).decode()),
    "monitor.wandb": Leaf(True, "tracked", lambda s: any(isinstance(sink, Wandb) for sink in s.hook(Records).sinks)),
    "monitor.tensorboard": Leaf(True, "watched", lambda s: any((s.run.folder / "tensorboard").iterdir())),
    "monitor.prometheus": Leaf(0, "watched", lambda s: None if sink(s, Prometheus) is None else 0),
    "monitor.prometheus_host": Leaf("127.0.0.2", "watched", lambda s: sink(s, Prometheus).address.split("/")[2].split(":")[0]),
    "monitor.webhook": Leaf("http://127.0.0.1:9/hook", "watched", lambda s: sink(s, Webhook)._url),
    "alerts.window": Leaf(3, "watched", lambda s: s.lines("ranks.jsonl")[0]["step"] - WARM),
    "alerts.memory": Leaf(0.0001, "watched", lambda s: alert_of(s, "memory")["limit"]),
    "alerts.data_wait": Leaf(0.00001, "twice", lambda s: alert_of(s, "data_wait")["limit"]),
    "alerts.recompute": Leaf(0.001, "twice", lambda s: alert_of(s, "recompute")["limit"]),
    "alerts.loss_spike": Leaf(7.5, "watched", lambda s: spike_limit(s, of_loss=True)),
    "alerts.grad_spike": Leaf(11.25, "watched", lambda s: spike_limit(s, of_loss=False)),
    "alerts.nan": Leaf(False, "watched", nan_is_told),
    "alerts.skipped": Leaf(7, "fp16", skips_until_told),
    "alerts.actions": Leaf(["memory:webhook"], "watched", lambda s: [f"memory:{action}" for action in alert_of(s, "memory")["actions"]]),
    "profile.level": Leaf("ops", "watched", lambda s: "ops" if (s.run.folder / "profile/ops.json").exists() else "timers"),
    "profile.first": Leaf(3, "watched", lambda s: profiled(s)["step"] - profiled(s)["steps"] + 1),
    "profile.steps": Leaf(2, "watched", lambda s: profiled(s)["steps"]),
    "monitor.wandb_project": Leaf("elsewhere", "tracked", lambda s: s.hook(Records).sinks[-1]._run.project),
    "limits.wall_time": Leaf(500.0, "llama", lambda s: round(s.hook(Stopping).until - time.monotonic() + age_s(), -1)),
    "limits.memory_gib": Leaf(64.0, "llama", lambda s: s.run.explained.__self__.room / 2**30 if memory_is_limited() else None),
    "launch.threads": Leaf(3, "llama", lambda s: torch.get_num_threads()),
    "launch.timeout": Leaf(123.0, "llama", lambda s: wait_s(s.run.feed.groups.control)),
    "launch.shm_comm": Leaf(True, "compiled", lambda s: SWITCH[0]),
}
# fmt: on


def words_of(start: str, folder: Path) -> list[str]:
    settings = [leaf.word(key, folder) for key, leaf in TABLE.items() if leaf.start == start]
    return [*STAGE_0, f"output_root={folder}/runs", *STARTS[start].words, *settings]


def live(_rank: int, _world_size: int, start: str, folder: str) -> dict[str, Any]:
    """Everything that the readers of a start find, by key."""
    spec = STARTS[start]
    os.chdir(folder)
    if spec.before is not None:
        drive([*STAGE_0, f"output_root={folder}/runs", *spec.before])
    seen = drive(words_of(start, Path(folder)), spec.trains)
    return {key: leaf.read(seen) for key, leaf in TABLE.items() if leaf.start == start}
