"""How small and how large a number may be, for each setting that is one. Data alone; check.py looks at it."""

from __future__ import annotations

RANGES: dict[str, tuple[float | None, float | None]] = {
    "seed": (0, None), "steps": (1, None), "clip_grad_norm": (0, None), "eval.every": (-1, None), "eval.samples": (0, None),
    "batch.global_size": (1, None),
    "model.hidden_size": (1, None), "model.num_layers": (1, None), "model.num_heads": (1, None), "model.num_kv_heads": (1, None),
    "model.head_dim": (1, None), "model.ffn_hidden_size": (1, None), "model.vocab_size": (1, None), "model.max_positions": (1, None),
    "model.norm_eps": (0, None), "model.rope_theta": (1, None), "model.rope_factor": (1, None), "model.rope_low_freq": (0.001, None),
    "model.rope_high_freq": (0.001, None), "model.rope_original_positions": (1, None),
    "model.dropout": (0, 0.99), "model.init_std": (0, None),
    "data.seq_length": (1, None), "data.val_fraction": (0, 0.9), "data.synthetic_tokens": (2, None), "data.workers": (0, None),
    "data.prefetch": (1, None),
    "precision.initial_scale_power": (0, 32), "precision.scale_window": (1, None), "precision.hysteresis": (1, None),
    "precision.min_scale": (1, None),
    "zero.reduce_bucket_size": (1, None), "zero.allgather_bucket_size": (1, None), "zero.prefetch_bucket_size": (0, None),
    "zero.persistence_threshold": (0, None), "zero.max_live_parameters": (0, None), "zero.max_reuse_distance": (0, None),
    "parallel.data": (1, None), "parallel.tensor": (1, None), "parallel.pipeline": (1, None), "parallel.context": (1, None),
    "recompute.every": (1, None), "recompute.max_extra_time": (0, None), "recompute.min_share": (0, 1),
    "optimizer.lr": (0, None), "optimizer.weight_decay": (0, None), "optimizer.beta1": (0, 0.9999999), "optimizer.beta2": (0, 0.9999999),
    "optimizer.eps": (0, None), "optimizer.momentum": (0, 1),
    "schedule.warmup_steps": (0, None), "schedule.total_steps": (1, None), "schedule.min_ratio": (0, 1), "schedule.decay_steps": (0, None),
    "checkpoint.memory_every": (0, None), "checkpoint.mtbf_hours": (0.001, None), "checkpoint.keep_last": (0, None),
    "checkpoint.keep_every": (0, None), "checkpoint.keep_best": (0, None), "verify.hash_every": (0, None), "verify.steps": (2, None),
    "monitor.every": (1, None), "monitor.sample_tokens": (0, None), "launch.num_procs": (1, None),
    "limits.wall_time": (0, None), "limits.memory_gib": (0.001, None), "launch.threads": (1, None), "launch.timeout": (1, 31_536_000),
    "launch.parallel_jobs": (1, None), "launch.job_limit": (0, None),
    "launch.node_rank": (0, None), "launch.master_port": (1, 65_535), "launch.restarts": (0, None), "launch.hang_factor": (1, None),
    "launch.hang_least": (0, None), "plan.world_size": (1, None), "plan.ranks_per_host": (1, None), "plan.show": (1, None),
    "plan.probe": (0, None),
    "alerts.window": (2, None), "alerts.memory": (0, 1), "alerts.communication": (0, 1), "alerts.utilisation_low": (0, 1),
    "alerts.utilisation_high": (0, 1), "alerts.data_wait": (0, 1), "alerts.recompute": (0, 1), "alerts.straggler": (1, None),
    "alerts.loss_spike": (1, None), "alerts.grad_spike": (1, None), "alerts.skipped": (0, None), "alerts.drift_every": (0, None),
    "alerts.rollbacks": (0, None), "monitor.prometheus": (0, 65_535),
    "prepare.workers": (1, 1024), "prepare.max_tokens": (1, None), "prepare.part_mib": (0.001, None),
    "profile.first": (1, None), "profile.steps": (1, None), "profile.rank": (0, None),
}  # fmt: skip
"""key: (least, greatest) value allowed, both included; None: no limit. A key set to null is not looked at."""
