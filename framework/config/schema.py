"""Every setting of the framework, written once: type, default, meaning, and what a change of it means at resume.

The tree is frozen dataclasses and nothing else: no torch, no OmegaConf, no logic beyond derived numbers.
Each field is made by one of three functions, and the function's name is its tag:

    meaning   decides what is learned: a change at resume is listed and refused unless resume_changes=allow
    layout    decides where it is computed: a change at resume is allowed and noted
    free      decides what is shown, kept or when to stop: a change is nobody's business

conf/README.md is generated from this file (`make docs`). Sizes are in elements, times in seconds unless said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

T = TypeVar("T")


def _setting(tag: str, default: Any, doc: str) -> Any:
    return field(default=default, metadata={"tag": tag, "doc": doc})


def meaning(default: T, doc: str) -> T:
    return _setting("meaning", default, doc)


def layout(default: T, doc: str) -> T:
    return _setting("layout", default, doc)


def free(default: T, doc: str) -> T:
    return _setting("free", default, doc)


def block(cls: type[T]) -> T:
    """A nested block of settings; its own fields carry the tags."""
    return field(default_factory=cls)  # type: ignore[return-value]


@dataclass(frozen=True)
class Model:
    """A decoder: Llama (rmsnorm, rope, swiglu) or GPT-2 (layernorm, learned, gelu), or any mixture of the two."""

    hidden_size: int = meaning(128, "width of the residual stream")
    num_layers: int = meaning(2, "number of blocks")
    num_heads: int = meaning(4, "query heads per block")
    num_kv_heads: int | None = meaning(None, "key and value heads per block (grouped-query attention); null: as many as num_heads")
    head_dim: int | None = meaning(None, "width of one head; null: hidden_size / num_heads")
    ffn_hidden_size: int = meaning(384, "inner width of the feed-forward block")
    vocab_size: int = meaning(256, "number of token ids that the model knows")
    max_positions: int = meaning(1024, "longest sequence that the model can represent, in tokens")
    norm: Literal["rmsnorm", "layernorm"] = meaning("rmsnorm", "normalisation, computed in fp32")
    norm_eps: float = meaning(1e-5, "added to the variance before the root")
    position: Literal["rope", "learned"] = meaning("rope", "rotary or learned absolute positions")
    rope_theta: float = meaning(10000.0, "base of the rotary frequencies")
    rope_scaling: Literal["none", "linear", "llama3"] = meaning("none", "how the rotary frequencies are stretched for longer sequences")
    rope_factor: float = meaning(1.0, "rope_scaling: by how much")
    rope_low_freq: float = meaning(1.0, "llama3: frequencies that turn less often than this in the original length are stretched")
    rope_high_freq: float = meaning(4.0, "llama3: and those that turn more often than this are not")
    rope_original_positions: int = meaning(8192, "llama3: the original length, in tokens")
    mlp: Literal["swiglu", "gelu"] = meaning("swiglu", "gated SiLU (gate, up, down) or tanh-approximated GELU (up, down)")
    bias: bool = meaning(False, "biases in the linear layers (and in layernorm)")
    attention_bias: Literal["none", "qkv", "all"] = meaning(
        "none", "where bias=false, biases in attention alone: of queries, keys and values (Qwen2), or of the output as well"
    )
    qk_norm: bool = meaning(False, "an RMS norm over each query head and each key head, before the rotation (Qwen3)")
    tie_embeddings: bool = meaning(True, "the output head uses the token embedding's weight")
    dropout: float = meaning(0.0, "probability of dropping an element of the embedding, the attention weights and each residual branch")
    init_std: float = meaning(0.02, "standard deviation of the initial weights; residual output layers get init_std / sqrt(2 * num_layers)")
    init_from: str | None = meaning(
        None, "a Hugging Face folder: its config.json says the shape (with model=hf), its weights are where training begins; null: random"
    )

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def qkv_bias(self) -> bool:
        return self.bias or self.attention_bias != "none"

    @property
    def out_bias(self) -> bool:
        return self.bias or self.attention_bias == "all"


@dataclass(frozen=True)
class Data:
    """Where tokens come from and in which order they are read."""

    kind: Literal["pydocs", "kjv", "tokens", "synthetic", "text"] = meaning(
        "pydocs", "a corpus built on first use; tokens: files that exist; text: what framework.prepare makes token files of"
    )
    files: tuple[str, ...] = meaning((), "kind=tokens: paths without .bin/.idx, or globs of such; text: paths, globs, URLs")
    weights: tuple[float, ...] = meaning(
        (), "kind=tokens: the share that each entry of `files` has in what is read, in any unit; empty: the files are one corpus"
    )
    tokenizer: str | None = free(
        None, "framework.prepare, and tasks of framework.evaluate: bytes, or a tokenizer's file or folder (framework/data/tokenizer.py)"
    )
    val_files: tuple[str, ...] = meaning((), "token files held out; empty: the last val_fraction of `files`")
    val_fraction: float = meaning(0.1, "share of the tokens held out at the end when val_files is empty")
    seq_length: int = meaning(128, "tokens per sample")
    shuffle: bool = meaning(True, "visit the samples of an epoch in a seeded random order; false: in the file's order")
    documents: Literal["joined", "apart"] = meaning(
        "joined", "documents in one sample: read as one text, or apart (none attends to another, positions begin anew, no loss across)"
    )
    text: Literal["bytes", "none"] = free("none", "how ids become text again in printed samples")
    synthetic_tokens: int = meaning(1_000_000, "length of the corpus for kind=synthetic, in tokens")
    cache: str = free("runs/.data", "folder for corpora that are built on first use")
    workers: int | None = free(None, "loader processes per rank; null: cores / ranks, at most 8; 0: none, read in the training process")
    prefetch: int = free(4, "batches that each loader process reads ahead")
    log_samples: bool = free(False, "write the global index of every sample of every micro-batch to samples.jsonl")


@dataclass(frozen=True)
class Batch:
    """global_size = micro_size x data ranks x accumulation steps; the last is derived."""

    global_size: int = meaning(32, "samples per optimizer step, over all ranks")
    micro_size: int | Literal["auto"] = layout(4, "samples per forward pass on one rank; auto: the most that fit into memory")

    @property
    def micro(self) -> int:
        """micro_size as a number: `auto` counts as one sample until the trainer has found more."""
        return 1 if self.micro_size == "auto" else self.micro_size


@dataclass(frozen=True)
class Precision:
    """The type of weights and products. Gradients are accumulated in fp32 in every choice."""

    dtype: Literal["fp32", "bf16", "fp16"] = meaning("fp32", "type of the matrix products")
    autocast: bool = meaning(False, "fp32 weights and gradients, cast inside the forward pass; false: half weights with fp32 masters")
    initial_scale_power: int = meaning(16, "fp16: the loss scale starts at 2 to this power")
    scale_window: int = meaning(1000, "fp16: applied steps without overflow before the scale doubles")
    hysteresis: int = meaning(2, "fp16: overflows before the scale halves (not used by fp16_autocast)")
    min_scale: int = meaning(1, "fp16: floor of the loss scale (not used by fp16_autocast)")

    @property
    def half_weights(self) -> bool:
        """Weights are held in half precision beside fp32 masters."""
        return self.dtype != "fp32" and not self.autocast


@dataclass(frozen=True)
class Zero:
    """What DeepSpeed's ZeRO divides over the data ranks."""

    stage: Literal[0, 1, 2, 3] = layout(0, "0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters")
    offload: Literal["none", "cpu", "nvme"] = layout(
        "none", "where optimizer state (and parameters at stage 3) live between uses; nvme: on a local disk, stage 3 only"
    )
    nvme_path: str | None = layout(None, "offload=nvme: a folder on that disk; what lies there is worth nothing after the run")
    overlap_comm: bool = layout(True, "reduce gradients while the backward pass goes on (a pipeline always does it afterwards)")
    reduce_bucket_size: int = layout(50_000_000, "elements per gradient reduction, at most those of the model")
    allgather_bucket_size: int = layout(50_000_000, "elements per gathering of updated parameters (stages 1 and 2)")
    prefetch_bucket_size: int = layout(50_000_000, "elements that stage 3 gathers ahead")
    persistence_threshold: int = layout(100_000, "stage 3 keeps parameters smaller than this gathered")
    max_live_parameters: int = layout(1_000_000_000, "elements that stage 3 keeps gathered at the same time")
    max_reuse_distance: int = layout(1_000_000_000, "stage 3 keeps a parameter that is used again within this many elements")


