"""Settings that do not go together: one list of rules, each with its law and its remedy.

A rule is a function: its name is the rule's id, its docstring is the law, and it returns None or what breaks the law.
All run on the composed config before any process group, model or file exists. Pure; conf/README.md is generated from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from framework.base.errors import ConfigError
from framework.config.ranges import RANGES
from framework.config.schema import Config, Launch, Recompute


@dataclass(frozen=True)
class Case:
    """What a rule looks at: a config, the number of ranks, and how many of them share a host."""

    config: Config
    ranks: int
    ranks_per_host: int

    @property
    def data_ranks(self) -> int:
        parallel = self.config.parallel
        return parallel.data or max(1, self.ranks // parallel.model_ranks)

    @property
    def samples_at_once(self) -> int:
        """Samples that all data ranks take in one micro-batch."""
        return self.config.batch.micro_size * self.data_ranks

    @property
    def head_ranks(self) -> int:
        """Ranks that share the heads of one attention."""
        return self.config.parallel.tensor * self.config.parallel.context


class Offence(NamedTuple):
    """What breaks a law: the key, what stands there, what to write instead."""

    key: str
    got: str
    write: str


def value_at(config: Any, key: str) -> Any:
    """The value at a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def check(config: Config, ranks: int, ranks_per_host: int) -> None:
    """Raise the ConfigError of the first rule that `config` breaks on `ranks` processes, `ranks_per_host` of them on each host."""
    for key, (least, greatest) in RANGES.items():
        value = value_at(config, key)
        if value is None or ((least is None or value >= least) and (value < math.inf if greatest is None else value <= greatest)):
            continue
        raise ConfigError(key, value, f"{least} or more" if greatest is None else f"{least} to {greatest}")
    case = Case(config, ranks, ranks_per_host)
    for rule in RULES:
        offence = rule(case)
        if offence is not None:
            raise ConfigError(f"{offence.key}  [{rule.__name__}]", offence.got, str(rule.__doc__), offence.write)


def name(case: Case) -> Offence | None:
    """the name is one folder below output_root: letters, digits, and . - _ = , +"""
    given = case.config.name
    if re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._=,+-]*", given):
        return None
    return Offence("name", repr(given), "name=run")


def world(case: Case) -> Offence | None:
    """the number of ranks is data x tensor x pipeline x context"""
    p = case.config.parallel
    if case.ranks == case.data_ranks * p.model_ranks:
        return None
    axes = f"data {p.data or 'null'} x tensor {p.tensor} x pipeline {p.pipeline} x context {p.context}"
    return Offence("parallel", f"{case.ranks} ranks for {axes}", "parallel.data=null, and degrees whose product divides the ranks")


def global_batch(case: Case) -> Offence | None:
    """batch.global_size = batch.micro_size x data ranks x accumulation steps, a whole number of them"""
    batch, at_once = case.config.batch, case.samples_at_once
    if batch.global_size % at_once == 0:
        return None
    steps = batch.global_size / at_once
    got = f"global {batch.global_size}, micro {batch.micro_size} x data {case.data_ranks} x accumulation {steps:.3g}"
    return Offence("batch.global_size", got, f"batch.global_size={max(1, round(steps)) * at_once}")


def half_weights_stage0(case: Case) -> Offence | None:
    """half weights (precision=fp16|bf16) accumulate gradients in fp32, which DeepSpeed offers from ZeRO stage 1 on"""
    precision = case.config.precision
    if not precision.half_weights or case.config.zero.stage > 0 or case.config.engine == "plain":
        return None
    return Offence("precision", f"{precision.dtype} weights with zero.stage 0", f"zero=stage1, or precision={precision.dtype}_autocast")


def autocast_fp32(case: Case) -> Offence | None:
    """autocast needs a half type to cast to"""
    if not case.config.precision.autocast or case.config.precision.dtype != "fp32":
        return None
    return Offence("precision.autocast", "true with precision.dtype fp32", "precision=fp32, or precision=bf16_autocast")


