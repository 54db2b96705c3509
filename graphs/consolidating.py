"""Nodes of the step graph that change the skill bank and close the step: consolidate → finish."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from langgraph.runtime import Runtime

from sesa.candidates import parse_candidates
from sesa.consolidation import choose, due, plan_commit
from sesa.graphs import names
from sesa.graphs.context import RunContext
from sesa.graphs.distiller import DistilContext, distil_failures
from sesa.graphs.stage import StepState, committed, stored
from sesa.skills import Bank
from sesa.types import (
    Failure,
    FailureStatus,
    Role,
    Rollout,
    Skill,
    SkillEventKind,
    StopReason,
    Verdict,
)


async def consolidate(state: StepState, runtime: Runtime[RunContext]) -> None:
    """Credit the skills that were loaded; when due, distil the pending failures; commit the next bank version."""
    ctx, step = runtime.context, state["step"]
    if committed(ctx, step, "consolidate"):
        return
    if not ctx.config.bank.enabled:
        ctx.store.commit_node(ctx.run_id, step, "consolidate", {"enabled": False})
        return
    ctx.stage.start("consolidate", 1)
    bank = ctx.bank(step)
    # A version of this step that is there already was committed before a kill; it stands.
    if ctx.store.bank_version(ctx.run_id, step=step + 1) == bank.version:
        await commit_next_version(ctx, step, bank)
    ctx.store.commit_node(ctx.run_id, step, "consolidate", bank_counts(ctx, step, bank))
    ctx.stage.tick("consolidate")


async def commit_next_version(ctx: RunContext, step: int, bank: Bank) -> None:
    """Plan the step's change of the bank from stored rows and commit it; no new version where nothing changes."""
    config = ctx.config
    pending = ctx.store.failures(ctx.run_id, status=FailureStatus.PENDING)
    batches = await distil_pending(ctx, step, pending) if due(step, len(pending), config.distiller) else []
    read: list[Failure] = []
    unread: list[Failure] = []
    candidates: list[Skill] = []
    for batch, rollout in batches:
        if rollout.stop_reason is StopReason.ANSWERED:
            candidates += parse_candidates(rollout.turns[-1].call.text, batch, step)
            read += batch
        elif rollout.stop_reason is StopReason.INVALID:
            unread += batch  # of those lost to a server nothing is said: they stay in the queue
    plan = await asyncio.to_thread(
        plan_commit,
        bank,
        rollouts=ctx.store.rollouts(ctx.run_id, step=step, role=Role.SOLVER),
        candidates=candidates,
        failures=read,
        undistilled=unread,
        config=config.bank,
        encoder=ctx.encoder,
        step=step,
    )
    if not plan.empty:
        ctx.store.commit_bank(
            ctx.run_id,
            step=step,
            base_version=bank.version,
            events=plan.events,
            skills=plan.skills,
            failures_used=plan.failures_used,
        )


def bank_counts(ctx: RunContext, step: int, before: Bank) -> dict[str, Any]:
    """What the step did to the bank, recomputed from the committed events and the distiller's stored calls."""
    after = Bank.from_store(ctx.store, ctx.run_id, ctx.store.bank_version(ctx.run_id, step=step + 1))
    events = [e for e in ctx.store.bank_events(ctx.run_id, upto=after.version) if e.version > before.version]
    kinds = Counter(e.kind for e in events)
    calls = Counter(r.stop_reason for r in ctx.store.rollouts(ctx.run_id, step=step, role=Role.DISTILLER, turns=False))
    return {
        "bank_version": after.version,
        "distillations": sum(calls.values()),
        "out_of_form": calls[StopReason.INVALID],
        "lost": calls[StopReason.BACKEND_ERROR],
        "admitted": kinds[SkillEventKind.ADMITTED],
        "refused": dict(Counter(str(e.detail["check"]) for e in events if e.kind is SkillEventKind.REFUSED)),
        "credited": kinds[SkillEventKind.CREDITED],
        "retired": kinds[SkillEventKind.RETIRED],
        "evicted": kinds[SkillEventKind.EVICTED],
        "active_before": len(before.active),
        "active_after": len(after.active),
    }


