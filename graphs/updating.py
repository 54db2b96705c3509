"""Nodes of the step graph that train: update each policy, publish its new version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from langgraph.runtime import Runtime

from sesa.errors import NotFoundError
from sesa.graphs import names
from sesa.graphs.context import RunContext
from sesa.graphs.stage import StepState, committed
from sesa.store import Store
from sesa.types import PolicyVersion, Role, Rollout

POLICIES = (Role.PROPOSER, Role.SOLVER)


class StepNode(Protocol):
    """A node of the step graph."""

    async def __call__(self, state: StepState, runtime: Runtime[RunContext]) -> None: ...


def update(policy: Role) -> StepNode:
    """The node that trains ``policy`` on the step's groups."""

    async def node(state: StepState, runtime: Runtime[RunContext]) -> None:
        ctx, step, name = runtime.context, state["step"], f"update_{policy}"
        if committed(ctx, step, name):
            return
        if ctx.updater is None:
            ctx.store.commit_node(ctx.run_id, step, name, {"enabled": False})
            return
        ctx.stage.start(name, 1)
        groups = policy_groups(ctx, policy, step)
        outcome = await asyncio.to_thread(
            ctx.updater.update, str(policy), step, groups, version_before(ctx, policy, step)
        )
        ctx.store.save_trained(ctx.run_id, list(outcome.trained))
        ctx.store.save_stats(ctx.run_id, outcome.stats)
        if outcome.version is not None:
            ctx.store.save_version(ctx.run_id, outcome.version)
        stats = outcome.stats.model_dump(mode="json", exclude={"policy", "step"})
        ctx.store.commit_node(ctx.run_id, step, name, stats)
        ctx.stage.tick(name)

    return node


def policy_groups(ctx: RunContext, policy: Role, step: int) -> list[list[Rollout]]:
    """The rollouts that are compared with each other: attempts at one question, proposals for one seed answer."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in ctx.store.rollouts(ctx.run_id, step=step, role=policy):
        key = rollout.question_id if policy is Role.SOLVER else str(names.seed_index(rollout.id))
        groups.setdefault(key, []).append(rollout)
    return [sorted(groups[key], key=lambda r: r.id) for key in sorted(groups)]


def version_before(ctx: RunContext, policy: Role, step: int) -> PolicyVersion:
    """The version that produced the step's rollouts: the newest that an earlier step made."""
    versions = [v for v in ctx.store.versions(ctx.run_id, str(policy)) if v.version == 0 or v.step < step]
    if not versions:
        raise NotFoundError(f"run {ctx.run_id}: has no version of the {policy}; start a new run")
    return max(versions, key=lambda v: v.version)


def served_version(store: Store, run_id: str, policy: str) -> PolicyVersion:
    """The newest published version of a policy. Raises NotFoundError where the run has none."""
    published = [v for v in store.versions(run_id, policy) if v.published]
    if not published:
        raise NotFoundError(f"run {run_id}: has no published version of the {policy}; resume or start a run")
    return max(published, key=lambda v: v.version)


def relocate(store: Store, run_id: str, folder: Path, model_dir: Path) -> None:
    """Follow a run whose folder, or whose starting model, lies elsewhere now: the store's paths are set right."""
    for version in store.versions(run_id):
        now = folder / "weights" / version.policy / f"v{version.version:04d}" if version.version else model_dir
        if not Path(version.path).exists() and now.exists():
            store.save_version(run_id, version.model_copy(update={"path": str(now)}))


async def publish(state: StepState, runtime: Runtime[RunContext]) -> None:
    """Have the servers serve what was trained in this step."""
    ctx, step = runtime.context, state["step"]
    if committed(ctx, step, "publish"):
        return
    published: dict[str, int] = {}
    ctx.stage.start("publish", len(POLICIES))
    for policy in POLICIES:
        newest = max(ctx.store.versions(ctx.run_id, str(policy)), key=lambda v: v.version)
        if newest.step == step and newest.version > 0:
            await ctx.publisher.publish(newest)
            ctx.store.save_version(ctx.run_id, newest.model_copy(update={"published": True}))
            published[str(policy)] = newest.version
        ctx.stage.tick("publish")
    ctx.store.commit_node(ctx.run_id, step, "publish", {"published": published})
