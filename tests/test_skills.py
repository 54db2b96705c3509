from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bank_life import CONFIG, ENCODER, K, Life, bank_of, event, right, skill, written, wrong
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_records import HashingEncoder, failure

from sesa.config import BankSection
from sesa.consolidation import prime
from sesa.errors import DataError
from sesa.retrieval.encoder import get_encoder
from sesa.skills import Bank, new_skill, seed_skills
from sesa.store import Store
from sesa.types import (
    Counters,
    FailureStatus,
    SkillEvent,
    SkillSource,
    SkillStatus,
)

# -------------------------------------------------------------------------------------------------------- seed skills


def test_fifteen_seed_skills_fit_a_small_models_prompt() -> None:
    skills = seed_skills()
    assert len({s.id for s in skills}) == len({s.text for s in skills}) == 15
    for s in skills:
        assert s.source is SkillSource.SEED
        parts = {"description": 30, "trigger": 20, "avoidance": 20, "query_template": 12}
        assert {p: n for p, n in parts.items() if len(getattr(s, p).split()) > n} == {}, s.trigger


def test_prime_makes_version_one_of_the_seeds() -> None:
    plan = prime(CONFIG)
    bank = Life().apply(plan)
    assert (plan.base_version, bank.version) == (0, 1)
    assert {s.id for s in bank.active} == {s.id for s in seed_skills()}
    assert prime(BankSection(seed_skills=False)).empty


def test_the_same_lesson_has_the_same_id_and_another_lesson_another() -> None:
    a = skill("rivers")
    assert (
        a.id
        == new_skill(description=" Look for  rivers first", trigger="asks about rivers ", source=SkillSource.SEED).id
    )
    assert a.id != skill("lakes").id


# ------------------------------------------------------------------------------------------------------------- replay


def test_replay_stops_at_a_version_and_keeps_history() -> None:
    a, b = skill("rivers"), skill("lakes")
    events = [
        event(1, K.CREATED, a.id),
        event(2, K.CREDITED, a.id, retrieved=2, helpful=1, hurt=1, rollouts=["r1", "r2"]),
        event(2, K.ADMITTED, b.id),
        event(3, K.RETIRED, a.id),
        event(4, K.RESTORED, a.id),
        event(5, K.EDITED, a.id, description="Look at the map"),
        event(6, K.EVICTED, b.id),
    ]
    texts = {a.id: a, b.id: b}
    assert [s.id for s in Bank.replay(events, texts, 1).active] == [a.id]
    at2 = Bank.replay(events, texts, 2)
    assert {s.id for s in at2.active} == {a.id, b.id}
    assert at2.skills[a.id].counters == Counters(retrieved=2, helpful=1, hurt=1)
    assert at2.credited == {"r1", "r2"}
    assert Bank.replay(events, texts, 3).skills[a.id].status is SkillStatus.RETIRED
    assert Bank.replay(events, texts, 4).skills[a.id].status is SkillStatus.ACTIVE
    last = Bank.replay(events, texts)
    assert (last.version, last.skills[a.id].description) == (6, "Look at the map")
    assert last.skills[b.id].status is SkillStatus.EVICTED
    assert Bank.replay([], {}).version == 0
    assert Bank.replay(events, texts, 9).version == 9


def test_a_refused_candidate_is_on_record_and_never_replaces_what_is_there() -> None:
    a, b = skill("rivers"), skill("lakes")
    bank = Bank.replay(
        [event(1, K.CREATED, a.id), event(2, K.REFUSED, a.id), event(2, K.REFUSED, b.id)], {a.id: a, b.id: b}
    )
    assert bank.skills[a.id].status is SkillStatus.ACTIVE
    assert bank.skills[b.id].status is SkillStatus.REFUSED
    assert [s.id for s in bank.active] == [a.id]


def test_rollback_restores_the_active_bank_and_loses_nothing() -> None:
    a, b, c = skill("rivers"), skill("lakes"), skill("seas")
    events = [
        event(1, K.CREATED, a.id),
        event(1, K.CREATED, b.id),
        event(2, K.RETIRED, a.id),
        event(2, K.ADMITTED, c.id),
        event(3, K.CREDITED, b.id, retrieved=1, helpful=1, hurt=0, rollouts=["r"]),
        event(4, K.ROLLED_BACK, "", to=1),
        event(5, K.CREDITED, a.id, retrieved=1, helpful=0, hurt=1, rollouts=["s"]),
    ]
    texts = {s.id: s for s in (a, b, c)}
    assert Bank.replay(events, texts, 4).active == Bank.replay(events, texts, 1).active
    assert Bank.replay(events, texts, 4).skills[c.id].status is SkillStatus.RETIRED
    assert Bank.replay(events, texts, 4).credited == {"r"}  # what was counted before the rollback is not counted again
    assert Bank.replay(events, texts).skills[a.id].counters.hurt == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (event(2, K.RETIRED, "skill-x"), "never created"),
        (event(2, K.ADMITTED, "skill-x"), "no text"),
        (event(2, K.EDITED, "A", id="b"), "id cannot be edited"),
        (event(2, K.EDITED, "A", description=""), "description: String should have at least 1 character"),
    ],
)
def test_events_that_cannot_be_are_one_line_errors(bad: SkillEvent, message: str) -> None:
    a = skill("rivers").model_copy(update={"id": "A"})
    with pytest.raises(DataError, match=message) as caught:
        Bank.replay([event(1, K.CREATED, "A"), bad], {"A": a})
    assert "\n" not in str(caught.value) and "version 2" in str(caught.value)