async def distil_pending(ctx: RunContext, step: int, pending: Sequence[Failure]) -> list[tuple[list[Failure], Rollout]]:
    """Put the chosen failures before the distiller, some at a time; (failures, the distiller's rollout) each."""
    config = ctx.config.distiller
    chosen = choose(pending, config.max_chosen)
    size = config.failures_per_call
    batches = [chosen[start : start + size] for start in range(0, len(chosen), size)]
    ctx.stage.start("distil", len(batches))
    limit = asyncio.Semaphore(ctx.config.run.concurrency)

    async def one(number: int, batch: list[Failure]) -> Rollout:
        rollout_id = names.distillation(ctx.run_id, step, number)
        async with limit:
            if not stored(ctx, rollout_id):
                trajectories = {r.id: r for r in ctx.store.rollouts(ctx.run_id, ids=[f.id for f in batch])}
                rollout = await distil_failures(
                    DistilContext(
                        base=Rollout(
                            id=rollout_id,
                            role=Role.DISTILLER,
                            question_id=batch[0].question_id,
                            step=step,
                            sample=number,
                            stop_reason=StopReason.CANCELLED,
                        ),
                        model=ctx.distiller or ctx.solver,
                        failures=batch,
                        rollouts=[trajectories[f.id] for f in batch],
                        sampling=config.sampling,
                        tries=1 + config.retries,
                        seed=ctx.call_seed("distil", step, number),
                        passage_words=ctx.config.retrieval.passage_words,
                    )
                )
                ctx.store.save_rollouts(ctx.run_id, [rollout])
            ctx.stage.tick("distil")
            return ctx.store.rollout(ctx.run_id, rollout_id)

    rollouts = await asyncio.gather(*(one(number, batch) for number, batch in enumerate(batches)))
    return list(zip(batches, rollouts, strict=True))


async def finish(state: StepState, runtime: Runtime[RunContext]) -> None:
    """Compute the step's metrics from the store."""
    ctx, step = runtime.context, state["step"]
    if committed(ctx, step, "finish"):
        return
    ctx.store.save_metrics(ctx.run_id, step, step_metrics(ctx, step))
    ctx.store.commit_node(ctx.run_id, step, "finish", {})


def step_metrics(ctx: RunContext, step: int) -> dict[str, float]:
    """Numbers of one step, all recomputed from stored rows; a number that has no rows behind it is left out."""
    questions = ctx.store.questions(ctx.run_id, step=step)
    metrics: dict[str, float] = {"questions": len(questions)}
    if questions:
        metrics["valid_share"] = sum(q.status is Verdict.PASS for q in questions) / len(questions)
    for role in (Role.PROPOSER, Role.SOLVER):
        rollouts = ctx.store.rollouts(ctx.run_id, step=step, role=role)
        finished = [r for r in rollouts if r.finished]
        scored = [r for r in finished if r.rewards]
        metrics[f"{role}/rollouts"] = len(rollouts)
        metrics[f"{role}/lost"] = len(rollouts) - len(finished)
        if scored:
            metrics[f"{role}/reward"] = fmean(r.value for r in scored)
        if finished:
            metrics[f"{role}/turns"] = fmean(len(r.turns) for r in finished)
            metrics[f"{role}/searches"] = fmean(len(r.searches) for r in finished)
            metrics[f"{role}/sampled_tokens"] = sum(r.sampled_tokens for r in finished)
            cut = sum(r.stop_reason is StopReason.MAX_TOKENS for r in finished)
            metrics[f"{role}/truncated_share"] = cut / len(finished)
        if role is Role.SOLVER and scored:
            metrics["solver/success"] = fmean(r.reward("correct") or 0.0 for r in scored)
    for stats in ctx.store.stats(ctx.run_id, step=step):
        for name in ("loss", "grad_norm", "ratio_mean", "trained_tokens", "groups"):
            value = getattr(stats, name)
            if value is not None:
                metrics[f"{stats.policy}/{name}"] = float(value)
    return metrics
