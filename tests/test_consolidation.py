from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from bank_life import ENCODER, K, Life, bank_of, commit, event, right, skill, wrong
from hypothesis import given
from hypothesis import strategies as st
from rollout_records import answer, attempt, failure, malformed, proposal, search

from sesa.config import BankSection, DistillerSection
from sesa.consolidation import choose, due, prime
from sesa.types import (
    Counters,
    SkillSource,
    SkillStatus,
    StopReason,
)

# ------------------------------------------------------------------------------------------------------------- credit


def test_credit_counts_loads_helpful_and_hurt() -> None:
    a, b = skill("rivers"), skill("lakes")
    rollouts = [
        right("r1", a.id, b.id),
        wrong("r2", a.id),
        attempt(search("x"), stop=StopReason.MAX_TURNS, key="r3", correct=0.0, skills=(a.id,)),
        attempt(malformed(), stop=StopReason.INVALID, key="r4", correct=0.0, skills=(a.id,)),
        attempt(stop=StopReason.BACKEND_ERROR, key="r5", skills=(a.id,)),
        attempt(answer("a"), key="r6", correct=1.0, considered=(b.id,)),
    ]
    plan = commit(bank_of(a, b), rollouts=rollouts)
    credit = {e.skill_id: e.detail for e in plan.events if e.kind is K.CREDITED}
    assert credit[a.id] == {"retrieved": 4, "helpful": 1, "hurt": 2, "rollouts": ["r1", "r2", "r3", "r4"]}
    assert credit[b.id] == {"retrieved": 1, "helpful": 1, "hurt": 0, "rollouts": ["r1"]}
    assert all(e.version == 2 and e.step == 1 for e in plan.events)


def test_credit_is_counted_once_per_rollout_also_after_a_resume() -> None:
    a = skill("rivers", SkillSource.SEED)
    life = Life(a)
    life.commit(rollouts=[right("r1", a.id), right("r1", a.id), wrong("r2", a.id)])
    counted = life.bank.skills[a.id].counters
    assert counted == Counters(retrieved=2, helpful=1, hurt=1)
    assert life.commit(rollouts=[right("r1", a.id), wrong("r2", a.id)]).empty
    life.commit(rollouts=[wrong("r2", a.id), wrong("r3", a.id)], step=2)
    assert life.bank.skills[a.id].counters == Counters(retrieved=3, helpful=1, hurt=2)


@given(st.permutations(range(8)), st.data())
def test_the_plan_does_not_depend_on_the_order_of_its_input(order: list[int], data: st.DataObject) -> None:
    skills = [skill(t) for t in ("rivers", "lakes", "films")]
    rollouts = [(right if i % 3 else wrong)(f"r{i}", skills[i % 3].id, skills[(i + 1) % 3].id) for i in range(8)]
    failures = [failure(f"f{i}") for i in range(3)]
    candidates = [skill(f"rivers of kind {i % 4}", provenance=(f"f{i % 3}",)) for i in range(8)]
    shuffled = data.draw(st.permutations(candidates))
    config = BankSection(admit_below=0.9, max_active=4)
    bank = bank_of(*skills)
    expected = commit(bank, rollouts=rollouts, candidates=candidates, failures=failures, config=config)
    found = commit(
        bank, rollouts=[rollouts[i] for i in order], candidates=shuffled, failures=failures[::-1], config=config
    )
    assert found == expected


def test_credit_for_what_cannot_be_is_an_error() -> None:
    with pytest.raises(ValueError, match="bank version 1 lacks"):
        commit(bank_of(skill("rivers")), rollouts=[right("r1", "skill-unknown")])
    with pytest.raises(ValueError, match="only solver rollouts"):
        commit(bank_of(skill("rivers")), rollouts=[proposal(answer("x"))])
    with pytest.raises(ValueError, match="no correct reward"):
        commit(bank_of(skill("rivers")), rollouts=[attempt(answer("a"), skills=(skill("rivers").id,))])


# --------------------------------------------------------------------------------------------------- retire and evict


def test_a_hurting_skill_is_retired_at_its_third_load_and_a_seed_never() -> None:
    a, s = skill("rivers"), skill("lakes", SkillSource.SEED)
    life = Life(a, s)
    life.commit(rollouts=[wrong("r1", a.id, s.id), wrong("r2", a.id, s.id)])
    assert life.bank.skills[a.id].status is SkillStatus.ACTIVE
    plan = life.commit(rollouts=[right("r3", a.id, s.id)], step=2)
    retired = [e for e in plan.events if e.kind is K.RETIRED]
    assert [(e.skill_id, e.detail["retrieved"]) for e in retired] == [(a.id, 3)]
    assert "-1 after 3 loads" in retired[0].reason
    assert life.bank.skills[a.id].status is SkillStatus.RETIRED
    assert life.bank.skills[s.id].status is SkillStatus.ACTIVE


