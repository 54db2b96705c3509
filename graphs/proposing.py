"""Nodes of the step graph that make questions: seeds → propose ⇉ → validate ⇉."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, TypedDict

from langgraph.runtime import Runtime
from langgraph.types import Command

from sesa.agents.reader import read_evidence
from sesa.errors import BadReplyError, ServerError
from sesa.graphs import names
from sesa.graphs.context import RunContext
from sesa.graphs.proposer import propose
from sesa.graphs.stage import StepState, committed, fan_out, sampled, stored
from sesa.rewards import exact_match
from sesa.types import Answer, Check, Passage, Question, Role, Rollout, SeedAnswer, StopReason, Turn, Verdict
from sesa.validity import evidence_mix, evidence_verdict, retrieved_evidence, run_checks

Go = Command[Any]


class ProposeJob(TypedDict):
    step: int
    id: str
    seed: int
    sample: int


class ValidateJob(TypedDict):
    step: int
    proposal: str


async def seeds(state: StepState, runtime: Runtime[RunContext]) -> Go:
    """Choose the step's seed answers, then send out its proposals."""
    ctx, step = runtime.context, state["step"]
    if not committed(ctx, step, "seeds"):
        chosen = choose_seeds(ctx, step)
        ctx.store.save_step_seeds(ctx.run_id, step, chosen)
        ctx.store.commit_node(ctx.run_id, step, "seeds", {"seeds": len(chosen)})
    done = ctx.store.rollout_ids(ctx.run_id, step=step, role=Role.PROPOSER)
    jobs = [
        ProposeJob(step=step, id=names.proposal(ctx.run_id, step, seed, sample), seed=seed, sample=sample)
        for seed in range(len(ctx.store.step_seeds(ctx.run_id, step)))
        for sample in range(ctx.config.proposer.proposals)
    ]
    return fan_out(ctx, "propose", [job for job in jobs if job["id"] not in done], len(jobs), "proposed")


def choose_seeds(ctx: RunContext, step: int) -> list[SeedAnswer]:
    """The step's share of the pool: the pool is walked through in a shuffled order, a new one each time round."""
    n, pool = ctx.config.proposer.seeds, ctx.seeds
    chosen: dict[str, SeedAnswer] = {}
    orders: dict[int, list[SeedAnswer]] = {}
    for position in range((step - 1) * n, step * n):
        round_, place = divmod(position, len(pool))
        if round_ not in orders:
            orders[round_] = random.Random(f"{ctx.config.run.seed}:seeds:{round_}").sample(pool, len(pool))
        seed = orders[round_][place]
        chosen.setdefault(seed.id, seed)
    return list(chosen.values())


async def propose_one(state: ProposeJob, runtime: Runtime[RunContext]) -> None:
    """Sample and store one proposal."""
    job = state
    ctx = runtime.context
    if stored(ctx, job["id"]):
        return
    seed = ctx.store.step_seeds(ctx.run_id, job["step"])[job["seed"]]
    rollout = await sampled(ctx, lambda: propose(ctx, job["id"], seed, job["step"], job["sample"]))
    ctx.store.save_rollouts(ctx.run_id, [rollout])
    ctx.stage.tick("propose")


async def proposed(state: StepState, runtime: Runtime[RunContext]) -> Go:
    """All proposals are in; send out their validation."""
    ctx, step = runtime.context, state["step"]
    proposals = ctx.store.rollouts(ctx.run_id, step=step, role=Role.PROPOSER, turns=False)
    if not committed(ctx, step, "propose"):
        stops = Counter(str(r.stop_reason) for r in proposals)
        ctx.store.commit_node(ctx.run_id, step, "propose", {"proposals": len(proposals), "stop_reasons": dict(stops)})
    done = {q.id for q in ctx.store.questions(ctx.run_id, step=step)}
    jobs = [ValidateJob(step=step, proposal=r.id) for r in proposals]
    owed = [job for job in jobs if names.question(job["proposal"]) not in done]
    return fan_out(ctx, "validate", owed, len(jobs), "validated")


async def validate_one(state: ValidateJob, runtime: Runtime[RunContext]) -> None:
    """Run the checks on one proposal and store the question with its verdicts."""
    job = state
    ctx, step = runtime.context, job["step"]
    question_id = names.question(job["proposal"])
    if ctx.store.questions(ctx.run_id, ids=[question_id]):
        return
    proposal = ctx.store.rollout(ctx.run_id, job["proposal"])
    seed = ctx.store.step_seeds(ctx.run_id, step)[names.seed_index(proposal.id)]
    examined = run_checks(proposal, seed, ctx.config.validity)
    question = Question(
        id=question_id,
        text=examined.question or "",
        target=seed.answer,
        aliases=seed.aliases,
        seed=seed,
        evidence=examined.evidence,
        checks=examined.checks,
        proposal_id=proposal.id,
        step=step,
    )
    if ctx.config.validity.evidence_check and question.status is Verdict.PASS:
        check = await evidence_check(ctx, question)
        question = question.model_copy(update={"checks": (*question.checks, check)})
    ctx.store.save_questions(ctx.run_id, [question])
    ctx.stage.tick("validate")


async def evidence_check(ctx: RunContext, question: Question) -> Check:
    """A model that may not search answers from the question's evidence, mixed with that of other questions."""
    rollout_id = names.evidence(question.id)
    before = ctx.store.rollouts(ctx.run_id, ids=[rollout_id])
    rollout = before[0] if before else await sampled(ctx, lambda: _read(ctx, question, rollout_id))
    if not before:
        ctx.store.save_rollouts(ctx.run_id, [rollout])
    answers = [turn.action.text for turn in rollout.turns if isinstance(turn.action, Answer)]
    best = max(answers, key=lambda answer: exact_match(answer, question.golds), default=None)
    return evidence_verdict(best, question.golds, rollout.error)


async def _read(ctx: RunContext, question: Question, rollout_id: str) -> Rollout:
    config = ctx.config
    passages = evidence_mix(
        question.evidence, _others(ctx, question), config.validity.distractors, ctx.call_seed("mix", question.id)
    )
    base = Rollout(
        id=rollout_id,
        role=Role.JUDGE,
        question_id=question.id,
        step=question.step,
        stop_reason=StopReason.BACKEND_ERROR,
    )
    turns: list[Turn] = []
    for number in range(config.validity.evidence_tries):
        try:
            reading = await read_evidence(
                ctx.solver,
                ctx.solver.template,
                question.text,
                passages,
                config.retrieval.passage_words,
                ctx.call_seed("read", question.id),
                number,
            )
        except (ServerError, BadReplyError) as error:
            return base.model_copy(update={"turns": tuple(turns), "error": str(error)})
        turns.append(reading.turn)
        if reading.answer is not None and exact_match(reading.answer, question.golds) == 1.0:
            break
    answered = any(isinstance(turn.action, Answer) for turn in turns)
    stop = StopReason.ANSWERED if answered else StopReason.INVALID
    return base.model_copy(update={"turns": tuple(turns), "stop_reason": stop})


def _others(ctx: RunContext, question: Question) -> list[Passage]:
    """Passages that the step's proposals for other seed answers retrieved: known once all proposals are in."""
    own = names.seed_index(question.id)
    if question.step not in ctx.step_passages:
        ctx.step_passages.clear()
        ctx.step_passages[question.step] = [
            (names.seed_index(r.id), retrieved_evidence(r))
            for r in ctx.store.rollouts(ctx.run_id, step=question.step, role=Role.PROPOSER)
        ]
    return [p for index, found in ctx.step_passages[question.step] if index != own for p in found]
