"""The dict for DeepSpeed, held against DeepSpeed: every key that it knows is written, every key that is written is known.

DeepSpeed ignores most unknown keys, so a misspelt one is found by a dict that notes what is read from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any

import pytest
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig, get_pipeline_config
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

from framework.config.schema import Batch, Config, Parallel, Precision, Zero
from framework.engine.dsconfig import deepspeed_config
from tests.engine import tiny
from tests.engine.tiny import Form

FORMS = tiny.allowed_forms(1)

# Blocks of which every field is written.
WHOLE = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
}
# Blocks in which DeepSpeed's own classes refuse an unknown key; of the last ones only the switch is written, as off.
STRICT = {*WHOLE, "hybrid_engine", "compile", "tensor_parallel", "tensorboard", "wandb", "csv_monitor", "comet", "comms_logger"}
# What DeepSpeed looks for and must not find: removed by it, done by us, for engines not used here, or switched on by being there.
ABSENT = {*_REMOVED_TOP_LEVEL_CONFIG_KEYS, "optimizer", "scheduler", "pipeline", "aio", "weight_quantization", "vocabulary_size"}


def settings_of(config: Config) -> dict[str, Any]:
    return deepspeed_config(config, data_ranks=1, accumulation=8)


def form_config(form: Form) -> Config:
    return Config(precision=tiny.precision_of(form.precision), zero=tiny.zero_of(form.stage, form.offload))


def at(settings: dict[str, Any], path: str) -> Any:
    for name in path.split("."):
        settings = settings[name]
    return settings


class Noting(dict[str, Any]):
    """A dict that writes down which keys are asked for, in it and in the dicts inside it."""

    def __init__(self, content: dict[str, Any], path: str, asked: set[str]) -> None:
        inner = {key: Noting(value, f"{path}{key}.", asked) for key, value in content.items() if isinstance(value, dict)}
        super().__init__({**content, **inner})
        self.path, self.asked = path, asked

    def __copy__(self) -> Noting:
        return self

    def __getitem__(self, key: str) -> Any:
        self.asked.add(self.path + key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(f"{self.path}{key}")
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(self.path + key)
        return super().get(key, default)

    def keys(self) -> Any:
        return _Keys(self)


class _Keys:
    """`key in d.keys()` is asking too; going through them is not."""

    def __init__(self, noting: Noting) -> None:
        self.noting = noting

    def __contains__(self, key: object) -> bool:
        return key in self.noting

    def __iter__(self) -> Iterator[str]:
        return iter(self.noting)


def read_by_deepspeed(settings: dict[str, Any]) -> set[str]:
    """The dotted keys that DeepSpeedConfig asks for."""
    asked: set[str] = set()
    DeepSpeedConfig(Noting(settings, "", asked))
    return asked


def paths(settings: dict[str, Any], before: str = "") -> Iterator[str]:
    """All dotted keys, blocks before what is in them."""
    for key, value in settings.items():
        yield before + key
        if isinstance(value, dict):
            yield from paths(value, f"{before}{key}.")


def unknown(settings: dict[str, Any]) -> set[str]:
    """Written keys that nobody reads."""
    return {path for path in set(paths(settings)) - read_by_deepspeed(settings) if path.rpartition(".")[0] not in STRICT}


def test_every_key_is_known() -> None:
    assert unknown(settings_of(Config())) == set()


BLOCKS = [path for path in paths(settings_of(Config())) if isinstance(at(settings_of(Config()), path), dict)]


@pytest.mark.parametrize("block", ["", *BLOCKS])
def test_a_misspelt_key_would_be_found(block: str) -> None:
    settings = deepcopy(settings_of(Config()))
    (at(settings, block) if block else settings)["gradient_cliping"] = 1
    assert is_found(settings, "gradient_cliping")


def is_found(settings: dict[str, Any], key: str) -> bool:
    """Whether a wrong key is refused by DeepSpeed, or seen by these tests."""
    try:
        return any(path.endswith(key) for path in unknown(settings))
    except ValueError as refused:
        return key in str(refused)


def test_every_key_that_deepspeed_looks_for_is_written_or_has_a_reason() -> None:
    looked_for = {key for key in read_by_deepspeed(settings_of(Config())) if "." not in key}
    assert looked_for - settings_of(Config()).keys() <= ABSENT


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("block", WHOLE)
def test_every_field_is_written_under_its_alias(form: Form, block: str) -> None:
    known = {
        field.alias or name for name, field in WHOLE[block].model_fields.items() if not (field.json_schema_extra or {}).get("deprecated")
    }
    assert at(settings_of(form_config(form)), block).keys() == known - {"leaf_module"}


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_deepspeed_reads_what_was_meant(form: Form) -> None:
    config = form_config(form)
    read = DeepSpeedConfig(settings_of(config))
    assert (read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (32, 4, 8)
    assert read.zero_config.stage == form.stage
    assert read.zero_config.offload_optimizer is not None
    assert read.zero_config.offload_param is not None
    assert read.zero_config.offload_optimizer.device == form.offload
    assert read.zero_config.offload_param.device == (form.offload if form.stage == 3 else "none")
    assert (read.float16_config.enabled, read.bfloat16_config.enabled) == (form.precision == "fp16", form.precision == "bf16")
    assert read.torch_autocast_enabled == form.precision.endswith("autocast")
    assert read.gradient_clipping == (config.clip_grad_norm if form.stage else 0.0)
    assert read.grad_accum_dtype == "fp32"
    assert str(read.communication_data_type) == "torch.float32"


def test_the_block_of_a_pipeline_has_the_keys_that_deepspeed_reads() -> None:
    """It takes any key, so they are held against its defaults, and against what its engine asks for beside them."""
    block = settings_of(Config(parallel=Parallel(pipeline=2)))["pipeline"]
    assert block.keys() == get_pipeline_config({}).keys() | {"use_reentrant"}
    assert not any(block[key] for key in ("seed_layers", "activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned"))


def test_everything_that_we_do_ourselves_is_off() -> None:
    settings = settings_of(Config())
    assert not any(block["enabled"] for name, block in settings.items() if isinstance(block, dict) and "enabled" in block)
    assert not ABSENT & settings.keys()


# ---------------------------------------------------------------- each setting moves its own key

FP16 = Precision(dtype="fp16", initial_scale_power=8)
STAGE3 = Zero(stage=3)
NVME = replace(STAGE3, offload="nvme", nvme_path="d")
LEAVES: tuple[tuple[str, Any, Any, dict[str, Any]], ...] = (
    # block, the block before, the block after, what changes in the dict
    ("precision", Precision(), Precision(dtype="bf16"), {"bf16.enabled": True, "torch_autocast.dtype": "bfloat16"}),
    ("precision", Precision(), Precision(dtype="fp16"), {"fp16.enabled": True, "torch_autocast.dtype": "float16"}),
    ("precision", Precision("bf16"), Precision("bf16", autocast=True), {"bf16.enabled": False, "torch_autocast.enabled": True}),
    ("precision", FP16, replace(FP16, initial_scale_power=9), {"fp16.initial_scale_power": 9}),
    ("precision", FP16, replace(FP16, scale_window=7), {"fp16.loss_scale_window": 7}),
    ("precision", FP16, replace(FP16, hysteresis=5), {"fp16.hysteresis": 5}),
    ("precision", FP16, replace(FP16, min_scale=4), {"fp16.min_loss_scale": 4}),
    ("zero", Zero(), Zero(stage=1), {
        "zero_optimization.stage": 1, "zero_optimization.overlap_comm": True, "gradient_clipping": Config.clip_grad_norm,
    }),
    ("zero", Zero(stage=2), Zero(stage=2, offload="cpu"), {"zero_optimization.offload_optimizer.device": "cpu"}),
    ("zero", STAGE3, replace(STAGE3, offload="cpu"), {
        "zero_optimization.offload_optimizer.device": "cpu", "zero_optimization.offload_param.device": "cpu",
    }),
    # The largest matrix of the default model is one of the feed-forward layer: 384 x 128.
    ("zero", STAGE3, NVME, {
        "zero_optimization.offload_optimizer.device": "nvme", "zero_optimization.offload_param.device": "nvme",
        "zero_optimization.offload_optimizer.nvme_path": "d", "zero_optimization.offload_param.nvme_path": "d",
        "zero_optimization.offload_param.buffer_size": 49_152, "zero_optimization.offload_param.max_in_cpu": 0,
    }),
    ("zero", STAGE3, replace(STAGE3, overlap_comm=False), {"zero_optimization.overlap_comm": False}),
    ("zero", STAGE3, replace(STAGE3, reduce_bucket_size=11), {"zero_optimization.reduce_bucket_size": 11}),
    ("zero", STAGE3, replace(STAGE3, allgather_bucket_size=12), {"zero_optimization.allgather_bucket_size": 12}),
    ("zero", STAGE3, replace(STAGE3, prefetch_bucket_size=13), {"zero_optimization.stage3_prefetch_bucket_size": 13}),
    ("zero", STAGE3, replace(STAGE3, persistence_threshold=14), {"zero_optimization.stage3_param_persistence_threshold": 14}),
    ("zero", STAGE3, replace(STAGE3, max_live_parameters=15), {"zero_optimization.stage3_max_live_parameters": 15}),
    ("zero", STAGE3, replace(STAGE3, max_reuse_distance=16), {"zero_optimization.stage3_max_reuse_distance": 16}),
    ("batch", Batch(32, 4), Batch(32, 2), {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 16}),
)  # fmt: skip


@pytest.mark.parametrize(("block", "before", "after", "changed"), LEAVES, ids=[",".join(row[-1]) for row in LEAVES])
def test_a_setting_moves_its_own_key(block: str, before: Any, after: Any, changed: dict[str, Any]) -> None:
    assert difference(replace(Config(), **{block: before}), replace(Config(), **{block: after})) == changed


@pytest.mark.parametrize("block", ["precision", "zero"])
def test_no_setting_is_forgotten_here(block: str) -> None:
    moved = {
        field.name
        for name, before, after, _ in LEAVES
        for field in fields(before)
        if name == block and getattr(before, field.name) != getattr(after, field.name)
    }
    assert moved == {field.name for field in fields(getattr(Config(), block))}


@pytest.mark.parametrize(("stage", "changed"), [(0, {}), (1, {"gradient_clipping": 0.5}), (3, {"gradient_clipping": 0.5})])
def test_the_clip_norm_goes_to_the_sharded_optimizer(stage: int, changed: dict[str, Any]) -> None:
    config = Config(zero=tiny.zero_of(stage))
    assert difference(config, replace(config, clip_grad_norm=0.5)) == changed


@pytest.mark.parametrize(("data_ranks", "accumulation"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_the_batch_is_the_global_one(data_ranks: int, accumulation: int) -> None:
    settings = deepspeed_config(Config(batch=Batch(32, 4)), data_ranks, accumulation)
    assert (settings["train_batch_size"], settings["gradient_accumulation_steps"]) == (32, accumulation)


def difference(before: Config, after: Config) -> dict[str, Any]:
    """The leaves of the dict that differ, with the value after."""
    old, new = settings_of(before), settings_of(after)
    assert list(paths(old)) == list(paths(new))
    leaves = [path for path in paths(new) if not isinstance(at(new, path), dict)]
    return {path: at(new, path) for path in leaves if at(new, path) != at(old, path)}
