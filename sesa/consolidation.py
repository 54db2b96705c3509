"""The bank's change at a step boundary, planned as a pure function of the bank, the step's rollouts and the candidates.

The store commits a plan in one transaction under a compare-and-set on ``base_version``, once per step; so credit is
counted once also when a step is resumed. Order of a plan: credit, retire, admit, evict (arXiv 2607.29468).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sesa.admission import Admission
from sesa.config import BankSection, DistillerSection
from sesa.rewards import substantively_wrong
from sesa.skill_index import Encoder
from sesa.skills import Bank, seed_skills
from sesa.types import (
    Counters,
    Failure,
    FailureStatus,
    Role,
    Rollout,
    Skill,
    SkillEvent,
    SkillEventKind,
    SkillSource,
    SkillStatus,
)


@dataclass(frozen=True)
class BankPlan:
    """What one commit writes: the events of version ``base_version`` + 1, texts of new skills, failures used."""

    base_version: int
    step: int
    events: tuple[SkillEvent, ...] = ()
    skills: tuple[Skill, ...] = ()
    failures_used: Mapping[str, FailureStatus] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to commit."""
        return not (self.events or self.failures_used)

    def count(self, kind: SkillEventKind) -> int:
        """Number of events of one kind."""
        return sum(event.kind is kind for event in self.events)

    @property
    def refused_by(self) -> dict[str, int]:
        """Refused candidates by the check that refused them."""
        refused = (e for e in self.events if e.kind is SkillEventKind.REFUSED)
        return dict(Counter(str(event.detail["check"]) for event in refused))


def due(step: int, pending: int, config: DistillerSection) -> bool:
    """Whether failures are distilled after ``step`` (counted from 1): every n steps, once enough are pending."""
    return step > 0 and step % config.every == 0 and pending >= config.min_pending


def choose(pending: Sequence[Failure], n: int) -> list[Failure]:
    """At most ``n`` of the pending failures (given oldest first) to distill, in the order chosen.

    Preferred are failures of a kind that repeats and failures in spite of loaded guidance, then the oldest. The kind
    of a failure is its cause, or its question while the cause is not known.
    """
    kinds = Counter(_kind(failure) for failure in pending)

    def rank(position: int) -> tuple[int, int, int]:
        failure = pending[position]
        repeats = kinds[_kind(failure)]
        return -((repeats > 1) + bool(failure.skills)), -repeats, position

    return [pending[position] for position in sorted(range(len(pending)), key=rank)[:n]]


def prime(config: BankSection) -> BankPlan:
    """The plan of version 1: the hand-written seed skills. Empty where they are switched off."""
    skills = tuple(seed_skills()) if config.seed_skills else ()
    events = [_event(0, 0, SkillEventKind.CREATED, skill.id, "seed skill") for skill in skills]
    return BankPlan(base_version=0, step=0, events=tuple(events), skills=skills)


def plan_commit(
    bank: Bank,
    *,
    rollouts: Iterable[Rollout],
    candidates: Iterable[Skill],
    failures: Iterable[Failure],
    config: BankSection,
    encoder: Encoder,
    step: int,
    undistilled: Iterable[Failure] = (),
) -> BankPlan:
    """Plan the commit that ends ``step``.

    ``rollouts`` are the step's scored solver rollouts, ``failures`` those that were put before the distiller (they
    are marked consolidated), ``candidates`` what it wrote, ``undistilled`` failures for which it never replied in
    form (they are marked dropped). The plan does not depend on the order of any of them.
    Every candidate becomes a skill row, admitted or refused. Raises ValueError for a rollout that is not scored or
    names a skill that the bank does not hold.
    """
    used = {failure.id: failure for failure in failures}
    marked = dict.fromkeys(used, FailureStatus.CONSOLIDATED)
    marked.update({failure.id: FailureStatus.DROPPED for failure in undistilled if failure.id not in used})
    events = _credit(bank, rollouts, step)
    counters = {event.skill_id: _counters(bank, event) for event in events}

    retired = [
        (bank.skills[key], after)
        for key, after in counters.items()
        if _expendable(bank.skills[key]) and after.retrieved >= config.retire_after and after.score < 0
    ]
    for skill, after in retired:
        reason = f"helpful - hurt = {after.score} after {after.retrieved} loads"
        events.append(_event(bank.version, step, SkillEventKind.RETIRED, skill.id, reason, after.model_dump()))

    admission = Admission(bank, used, config, encoder)
    admission.drop({skill.id for skill, _ in retired})
    created: list[Skill] = []
    admitted: list[Skill] = []
    for candidate in _merged(candidates):
        refusal = admission.judge(candidate)
        if candidate.id not in bank.skills:
            created.append(candidate)
        if refusal is None:
            admitted.append(candidate)
            detail: dict[str, Any] = {"provenance": list(candidate.provenance)}
            reason = f"{candidate.source} from {len(candidate.provenance)} failures"
            events.append(_event(bank.version, step, SkillEventKind.ADMITTED, candidate.id, reason, detail))
        else:
            detail = {"check": refusal.check, "provenance": list(candidate.provenance), **refusal.detail}
            reason = f"{refusal.check}: {refusal.reason}"
            events.append(_event(bank.version, step, SkillEventKind.REFUSED, candidate.id, reason, detail))

    gone = {skill.id for skill, _ in retired}
    active = [
        s.model_copy(update={"counters": counters.get(s.id, s.counters)}) for s in bank.active if s.id not in gone
    ]
    # A candidate that was refused before and fits now brings the counters it has: none.
    events += _evict(bank.version, step, [*active, *admitted], config.max_active)
    return BankPlan(
        base_version=bank.version,
        step=step,
        events=tuple(events),
        skills=tuple(created),
        failures_used={key: marked[key] for key in sorted(marked)},
    )


