"""The proposer: given a target answer, searches and poses a question. It never sees anything of the skill bank."""

from __future__ import annotations

from sesa import prompts
from sesa.agents.search_agent import SearchAgent
from sesa.config import RunConfig
from sesa.types import Role, SeedAnswer


def proposer(config: RunConfig, seed: SeedAnswer) -> SearchAgent:
    """The proposer at work on one seed answer. There is no argument through which a skill could reach it."""
    return SearchAgent(
        role=Role.PROPOSER,
        prompt=prompts.load(config.proposer.prompt),
        final="question",
        variables={"answer": seed.answer},
        passage_words=config.retrieval.passage_words,
    )
