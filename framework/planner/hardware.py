"""What a plan is made for: rates, sizes and links of devices, each with its source. Data, and who shares which link.

Peaks are dense (no sparsity). Links are bytes per second of one device in one direction; where a source gives both directions
together, it is half of that. What work gets of a peak stands in `Reached`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from framework.base.errors import ConfigError

T, G = 1e12, 1e9
AUTO = "auto"
CPU_INFO = Path("/proc/cpuinfo")
SHARE = 0.8
"""Of a device's memory that a plan may fill: the rest is the driver's, the libraries' and what an allocator cannot use."""


@dataclass(frozen=True)
class Link:
    """Bytes per second of one device in one direction, and seconds that a message takes beside that."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Host:
    """What devices stand in. `to_host` is the way between a device and the host's memory, bytes/s of one device; `memory` bytes,
    `bandwidth` bytes/s of the host."""

    devices: int
    inside: Link
    across: Link
    to_host: float
    memory: int
    bandwidth: float
    source: str


@dataclass(frozen=True)
class Reached:
    """What work gets of a peak. `products`: share, of large matrices; `half`: the size at which a dimension of a matrix doubles the
    time of its product; `copies`: share, of an optimizer's update; `between`: share, of all that stands between products, by the
    bytes that work.py counts; `links`: share, of long messages; `operator`: seconds that an operation takes
    on small tensors; `hooks`: seconds per parameter tensor that ZeRO stage 0, 1, 2, 3 adds to a micro-batch."""

    products: float
    half: float
    copies: float
    between: float
    links: float
    operator: float
    hooks: tuple[float, float, float, float]
    source: str


@dataclass(frozen=True)
class Hardware:
    """One kind of device. `products` is FLOP/s by type, `memory` bytes, `bandwidth` bytes/s of that memory. `shared`: the ranks of
    a host are processes on one device, a CPU, whose memory is the host's; `products` and `bandwidth` are then of one core, and
    `cores` how many."""

    name: str
    products: Mapping[str, float]
    memory: int
    bandwidth: float
    host: Host
    reached: Reached
    source: str
    shared: bool = False
    cores: int = 1


LARGE = Reached(
    products=0.70,
    half=96.0,
    copies=0.85,
    between=0.85,
    links=0.80,
    operator=5e-6,
    hooks=(0.0, 0.0, 0.0, 0.0),
    source="assumed; with them the whole steps of Narayanan et al. 2021, table 1, are met (tests/planner/test_published_times.py)",
)
DGX_A100 = Host(8, Link(300 * G, 4e-6), Link(25 * G, 8e-6), 32 * G, 10**12, 400 * G, "NVIDIA DGX A100 datasheet, 2020; latencies ours")
DGX_H100 = Host(8, Link(450 * G, 4e-6), Link(50 * G, 8e-6), 64 * G, 2 * 10**12, 600 * G, "NVIDIA DGX H100 datasheet, 2023; latencies ours")
DGX_B200 = Host(8, Link(900 * G, 4e-6), Link(50 * G, 8e-6), 64 * G, 2 * 10**12, 700 * G, "NVIDIA DGX B200 datasheet, 2024; latencies ours")
PCIE = Host(
    8, Link(32 * G, 8e-6), Link(12.5 * G, 8e-6), 32 * G, 10**12, 400 * G, "PCIe 4.0 x16; one 100 Gb/s port each, host memory: assumed"
)
MI300X_HOST = Host(8, Link(448 * G, 4e-6), Link(50 * G, 8e-6), 64 * G, 2 * 10**12, 700 * G,
                   "AMD Instinct MI300X platform data sheet, 2023 (896 GB/s both ways); ports, host memory, latencies assumed")  # fmt: skip
HALF_A100 = {"bf16": 312 * T, "fp16": 312 * T, "fp32": 19.5 * T}
HALF_H100 = {"bf16": 989 * T, "fp16": 989 * T, "fp32": 67 * T}
CPU = Hardware(
    "cpu",
    {"fp32": 99.6 * G, "bf16": 217 * G, "fp16": 0.7 * G},
    memory=0,
    bandwidth=61 * G,
    host=Host(1, Link(2.69 * G, 167e-6), Link(2.69 * G, 167e-6), 61 * G, 0, 61 * G, "ranks of one host talk through its memory (gloo)"),
    reached=Reached(
        products=1.0,
        half=3.8,
        copies=1.0,
        between=0.1,
        links=1.0,
        operator=11e-6,
        hooks=(0.0, 40e-6, 40e-6, 300e-6),
        source="measured, tests/bench/rates.py, 2026-12-01: one core while a second one is busy; hooks assumed",
    ),
    source="measured on one core of a 2-core x86-64 with AVX-512, tests/bench/rates.py, 2026-12-01",
    shared=True,
)
SLOW_HALF = 0.7 * G
"""FLOP/s of one core in bf16 where it has no instructions for that."""
ENTRIES = (
    Hardware("a100_40gb", HALF_A100, 40 * 10**9, 1.555 * T, DGX_A100, LARGE, "NVIDIA A100 datasheet, 2021 (SXM)"),
    Hardware("a100_80gb", HALF_A100, 80 * 10**9, 2.039 * T, DGX_A100, LARGE, "NVIDIA A100 datasheet, 2021 (SXM)"),
    Hardware("h100_80gb", HALF_H100, 80 * 10**9, 3.35 * T, DGX_H100, LARGE, "NVIDIA H100 datasheet, 2023 (SXM)"),
    Hardware("h200_141gb", HALF_H100, 141 * 10**9, 4.8 * T, DGX_H100, LARGE, "NVIDIA H200 datasheet, 2024 (SXM)"),
    Hardware("b200_180gb", {"bf16": 2250 * T, "fp16": 2250 * T, "fp32": 75 * T}, 180 * 10**9, 8.0 * T, DGX_B200, LARGE,
             "NVIDIA DGX B200 datasheet, 2024 (an eighth of it)"),
    Hardware("l40s_48gb", {"bf16": 362 * T, "fp16": 362 * T, "fp32": 91.6 * T}, 48 * 10**9, 0.864 * T, PCIE, LARGE,
             "NVIDIA L40S datasheet, 2023"),
    Hardware("mi300x_192gb", {"bf16": 1307 * T, "fp16": 1307 * T, "fp32": 163.4 * T}, 192 * 10**9, 5.3 * T, MI300X_HOST, LARGE,
             "AMD Instinct MI300X data sheet, 2023"),
    CPU,
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    """Hardware, and how many ranks share one of its hosts."""

    hardware: Hardware
    ranks_per_host: int

    @property
    def memory(self) -> int:
        """Bytes that one rank has on its device: all of it, or its share of the host's."""
        return self.hardware.memory // (self.ranks_per_host if self.hardware.shared else 1)

    @property
    def host_memory(self) -> int:
        """Bytes of the host's memory that one rank has."""
        return self.hardware.host.memory // self.ranks_per_host

    def products(self, dtype: str) -> float:
        """FLOP/s of one rank on large matrices of `dtype`."""
        here = self.hardware
        return here.products[dtype] * here.reached.products * self._share

    @property
    def bandwidth(self) -> float:
        """Bytes/s of one rank in an update."""
        return self.peak_bandwidth * self.hardware.reached.copies

    @property
    def between(self) -> float:
        """Bytes/s of one rank in what stands between products."""
        return self.peak_bandwidth * self.hardware.reached.between

    @property
    def peaks(self) -> dict[str, float]:
        """FLOP/s of one rank by type, as the source gives it."""
        return {dtype: rate * self._share for dtype, rate in self.hardware.products.items()}

    @property
    def peak_bandwidth(self) -> float:
        """Bytes/s of one rank, as the source gives it."""
        return self.hardware.bandwidth * self._share

    @property
    def _share(self) -> float:
        """Devices that one rank has: of a CPU, cores."""
        return self.hardware.cores / self.ranks_per_host if self.hardware.shared else 1.0

    def link(self, stride: int, degree: int) -> Link:
        """What a ring of `degree` ranks has, `stride` ranks apart. Where it leaves the host, it goes in and out through the ports of
        all its ranks there, and the rings beside it through those of theirs."""
        host, share = self.hardware.host, self.hardware.reached.links
        if stride * degree <= self.ranks_per_host:
            return Link(host.inside.bandwidth * share, host.inside.latency)
        together = max(1, self.ranks_per_host // stride)
        return Link(min(host.inside.bandwidth, host.across.bandwidth * together) * share, host.across.latency)


def names() -> tuple[str, ...]:
    """What plan.hardware may be."""
    return (AUTO, *(entry.name for entry in ENTRIES if not entry.shared))


def named(name: str) -> Hardware:
    """The entry of that name; for `auto` the CPU of this machine. Raises ConfigError with the nearest name."""
    if name == AUTO:
        return this_machine()
    found = {entry.name: entry for entry in ENTRIES if not entry.shared}
    if name not in found:
        near = difflib.get_close_matches(name, names(), n=1, cutoff=0.0)
        raise ConfigError("plan.hardware", name, f"one of {', '.join(names())}", f"plan.hardware={near[0]}")
    return found[name]


def recognised(device: str, memory: int) -> Hardware | None:
    """The entry of an accelerator by what its driver calls it (NVIDIA H200) and its memory in bytes; None where there is none."""
    words = re.split(r"[^a-z0-9]+", device.lower())
    found = [entry for entry in ENTRIES if not entry.shared and entry.name.split("_")[0] in words]
    return min(found, key=lambda entry: abs(entry.memory - memory), default=None)


def this_machine() -> Hardware:
    """The CPU that this process may use: cores, memory and instructions as Linux shows them, rates of one core as measured elsewhere."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    flags = set(CPU_INFO.read_text().split()) if CPU_INFO.exists() else set()
    half = CPU.products["bf16"] if flags & {"avx512_bf16", "amx_bf16"} else SLOW_HALF
    cores, host = len(os.sched_getaffinity(0)), replace(CPU.host, memory=memory, bandwidth=CPU.bandwidth)
    return replace(CPU, products={**CPU.products, "bf16": half}, memory=memory, cores=cores, host=host)
