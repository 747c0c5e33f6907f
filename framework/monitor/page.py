"""The words and numbers that people see, as plain text that fits a width: head, table of steps, foot. Prints nothing itself.

Plain ASCII, so that every log file and terminal can show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framework.config.schema import Config, Model

if TYPE_CHECKING:  # the words need no torch
    from framework.monitor.meters import EvalRecord, Meter, TrainRecord

Row = tuple[str, Sequence[str]]
INDENT, LABEL = 2, 10


@dataclass(frozen=True)
class Facts:
    """What is known of the run beside its settings, once it is built.

    `parameters` are the logical parameters of the whole model, `tokens` and `held_out_tokens` the sizes of the two parts of the
    corpus, `first_step` the step that this start begins with (1, or later when it goes on), `device` its name for people, `peak`
    the FLOP/s of all ranks together on large matrices of the run's precision, None where that is not known, `mixture` (corpus, its
    share of the samples, its epochs in the whole run) where corpora take turns.
    """

    parameters: int
    ranks: int
    device: str
    tokens: int
    held_out_tokens: int
    first_step: int = 1
    peak: float | None = None
    mixture: Sequence[tuple[str, float, float]] = ()


@dataclass(frozen=True)
class Moment:
    """What a line about one step is made of."""

    record: TrainRecord
    steps: int
    meter: Meter

    @property
    def eta_s(self) -> float:
        return self.meter.eta_s(self.steps - self.record.step)


@dataclass(frozen=True)
class MemoryRow:
    """One book of the Ledger, in bytes; `measured` is None where this machine cannot say."""

    book: str
    predicted: int
    measured: int | None = None

    @property
    def error(self) -> float | None:
        """What the prediction is off, as a share of what was measured."""
        if self.measured is None or self.measured == self.predicted:
            return None if self.measured is None else 0.0
        return self.predicted / self.measured - 1 if self.measured else 1.0


def memory_lines(rank: int, rows: Sequence[MemoryRow], peak: int, machine: Mapping[str, int]) -> list[str]:
    """The Ledger of one rank as a table, and what the machine says of it."""
    lines = [f"{f'memory of rank {rank}':<16}{'predicted':>12}{'measured':>12}  error"]
    for row in rows:
        measured = "-" if row.measured is None else size(row.measured)
        error = "" if row.error is None else "exact" if row.error == 0 else f"{100 * row.error:+.1f} %"
        lines.append(f"  {row.book:<14}{size(row.predicted):>12}{measured:>12}  {error}".rstrip())
    lines.append(f"  {'peak':<14}{size(peak):>12}{size(machine['allocated_peak']) if 'allocated_peak' in machine else '-':>12}")
    if "resident" in machine:
        lines.append(f"  resident {size(machine['resident'])}, at most {size(machine['resident_peak'])}, with Python and its libraries")
    if "reserved_peak" in machine:
        idle, retries = size(machine["fragmented"]), machine["retries"]
        lines.append(f"  reserved {size(machine['reserved_peak'])}, of it {idle} in pieces, {retries} retries")
    return lines


def operator_lines(rank: int, steps: int, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of ops.json as a table, of one step."""
    lines = [f"{f'operators of rank {rank}, a step of {steps}':<44}{'calls':>7}{'ms':>9}  share  shapes"]
    for row in rows:
        shapes = " ".join(str(shape).replace(" ", "") for shape in row["shapes"] if shape)
        figures = f"{row['calls']:>7.0f}{1e3 * row['self_s']:>9.2f} {100 * row['share']:>5.1f}%"
        lines.append(f"  {row['name'][:42]:<42}{figures}  {shapes}".rstrip())
    return lines


def short(number: float) -> str:
    """A count in four to five characters: 950, 19.5k, 1.23M, 8.03B."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * limit:
            return f"{number / limit:#.3g}".rstrip(".") + unit
    return f"{number:.0f}"


def size(count: float) -> str:
    """Bytes for people: 512 MiB, 1.23 GiB."""
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= 0.9995 * limit:
            value = count / limit
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:#.3g} {unit}"
    return f"{count:.0f} B"


def span(seconds: float) -> str:
    """A duration: 0:42, 12:05, 3:25:45, 2d 03:25."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, left = divmod(hours, 24)
    if days:
        return f"{days}d {left:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float) -> str:
    """A loss or a norm with four figures, in at most nine characters: 2.1034, 153.20, 1.532e+06, nan."""
    if abs(value) < 100:
        return f"{value:.4f}"
    return f"{value:.2f}" if abs(value) < 10000 else f"{value:.3e}"


def unit_of(config: Config) -> str:
    """What a loss counts: nats per byte where tokens are bytes."""
    return "byte" if config.data.text == "bytes" else "token"


def _model_words(model: Model, parameters: int) -> list[str]:
    words = [f"{short(parameters)} parameters", f"{model.num_layers} blocks", f"hidden {model.hidden_size}", f"{model.num_heads} heads"]
    if model.kv_heads != model.num_heads:
        words.append(f"{model.kv_heads} kv heads")
    return [*words, f"vocabulary {model.vocab_size:,}"]


