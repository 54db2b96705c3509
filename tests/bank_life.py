"""A skill bank with its events and texts, as a store would keep them, for tests."""

from __future__ import annotations

from typing import Any

from rollout_records import HashingEncoder, answer, attempt

from sesa.config import BankSection
from sesa.consolidation import BankPlan, plan_commit
from sesa.skills import Bank, new_skill
from sesa.types import (
    Rollout,
    Skill,
    SkillEvent,
    SkillEventKind,
    SkillSource,
)

ENCODER = HashingEncoder()
CONFIG = BankSection()
K = SkillEventKind


def skill(text: str, source: SkillSource = SkillSource.DISTILLED, **more: Any) -> Skill:
    return new_skill(description=f"Look for {text} first", trigger=f"asks about {text}", source=source, **more)


def event(version: int, kind: SkillEventKind, key: str, **detail: Any) -> SkillEvent:
    return SkillEvent(version=version, kind=kind, skill_id=key, reason="test", detail=detail)


def bank_of(*skills: Skill, version: int = 1) -> Bank:
    return Bank.replay([event(version, K.CREATED, s.id) for s in skills], {s.id: s for s in skills})


def commit(bank: Bank, **changes: Any) -> BankPlan:
    values: dict[str, Any] = {
        "rollouts": (),
        "candidates": (),
        "failures": (),
        "config": CONFIG,
        "encoder": ENCODER,
        "step": 1,
    }
    return plan_commit(bank, **(values | changes))


class Life:
    """A bank with its events and texts, as a store would keep them."""

    def __init__(self, *skills: Skill) -> None:
        self.events: list[SkillEvent] = [event(1, K.CREATED, s.id) for s in skills]
        self.texts: dict[str, Skill] = {s.id: s for s in skills}

    @property
    def bank(self) -> Bank:
        return Bank.replay(self.events, self.texts)

    def apply(self, plan: BankPlan) -> Bank:
        self.events += plan.events
        for created in plan.skills:
            self.texts.setdefault(created.id, created)
        return self.bank

    def commit(self, **changes: Any) -> BankPlan:
        plan = commit(self.bank, **changes)
        self.apply(plan)
        return plan


def right(key: str, *skills: str) -> Rollout:
    return attempt(answer("a"), key=key, correct=1.0, skills=skills)


def wrong(key: str, *skills: str) -> Rollout:
    return attempt(answer("b"), key=key, correct=0.0, skills=skills)


def written(description: str, trigger: str = "asks about a river", **more: Any) -> Skill:
    return new_skill(description=description, trigger=trigger, source=SkillSource.DISTILLED, **more)
