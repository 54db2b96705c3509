"""The skill bank: an immutable view of the skills at one version, rebuilt from events.

Events are the truth. A skill's text is stored once, as it was created; its status, its counters and later edits
follow from the events. Nothing is deleted: a skill that is retired, evicted or refused keeps its history.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from types import MappingProxyType
from typing import Any, Protocol

from pydantic import ValidationError

from sesa.errors import DataError
from sesa.skill_index import Encoder, SkillIndex
from sesa.types import Counters, LoadedSkill, Skill, SkillEvent, SkillEventKind, SkillSource, SkillStatus

_STATUS_AFTER = {
    SkillEventKind.CREATED: SkillStatus.ACTIVE,
    SkillEventKind.ADMITTED: SkillStatus.ACTIVE,
    SkillEventKind.RESTORED: SkillStatus.ACTIVE,
    SkillEventKind.RETIRED: SkillStatus.RETIRED,
    SkillEventKind.EVICTED: SkillStatus.EVICTED,
}
_EDITABLE = ("description", "trigger", "avoidance", "query_template")


class BankStore(Protocol):
    """What the bank needs of the run store."""

    def bank_version(self, run_id: str) -> int: ...

    def bank_events(self, run_id: str, *, upto: int | None = None) -> list[SkillEvent]: ...

    def skill_texts(self, run_id: str) -> dict[str, Skill]: ...


@dataclass(frozen=True)
class Bank:
    """All skills ever seen, as they stand at ``version``. Version 0 is the empty bank.

    ``credited`` holds the ids of rollouts whose credit is already counted, so that none is counted twice.
    """

    version: int = 0
    skills: Mapping[str, Skill] = field(default_factory=lambda: MappingProxyType({}))
    credited: frozenset[str] = frozenset()
    _indexes: list[SkillIndex] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def replay(cls, events: Iterable[SkillEvent], texts: Mapping[str, Skill], version: int | None = None) -> Bank:
        """The bank after ``events`` up to and including ``version`` (all of them where it is None).

        ``texts`` maps a skill's id to the skill as created; its status and counters are ignored. Raises DataError
        for an event that names a skill without text, changes one that was never created, or edits it wrongly.
        """
        ordered = sorted(events, key=lambda event: event.version)  # stable: the order within a version is kept
        if version is not None:
            ordered = [event for event in ordered if event.version <= version]
        skills: dict[str, Skill] = {}
        credited: set[str] = set()
        for position, event in enumerate(ordered):
            if event.kind is SkillEventKind.ROLLED_BACK:
                skills = _rolled_back(skills, cls.replay(ordered[:position], texts, int(event.detail["to"])))
                continue
            skills[event.skill_id] = _applied(skills.get(event.skill_id), event, texts)
            if event.kind is SkillEventKind.CREDITED:
                credited.update(event.detail.get("rollouts", ()))
        last = ordered[-1].version if ordered else 0
        return cls(version if version is not None else last, MappingProxyType(skills), frozenset(credited))

    @classmethod
    def from_store(cls, store: BankStore, run_id: str, version: int | None = None) -> Bank:
        """The bank of a run at ``version``, the current one where it is None."""
        version = store.bank_version(run_id) if version is None else version
        return cls.replay(store.bank_events(run_id, upto=version), store.skill_texts(run_id), version)

    @property
    def active(self) -> tuple[Skill, ...]:
        """The skills that can be retrieved, by id."""
        return tuple(skill for _, skill in sorted(self.skills.items()) if skill.status is SkillStatus.ACTIVE)

    def index(self, encoder: Encoder) -> SkillIndex:
        """The embeddings of the active skills under ``encoder``, computed once per bank and encoder."""
        for index in self._indexes:
            if index.encoder is encoder:
                return index
        self._indexes.append(SkillIndex(self.active, encoder))
        return self._indexes[-1]

    def retrieve(self, question: str, encoder: Encoder, k: int, min_similarity: float) -> tuple[LoadedSkill, ...]:
        """The skills for one question; see `retrieve_batch`."""
        return self.retrieve_batch([question], encoder, k, min_similarity)[0]

    def retrieve_batch(
        self, questions: Sequence[str], encoder: Encoder, k: int, min_similarity: float
    ) -> list[tuple[LoadedSkill, ...]]:
        """Per question the 2k nearest active skills by cosine similarity, nearest first, ties by id.

        The first k with at least ``min_similarity`` are loaded; the others are listed as considered. The result
        depends on the bank's version, the question and the encoder alone.
        """
        if k == 0 or not questions:
            return [() for _ in questions]
        nearest = self.index(encoder).nearest(questions, 2 * k)
        return [
            tuple(
                LoadedSkill(id=skill_id, similarity=similarity, loaded=rank < k and similarity >= min_similarity)
                for rank, (skill_id, similarity) in enumerate(found)
            )
            for found in nearest
        ]


def skill_id(description: str, trigger: str, avoidance: str = "", query_template: str = "") -> str:
    """Id of a skill: a hash of its content, so that the same lesson has the same id whenever it is written."""
    content = json.dumps([" ".join(part.split()) for part in (trigger, description, avoidance, query_template)])
    return f"skill-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def new_skill(
    *,
    description: str,
    trigger: str,
    avoidance: str = "",
    query_template: str = "",
    source: SkillSource,
    provenance: Sequence[str] = (),
    step: int = 0,
) -> Skill:
    """A skill with white space collapsed and the id of its content."""
    parts: dict[str, Any] = {
        "description": " ".join(description.split()),
        "trigger": " ".join(trigger.split()),
        "avoidance": " ".join(avoidance.split()),
        "query_template": " ".join(query_template.split()),
    }
    return Skill(id=skill_id(**parts), **parts, source=source, provenance=tuple(provenance), created_step=step)


def seed_skills() -> list[Skill]:
    """The hand-written skills that a bank starts with."""
    text = resources.files("sesa").joinpath("data/seed_skills.json").read_text(encoding="utf-8")
    return [new_skill(**row, source=SkillSource.SEED) for row in json.loads(text)["skills"]]


def _applied(skill: Skill | None, event: SkillEvent, texts: Mapping[str, Skill]) -> Skill:
    """The skill after one event."""
    where = f"bank version {event.version}: {event.kind} event of skill {event.skill_id}"
    kind = event.kind
    if skill is None:
        if kind not in (SkillEventKind.CREATED, SkillEventKind.ADMITTED, SkillEventKind.REFUSED):
            raise DataError(f"{where}: the skill was never created; the store's events are incomplete")
        if event.skill_id not in texts:
            raise DataError(f"{where}: the store holds no text of it; restore the store from a copy")
        status = SkillStatus.REFUSED if kind is SkillEventKind.REFUSED else SkillStatus.ACTIVE
        return texts[event.skill_id].model_copy(update={"status": status, "counters": Counters()})
    if kind is SkillEventKind.REFUSED:  # written again by the distiller: history, no change of what is there
        return skill
    if kind is SkillEventKind.CREDITED:
        added = Counters(**{name: event.detail.get(name, 0) for name in Counters.model_fields})
        return skill.model_copy(update={"counters": _sum(skill.counters, added)})
    if kind is SkillEventKind.EDITED:
        return _edited(skill, event.detail, where)
    return skill.model_copy(update={"status": _STATUS_AFTER[kind]})


def _edited(skill: Skill, changes: Mapping[str, Any], where: str) -> Skill:
    unknown = sorted(set(changes) - set(_EDITABLE))
    if unknown:
        raise DataError(f"{where}: {unknown[0]} cannot be edited; only {', '.join(_EDITABLE)} can")
    try:
        return Skill.model_validate({**skill.model_dump(), **changes})
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{where}: {first['loc'][0]}: {first['msg']}") from None


def _rolled_back(now: Mapping[str, Skill], then: Bank) -> dict[str, Skill]:
    """The skills of the earlier bank, and those born since: retired, so that none is lost and none is read."""
    born_since = {
        key: skill.model_copy(update={"status": SkillStatus.RETIRED}) if skill.status is SkillStatus.ACTIVE else skill
        for key, skill in now.items()
        if key not in then.skills
    }
    return {**then.skills, **born_since}


def _sum(a: Counters, b: Counters) -> Counters:
    return Counters(retrieved=a.retrieved + b.retrieved, helpful=a.helpful + b.helpful, hurt=a.hurt + b.hurt)