def head(config: Config, facts: Facts) -> list[Row]:
    """What is about to happen, as labelled rows."""
    batch, parallel = config.batch, config.parallel
    data_ranks = facts.ranks // parallel.model_ranks
    accumulation = batch.global_size // (batch.micro * data_ranks)
    degrees = {"data": data_ranks, "tensor": parallel.tensor, "pipeline": parallel.pipeline, "context": parallel.context}
    layout = " x ".join(f"{degree} {axis}" for axis, degree in degrees.items() if degree > 1 or axis == "data")
    per_step = batch.global_size * config.data.seq_length
    precision = config.precision.dtype + (" autocast" if config.precision.autocast else "")
    offload = "" if config.zero.offload == "none" else f", offload to {config.zero.offload}"
    engine = f"ZeRO {config.zero.stage}{offload}" if config.engine == "deepspeed" else "plain engine"
    left = max(0, config.steps - facts.first_step + 1)
    steps = f"{left:,} steps" if facts.first_step == 1 else f"{left:,} of {config.steps:,} steps left"
    return [
        ("folder", [config.run_dir]),
        ("model", _model_words(config.model, facts.parameters)),
        ("ranks", [f"{facts.ranks} = {layout}", facts.device, precision, engine]),
        ("batch", [f"{batch.global_size} samples = {batch.micro} micro x {data_ranks} data x {accumulation} accumulation"]),
        ("length", [steps, f"{per_step:,} tokens each", f"{short(left * per_step)} tokens in all"]),
        ("data", [config.data.kind, f"{short(facts.tokens)} tokens", f"{short(facts.held_out_tokens)} held out",
                  f"{config.data.seq_length} {unit_of(config)}s a sample"]),
        *([("mixture", [f"{name} {100 * share:.3g} % ({epochs:.2f} epochs)" for name, share, epochs in facts.mixture])]
          if facts.mixture else []),
    ]  # fmt: skip


def lay_out(rows: Sequence[Row], width: int) -> list[str]:
    """Rows as lines of at most `width` columns: a label, then its parts; parts that do not fit go on below one another."""
    lines = []
    for label, parts in rows:
        line = " " * INDENT + label.ljust(LABEL)
        for position, part in enumerate(parts):
            piece = part if position == 0 else f", {part}"
            comma = position < len(parts) - 1
            if position and len(line) + len(piece) + comma > width:
                lines.append(f"{line},")
                line, piece = " " * (INDENT + LABEL), part
            line += piece
        lines.append(line if len(line) <= width else line[: width - 3] + "...")
    return lines


@dataclass(frozen=True)
class Column:
    """One column of the table: `keep` says how long it stays when room is short, the lowest goes first."""

    title: str
    width: int
    keep: int
    cell: Callable[[Moment], str]


def columns(config: Config, width: int) -> list[Column]:
    """The columns that fit into `width`, in their order."""
    digits = len(str(config.steps))
    table = [
        Column("step", max(4, 2 * digits + 1), 9, lambda now: f"{now.record.step}/{now.steps}"),
        Column(f"nats/{unit_of(config)}", 10, 9, lambda now: number(now.record.loss)),
        Column("lr", 8, 5, lambda now: f"{now.record.lr:.2e}"),
        Column("grad norm", 9, 3, lambda now: number(now.record.grad_norm)),
        Column("tokens/s", 8, 7, lambda now: short(now.meter.tokens_per_s)),
        Column("s/step", 7, 1, lambda now: f"{now.meter.step_time_s:.3f}"),
        Column("memory", 8, 2, lambda now: size(now.record.memory_bytes)),
        Column("eta", 8, 6, lambda now: span(now.eta_s)),
    ]
    while sum(column.width + 2 for column in table) - 2 > width and min(column.keep for column in table) < 9:
        table.remove(min(table, key=lambda column: column.keep))
    return table


def table_line(table: Sequence[Column], moment: Moment | None) -> str:
    """One line of the table, numbers to the right; the titles when there is no moment."""
    cells = [column.title if moment is None else column.cell(moment) for column in table]
    return "  ".join(cell.rjust(column.width) for cell, column in zip(cells, table, strict=True))


def eval_line(table: Sequence[Column], record: EvalRecord, steps: int) -> str:
    """An evaluation as a line of the same table: step and loss in their columns, then words."""
    step, loss = (text.rjust(column.width) for text, column in zip((f"{record.step}/{steps}", number(record.loss)), table, strict=False))
    return f"{step}  {loss}  held out, {record.samples:,} samples in {span_s(record.time_s)}"


def skip_line(count: int, loss_scale: float) -> str:
    """What is said of steps that changed nothing."""
    steps = "1 step" if count == 1 else f"{count} steps"
    return f"skipped {steps}: gradients overflowed, loss scale {loss_scale:,.0f}"


def span_s(seconds: float) -> str:
    """A short duration with a fraction, a longer one as on a clock: 1.2 s, 2:05."""
    return f"{seconds:.1f} s" if seconds < 60 else span(seconds)


def foot(last: Moment | None, held_out: dict[int, float], unit: str, seconds: float, folder: str) -> list[Row]:
    """How it went: last loss, held-out losses (step -> loss), speed, time of this start [s], where things lie."""
    rows: list[Row] = []
    if last is not None:
        rows.append(("train", [f"{number(last.record.loss)} nats per {unit}", f"step {last.record.step:,}"]))
    if held_out:
        final, best = max(held_out), min(held_out, key=lambda step: (held_out[step] != held_out[step], held_out[step]))
        words = [f"{number(held_out[final])} nats per {unit}", f"step {final:,}"]
        rows.append(("held out", words if best == final else [*words, f"best {number(held_out[best])} at step {best:,}"]))
    if last is not None:
        speed = [f"{short(last.meter.tokens_per_s)} tokens/s", f"{last.meter.step_time_s:.3f} s a step"]
        speed += [f"P99 {last.meter.quantile(0.99):.3f} s"]
        speed += [] if last.record.mfu is None else [f"MFU {100 * last.record.mfu:.0f} %"]
        rows.append(("speed", [*speed, f"{size(last.record.memory_bytes)} at most"]))
    return [*rows, ("time", [span_s(seconds)]), ("folder", [folder])]
