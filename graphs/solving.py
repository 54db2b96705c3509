"""Nodes of the step graph that answer questions: solve ⇉ → score → collect."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any, TypedDict

from langgraph.runtime import Runtime
from langgraph.types import Command

from sesa.graphs import names
from sesa.graphs.context import RunContext
from sesa.graphs.solver import SolveTask, solve
from sesa.graphs.stage import StepState, committed, fan_out, log_once, sampled, stored
from sesa.rewards import proposer_rewards, solver_rewards, substantively_wrong
from sesa.text import comparable
from sesa.types import Failure, Group, LoadedSkill, Question, Reward, Role, Rollout, Verdict


class SolveJob(TypedDict):
    step: int
    id: str
    question: str
    sample: int
    considered: list[dict[str, Any]]


async def validated(state: StepState, runtime: Runtime[RunContext]) -> Command[Any]:
    """All verdicts are in; choose the questions, look up their skills, send out the attempts."""
    ctx, step = runtime.context, state["step"]
    questions = ctx.store.questions(ctx.run_id, step=step)
    if not committed(ctx, step, "validate"):
        refused = Counter(q.refused_by for q in questions if q.status is Verdict.FAIL)
        unknown = sum(q.status is Verdict.UNKNOWN for q in questions)
        valid = sum(q.status is Verdict.PASS for q in questions)
        if questions and not valid:
            worst = ", ".join(f"{name} {count}" for name, count in refused.most_common())
            log_once(ctx, step, "alarm", f"no valid question of {len(questions)}; refused by: {worst}")
        counts = {"valid": valid, "refused": dict(refused), "set_aside": unknown}
        ctx.store.commit_node(ctx.run_id, step, "validate", counts)
    chosen = questions_to_solve(ctx, questions)
    considered = await skills_for(ctx, step, chosen)
    done = ctx.store.rollout_ids(ctx.run_id, step=step, role=Role.SOLVER)
    jobs = [
        SolveJob(
            step=step,
            id=names.attempt(question.id, sample),
            question=question.id,
            sample=sample,
            considered=[skill.model_dump(mode="json") for skill in skills],
        )
        for question, skills in zip(chosen, considered, strict=True)
        for sample in range(ctx.config.solver.rollouts)
    ]
    return fan_out(ctx, "solve", [job for job in jobs if job["id"] not in done], len(jobs), "score")


def questions_to_solve(ctx: RunContext, questions: Sequence[Question]) -> list[Question]:
    """The valid questions, each wording once, at most ``solver.questions`` of them, chosen by the run's seed."""
    unique: dict[tuple[str, str], Question] = {}
    for question in questions:
        if question.status is Verdict.PASS:
            unique.setdefault(wording(question), question)
    chosen = list(unique.values())
    limit = ctx.config.solver.questions or len(chosen)
    if len(chosen) > limit:
        rng = random.Random(f"{ctx.config.run.seed}:questions:{chosen[0].step}")
        chosen = sorted(rng.sample(chosen, limit), key=lambda q: q.id)
    return chosen


def wording(question: Question) -> tuple[str, str]:
    """Equal for proposals of the same question: those share one group, and its success rate."""
    return comparable(question.text), comparable(question.target)


async def skills_for(ctx: RunContext, step: int, questions: Sequence[Question]) -> list[tuple[LoadedSkill, ...]]:
    """The skills nearest to each question in the bank of this step."""
    config = ctx.config.bank
    if not config.enabled or not questions:
        return [() for _ in questions]
    bank = ctx.bank(step)
    return await asyncio.to_thread(
        bank.retrieve_batch, [q.text for q in questions], ctx.encoder, config.top_k, config.min_similarity
    )


