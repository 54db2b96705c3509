"""The proposer: given a target answer, searches and poses a question. It never sees anything of the skill bank."""

from __future__ import annotations

from sesa import prompts
from sesa.agents.search_agent import SearchAgent
from sesa.config import RunConfig
from sesa.types import Role, SeedAnswer


def proposer(config: RunConfig, seed: SeedAnswer) -> SearchAgent:
    """The proposer at work on one seed answer. There is no argument through which a skill could reach it.

    Where a prompt for the seed's type exists (``NAME_date`` beside ``NAME``), its worked examples fit better and it is
    taken.
    """
    typed = f"{config.proposer.prompt}_{seed.type}"
    return SearchAgent(
        role=Role.PROPOSER,
        prompt=prompts.load(typed if typed in prompts.names() else config.proposer.prompt),
        final="question",
        variables={"answer": seed.answer},
        passage_words=config.retrieval.passage_words,
    )
