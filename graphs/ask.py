"""One question to the trained agent, with or without the skill bank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from sesa.config import RunConfig
from sesa.graphs.context import Policy, Searcher
from sesa.graphs.session import Say, open_parts, prepare_model
from sesa.graphs.solver import SolveTask, solve
from sesa.graphs.updating import relocate, served_version
from sesa.retrieval.base import Progress
from sesa.skill_index import Encoder
from sesa.skills import Bank
from sesa.store import Store
from sesa.types import LoadedSkill, Rollout


async def ask(
    config: RunConfig,
    run_id: str,
    store: Store,
    question: str,
    bank: Literal["on", "off"],
    *,
    root: Path,
    say: Say,
    progress: Progress,
) -> tuple[Rollout, Bank | None]:
    """Answer ``question`` greedily with the run's newest solver; SESA-On reads the run's bank, SESA-Off nothing.

    Returns the rollout (its turns hold searches and passages, its ``skills`` what was loaded) and the bank read.
    The rollout is not stored. Starts the solver's server, on any free port, unless ``serving.attach`` names one that
    runs.
    """
    config = solver_alone(config)
    model_dir = prepare_model(config, say)
    relocate(store, run_id, root.resolve() / run_id, model_dir)
    # A server that runs already is asked as it is: it may belong to a run that is training.
    versions = {} if "solver" in config.serving.attach else {"solver": served_version(store, run_id, "solver")}
    async with open_parts(
        config,
        model_dir=model_dir,
        corpus=None,
        log_dir=root / run_id / "logs" / "ask",
        policies=("solver",),
        versions=versions,
        say=say,
        progress=progress,
    ) as parts:
        client = parts.serving.client("solver")
        return await answer(config, run_id, store, client, parts.searcher, parts.encoder, question, bank)


def solver_alone(config: RunConfig) -> RunConfig:
    """The run's configuration for serving nothing but its solver, beside a training run that may be in progress.

    The proposer's attached server is left out, and so is the configured port, which the run's own servers may hold.
    """
    attach = {name: url for name, url in config.serving.attach.items() if name == "solver"}
    return config.model_copy(update={"serving": config.serving.model_copy(update={"attach": attach, "port": 0})})


async def answer(
    config: RunConfig,
    run_id: str,
    store: Store,
    policy: Policy,
    searcher: Searcher,
    encoder: Encoder,
    question: str,
    bank: Literal["on", "off"],
) -> tuple[Rollout, Bank | None]:
    """The same over parts that are open already."""
    view = Bank.from_store(store, run_id) if bank == "on" else None
    considered: Sequence[LoadedSkill] = ()
    if view is not None:
        considered = view.retrieve(question, encoder, config.bank.top_k, config.bank.min_similarity)
    task = SolveTask(id="ask", question_id="ask", question=question, bank=view, considered=tuple(considered))
    greedy = config.solver.sampling.model_copy(update={"temperature": 0.0})
    return await solve(config, policy, searcher, task, sampling=greedy, seed=config.run.seed), view