IDS = [f"s{i}" for i in range(5)]
TEXTS = {key: skill(f"thing {key}").model_copy(update={"id": key}) for key in IDS}
CHANGES = st.tuples(
    st.sampled_from([k for k in K if k is not K.ROLLED_BACK]),
    st.sampled_from(IDS),
    st.integers(0, 4),
    st.integers(0, 4),
    st.booleans(),
)


@given(st.lists(CHANGES, max_size=60))
@settings(max_examples=300, deadline=None)
def test_random_event_streams_replay_like_the_straightforward_model(changes: list[tuple[Any, ...]]) -> None:
    """A model with mutable dictionaries walks the same stream, one event at a time, and is compared at each version."""
    status: dict[str, str] = {}
    count: dict[str, list[int]] = {}
    text: dict[str, str] = {}
    events: list[SkillEvent] = []
    version = 0
    snapshots: dict[int, dict[str, tuple[str, list[int], str]]] = {}
    for i, (kind, key, helpful, hurt, new_version) in enumerate(changes):
        if key not in status and kind not in (K.CREATED, K.ADMITTED, K.REFUSED):
            continue
        version += new_version or version == 0
        detail: dict[str, Any] = {}
        if key not in status:
            status[key] = "refused" if kind is K.REFUSED else "active"
            count[key], text[key] = [0, 0, 0], TEXTS[key].description
        elif kind is K.CREDITED:
            detail = {"retrieved": helpful + hurt, "helpful": helpful, "hurt": hurt, "rollouts": [f"r{i}"]}
            count[key] = [x + y for x, y in zip(count[key], (helpful + hurt, helpful, hurt), strict=True)]
        elif kind is K.EDITED:
            detail = {"description": f"text {i}"}
            text[key] = f"text {i}"
        elif kind is not K.REFUSED:
            after = {K.RETIRED: "retired", K.EVICTED: "evicted"}
            status[key] = after.get(kind, "active")
        events.append(event(version, kind, key, **detail))
        snapshots[version] = {key: (status[key], list(count[key]), text[key]) for key in status}
    for at, expected in snapshots.items():
        bank = Bank.replay(events, TEXTS, at)
        found = {
            key: (s.status.value, [s.counters.retrieved, s.counters.helpful, s.counters.hurt], s.description)
            for key, s in bank.skills.items()
        }
        assert found == expected
        assert [s.id for s in bank.active] == sorted(key for key, row in expected.items() if row[0] == "active")


# ---------------------------------------------------------------------------------------------------------- retrieval


def test_retrieval_loads_the_nearest_and_lists_the_considered() -> None:
    topics = ["rivers in europe", "rivers", "lakes", "films", "songs", "kings", "wars", "planets"]
    bank = bank_of(*(skill(t) for t in topics))
    found = bank.retrieve("asks about rivers", ENCODER, k=3, min_similarity=0.5)
    assert len(found) == 6
    assert found[0].id == skill("rivers").id
    assert [s.similarity for s in found] == sorted((s.similarity for s in found), reverse=True)
    assert [s.loaded for s in found] == [i < 3 and s.similarity >= 0.5 for i, s in enumerate(found)]
    assert any(s.loaded for s in found) and not all(s.loaded for s in found[:3])
    without_floor = bank.retrieve("asks about rivers", ENCODER, k=3, min_similarity=-1.0)
    assert [s.loaded for s in without_floor] == [True] * 3 + [False] * 3


def test_only_active_skills_are_found_and_an_empty_bank_gives_none() -> None:
    a, b = skill("rivers"), skill("lakes")
    bank = Bank.replay([event(1, K.CREATED, a.id), event(1, K.REFUSED, b.id)], {a.id: a, b.id: b})
    assert [s.id for s in bank.retrieve("lakes", ENCODER, 3, -1.0)] == [a.id]
    assert Bank().retrieve("lakes", ENCODER, 3, -1.0) == ()
    assert bank.retrieve("lakes", ENCODER, 0, -1.0) == ()
    assert bank.retrieve_batch([], ENCODER, 3, -1.0) == []


