"""The loop, on a page: next batch, step, hooks."""

from __future__ import annotations

from contextlib import ExitStack

from framework.monitor.runfile import End
from framework.trainer.run import Run, Turn


def train(run: Run) -> None:
    """Run from the position to config.steps."""
    status: End = "failed"
    try:
        for hook in run.hooks:
            hook.start(run)
        run.clock.lap()
        while run.position.step < run.config.steps:
            turn = _turn(run)
            for hook in run.hooks:
                hook.after_step(run, turn)
        status = "done"
    finally:
        _end(run, status)


def _end(run: Run, status: End) -> None:
    """Every hook ends, the last one first, whatever another one raises; then the stream."""
    with ExitStack() as stack:
        stack.callback(run.feed.close)
        for hook in run.hooks:
            stack.callback(hook.end, run, status)


def _turn(run: Run) -> Turn:
    fed = run.feed.next()
    out = run.engine.step(fed.batch, fed.tokens)
    run.position.step += 1
    run.position.consumed_samples += run.config.batch.global_size
    step = run.position.step
    return Turn(step, fed.batch, out, fed.tokens, run.clock.lap(), fed.wait_s, fed.votes, step == run.config.steps)