def fp16_autocast_stage(case: Case) -> Offence | None:
    """fp16_autocast is offered at ZeRO stage 0 only: at other stages DeepSpeed does not scale its loss"""
    precision, zero = case.config.precision, case.config.zero
    if not (precision.autocast and precision.dtype == "fp16" and zero.stage > 0):
        return None
    return Offence("precision", f"fp16_autocast with zero.stage {zero.stage}", "zero=stage0, or precision=fp16")


def pipeline_zero(case: Case) -> Offence | None:
    """pipeline stages keep whole gradients: ZeRO stage 0 or 1"""
    stages, zero = case.config.parallel.pipeline, case.config.zero
    if stages == 1 or zero.stage <= 1:
        return None
    return Offence("zero.stage", f"{zero.stage} with parallel.pipeline {stages}", "zero=stage1")


def pipeline_scaler(case: Case) -> Offence | None:
    """fp16_autocast has one loss scale, which pipeline stages do not share"""
    precision, stages = case.config.precision, case.config.parallel.pipeline
    if stages == 1 or not precision.autocast or precision.dtype != "fp16":
        return None
    return Offence("precision", f"fp16_autocast with parallel.pipeline {stages}", "precision=fp16 zero=stage1, or precision=bf16_autocast")


def offload_stage(case: Case) -> Offence | None:
    """offload moves what ZeRO has divided: stage 1, 2 or 3"""
    zero = case.config.zero
    if zero.offload == "none" or zero.stage > 0:
        return None
    return Offence("zero.offload", f"{zero.offload} with zero.stage 0", "zero=stage2_offload, or zero.offload=none")


def pipeline_blocks(case: Case) -> Offence | None:
    """every pipeline stage holds at least one block"""
    stages, blocks = case.config.parallel.pipeline, case.config.model.num_layers
    if stages <= blocks:
        return None
    return Offence("parallel.pipeline", f"{stages} stages for {blocks} blocks", f"parallel.pipeline={blocks} or fewer")


def tensor_host(case: Case) -> Offence | None:
    """a tensor group stays inside one host"""
    tensor = case.config.parallel.tensor
    if tensor == 1 or case.ranks_per_host % tensor == 0:
        return None
    got = f"{tensor} with {case.ranks_per_host} ranks per host"
    return Offence("parallel.tensor", got, "a degree that divides the ranks per host")


def sequence_parallel(case: Case) -> Offence | None:
    """sequence parallel slices the sequence over tensor ranks, evenly"""
    parallel, length = case.config.parallel, case.config.data.seq_length // case.config.parallel.context
    if not parallel.sequence or (parallel.tensor > 1 and length % parallel.tensor == 0):
        return None
    return Offence("parallel.sequence", f"true with parallel.tensor {parallel.tensor}, {length} tokens", "parallel.sequence=false")


def heads(case: Case) -> Offence | None:
    """query heads divide over tensor x context"""
    model, degree = case.config.model, case.head_ranks
    if model.num_heads % degree == 0:
        return None
    return Offence("model.num_heads", f"{model.num_heads} heads over {degree} tensor x context ranks", "degrees that divide the heads")


def kv_heads(case: Case) -> Offence | None:
    """key/value heads divide the query heads, and tensor ranks share them evenly: none is held twice"""
    model, tensor = case.config.model, case.config.parallel.tensor
    if model.num_heads % model.kv_heads == 0 and model.kv_heads % tensor == 0:
        return None
    got = f"{model.kv_heads} for {model.num_heads} query heads over tensor {tensor}"
    return Offence("model.num_kv_heads", got, "a common divisor")


def head_width(case: Case) -> Offence | None:
    """hidden_size divides into num_heads unless head_dim is given, and a rotary head has an even width"""
    model = case.config.model
    divides = model.head_dim is not None or model.hidden_size % model.num_heads == 0
    if divides and (model.position != "rope" or model.head_width % 2 == 0):
        return None
    got = f"{model.hidden_size} over {model.num_heads} heads, head_dim {model.head_dim}"
    return Offence("model.hidden_size", got, "a multiple of 2 x num_heads")