@dataclass(frozen=True)
class Parallel:
    """Degrees of the four axes; their product is the number of ranks."""

    data: int | None = layout(None, "data ranks; null: ranks / (tensor x pipeline x context)")
    tensor: int = layout(1, "ranks that share each matrix")
    sequence: bool = layout(False, "between the split layers each tensor rank has a slice of the sequence (Megatron's sequence parallel)")
    pipeline: int = layout(1, "ranks that share the blocks")
    partition: Literal["uniform", "parameters", "measured"] = layout(
        "parameters", "pipeline stages are alike in blocks (uniform), in parameters, or in time by a short probe (measured)"
    )
    context: int = layout(1, "ranks that share each sequence")

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one replica of the model together."""
        return self.tensor * self.pipeline * self.context


@dataclass(frozen=True)
class Recompute:
    """Activations that are computed again in the backward pass instead of kept (not to be confused with `checkpoint`)."""

    granularity: Literal["none", "full", "selective", "auto"] = layout(
        "none", "nothing, whole blocks, the kinds of module in `modules`, or those that a probe finds to pay (auto)"
    )
    every: int = layout(1, "full: blocks 0, k, 2k, ... of every k-th block")
    modules: tuple[str, ...] = layout(
        (), "selective: attention, core, mlp, activation, ffn_in, norm, head, or patterns of module names (model/recompute.py)"
    )
    offload: bool = layout(False, "what recomputed parts still keep, their inputs, lies on the host until the backward pass")
    max_extra_time: float = layout(0.10, "auto: recompute until a step takes this share longer")
    min_share: float = layout(0.15, "auto: only kinds that hold more than this share of the activation bytes")


@dataclass(frozen=True)
class Optimizer:
    """The update rule; weight decay falls on matrices only."""

    name: Literal["adamw", "sgd"] = meaning("adamw", "AdamW (Loshchilov & Hutter 2019) or plain SGD with momentum")
    lr: float = meaning(1e-3, "peak learning rate")
    weight_decay: float = meaning(0.1, "decoupled (adamw) or added to the gradient (sgd); on matrices only")
    beta1: float = meaning(0.9, "adamw: decay of the mean of gradients")
    beta2: float = meaning(0.95, "adamw: decay of the mean of squared gradients")
    eps: float = meaning(1e-8, "adamw: added to the root of the second moment")
    momentum: float = meaning(0.0, "sgd: decay of the velocity")


@dataclass(frozen=True)
class Schedule:
    """Learning rate by applied updates (a step skipped for overflow does not count)."""

    name: Literal["cosine", "linear", "wsd", "constant"] = meaning("cosine", "shape after the warm-up")
    warmup_steps: int = meaning(0, "updates over which the rate rises linearly to optimizer.lr")
    total_steps: int = meaning(100, "update at which the decay ends; set it to raise `steps` later without touching the rate")
    min_ratio: float = meaning(0.1, "final rate / peak rate (not used by constant)")
    decay_steps: int = meaning(0, "wsd: length of the linear decay at the end, in updates")


@dataclass(frozen=True)
class Eval:
    """Loss on the held-out tokens; draws nothing from the training random numbers."""

    every: int = free(0, "steps between evaluations; 0: only after the last step; -1: never")
    samples: int = free(0, "held-out samples to read; 0: all")


@dataclass(frozen=True)
class Checkpoint:
    """State kept on disk (not to be confused with `recompute`)."""

    mode: Literal["none", "sync", "async"] = free("async", "none: nothing; sync: the training waits; async: a process beside it writes")
    every: int | Literal["auto"] = free("auto", "steps between saves to disk; auto: as many as make saving cost 5 %; 0: only the last step")
    memory_every: int = free(0, "steps between saves to shared memory, which survive a kill of every process of this host; 0: never")
    mtbf_hours: float | None = free(None, "mean time between failures: every=auto then takes the interval that loses least to both")
    busy: Literal["wait", "skip"] = free("wait", "when a save is due while one is being written: wait for it, or leave the new one out")
    keep_last: int = free(3, "newest checkpoints that stay; 0: all")
    keep_every: int = free(0, "checkpoints of steps divisible by this stay too; 0: none")
    keep_best: int = free(0, "this many checkpoints of the lowest held-out loss stay too")
    optimizer_dtype: Literal["fp32", "bf16", "fp16"] = free("fp32", "of kept moments; bf16, fp16: half the bytes, an inexact resume")
    root: str | None = free(None, "folder or fsspec URL of the checkpoints; null: checkpoints/ in the run folder")


@dataclass(frozen=True)
class Verify:
    """Proof that a run is the run it should be."""

    hash_every: int = free(0, "steps between lines of hashes.jsonl: weights, optimizer, random numbers and data of every rank; 0: none")
    tensors: bool = free(False, "hash every tensor by itself too, so that the first that differs can be named")
    steps: int = free(6, "python -m framework.verify: steps before the first kill, and steps after the last")
    matrix: Literal["none", "full"] = free("none", "full: walk every allowed precision, ZeRO stage and number of loader workers")


@dataclass(frozen=True)
class Alerts:
    """When something is said to go wrong; null switches a limit off. Shares are of the step, medians over `window` steps."""

    window: int = free(10, "steps between two looks at the shares; each alert is given once, and again when it has been over")
    memory: float | None = free(0.80, "share of the device's memory in use at most, of the rank with the most")
    communication: float | None = free(0.30, "share of a step that even the slowest rank waits for communication")
    utilisation_low: float | None = free(0.70, "share of time in which the accelerator computes: less is an alert (none on a CPU)")
    utilisation_high: float | None = free(0.95, "and so is more: no room is left for a slower step")
    data_wait: float | None = free(0.10, "share of a step that the slowest rank waits for data")
    recompute: float | None = free(0.15, "share of a step that computes again, where less than half of `memory` is in use")
    straggler: float | None = free(1.30, "work of the slowest rank in a step, as a multiple of the median rank's")
    loss_spike: float | None = free(6.0, "loss above the median of the last 50 steps, in standard deviations of theirs")
    grad_spike: float | None = free(10.0, "the same for the gradient norm")
    nan: bool = free(True, "a loss or a gradient norm that is not finite (where fp16 skips a step it is `skipped` that counts)")
    skipped: int = free(4, "steps skipped in a row, or a loss scale at its floor; 0: never")
    drift_every: int = free(0, "steps between comparisons of the weights that data ranks hold alike; 0: never")
    actions: tuple[str, ...] = free(
        (), "ALERT:ACTION beside the line in events.jsonl; ALERT or all; ACTION is webhook, wandb, skip, rollback or stop"
    )
    rollbacks: int = free(3, "rollbacks of one run, at most; then it stops")


@dataclass(frozen=True)
class Monitor:
    """What is shown and where it is sent. metrics.jsonl is always written."""

    console: Literal["auto", "rich", "plain", "none"] = free("auto", "auto: rich on a terminal, plain lines elsewhere")
    every: int = free(10, "steps between plain console lines")
    curve: bool = free(True, "draw the loss curve in the terminal at the end")
    sample_tokens: int = free(0, "length of the text that the model writes at the end, in tokens; 0: none")
    sample_prompt: str = free("The ", "how that text begins")
    wandb: bool = free(False, "send metrics to Weights & Biases (WANDB_MODE=offline|disabled is honoured)")
    wandb_project: str = free("framework", "project that the run is listed under")
    tensorboard: bool = free(False, "write event files for TensorBoard to tensorboard/ in the run folder")
    prometheus: int | None = free(None, "TCP port where the first rank shows the newest numbers as text for Prometheus; 0: a free one")
    prometheus_host: str = free("127.0.0.1", "address that it listens on")
    webhook: str | None = free(None, "URL that alerts with the action webhook are sent to, as JSON by POST")


@dataclass(frozen=True)
class Profile:
    """Where the time goes, in three depths. metrics.jsonl has the parts of every step in each of them."""

    level: Literal["timers", "ops", "kernels"] = free(
        "timers", "timers: the parts of a step; ops: and the ten dearest operators; kernels: and each against the roofline, with a trace"
    )
    first: int = free(10, "ops, kernels: the first step of the window, counted from the start of the ranks")
    steps: int = free(3, "ops, kernels: steps of the window")
    rank: int = free(0, "ops, kernels: the rank that is looked at")


@dataclass(frozen=True)
class Adapter:
    """Parameters trained beside a frozen model."""

    kind: Literal["none"] = meaning("none", "kind of adapter")


@dataclass(frozen=True)
class Limits:
    """When a run stops before its last step: complete, with a checkpoint and exit code 75; and how much memory it may take."""

    wall_time: float | None = free(None, "seconds after which the run stops, counted from the start of its processes; null: never")
    memory_gib: float | None = free(None, "GiB that a rank may take for its model and its steps; null: what the device has")


@dataclass(frozen=True)
class Launch:
    """How processes use the machine."""

    num_procs: int | None = free(None, "ranks that a program starts by itself; null: one (train), the hostfile's, or the model's ranks")
    hostfile: str | None = free(None, "a file of lines `HOST slots=N`: one run over many hosts; null: this host")
    include: str = free("", "of the hostfile only these, in DeepSpeed's words: host1:0,1@host2")
    exclude: str = free("", "of the hostfile all but these, in the same words")
    launcher: Literal["pdsh", "openmpi", "mpich", "slurm", "no_ssh"] = free(
        "pdsh", "what starts the ranks of other hosts; no_ssh: nobody, the same command is given on each host, with its node_rank"
    )
    node_rank: int | None = free(None, "launcher=no_ssh: place of this host in the hostfile, from 0")
    master_addr: str | None = free(None, "address of the first host; null: DeepSpeed asks it")
    master_port: int | None = free(None, "TCP port where the ranks meet; null: a free one (this host), 29500 (many hosts)")
    dry_run: bool = free(False, "print what would be started, and start nothing")
    print: Literal["none", "sbatch", "k8s"] = free("none", "print a Slurm script or a Kubernetes job to submit, and start nothing")
    supervise: bool = free(False, "watch the ranks; after a crash, a lost rank or a hang start again from the newest complete state")
    restarts: int = free(3, "supervise: starts after the first one, at most")
    hang_factor: float = free(50.0, "supervise: a step that takes this many times the P99 step time is a hang")
    hang_least: float = free(60.0, "supervise: seconds that a step may take in any case")
    elastic: bool = free(False, "supervise: start again on the ranks that are left, with the same global batch")
    threads: int | None = free(None, "CPU threads per rank; null: cores / ranks on this host")
    parallel_jobs: int = free(1, "a sweep (-m): jobs at the same time; they share cores or devices without overlap")
    job_limit: float | None = free(None, "a sweep (-m): seconds after which a job is stopped; null: never")
    fail_fast: bool = free(False, "a sweep (-m): stop the other jobs when one has failed")
    objective: Literal["train.loss", "eval.loss"] = free("train.loss", "a sweep (-m): what its sweeper minimises")
    timeout: float = free(600.0, "seconds that a collective may wait for a rank before the run fails")
    shm_comm: bool = free(False, "compile DeepSpeed's shared-memory collectives for CPU ranks (minutes at the first start)")


@dataclass(frozen=True)
class Plan:
    """python -m framework.plan: memory, time and layouts on paper, before anything runs."""

    world_size: int | None = free(None, "ranks to plan for; null: launch's, or one replica's")
    ranks_per_host: int | None = free(None, "ranks that share a host; null: the hardware's devices, at most world_size")
    hardware: str = free("auto", "what to plan for, a name of the hardware table; auto: the CPU of this machine")
    format: Literal["text", "json"] = free("text", "for people, or for programs")
    build: bool = free(False, "build the model of each pipeline stage without memory, and hold it against the Ledger")
    search: bool = free(False, "search all layouts of world_size ranks and rank those that fit by time")
    explain: bool = free(False, "search: say of every layout that was left out why")
    show: int = free(10, "search: layouts that are listed")
    probe: int = free(0, "search: really run this many of the best for a few steps, and report estimate against measurement")
    write: str | None = free(None, "search: write the first choice as a recipe to this file")


@dataclass(frozen=True)
class Convert:
    """python -m framework.convert: what to make of a run's newest checkpoint."""

    to: Literal["weights", "hf"] = free(
        "weights", "framework.convert: weights: the model alone, whole tensors in safetensors files; hf: a folder for from_pretrained"
    )
    out: str | None = free(None, "framework.convert: the folder to make")
    dtype: Literal["fp32", "bf16", "fp16"] = free("fp32", "framework.convert: type of the weights")


