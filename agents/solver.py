"""The solver: given a question, and skills in front of it, searches and answers."""

from __future__ import annotations

from collections.abc import Sequence

from sesa import prompts
from sesa.agents.search_agent import SearchAgent
from sesa.config import RunConfig
from sesa.prompts import Prompt
from sesa.types import Role, Skill


def solver(config: RunConfig, question: str, skills: Sequence[Skill]) -> SearchAgent:
    """The solver at work on one question. Skills stand before the question, so that the first query sees them."""
    prompt = prompts.load(config.solver.prompt)
    return SearchAgent(
        role=Role.SOLVER,
        prompt=prompt,
        final="answer",
        variables={"question": question, "skills": skill_block(prompt, skills)},
        passage_words=config.retrieval.passage_words,
    )


def skill_block(prompt: Prompt, skills: Sequence[Skill]) -> str:
    """The loaded skills as text with a blank line after; empty where none is loaded."""
    if not skills:
        return ""
    lines = [prompt.section("skill_heading"), *(skill_line(skill) for skill in skills)]
    return "\n".join(lines) + "\n\n"


def skill_line(skill: Skill) -> str:
    """One skill on one line: trigger, description, avoidance cue, query template."""
    parts = [f"- {skill.trigger.rstrip('.')}: {skill.description}"]
    if skill.avoidance:
        parts.append(f"Avoid: {skill.avoidance}")
    if skill.query_template:
        parts.append(f"Query: {skill.query_template}")
    return " ".join(parts)