def ffn_width(case: Case) -> Offence | None:
    """the feed-forward width divides over the tensor ranks"""
    width, tensor = case.config.model.ffn_hidden_size, case.config.parallel.tensor
    if width % tensor == 0:
        return None
    return Offence("model.ffn_hidden_size", f"{width} over tensor {tensor}", "a multiple of parallel.tensor")


def vocabulary(case: Case) -> Offence | None:
    """every tensor rank holds at least one row of the vocabulary, which is divided into equal parts, rounded up"""
    rows, tensor = case.config.model.vocab_size, case.config.parallel.tensor
    if (tensor - 1) * math.ceil(rows / tensor) < rows:
        return None
    return Offence("model.vocab_size", f"{rows} rows over tensor {tensor}", "a smaller parallel.tensor")


def sequence(case: Case) -> Offence | None:
    """the sequence divides over the context ranks"""
    length, context = case.config.data.seq_length, case.config.parallel.context
    if length % context == 0:
        return None
    return Offence("data.seq_length", f"{length} over context {context}", "a multiple of parallel.context")


def positions(case: Case) -> Offence | None:
    """a sample is no longer than the model's longest sequence"""
    length, longest = case.config.data.seq_length, case.config.model.max_positions
    if length <= longest:
        return None
    return Offence("data.seq_length", f"{length} with model.max_positions {longest}", f"model.max_positions={length}")


def files(case: Case) -> Offence | None:
    """data=tokens reads data.files, and the other kinds build their own"""
    data = case.config.data
    if (data.kind == "tokens") == bool(data.files) and (data.kind == "tokens" or not data.val_files):
        return None
    got = f"{[*data.files, *data.val_files]} with data.kind {data.kind}"
    return Offence("data.files", got, "data=tokens data.files=[PATH_WITHOUT_SUFFIX]")


def schedule_length(case: Case) -> Offence | None:
    """warm-up and decay of wsd fit into schedule.total_steps"""
    s = case.config.schedule
    if s.name != "wsd" or s.warmup_steps + s.decay_steps <= s.total_steps:
        return None
    got = f"{s.warmup_steps} + decay {s.decay_steps}, total {s.total_steps}"
    return Offence("schedule.warmup_steps", got, "a shorter warm-up or decay")


def wsd_decay(case: Case) -> Offence | None:
    """decay_steps is the length of wsd's decay, and of no other schedule's"""
    s = case.config.schedule
    if (s.name == "wsd") == (s.decay_steps > 0):
        return None
    return Offence("schedule.decay_steps", f"{s.decay_steps} with schedule.name {s.name}", "schedule=wsd schedule.decay_steps=N")


def plain_engine(case: Case) -> Offence | None:
    """engine=plain is one process in fp32 without ZeRO"""
    c = case.config
    if c.engine != "plain" or (case.ranks == 1 and c.precision.dtype == "fp32" and c.zero.stage == 0):
        return None
    got = f"plain on {case.ranks} ranks, precision {c.precision.dtype}, zero.stage {c.zero.stage}"
    return Offence("engine", got, "engine=deepspeed")


def recompute_words(case: Case) -> Offence | None:
    """recompute: `every` belongs to full, `modules` to selective, max_extra_time and min_share to auto, and offload to all but none"""
    given, usual = case.config.recompute, Recompute()
    owners = {"every": "full", "modules": "selective", "max_extra_time": "auto", "min_share": "auto"}
    for word, owner in owners.items():
        if getattr(given, word) != getattr(usual, word) and given.granularity != owner:
            got = f"{getattr(given, word)} with granularity {given.granularity}"
            return Offence(f"recompute.{word}", got, f"recompute.granularity={owner}")
    if given.offload and given.granularity == "none":
        return Offence("recompute.offload", "true with granularity none", "recompute.granularity=full")
    if given.granularity == "selective" and not given.modules:
        return Offence("recompute.modules", "nothing with granularity selective", "recompute.modules=[attention,activation]")
    return None


