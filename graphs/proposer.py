"""The proposer's graph: one proposal for one seed answer."""

from __future__ import annotations

from sesa.agents.proposer import proposer
from sesa.graphs.context import RunContext
from sesa.graphs.search_loop import RolloutContext, build, run_loop
from sesa.types import Role, Rollout, SeedAnswer, StopReason

graph = build("proposer")


async def propose(ctx: RunContext, rollout_id: str, seed: SeedAnswer, step: int, sample: int) -> Rollout:
    """Sample one proposal. Nothing of the bank is passed in, or could be."""
    config = ctx.config.proposer
    return await run_loop(
        graph,
        RolloutContext(
            base=Rollout(
                id=rollout_id,
                role=Role.PROPOSER,
                question_id=rollout_id,
                step=step,
                sample=sample,
                stop_reason=StopReason.CANCELLED,
            ),
            agent=proposer(ctx.config, seed),
            policy=ctx.proposer,
            searcher=ctx.searcher,
            sampling=config.sampling,
            max_turns=config.max_turns,
            top_k=ctx.config.retrieval.top_k,
            seed=ctx.call_seed("propose", step, seed.id, sample),
        ),
    )
