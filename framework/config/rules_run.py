"""Rules of everything around the model: name, data, schedule, starting ranks, saving, showing. Pure functions of a case."""

from __future__ import annotations

import math
import re

from framework.config.case import Case, Offence, Rule
from framework.config.schema import Launch, Plan, Prepare, Profile

ALERTS = (
    "memory", "communication", "utilisation", "data_wait", "recompute", "straggler", "loss_spike", "grad_spike", "nan", "skipped", "drift",
)  # fmt: skip
TELLS = ("webhook", "wandb")
"""Actions that only tell somebody."""
ACTS = ("skip", "rollback", "stop")
"""Actions that change the course of the run."""
ACTIONS = (*TELLS, *ACTS)
MENDED = ("loss_spike", "grad_spike", "nan", "skipped", "drift")
"""Alerts that an earlier State has not."""


def name(case: Case) -> Offence | None:
    """the name is one folder below output_root: letters, digits, and . - _ = , +"""
    given = case.config.name
    if re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._=,+-]*", given):
        return None
    return Offence("name", repr(given), "name=run")


def files(case: Case) -> Offence | None:
    """data=tokens and data=text read data.files, and the other kinds build their own"""
    data = case.config.data
    if (data.kind in ("tokens", "text")) == bool(data.files) and (data.kind == "tokens" or not data.val_files):
        return None
    got = f"{[*data.files, *data.val_files]} with data.kind {data.kind}"
    return Offence("data.files", got, "data=tokens data.files=[PATH_WITHOUT_SUFFIX]")


def weights(case: Case) -> Offence | None:
    """data.weights has one number above 0 for each entry of data.files, with data=tokens"""
    given, entries = case.config.data.weights, case.config.data.files
    if not given:
        return None
    if case.config.data.kind != "tokens" or len(given) != len(entries):
        return Offence("data.weights", f"{len(given)} for {len(entries)} entries of data.files", "data.weights=[] or one for each")
    if not all(0 < weight < math.inf for weight in given):
        return Offence("data.weights", str([*given]), "only numbers above 0")
    return None


def prepare_words(case: Case) -> Offence | None:
    """prepare.over_long says what becomes of documents above prepare.max_tokens"""
    given = case.config.prepare
    if given.max_tokens is not None or given.over_long == Prepare().over_long:
        return None
    return Offence("prepare.over_long", f"{given.over_long} with max_tokens null", "prepare.max_tokens=N")


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


def plan_words(case: Case) -> Offence | None:
    """plan: explain, show, probe and write belong to search"""
    given, usual = case.config.plan, Plan()
    for word in ("explain", "show", "probe", "write"):
        if not given.search and getattr(given, word) != getattr(usual, word):
            return Offence(f"plan.{word}", f"{getattr(given, word)} without search", "plan.search=true")
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


def alert_actions(case: Case) -> Offence | None:
    """alerts.actions: ALERT:ACTION; skip is for loss_spike without a pipeline, rollback for what a checkpoint mends"""
    config, key = case.config, "alerts.actions"
    for entry in config.alerts.actions:
        alert, _, action = entry.partition(":")
        if alert not in (*ALERTS, "all") or action not in ACTIONS:
            expected = f"one of {', '.join(ALERTS)}, all, then one of {', '.join(ACTIONS)}"
            return Offence(key, f"{entry}, which is not {expected}", "alerts.actions=[nan:rollback]")
        if action == "skip" and (alert != "loss_spike" or config.parallel.pipeline > 1):
            return Offence(key, f"{entry} with parallel.pipeline {config.parallel.pipeline}", "alerts.actions=[loss_spike:rollback]")
        if action == "rollback" and alert not in MENDED:
            return Offence(key, f"{entry}, where {', '.join(MENDED)} can be rolled back", f"alerts.actions=[{alert}:stop]")
        if action == "rollback" and config.checkpoint.mode == "none":
            return Offence(key, f"{entry} with checkpoint.mode none", "checkpoint=async")
        if action == "webhook" and config.monitor.webhook is None:
            return Offence(key, f"{entry} with monitor.webhook null", "monitor.webhook=URL")
        if action == "wandb" and not config.monitor.wandb:
            return Offence(key, f"{entry} with monitor.wandb false", "monitor=wandb")
    return None


def alert_drift(case: Case) -> Offence | None:
    """weights are compared over data ranks that hold them alike: two or more, below ZeRO stage 3"""
    config = case.config
    copies = case.ranks // (config.parallel.tensor * config.parallel.pipeline)
    if config.alerts.drift_every == 0 or (config.zero.stage < 3 and copies > 1):
        return None
    got = f"{config.alerts.drift_every} with zero.stage {config.zero.stage} and {copies} ranks that hold the same"
    return Offence("alerts.drift_every", got, "alerts.drift_every=0")


def profile_words(case: Case) -> Offence | None:
    """profile: first, steps and rank belong to the levels ops and kernels"""
    given, usual = case.config.profile, Profile()
    for word in ("first", "steps", "rank"):
        if given.level == "timers" and getattr(given, word) != getattr(usual, word):
            return Offence(f"profile.{word}", f"{getattr(given, word)} with level timers", "profile=ops")
    return None


def profile_rank(case: Case) -> Offence | None:
    """profile.rank is one of the run's ranks: 0 to ranks - 1"""
    if case.config.profile.rank < case.ranks:
        return None
    return Offence("profile.rank", f"{case.config.profile.rank} of {case.ranks} ranks", "profile.rank=0")


RUN: tuple[Rule, ...] = (
    name, files, weights, prepare_words, schedule_length, wsd_decay, objective, hosts_words, supervisor_words, plan_words,
    save_every, save_memory, sample_text, alert_actions, alert_drift,
    profile_words, profile_rank,
)  # fmt: skip
