"""Every rule: one config that breaks it, and the remedy of its own letter, which passes. A rule without a case fails here."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import cache
from typing import Any, NamedTuple

import pytest

from framework.base.errors import ConfigError
from framework.config.check import RANGES, RULES, check, value_at
from framework.config.compose import build, compose, leaves, to_dict
from framework.config.schema import Config


class Offender(NamedTuple):
    """Words that break a rule on `ranks` ranks (`host` of them on each host), and words beside them that mend it."""

    words: list[str]
    remedy: list[str]
    ranks: int = 1
    host: int | None = None


composed = cache(lambda *words: compose(words))
WSD = ["schedule=wsd", "schedule.total_steps=10"]
OFFENDERS: dict[str, Offender] = {
    "name": Offender(["name=../up"], ["name=run"]),
    "world": Offender(["parallel.data=3"], ["parallel.data=null"], ranks=4),
    "global_batch": Offender(["batch.global_size=30", "batch.micro_size=4"], ["batch.global_size=32"], ranks=2),
    "half_weights_stage0": Offender(["precision=bf16", "zero=stage0"], ["zero=stage1"]),
    "autocast_fp32": Offender(["precision.autocast=true"], ["precision=bf16_autocast"]),
    "fp16_autocast_stage": Offender(["precision=fp16_autocast", "zero=stage1"], ["zero=stage0"]),
    "pipeline_zero": Offender(["parallel=pipeline2", "zero=stage2"], ["zero=stage1"], ranks=2),
    "pipeline_scaler": Offender(["parallel=pipeline2", "precision=fp16_autocast"], ["precision=bf16_autocast"], ranks=2),
    "offload_stage": Offender(["zero.offload=cpu"], ["zero.offload=none"]),
    "nvme_place": Offender(["zero=stage3_nvme", "checkpoint=none"], ["zero.nvme_path=d"]),
    "nvme_buffers": Offender(
        ["zero=stage3_nvme", "checkpoint=none", "zero.nvme_path=d", "zero.max_live_parameters=9"], ["zero.max_live_parameters=0"]
    ),
    "nvme_state": Offender(["zero=stage3_nvme", "zero.nvme_path=d"], ["checkpoint=none", "verify.hash_every=0"]),
    "pipeline_blocks": Offender(["parallel.pipeline=4", "model.num_layers=2"], ["parallel.pipeline=2"], ranks=4),
    "tensor_host": Offender(["parallel.tensor=4"], ["parallel.tensor=2"], ranks=4, host=2),
    "sequence_parallel": Offender(["parallel.sequence=true"], ["parallel.sequence=false"]),
    "heads": Offender(["model.num_heads=3", "model.num_kv_heads=3", "model.head_dim=32", "parallel=tensor2"], ["parallel=data"], ranks=2),
    "kv_heads": Offender(["model.num_kv_heads=3"], ["model.num_kv_heads=2"]),
    "head_width": Offender(["model.hidden_size=130"], ["model.hidden_size=136"]),
    "attention_bias": Offender(["model.attention_bias=qkv", "model.bias=true"], ["model.bias=false"]),
    "rope_words": Offender(["model.rope_factor=8"], ["model.rope_scaling=linear"]),
    "init_from": Offender(["model=hf"], ["model.init_from=null"]),
    "ffn_width": Offender(["model.ffn_hidden_size=33", "parallel=tensor2"], ["model.ffn_hidden_size=34"], ranks=2),
    "vocabulary": Offender(["model.vocab_size=1", "parallel=tensor2"], ["parallel=data"], ranks=2),
    "sequence": Offender(["data.seq_length=33", "parallel=context2"], ["data.seq_length=34"], ranks=2),
    "positions": Offender(["data.seq_length=2048"], ["model.max_positions=2048"]),
    "files": Offender(["data=tokens"], ["data=tokens", "data.files=[a]"]),
    "weights": Offender(["data=tokens", "data.files=[a,b]", "data.weights=[0.5]"], ["data.weights=[0.5,0.25]"]),
    "prepare_words": Offender(["prepare.over_long=split"], ["prepare.max_tokens=9"]),
    "schedule_length": Offender([*WSD, "schedule.warmup_steps=6", "schedule.decay_steps=5"], ["schedule.decay_steps=4"]),
    "wsd_decay": Offender(["schedule.decay_steps=5"], ["schedule=wsd", "schedule.decay_steps=5"]),
    "plain_engine": Offender(["engine=plain", "zero=stage1"], ["engine=deepspeed"]),
    "recompute_words": Offender(["recompute.every=2"], ["recompute.granularity=full"]),
    "objective": Offender(["launch.objective=eval.loss", "eval.every=-1"], ["eval.every=0"]),
    "hosts_words": Offender(["launch.node_rank=1"], ["launch.node_rank=null"]),
    "supervisor_words": Offender(["launch.elastic=true"], ["launch.supervise=true"]),
    "plan_words": Offender(["plan.probe=3"], ["plan.search=true"]),
    "micro_batch": Offender(["batch.micro_size=0"], ["batch.micro_size=auto"]),
    "save_every": Offender(["checkpoint.every=-1"], ["checkpoint.every=auto"]),
    "save_memory": Offender(["checkpoint.memory_every=5"], ["checkpoint.memory_every=0"], ranks=2, host=1),
    "profile_words": Offender(["profile.first=2"], ["profile=ops"]),
    "profile_rank": Offender(["profile=ops", "profile.rank=2"], ["profile.rank=1"], ranks=2),
    "sample_text": Offender(["monitor.sample_tokens=5", "data=synthetic"], ["monitor.sample_tokens=0"]),
    "alert_actions": Offender(["alerts.actions=[nan:rollback]", "checkpoint=none"], ["checkpoint=async"]),
    "alert_drift": Offender(["alerts.drift_every=5", "zero=stage3"], ["alerts.drift_every=0"], ranks=2),
}


def test_every_rule_has_an_offender_and_every_offender_a_rule() -> None:
    assert {rule.__name__ for rule in RULES} == set(OFFENDERS)
    assert len({rule.__name__ for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("rule", OFFENDERS)
def test_the_offender_is_refused_by_this_rule_and_its_remedy_passes(rule: str) -> None:
    words, remedy, ranks, host = OFFENDERS[rule]
    with pytest.raises(ConfigError) as caught:
        check(composed(*words), ranks, host or ranks)
    letter = caught.value
    assert letter.subject.endswith(f"[{rule}]")
    assert letter.expected == str(next(r for r in RULES if r.__name__ == rule).__doc__)
    assert letter.got
    assert letter.write
    check(composed(*words, *remedy), ranks, host or ranks)


@pytest.mark.parametrize("rule", OFFENDERS)
def test_the_letter_names_settings_that_exist(rule: str) -> None:
    """The subject is a key or a block of the schema; what to write is free text, but its key=value words compose."""
    words, _, ranks, host = OFFENDERS[rule]
    with pytest.raises(ConfigError) as caught:
        check(composed(*words), ranks, host or ranks)
    value_at(composed(), caught.value.subject.partition(" ")[0])
    for word in re.findall(r"[a-z_.]+=[\w.-]+", caught.value.write):
        if not word.endswith("=N"):
            composed(word)


@pytest.mark.parametrize(
    ("words", "offence"),
    [
        (["alerts.actions=[nann:stop]"], "nann:stop, which is not one of"),
        (["alerts.actions=[nan]"], "nan, which is not"),
        (["alerts.actions=[nan:skip]"], "nan:skip"),
        (["alerts.actions=[loss_spike:skip]", "parallel=pipeline2"], "parallel.pipeline 2"),
        (["alerts.actions=[memory:rollback]"], "where loss_spike, grad_spike, nan, skipped, drift can be"),
        (["alerts.actions=[all:webhook]"], "monitor.webhook null"),
        (["alerts.actions=[all:wandb]"], "monitor.wandb false"),
    ],
)
def test_actions_of_alerts_that_could_not_be_done_are_refused(words: list[str], offence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(composed(*words), 2, 2)
    assert caught.value.subject == "alerts.actions  [alert_actions]"
    assert offence in str(caught.value.got)


def test_the_defaults_pass_on_one_to_eight_ranks() -> None:
    for ranks in (1, 2, 4, 8):
        check(composed(), ranks, ranks)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (["precision=bf16", "zero=stage0", "engine=plain"], 1),
        (["parallel=context2", "model.num_kv_heads=1"], 2),
        (["parallel=tensor2_pipeline2", "zero=stage1", "precision=bf16"], 8),
        (["parallel=context2", "zero=stage3"], 4),
        (["schedule.warmup_steps=500", "steps=100"], 1),
        (["zero=stage3_offload", "precision=fp16"], 2),
    ],
)
def test_what_only_looks_wrong(words: list[str], ranks: int) -> None:
    """The first is refused, by the rule that is meant and no earlier one; the others are allowed."""
    if "engine=plain" in words:
        with pytest.raises(ConfigError, match="plain_engine"):
            check(composed(*words), ranks, ranks)
    else:
        check(composed(*words), ranks, ranks)


# ---------------------------------------------------------------- ranges


def with_value(key: str, value: Any) -> Config:
    block, _, name = key.rpartition(".")
    plain = to_dict(Config())
    (plain[block] if block else plain)[name] = value
    return build(Config, plain)


@pytest.mark.parametrize("key", RANGES)
def test_just_outside_a_range_is_refused(key: str) -> None:
    kinds = {name: kind for name, kind, _ in leaves()}
    least, greatest = RANGES[key]
    whole = kinds[key] is int or int in getattr(kinds[key], "__args__", ())
    outside: list[Any] = []
    if least is not None:
        outside.append(least - 1 if whole else float(least) - 0.5)
    if greatest is not None:
        outside.append(greatest + 1 if whole else float(greatest) * 1.5)
    if not whole:
        outside += [math.nan, math.inf]
    assert outside
    for value in outside:
        with pytest.raises(ConfigError) as caught:
            check(with_value(key, value), 1, 1)
        assert caught.value.subject == key


def test_every_number_has_a_range() -> None:
    """A number without one is either a choice of its type or looked at by a rule of its own."""
    numbers = {key for key, kind, _ in leaves() if kind in (int, float) or {int, float} & set(getattr(kind, "__args__", ()))}
    assert numbers - set(RANGES) == {"checkpoint.every", "batch.micro_size", "data.weights"}
    assert set(RANGES) <= numbers


def test_a_setting_that_is_null_has_no_range_to_leave() -> None:
    check(dataclasses.replace(Config(), launch=dataclasses.replace(Config().launch, threads=None)), 1, 1)
