"""A sequence eight times as long as fits on one rank: with two context ranks and recompute it trains in the same bytes."""

from __future__ import annotations

from dataclasses import replace

import torch

from framework.config.schema import Batch, Config, Data, Model, Parallel, Recompute
from framework.topology.grid import Grid
from framework.topology.groups import accelerator, connect, make_groups
from framework.topology.random import Streams
from tests.engine import tiny
from tests.memory import LiveBytes
from tests.ranks import run_ranks

SHORT = 128
MODEL = Model(hidden_size=64, num_layers=12, num_heads=4, ffn_hidden_size=192, vocab_size=64, max_positions=8 * SHORT)


def step_bytes(rank: int, ranks: int, length: int, recompute: Recompute) -> tuple[int, int]:
    """(peak of the live tensor bytes of a step beyond those that are always there, trained tokens) of this rank."""
    from framework.engine.dsconfig import deepspeed_config
    from framework.engine.sharded import DeepSpeedEngine, settler
    from framework.parallel.apply import make_model

    connect(60.0, shm_comm=False)
    config = Config(model=MODEL, data=Data(seq_length=length), batch=Batch(1, 1), parallel=Parallel(context=ranks), recompute=recompute)
    groups = make_groups(Grid(context=ranks), rank, 60.0)
    settings = deepspeed_config(config, ranks, 1)
    model = make_model(config, groups, Streams(accelerator()), torch.device("cpu"), settler(config, settings, groups))
    engine = DeepSpeedEngine(model, config, settings, groups)
    batch = tiny.samples(0, 1, length, MODEL.vocab_size)
    [micro] = tiny.Layout(1, 1, 1).share(batch, 0)
    own = replace(micro, ids=micro.ids.chunk(ranks, dim=1)[rank], targets=micro.targets.chunk(ranks, dim=1)[rank])
    tokens = tiny.tokens_of(batch)
    first = engine.step([own], tokens)  # the optimizer's state is there afterwards
    with LiveBytes() as live:
        second = engine.step([own], tokens)
    assert second.loss < first.loss
    return live.peak, tokens


def test_eight_times_the_length_in_the_same_bytes() -> None:
    [(budget, short)] = run_ranks(step_bytes, 1, SHORT, Recompute(), env=tiny.ONE_THREAD, timeout=120)
    found = run_ranks(step_bytes, 2, 8 * SHORT, Recompute("full"), env=tiny.ONE_THREAD, timeout=120)
    [(without, _)] = run_ranks(step_bytes, 1, 8 * SHORT, Recompute(), env=tiny.ONE_THREAD, timeout=120)
    print(f"\n{SHORT} tokens on one rank {budget:,} bytes; {8 * SHORT} on two with recompute {found[0][0]:,}; on one without {without:,}")
    assert all(nbytes <= budget for nbytes, _ in found)
    assert without > 4 * budget
    assert found[0][1] > 6 * short