def _credit(bank: Bank, rollouts: Iterable[Rollout], step: int) -> list[SkillEvent]:
    """One CREDITED event per skill that was loaded, from rollouts whose credit is not counted yet.

    A load is counted for every finished rollout; helpful for a correct one, hurt for a substantively wrong one, and
    neither for one that failed in form. Rollouts lost to a backend count for nothing.
    """
    loads: dict[str, list[Rollout]] = {}
    unique = {rollout.id: rollout for rollout in rollouts if rollout.finished and rollout.id not in bank.credited}
    for _, rollout in sorted(unique.items()):
        if rollout.role is not Role.SOLVER:
            raise ValueError(f"rollout {rollout.id} is a {rollout.role}'s; only solver rollouts earn credit")
        for skill in rollout.skills:
            if skill.loaded:
                loads.setdefault(skill.id, []).append(rollout)
    events = []
    for key, users in sorted(loads.items()):
        if key not in bank.skills:
            raise ValueError(f"rollout {users[0].id} loaded skill {key}, which bank version {bank.version} lacks")
        helpful = sum(rollout.reward("correct") == 1.0 for rollout in users)
        hurt = sum(substantively_wrong(rollout) for rollout in users)
        detail = {
            "retrieved": len(users),
            "helpful": helpful,
            "hurt": hurt,
            "rollouts": [rollout.id for rollout in users],
        }
        reason = f"loaded {len(users)}, helpful {helpful}, hurt {hurt}"
        events.append(_event(bank.version, step, SkillEventKind.CREDITED, key, reason, detail))
    return events


def _evict(version: int, step: int, active: Sequence[Skill], limit: int) -> list[SkillEvent]:
    """Events for the lowest-scoring skills above ``limit``, the oldest first among equals; seed skills stay."""
    excess = max(0, len(active) - limit)
    order = sorted(
        (skill for skill in active if _expendable(skill)),
        key=lambda skill: (skill.counters.score, skill.created_step, skill.id),
    )
    return [
        _event(
            version,
            step,
            SkillEventKind.EVICTED,
            skill.id,
            f"score {skill.counters.score} is the lowest of {len(active) - i} active; the limit is {limit}",
            {"score": skill.counters.score, "active": len(active) - i, "limit": limit},
        )
        for i, skill in enumerate(order[:excess])
    ]


def _expendable(skill: Skill) -> bool:
    return skill.source is not SkillSource.SEED and skill.status is SkillStatus.ACTIVE


def _counters(bank: Bank, event: SkillEvent) -> Counters:
    now = bank.skills[event.skill_id].counters
    return Counters(
        retrieved=now.retrieved + event.detail["retrieved"],
        helpful=now.helpful + event.detail["helpful"],
        hurt=now.hurt + event.detail["hurt"],
    )


def _merged(candidates: Iterable[Skill]) -> list[Skill]:
    """Candidates in an order of their own (most sources first, then by id), equal texts joined with all sources."""
    sources: dict[str, set[str]] = {}
    first: dict[str, Skill] = {}
    for candidate in candidates:
        sources.setdefault(candidate.id, set()).update(candidate.provenance)
        first.setdefault(candidate.id, candidate)
    joined = [skill.model_copy(update={"provenance": tuple(sorted(sources[key]))}) for key, skill in first.items()]
    return sorted(joined, key=lambda skill: (-len(skill.provenance), skill.id))


def _kind(failure: Failure) -> str:
    return failure.question_id if failure.cause == "other" else f"cause:{failure.cause}"


def _event(
    base_version: int, step: int, kind: SkillEventKind, skill_id: str, reason: str, detail: dict[str, Any] | None = None
) -> SkillEvent:
    return SkillEvent(
        version=base_version + 1, kind=kind, skill_id=skill_id, reason=reason, step=step, detail=detail or {}
    )
