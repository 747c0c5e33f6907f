"""One rank of the measurement of bare sums: `python -m tests.bench.exchange COUNTS_AND_ELEMENTS REPORT`, under a launcher."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROUNDS = 9


def main(sums: list[tuple[int, int]], report: Path) -> None:
    """Write the seconds of each round but the first; a round makes every sum as often as told."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seconds = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        begun = time.perf_counter()
        for count, elements in sums:
            value = torch.ones(elements)
            for _ in range(count):
                dist.all_reduce(value)
        seconds.append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        report.write_text(json.dumps(seconds[1:]))


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    main(json.loads(words[0]), Path(words[1]))