def objective(case: Case) -> Offence | None:
    """launch.objective=eval.loss needs an evaluation"""
    if case.config.launch.objective != "eval.loss" or case.config.eval.every >= 0:
        return None
    return Offence("launch.objective", f"eval.loss with eval.every {case.config.eval.every}", "launch.objective=train.loss")


def hosts_words(case: Case) -> Offence | None:
    """launch: include, exclude, launcher and master_addr belong to a hostfile, of include and exclude one; node_rank belongs to no_ssh"""
    given, usual = case.config.launch, Launch()
    for word in ("include", "exclude", "launcher", "master_addr"):
        if given.hostfile is None and getattr(given, word) != getattr(usual, word):
            return Offence(f"launch.{word}", f"{getattr(given, word)} without a hostfile", "launch.hostfile=FILE")
    if given.include and given.exclude:
        return Offence("launch.exclude", f"{given.exclude} with include {given.include}", "launch.exclude=''")
    if (given.include or given.exclude) and given.launcher in ("openmpi", "mpich"):
        return Offence("launch.launcher", f"{given.launcher} with include or exclude", "launch.hostfile=FILE, with these hosts alone")
    if (given.launcher == "no_ssh") != (given.node_rank is not None):
        got = f"{given.node_rank} with launcher {given.launcher}"
        return Offence("launch.node_rank", got, "both: launch.launcher=no_ssh launch.node_rank=0")
    return None


def supervisor_words(case: Case) -> Offence | None:
    """launch: restarts, hang_factor, hang_least and elastic belong to supervise; one supervisor starts the ranks of all hosts"""
    given, usual = case.config.launch, Launch()
    for word in ("restarts", "hang_factor", "hang_least", "elastic"):
        if not given.supervise and getattr(given, word) != getattr(usual, word):
            return Offence(f"launch.{word}", f"{getattr(given, word)} without supervise", "launch.supervise=true")
    if given.supervise and given.launcher == "no_ssh":
        return Offence("launch.supervise", "true with launcher no_ssh", "launch.launcher=pdsh, openmpi, mpich or slurm")
    if given.supervise and given.print != "none":
        return Offence("launch.print", f"{given.print} with supervise", "launch.supervise=false; Slurm and Kubernetes start again")
    return None


def save_every(case: Case) -> Offence | None:
    """checkpoint.every is a number of steps, 0 or more, or auto"""
    every = case.config.checkpoint.every
    if every == "auto" or every >= 0:
        return None
    return Offence("checkpoint.every", str(every), "checkpoint.every=auto")


def save_memory(case: Case) -> Offence | None:
    """shared memory is one host's: a run over several hosts saves to disk; and a run that saves nothing saves nothing there"""
    checkpoint = case.config.checkpoint
    if checkpoint.memory_every == 0 or (checkpoint.mode != "none" and case.ranks == case.ranks_per_host):
        return None
    got = f"{checkpoint.memory_every} with checkpoint.mode {checkpoint.mode}, {case.ranks} ranks, {case.ranks_per_host} on this host"
    return Offence("checkpoint.memory_every", got, "checkpoint.memory_every=0")


def sample_text(case: Case) -> Offence | None:
    """a printed sample needs ids that become text"""
    monitor = case.config.monitor
    if monitor.sample_tokens == 0 or case.config.data.text != "none":
        return None
    return Offence("monitor.sample_tokens", f"{monitor.sample_tokens} with data.text none", "monitor.sample_tokens=0")


RULES: tuple[Callable[[Case], Offence | None], ...] = (
    name, world, global_batch, half_weights_stage0, autocast_fp32, fp16_autocast_stage, pipeline_zero, pipeline_scaler, offload_stage,
    pipeline_blocks, tensor_host, sequence_parallel, heads, kv_heads, head_width, ffn_width, vocabulary, sequence, positions, files,
    schedule_length, wsd_decay, plain_engine, recompute_words, objective, hosts_words, supervisor_words,
    save_every, save_memory, sample_text,
)  # fmt: skip
