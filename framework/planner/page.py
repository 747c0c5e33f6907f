"""A plan to read, for people and for programs. Sizes are bytes of one rank, times seconds of one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from framework.config import parameters
from framework.config.schema import Config
from framework.planner.advice import Advice, Judged
from framework.planner.cost import PARTS, seconds
from framework.planner.hardware import SHARE, Site
from framework.planner.search import Findings, Found, describe, recompute_words
from framework.planner.work import model_flop

WIDTH = 100
GB = 1e9


def facts(now: Judged, site: Site, advice: Sequence[Advice]) -> dict[str, Any]:
    """Everything as one object for JSON."""
    host = sum(now.ledger.host.values())
    return {
        "layout": layout_facts(now, site),
        "batch": batch(now),
        "dtypes": dtypes(now.config),
        "ledger": now.ledger.rows(),
        "time": {**now.time, "step": seconds(now.time)},
        "rates": rates(now, site),
        "verdict": {
            "fits": not now.reason,
            "text": now.reason or "fits",
            "device_bytes": now.ledger.total,
            "device_limit": int(SHARE * site.memory),
            "host_bytes": host,
            "host_limit": int(SHARE * site.host_memory),
        },
        "advice": [vars(entry) for entry in advice],
    }


def layout_facts(now: Judged, site: Site) -> dict[str, Any]:
    """Where everything is computed."""
    config, grid = now.config, now.grid
    return {
        "hardware": site.hardware.name,
        "ranks": grid.size,
        "ranks_per_host": site.ranks_per_host,
        "data": grid.data,
        "tensor": grid.tensor,
        "sequence": config.parallel.sequence,
        "pipeline": grid.pipeline,
        "context": grid.context,
        "zero": config.zero.stage,
        "offload": config.zero.offload,
        "recompute": recompute_words(config.recompute),
    }


def batch(now: Judged) -> dict[str, int]:
    """The effective batch and what it is made of."""
    given = now.config.batch
    return {
        "global_size": given.global_size,
        "micro_size": given.micro,
        "data_ranks": now.grid.data,
        "accumulation_steps": given.global_size // (given.micro * now.grid.data),
        "tokens": given.global_size * now.config.data.seq_length,
    }


def dtypes(config: Config) -> dict[str, str]:
    """The type of every buffer."""
    precision = config.precision
    weights = precision.dtype if precision.half_weights else "fp32"
    found = {"parameters": weights, "gradients": weights}
    if precision.half_weights:
        found["accumulation"] = "fp32"
    if precision.half_weights or config.zero.stage > 0:
        found["masters"] = "fp32"
    if config.optimizer.name == "adamw" or config.optimizer.momentum > 0:
        found["moments"] = "fp32"
    return {**found, "products": precision.dtype, "residual stream": weights, "loss": "fp32", "gradients between ranks": "fp32"}


def rates(now: Judged, site: Site) -> dict[str, float]:
    """Tokens per second over all ranks, and the share of the devices' peak that the model's own products are."""
    step, config, hardware = seconds(now.time), now.config, site.hardware
    devices = now.grid.size / site.ranks_per_host * hardware.cores if hardware.shared else now.grid.size
    peak = devices * hardware.products[config.precision.dtype]
    return {
        "tokens_per_s": batch(now)["tokens"] / step,
        "model_flop_utilisation": model_flop(config) * config.batch.global_size / step / peak,
    }


def text(now: Judged, site: Site, advice: Sequence[Advice]) -> str:
    """The page for people."""
    return "\n".join(_lines(now, site, advice))


def _lines(now: Judged, site: Site, advice: Sequence[Advice]) -> Iterator[str]:
    config, hardware, at = now.config, site.hardware, layout_facts(now, site)
    yield f"{config.name}: {parameters.count(config.model):,} parameters, {at['ranks']} ranks, {at['ranks_per_host']} on a host"
    yield f"  {hardware.name}, {size(site.memory)} each"
    yield from _wrapped("rates: ", hardware.source)
    yield from _wrapped("", hardware.reached.source)
    sequence = " (sequence sliced)" if at["sequence"] else ""
    yield ""
    yield f"layout    data {at['data']} x tensor {at['tensor']}{sequence} x pipeline {at['pipeline']} x context {at['context']}"
    yield f"          ZeRO stage {at['zero']}, offload {at['offload']}, recompute {at['recompute']}"
    yield "batch     {global_size} = micro {micro_size} x data {data_ranks} x accumulation {accumulation_steps}; {tokens:,} tokens".format(
        **batch(now)
    )
    yield ""
    yield from _memory(now)
    yield f"  {'device, at the fullest moment':<42}{size(now.ledger.total):>12}  of {size(SHARE * site.memory)} ({SHARE:.0%})"
    if now.ledger.host:
        yield f"  {'host':<42}{size(sum(now.ledger.host.values())):>12}  of {size(SHARE * site.host_memory)}"
    yield ""
    yield from _time(now, site)
    yield ""
    yield f"verdict   {'does not fit: ' + now.reason if now.reason else 'fits'}"
    yield from _advice(advice, bool(now.reason))


def _memory(now: Judged) -> Iterator[str]:
    kinds = dtypes(now.config)
    yield f"{'memory of the fullest rank':<32}{'type':<12}{'bytes':>12}"
    for book, nbytes in now.ledger.rows().items():
        host = now.ledger.host.get(book, 0)
        place = "" if not host else "  on the host" if host == nbytes else f"  {size(host)} of it on the host"
        yield f"  {book:<30}{kinds.get(book, ''):<12}{size(nbytes):>12}{place}"


def size(nbytes: float) -> str:
    """A number of bytes to read."""
    unit, name = (GB, "GB") if abs(nbytes) >= GB else (1e6, "MB")
    return f"{nbytes / unit:,.2f} {name}"


def _time(now: Judged, site: Site) -> Iterator[str]:
    whole, found = seconds(now.time), rates(now, site)
    yield f"{'time of a step':<16}{'s':>10}"
    for part, each in now.time.items():
        if each > 0:
            yield f"  {part:<14}{each:>10.4f}{each / whole:>6.0%}  {PARTS[part]}"
    yield f"  {'step':<14}{whole:>10.4f}        {found['tokens_per_s']:,.0f} tokens/s, {found['model_flop_utilisation']:.0%} of the peak"


def _advice(advice: Sequence[Advice], needed: bool) -> Iterator[str]:
    if not advice:
        yield f"advice    {'no single change makes it smaller' if needed else 'no single change makes it faster'}"
        return
    yield f"advice    {'what makes it smaller, in the order of cost' if needed else 'what fits too, and is faster'}"
    for entry in advice:
        saved = f"saves {size(entry.saves)}" if entry.saves >= 0 else f"takes {size(-entry.saves)}"
        yield f"  {entry.what:<46}{saved:>18}  {entry.costs:+10.4f} s{'  and it fits' if entry.fits and needed else ''}"
        yield f"      {entry.write}"


def _wrapped(head: str, words: str) -> Iterator[str]:
    line = f"  {head}"
    for word in words.split():
        if len(line) + len(word) + 1 > WIDTH:
            yield line
            line = "   "
        line += f"{'' if line.endswith(' ') else ' '}{word}"
    if line.strip():
        yield line


# ---------------------------------------------------------------- search


def found_facts(found: Found) -> dict[str, Any]:
    """One layout of a search."""
    layout, grid = found.layout, found.layout.grid
    degrees = {"data": grid.data, "tensor": grid.tensor, "sequence": layout.sequence, "pipeline": grid.pipeline, "context": grid.context}
    more = {"zero": layout.stage, "offload": layout.offload, "recompute": recompute_words(layout.recompute), "micro_size": layout.micro}
    return {**degrees, **more, "seconds": found.seconds, "device_bytes": found.device, "host_bytes": found.host}


def search_facts(findings: Findings, show: int, explain: bool) -> dict[str, Any]:
    """What a search adds to the object."""
    facts: dict[str, Any] = {
        "candidates": [found_facts(found) for found in findings.found[:show]],
        "searched": {"layouts": findings.layouts, "feasible": len(findings.found), "rejected": dict(_reasons(findings))},
    }
    if explain:
        facts["rejected"] = [
            {"layout": describe(branch.layout, branch.depth), "layouts": branch.layouts, "reason": branch.reason}
            for branch in findings.rejected
        ]
    return facts


def search_text(findings: Findings, show: int, explain: bool) -> str:
    """The same for people."""
    return "\n".join([*_table(findings, show), "", *_why(findings), *(_every(findings) if explain else ())])


def _table(findings: Findings, show: int) -> Iterable[str]:
    yield f"search    {findings.layouts:,} layouts, {len(findings.found):,} fit"
    if not findings.found:
        return
    yield f"  {'s':>9} {'GB':>8}  {'data':>4} {'tens.':>6} {'pipe':>4} {'ctx':>4}  {'ZeRO':<10}{'micro':>5}  recompute"
    for found in findings.found[:show]:
        layout, grid = found.layout, found.layout.grid
        zero = f"{layout.stage}{' offload' if layout.offload != 'none' else ''}"
        tensor = f"{grid.tensor}{' s' if layout.sequence else ''}"
        yield (
            f"  {found.seconds:>9.4f} {found.device / GB:>8.2f}  {grid.data:>4} {tensor:>6} {grid.pipeline:>4} {grid.context:>4}"
            f"  {zero:<10}{layout.micro:>5}  {recompute_words(layout.recompute)}"
        )


def _reasons(findings: Findings) -> list[tuple[str, int]]:
    """What layouts were left out by, and how many."""
    counted: Counter[str] = Counter()
    for branch in findings.rejected:
        counted[branch.reason.partition(":")[0]] += branch.layouts
    return counted.most_common()


def _why(findings: Findings) -> Iterable[str]:
    yield "left out by"
    for reason, layouts in _reasons(findings):
        yield f"  {reason:<60}{layouts:>10,}"


def _every(findings: Findings) -> Iterable[str]:
    yield ""
    yield "every branch that was left out, with its layouts"
    for branch in findings.rejected:
        yield f"  {describe(branch.layout, branch.depth)} ({branch.layouts}): {branch.reason}"