async def solve_one(state: SolveJob, runtime: Runtime[RunContext]) -> None:
    """Sample and store one attempt."""
    job = state
    ctx = runtime.context
    if stored(ctx, job["id"]):
        return
    (question,) = ctx.store.questions(ctx.run_id, ids=[job["question"]])
    task = SolveTask(
        id=job["id"],
        question_id=question.id,
        question=question.text,
        step=job["step"],
        sample=job["sample"],
        bank=ctx.bank(job["step"]) if ctx.config.bank.enabled else None,
        considered=tuple(LoadedSkill.model_validate(skill) for skill in job["considered"]),
    )
    seed = ctx.call_seed("solve", job["step"], question.id, job["sample"])
    sampling = ctx.config.solver.sampling
    rollout = await sampled(
        ctx, lambda: solve(ctx.config, ctx.solver, ctx.searcher, task, sampling=sampling, seed=seed)
    )
    ctx.store.save_rollouts(ctx.run_id, [rollout])
    ctx.stage.tick("solve")


async def score(state: StepState, runtime: Runtime[RunContext]) -> None:
    """Reward every attempt, then every proposal by its question's success rate."""
    ctx, step = runtime.context, state["step"]
    if committed(ctx, step, "solve"):
        return
    rewards: dict[str, Sequence[Reward]] = {}
    questions = {q.id: q for q in ctx.store.questions(ctx.run_id, step=step)}
    attempts = ctx.store.rollouts(ctx.run_id, step=step, role=Role.SOLVER)
    for rollout in attempts:
        rewards[rollout.id] = solver_rewards(rollout, questions[rollout.question_id], ctx.config.reward)
    scored = [r.model_copy(update={"rewards": tuple(rewards[r.id])}) for r in attempts]
    groups = grouped(list(questions.values()), scored)
    rates = {wording(group.question): group.success_rate for group in groups}
    for question in questions.values():
        assert question.proposal_id is not None
        rewards[question.proposal_id] = proposer_rewards(
            question.status, rates.get(wording(question)), ctx.config.reward
        )
    ctx.store.save_rewards(ctx.run_id, {key: parts for key, parts in rewards.items() if parts})
    known = [rate for rate in rates.values() if rate is not None]
    lost = [r for r in attempts if not r.finished]
    if lost:
        log_once(ctx, step, "alarm", f"{len(lost)} of {len(attempts)} attempts lost: {lost[0].error}")
    ctx.store.commit_node(
        ctx.run_id,
        step,
        "solve",
        {
            "rollouts": len(attempts),
            "lost": len(lost),
            "groups": len(groups),
            "frontier_groups": sum(0 < rate < 1 for rate in known),
            "success_rate": fmean(known) if known else None,
        },
    )


def grouped(questions: Sequence[Question], rollouts: Sequence[Rollout]) -> list[Group]:
    """The attempts by question, in the order of the questions; questions without attempts are left out."""
    by_question: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        by_question.setdefault(rollout.question_id, []).append(rollout)
    return [
        Group(question=question, rollouts=tuple(sorted(by_question[question.id], key=lambda r: r.id)))
        for question in questions
        if question.id in by_question
    ]


async def collect(state: StepState, runtime: Runtime[RunContext]) -> None:
    """Put the frontier failures of the step into the pending queue."""
    ctx, step = runtime.context, state["step"]
    if committed(ctx, step, "collect"):
        return
    groups = grouped(
        ctx.store.questions(ctx.run_id, step=step), ctx.store.rollouts(ctx.run_id, step=step, role=Role.SOLVER)
    )
    failures = [failure for group in groups for failure in frontier_failures(group)]
    ctx.store.save_failures(ctx.run_id, failures, ctx.config.distiller.queue)
    ctx.store.commit_node(ctx.run_id, step, "collect", {"failures": len(failures)})


def frontier_failures(group: Group) -> list[Failure]:
    """The substantively wrong attempts at a question that some attempts got right and some did not."""
    rate, question = group.success_rate, group.question
    if rate is None or not 0 < rate < 1:
        return []
    return [
        Failure(
            id=rollout.id,
            question_id=question.id,
            question=question.text,
            target=question.target,
            aliases=question.aliases,
            evidence=question.evidence,
            prediction=rollout.answer,
            skills=tuple(s.id for s in rollout.skills if s.loaded),
            stop_reason=rollout.stop_reason,
            step=rollout.step,
        )
        for rollout in group.finished
        if substantively_wrong(rollout)
    ]