def test_ties_are_broken_by_id() -> None:
    twins = [
        new_skill(description="Look up", trigger="rivers", query_template=str(i), source=SkillSource.SEED)
        for i in range(9)
    ]  # the query template is not embedded
    found = bank_of(*random.Random(1).sample(twins, 9)).retrieve("rivers", ENCODER, 2, -1.0)
    assert [s.id for s in found] == sorted(s.id for s in twins)[:4]


@given(st.lists(st.sampled_from(["rivers", "lakes", "big lakes", "films", "old films"]), min_size=1, max_size=8))
def test_batch_and_single_retrieval_agree(questions: list[str]) -> None:
    bank = bank_of(*(skill(f"{t} {i}") for i, t in enumerate(["rivers", "lakes", "films", "big rivers", "old lakes"])))
    assert bank.retrieve_batch(questions, ENCODER, 2, 0.2) == [bank.retrieve(q, ENCODER, 2, 0.2) for q in questions]


def test_skill_texts_are_embedded_once_per_process() -> None:
    encoder = HashingEncoder()
    a, b = skill("rivers"), skill("lakes")
    bank_of(a).retrieve("x", encoder, 1, -1.0)
    bank_of(a, b).retrieve_batch(["x", "x", "y"], encoder, 1, -1.0)
    assert Counter(encoder.encoded)[a.text] == Counter(encoder.encoded)[b.text] == 1


# --------------------------------------------------------------------------------------------------------- real parts


def test_the_store_gives_back_the_bank_that_was_committed(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store.sqlite")
    store.create_run("run", {}, {})
    plans = [prime(CONFIG)]
    lesson = written("Find the town first, then search the river in it").model_copy(update={"provenance": ("f0",)})
    life = Life()
    life.apply(plans[0])
    seed = life.bank.active[0].id
    store.save_failures("run", [failure()], queue_limit=300)
    plans.append(life.commit(rollouts=[right("r1", seed)], candidates=[lesson], failures=[failure()]))
    plans.append(life.commit(rollouts=[wrong(f"q{i}", lesson.id) for i in range(3)], step=2))
    for plan in plans:
        arguments: dict[str, Any] = {
            "step": plan.step,
            "base_version": plan.base_version,
            "events": plan.events,
            "skills": plan.skills,
            "failures_used": plan.failures_used,
        }
        assert store.commit_bank("run", **arguments) == plan.base_version + 1
        assert store.commit_bank("run", **arguments) == plan.base_version + 1  # a resumed step commits nothing twice
        assert Bank.from_store(store, "run", plan.base_version + 1) == Bank.replay(
            life.events, life.texts, plan.base_version + 1
        )
    bank = Bank.from_store(store, "run")
    assert bank == life.bank and bank.version == 3
    assert bank.skills[lesson.id].status is SkillStatus.RETIRED
    assert bank.skills[seed].counters == Counters(retrieved=1, helpful=1)
    assert [f.status for f in store.failures("run")] == [FailureStatus.CONSOLIDATED]
    store.close()


@pytest.mark.real
def test_seed_skills_are_found_for_the_questions_they_are_for() -> None:
    """With the embedded encoder: the skill for each kind of question is among the three loaded."""
    bank = Life().apply(prime(CONFIG))
    kinds = {
        "Who was born earlier, Theodor Kotsch or Herbert Walther?": "Which of two",
        "Who is the maternal grandfather of Louis the Pious?": "father, mother",
        "Where did the composer of the song Northwest Passage die?": "Who directed",
        "Who was the director of Extract?": "Who directed",
        "When was the first orca put in captivity?": "In what year",
        "In which city was Camille Paule born?": "Where is it?",
        "How many people live in Ghent?": "How many",
        "who played the judge in good will hunting": "played the role",
        "Are Karl Shapiro and Elie Wiesel both American writers?": "Are both",
        "What is the occupation of William Murray?": "occupation",
    }
    found = bank.retrieve_batch(list(kinds), get_encoder(), CONFIG.top_k, -1.0)
    missed = {
        q: [bank.skills[s.id].trigger for s in skills if s.loaded]
        for (q, trigger), skills in zip(kinds.items(), found, strict=True)
        if not any(trigger in bank.skills[s.id].trigger for s in skills if s.loaded)
    }
    assert missed == {}
    alone = [bank.retrieve(q, get_encoder(), CONFIG.top_k, -1.0) for q in kinds]
    assert [[s.id for s in one] for one in alone] == [[s.id for s in one] for one in found]
