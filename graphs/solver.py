"""The solver's graph: one attempt at one question, with the skills that were chosen for it."""

from __future__ import annotations

from dataclasses import dataclass

from sesa.agents.solver import solver
from sesa.config import RunConfig, SamplingSection
from sesa.graphs.context import Policy, Searcher
from sesa.graphs.search_loop import RolloutContext, build, run_loop
from sesa.skills import Bank
from sesa.types import LoadedSkill, Role, Rollout, StopReason

graph = build("solver")


@dataclass(frozen=True)
class SolveTask:
    """One attempt. ``considered`` are the bank's skills nearest to the question; those loaded stand in front of the
    prompt before the first query. Without a bank the prompt holds no skills and the rollout no bank version.
    """

    id: str
    question_id: str
    question: str
    step: int = 0
    sample: int = 0
    bank: Bank | None = None
    considered: tuple[LoadedSkill, ...] = ()


async def solve(
    config: RunConfig, policy: Policy, searcher: Searcher, task: SolveTask, *, sampling: SamplingSection, seed: int
) -> Rollout:
    """Sample one attempt."""
    bank = task.bank
    skills = [bank.skills[s.id] for s in task.considered if s.loaded] if bank else []
    base = Rollout(
        id=task.id,
        role=Role.SOLVER,
        question_id=task.question_id,
        step=task.step,
        sample=task.sample,
        bank_version=bank.version if bank else None,
        skills=task.considered if bank else (),
        stop_reason=StopReason.CANCELLED,
    )
    return await run_loop(
        graph,
        RolloutContext(
            base=base,
            agent=solver(config, task.question, skills),
            policy=policy,
            searcher=searcher,
            sampling=sampling,
            max_turns=config.solver.max_turns,
            top_k=config.retrieval.top_k,
            seed=seed,
        ),
    )
