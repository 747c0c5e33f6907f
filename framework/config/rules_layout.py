"""Rules of where and how a model is computed: ranks, precision, ZeRO, the four axes, recompute. Pure functions of a case."""

from __future__ import annotations

import math

from framework.config.case import Case, Offence, Rule
from framework.config.schema import Recompute


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
    got = f"global {batch.global_size}, micro {batch.micro} x data {case.data_ranks} x accumulation {steps:.3g}"
    return Offence("batch.global_size", got, f"batch.global_size={max(1, round(steps)) * at_once}")


def micro_batch(case: Case) -> Offence | None:
    """batch.micro_size is a number of samples, 1 or more, or auto"""
    given = case.config.batch.micro_size
    if given == "auto" or given >= 1:
        return None
    return Offence("batch.micro_size", str(given), "batch.micro_size=auto")


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


def nvme_place(case: Case) -> Offence | None:
    """offload=nvme is of ZeRO stage 3, and has a folder, zero.nvme_path, which nothing else has"""
    zero = case.config.zero
    if zero.offload != "nvme":
        return None if zero.nvme_path is None else Offence("zero.nvme_path", f"given with offload {zero.offload}", "zero.nvme_path=null")
    if zero.stage < 3:
        return Offence("zero.offload", f"nvme with zero.stage {zero.stage}", f"zero=stage{max(2, zero.stage)}_offload zero.nvme_path=null")
    return Offence("zero.nvme_path", "null with offload nvme", "zero.nvme_path=FOLDER") if zero.nvme_path is None else None


def nvme_buffers(case: Case) -> Offence | None:
    """with offload=nvme a gathered parameter holds one of five buffers: none is gathered ahead or kept"""
    zero = case.config.zero
    kept = {word: getattr(zero, word) for word in ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")}
    word = next((word for word, value in kept.items() if value > 0), None)
    if zero.offload != "nvme" or word is None:
        return None
    return Offence(f"zero.{word}", f"{kept[word]} with offload nvme", f"zero.{word}=0, as zero=stage3_nvme has it")


def nvme_state(case: Case) -> Offence | None:
    """masters and moments that offload=nvme keeps on the disk are neither saved nor hashed: no checkpoints, no hashes.jsonl"""
    c = case.config
    if c.zero.offload != "nvme" or (c.checkpoint.mode == "none" and c.verify.hash_every == 0):
        return None
    got = f"nvme with checkpoint.mode {c.checkpoint.mode}, verify.hash_every {c.verify.hash_every}"
    return Offence("zero.offload", got, "checkpoint=none verify.hash_every=0, or zero=stage3_offload zero.nvme_path=null")


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


def attention_bias(case: Case) -> Offence | None:
    """attention_bias is for a model whose linear layers have no biases otherwise"""
    model = case.config.model
    if model.attention_bias == "none" or not model.bias:
        return None
    return Offence("model.attention_bias", f"{model.attention_bias} with bias true", "model.attention_bias=none")


def rope_words(case: Case) -> Offence | None:
    """rope_scaling needs rotary positions, rope_factor a rope_scaling, and llama3 a rope_low_freq below rope_high_freq"""
    model = case.config.model
    if model.rope_scaling != "none" and model.position != "rope":
        return Offence("model.rope_scaling", f"{model.rope_scaling} with position {model.position}", "model.rope_scaling=none")
    if model.rope_scaling == "none" and model.rope_factor != 1:
        return Offence("model.rope_factor", f"{model.rope_factor} with rope_scaling none", "model.rope_scaling=linear")
    if model.rope_scaling == "llama3" and model.rope_low_freq >= model.rope_high_freq:
        got = f"{model.rope_low_freq} with rope_high_freq {model.rope_high_freq}"
        return Offence("model.rope_low_freq", got, "a lower one")
    return None


def init_from(case: Case) -> Offence | None:
    """model=hf takes its settings from the config.json in the folder model.init_from"""
    if case.config.model.init_from != "":
        return None
    return Offence("model.init_from", "nothing", "the name of a Hugging Face folder")


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


LAYOUT: tuple[Rule, ...] = (
    world, micro_batch, global_batch, half_weights_stage0, autocast_fp32, fp16_autocast_stage, pipeline_zero, pipeline_scaler,
    offload_stage, nvme_place, nvme_buffers, nvme_state, pipeline_blocks, tensor_host, sequence_parallel, heads, kv_heads, head_width,
    attention_bias, rope_words, init_from, ffn_width, vocabulary, sequence, positions, plain_engine, recompute_words,
)  # fmt: skip
