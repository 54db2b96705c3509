"""Ids of everything a step makes: readable, and the same whenever the step is run again."""

from __future__ import annotations


def proposal(run_id: str, step: int, seed: int, sample: int) -> str:
    """The ``sample``-th proposal for the ``seed``-th seed answer of a step."""
    return f"{run_id}.{step:04d}.p{seed:03d}.{sample:02d}"


def question(proposal_id: str) -> str:
    """The question that a proposal ended with."""
    head, seed, sample = proposal_id.rsplit(".", 2)
    return f"{head}.q{seed[1:]}.{sample}"


def seed_index(question_or_proposal_id: str) -> int:
    """Position of the seed answer within its step."""
    return int(question_or_proposal_id.split(".")[2][1:])


def attempt(question_id: str, sample: int) -> str:
    """The ``sample``-th solver rollout of a question."""
    return f"{question_id}.s{sample:02d}"


def evidence(question_id: str) -> str:
    """The reader's rollout of a question's evidence check."""
    return f"{question_id}.evidence"


def distillation(run_id: str, step: int, number: int) -> str:
    """The ``number``-th call of the distiller in a step."""
    return f"{run_id}.{step:04d}.d{number:02d}"
