"""What the nodes of the step graph share: their state, what has been done already, and fanning out."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypedDict

from langgraph.types import Command, Send

from sesa.graphs.context import RunContext
from sesa.types import Rollout, StopReason


class StepState(TypedDict):
    """State holds the number of the step; texts, tokens and numbers live in the store."""

    step: int


def committed(ctx: RunContext, step: int, node: str) -> bool:
    """Whether a node has committed: after a kill between its commit and the checkpoint it runs once more."""
    return node in ctx.store.nodes(ctx.run_id, step)


def stored(ctx: RunContext, rollout_id: str) -> bool:
    """Whether a rollout has been paid for already."""
    return bool(ctx.store.rollouts(ctx.run_id, ids=[rollout_id], turns=False))


async def sampled(ctx: RunContext, sample: Callable[[], Awaitable[Rollout]]) -> Rollout:
    """A rollout; where a server was lost over it, once more after the restart.

    Raises ServerError where a server cannot be brought back: the run stops, and nothing is recorded as lost that a
    resumed run could still get.
    """
    began = time.monotonic()
    rollout = await sample()
    if rollout.stop_reason is StopReason.BACKEND_ERROR:
        restarted = await ctx.publisher.ensure_alive(began)
        for name in restarted:
            log_once(ctx, rollout.step, "restart", f"{name}: its server died and was started again")
        if restarted:
            rollout = await sample()
    return rollout


def log_once(ctx: RunContext, step: int, kind: str, message: str) -> None:
    """A line in the run's log, not repeated when the node that writes it runs again."""
    if all(entry.message != message for entry in ctx.store.log_entries(ctx.run_id, step=step, kind=kind)):
        ctx.store.log(ctx.run_id, step, kind, message)


def fan_out(ctx: RunContext, node: str, jobs: Sequence[Mapping[str, Any]], total: int, join: str) -> Command[Any]:
    """Send the jobs that are still owed to ``node``, or go straight on to ``join`` where none is.

    How many run at once is bounded by the graph's ``max_concurrency``.
    """
    ctx.stage.start(node, total, done=total - len(jobs))
    return Command(goto=[Send(node, job) for job in jobs] if jobs else join)