@dataclass(frozen=True)
class Prepare:
    """python -m framework.prepare: texts to a token file."""

    out: str | None = free(None, "path of the token file to make, without .bin/.idx")
    workers: int | None = free(None, "processes that encode; null: as many as there are cores")
    field: str = free("text", ".jsonl: field with the text; .parquet: column")
    separator: str | None = free(None, ".txt: what stands between two documents (\\n is a newline); null: one document per file")
    end_of_document: str = free("auto", "token behind each document: auto (the tokenizer's own), none, or the token as text")
    bad_utf8: Literal["refuse", "replace", "skip"] = free("refuse", "what is not UTF-8: end, put U+FFFD there, or leave the document out")
    max_tokens: int | None = free(None, "tokens above which a document is over-long; null: none is")
    over_long: Literal["skip", "split"] = free("skip", "such a document: leave it out, or make several of it")
    dedup: bool = free(False, "leave out a document whose text was there before")
    part_mib: float = free(64.0, "MiB of text after which the work is made safe against a kill")


@dataclass(frozen=True)
class Evaluate:
    """python -m framework.evaluate: tasks of lm-evaluation-harness instead of the run's perplexity."""

    tasks: tuple[str, ...] = free((), "names or YAML files of tasks (package lm_eval); none: perplexity on token files")
    num_fewshot: int | None = free(None, "solved examples before each question; null: what the task says")
    limit: int | None = free(None, "questions of each task at most; null: all")
    max_length: int | None = free(
        None, "tokens seen at once; null: the run's data.seq_length, or model.max_positions where it began from a published model"
    )
    out: str | None = free(None, "a JSON file to write the numbers to")


