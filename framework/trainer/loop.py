"""The loop, on a page: next batch, step, hooks; until the last step, or until all ranks know that one was asked to stop."""

from __future__ import annotations

from contextlib import ExitStack

from framework.monitor.runfile import End
from framework.trainer.feed import Fed
from framework.trainer.run import STOP, Run, Turn


def train(run: Run) -> End:
    """Run from the position to config.steps, or to where it is asked to stop; which of both."""
    status: End = "failed"
    try:
        for hook in run.hooks:
            hook.start(run)
        run.clock.lap()
        status = _drive(run)
    finally:
        _end(run, status)
    return status


def _drive(run: Run) -> End:
    while run.position.step < run.config.steps:
        fed = run.feed.next()
        if fed.votes.get(STOP):
            for hook in run.hooks:
                hook.stop(run)
            return "stopped"
        turn = _turn(run, fed)
        for hook in run.hooks:
            hook.after_step(run, turn)
            if run.position.step != turn.step:
                break  # the run was rolled back: this step counts no more
    return "done"


def _end(run: Run, status: End) -> None:
    """Every hook ends, the last one first, whatever another one raises; then the stream."""
    with ExitStack() as stack:
        stack.callback(run.feed.close)
        for hook in run.hooks:
            stack.callback(hook.end, run, status)


def _turn(run: Run, fed: Fed) -> Turn:
    out = run.engine.step(fed.batch, fed.tokens)
    run.position.step += 1
    run.position.consumed_samples += run.config.batch.global_size
    step = run.position.step
    seconds, split = run.clock.lap()
    return Turn(step, fed.batch, out, fed.tokens, seconds, fed.wait_s, fed.votes, step == run.config.steps, split)
