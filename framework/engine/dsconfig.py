"""Config -> the dict that DeepSpeed is given: pure, every key, every time.

DeepSpeed's defaults have changed between releases and it ignores most unknown keys, so nothing is left to a default:
tests/engine/test_dsconfig.py holds the blocks here against DeepSpeed's own classes. The dict is kept as deepspeed.json.
What is not DeepSpeed's business here (optimizer, schedule, data order, checkpoints, monitoring) is written out as off.
"""

from __future__ import annotations

from math import ceil, prod
from typing import Any

from framework.config import parameters
from framework.config.schema import Config, Precision, Zero
from framework.planner.states import bucket


def deepspeed_config(config: Config, data_ranks: int, accumulation: int) -> dict[str, Any]:
    """The whole DeepSpeed config of a run; `data_ranks` counts data x context ranks."""
    micro = config.batch.micro
    overlap = config.zero.overlap_comm and config.zero.stage > 0 and config.parallel.pipeline == 1
    return {
        "train_batch_size": micro * accumulation * data_ranks,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "managed_gradient_accumulation": True,
        # At stage 0 DeepSpeed reports no norm, so the engine clips there; elsewhere the sharded optimizer must.
        "gradient_clipping": config.clip_grad_norm if config.zero.stage > 0 else 0.0,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "gradient_allreduce_op": "mean",
        "communication_data_type": "fp32",
        "seq_parallel_communication_data_type": "fp32",
        "disable_allgather": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            **_zero(config.zero, bucket(config), overlap),
            "offload_param": _offload_param(config, data_ranks),
            "offload_optimizer": _offload_optimizer(config.zero),
        },
        **_precision(config.precision),
        **(_PIPELINE if config.parallel.pipeline > 1 else {}),
        **_switched_off(),
    }


_PIPELINE: dict[str, Any] = {
    "pipeline": {
        "stages": "auto",
        "partition": "best",
        "seed_layers": False,
        "activation_checkpoint_interval": 0,
        # What tensor ranks send to the next stage is whole, or sliced by us.
        "pipe_partitioned": False,
        "grad_partitioned": False,
        "use_reentrant": False,
    }
}


def _precision(precision: Precision) -> dict[str, Any]:
    return {
        "data_types": {"grad_accum_dtype": "fp32", "param_dtype": None, "buffer_dtype": None, "keep_in_fp32_modules": []},
        "fp16": {
            "enabled": precision.half_weights and precision.dtype == "fp16",
            "auto_cast": False,
            "loss_scale": 0,
            "initial_scale_power": precision.initial_scale_power,
            "loss_scale_window": precision.scale_window,
            "hysteresis": precision.hysteresis,
            "consecutive_hysteresis": False,
            "min_loss_scale": precision.min_scale,
            "fp16_master_weights_and_grads": False,
        },
        "bf16": {
            "enabled": precision.half_weights and precision.dtype == "bf16",
            "immediate_grad_update": False,
            "check_grad_overflow": True,
            "bf16_master_weights_and_grads": False,
            "bf16_optimizer_states": False,
        },
        "torch_autocast": {
            "enabled": precision.autocast,
            "dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[precision.dtype],
            # A module named here would have its gradients reduced in half precision.
            "lower_precision_safe_modules": [],
        },
    }


def _zero(zero: Zero, bucket: int, overlap: bool) -> dict[str, Any]:
    return {
        "stage": zero.stage,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket,
        "use_multi_rank_bucket_allreduce": True,
        "allgather_partitions": True,
        "allgather_bucket_size": zero.allgather_bucket_size,
        "overlap_comm": overlap,
        "compute_grad_norm": True,
        "load_from_fp32_weights": True,
        "elastic_checkpoint": False,
        "zenflow": None,
        "sub_group_size": 1_000_000_000,
        "stage3_prefetch_bucket_size": zero.prefetch_bucket_size,
        "stage3_param_persistence_threshold": zero.persistence_threshold,
        "stage3_model_persistence_threshold": 9_223_372_036_854_775_807,
        "stage3_max_live_parameters": zero.max_live_parameters,
        "stage3_max_reuse_distance": zero.max_reuse_distance,
        "stage3_gather_16bit_weights_on_model_save": False,
        "stage3_module_granularity_threshold": 0,
        "stage3_use_all_reduce_for_fetch_params": False,
        "stage3_allgather_sequential": False,
        "ignore_unused_parameters": True,
        "legacy_stage1": False,
        "round_robin_gradients": False,
        "parameter_alignment": False,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_nontrainable_weights": False,
        "zero_quantized_gradients": False,
        "memory_efficient_linear": False,
        "pipeline_loading_checkpoint": False,
        "override_module_apply": True,
        "log_trace_cache_warnings": False,
        "enable_sanity_checks": False,
        "save_muon_momentum_buffer_in_memory": False,
        # leaf_module is left out: DeepSpeed warns of an empty list, and its own names classes that are not here.
    }


def _offload_optimizer(zero: Zero) -> dict[str, Any]:
    return {
        "device": zero.offload,
        "nvme_path": zero.nvme_path,
        "buffer_count": 4,
        "pin_memory": True,
        "pipeline_read": False,
        "pipeline_write": False,
        "fast_init": False,
        "ratio": 1.0,
        "super_offload": False,
        "cpuadam_cores_perc": 0.8,
    }


def _offload_param(config: Config, ranks: int) -> dict[str, Any]:
    """With nvme every partition of 1 MiB or more lies on the disk; a buffer holds the largest one."""
    zero, nvme = config.zero, config.zero.offload == "nvme"
    largest = max(ceil(prod(entry.local_shape(config.parallel.tensor)) / ranks) for entry in parameters.table(config.model))
    return {
        "device": zero.offload if zero.stage == 3 else "none",
        "nvme_path": zero.nvme_path,
        "buffer_count": 5,
        "buffer_size": largest if nvme else 100_000_000,
        "max_in_cpu": 0 if nvme else 1_000_000_000,
        "pin_memory": True,
    }


def _switched_off() -> dict[str, Any]:
    """What this framework does itself, or not at all."""
    return {
        "steps_per_print": None,
        "log_level": None,
        "dump_state": False,
        "disable_python_gc": False,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dataloader_drop_last": False,
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
        "flops_profiler": {"enabled": False},
        "comms_logger": {"enabled": False},
        "tensorboard": {"enabled": False},
        "wandb": {"enabled": False},
        "csv_monitor": {"enabled": False},
        "comet": {"enabled": False},
        "autotuning": {"enabled": False},
        "hybrid_engine": {"enabled": False},
        "data_efficiency": {"enabled": False},
        "compile": {"deepcompile": False},
        "tensor_parallel": {"autotp_size": 0},
        "expert_parallel": {"enabled": False},
        "use_data_before_expert_parallelism": False,
        "datastates_ckpt": False,
        "activation_checkpointing": {
            "partition_activations": False,
            "number_checkpoints": None,
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
            "profile": False,
            "cpu_checkpointing": False,
        },
        "checkpoint": {
            "tag_validation": "Fail",
            "load_universal": False,
            "use_node_local_storage": False,
            "parallel_write": {"pipeline_stage": False},
        },
    }