@dataclass(frozen=True)
class Report:
    """python -m framework.report: a run as one page."""

    out: str | None = free(None, "framework.report: the page to write; null: report.html in the run folder")


@dataclass(frozen=True)
class Config:
    """The root. One object of this class is the whole truth about a run."""

    name: str = free("run", "identity of the run: its folder is ${output_root}/${name}")
    seed: int = meaning(1, "of initial weights, order of samples and dropout")
    steps: int = free(100, "optimizer steps (loop turns) to train")
    engine: Literal["deepspeed", "plain"] = layout("deepspeed", "`plain`: one process, fp32, no DeepSpeed: the oracle of the tests")
    compile: Literal["none", "blocks"] = layout("none", "torch.compile each block")
    clip_grad_norm: float = meaning(1.0, "gradients are scaled down to this global L2 norm; 0: never")
    output_root: str = free("runs", "folder of all runs")
    run: str | None = free(None, "run folder (of framework.convert also one of its checkpoints) that convert, report and evaluate read")
    against: str | None = free(None, "framework.report: a second run folder, to compare with")
    resume: str = free("auto", "auto: the newest checkpoint if any; must: one; never: NAME becomes NAME.old-k; or a path")
    resume_changes: Literal["refuse", "allow"] = free("refuse", "whether a run may go on with other `meaning` settings")
    batch: Batch = block(Batch)
    eval: Eval = block(Eval)
    model: Model = block(Model)
    data: Data = block(Data)
    precision: Precision = block(Precision)
    zero: Zero = block(Zero)
    parallel: Parallel = block(Parallel)
    recompute: Recompute = block(Recompute)
    optimizer: Optimizer = block(Optimizer)
    schedule: Schedule = block(Schedule)
    checkpoint: Checkpoint = block(Checkpoint)
    verify: Verify = block(Verify)
    monitor: Monitor = block(Monitor)
    alerts: Alerts = block(Alerts)
    profile: Profile = block(Profile)
    adapter: Adapter = block(Adapter)
    limits: Limits = block(Limits)
    launch: Launch = block(Launch)
    plan: Plan = block(Plan)
    convert: Convert = block(Convert)
    prepare: Prepare = block(Prepare)
    evaluate: Evaluate = block(Evaluate)
    report: Report = block(Report)

    @property
    def run_dir(self) -> str:
        return f"{self.output_root}/{self.name}"