def test_a_balance_of_zero_stays_and_a_restored_skill_is_judged_by_its_next_load() -> None:
    a = skill("rivers")
    life = Life(a)
    life.commit(rollouts=[right("r1", a.id), wrong("r2", a.id), right("r3", a.id), wrong("r4", a.id)])
    assert life.bank.skills[a.id].status is SkillStatus.ACTIVE
    life.commit(rollouts=[wrong("r5", a.id)], step=2)
    assert life.bank.skills[a.id].status is SkillStatus.RETIRED
    life.events.append(event(4, K.RESTORED, a.id))
    life.commit(rollouts=[attempt(answer("x"), key="r6", correct=1.0)], step=3)
    assert life.bank.skills[a.id].status is SkillStatus.ACTIVE  # not loaded, so not judged
    life.commit(rollouts=[wrong("r7", a.id)], step=4)
    assert life.bank.skills[a.id].status is SkillStatus.RETIRED


def test_above_the_limit_the_lowest_score_goes_first_and_seeds_stay() -> None:
    seeds = [skill(f"seed {i}", SkillSource.SEED) for i in range(2)]
    good, bad, old, young = skill("good"), skill("bad"), skill("old", step=1), skill("young", step=2)
    life = Life(*seeds, good, bad, old, young)
    credit = [right("r1", good.id), wrong("r2", bad.id, seeds[0].id), wrong("r3", seeds[0].id)]
    plan = life.commit(rollouts=credit, config=BankSection(max_active=4))
    evicted = [e.skill_id for e in plan.events if e.kind is K.EVICTED]
    assert evicted == [bad.id, old.id]
    assert {s.id for s in life.bank.active} == {*(s.id for s in seeds), good.id, young.id}
    plan = life.commit(config=BankSection(max_active=1), step=2)
    assert {s.id for s in life.bank.active} == {s.id for s in seeds}


# ----------------------------------------------------------------------------------------------------- when and which


@pytest.mark.parametrize(
    ("step", "pending", "expected"),
    [(10, 20, True), (10, 19, False), (9, 300, False), (20, 300, True), (0, 300, False)],
)
def test_due_every_ten_steps_once_twenty_are_pending(step: int, pending: int, expected: bool) -> None:
    assert due(step, pending, DistillerSection()) is expected


def test_choose_prefers_repeated_kinds_and_failures_in_spite_of_guidance() -> None:
    plain = [failure(f"plain{i}") for i in range(3)]
    repeated = [failure(f"repeated{i}", cause="wrong entity") for i in range(3)]
    guided = failure("guided", skills=("skill-a",))
    both = failure("both", cause="wrong entity", skills=("skill-a",))
    pending = [*plain, *repeated, guided, both]
    assert [f.id for f in choose(pending, 6)] == ["both", "repeated0", "repeated1", "repeated2", "guided", "plain0"]
    assert choose(pending, 100) == choose(pending, 8) and len(choose(pending, 100)) == 8
    assert choose([], 30) == []


def test_choose_takes_the_oldest_first_where_nothing_else_tells_them_apart() -> None:
    pending = [failure(f"f{i}") for i in (3, 1, 2)]
    assert [f.id for f in choose(pending, 2)] == ["f3", "f1"]


# ------------------------------------------------------------------------------------------------------- a whole life


def test_sixty_steps_keep_every_rule() -> None:
    """Scripted rollouts and lessons through 60 commits: each bank obeys the limits, and events alone rebuild it."""
    rng = random.Random(0)
    config = BankSection(max_active=20, admit_below=0.93)
    life = Life()
    life.apply(prime(config))
    seeds = {s.id for s in life.bank.active}
    for step in range(1, 61):
        bank = life.bank
        active = [s.id for s in bank.active]
        rollouts = [rng.choice([right, wrong])(f"r{step}-{i}", *rng.sample(active, 3)) for i in range(10)]
        failures = [failure(f"f{step}-{i}") for i in range(3)]
        candidates = [
            skill(f"{rng.randrange(40)} alpha{rng.randrange(9)} beta{rng.randrange(9)}", provenance=(f.id,), step=step)
            for f in failures
        ]
        plan = life.commit(rollouts=rollouts, candidates=candidates, failures=failures, config=config, step=step)
        after = life.bank
        assert after.version == bank.version + 1
        assert len(after.active) <= 20 and seeds <= {s.id for s in after.active}
        loaded = {s.id for r in rollouts for s in r.skills}
        for s in after.active:
            assert s.id in seeds or s.id not in loaded or s.counters.retrieved < 3 or s.counters.score >= 0
        assert plan.count(K.CREDITED) == len(loaded)
        vectors = ENCODER.encode([s.text for s in after.active if s.id not in seeds])
        assert (np.triu(vectors @ vectors.T, 1) <= 0.93 + 1e-4).all()
    counts = Counter(e.kind for e in life.events)
    assert counts[K.RETIRED] and counts[K.EVICTED] and counts[K.ADMITTED] and counts[K.REFUSED]
    assert sum(s.counters.retrieved for s in life.bank.skills.values()) == 60 * 10 * 3
