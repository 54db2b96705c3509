"""What a store must do on every database. Subclassed by test_store.py (SQLite) and test_store_postgres.py."""

from __future__ import annotations

import math
import multiprocessing
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sesa.errors import BusyError, NotFoundError, StoreError
from sesa.store import FINAL_NODE, Store, migrations, schema
from sesa.types import (
    Answer,
    Ask,
    Check,
    Failure,
    FailureStatus,
    Hit,
    Invalid,
    LoadedSkill,
    Message,
    ModelCall,
    Passage,
    PolicyVersion,
    Question,
    Reward,
    Role,
    Rollout,
    Search,
    SeedAnswer,
    Skill,
    SkillEvent,
    SkillEventKind,
    StopReason,
    TrainedRow,
    TrainStats,
    Turn,
    Usage,
    Verdict,
)

# ------------------------------------------------------------------------------------------------------- record makers

texts = st.text(max_size=40)  # control characters and U+0000 included
ids = st.text(min_size=1, max_size=12)
floats = st.floats(allow_nan=False)
counts = st.integers(0, 2**40)
tokens = st.integers(0, 2**31 - 1)
passages = st.builds(Passage, id=ids, title=texts, text=texts)
hits = st.builds(Hit, passage=passages, score=floats, rank=st.integers(1, 100), retriever=texts)
messages = st.builds(Message, role=st.sampled_from(["system", "user", "assistant"]), content=texts)


@st.composite
def calls(draw: st.DrawFn) -> ModelCall:
    sampled = draw(st.lists(st.tuples(tokens, floats), max_size=6))
    return ModelCall(
        policy=draw(texts),
        policy_version=draw(counts),
        messages=tuple(draw(st.lists(messages, max_size=4))),
        prompt_ids=tuple(draw(st.lists(st.integers(0, 3), max_size=8))),
        token_ids=tuple(token for token, _ in sampled),
        logprobs=tuple(logprob for _, logprob in sampled),
        text=draw(texts),
        finish_reason=draw(texts),
        usage=Usage(prompt_tokens=draw(counts), completion_tokens=draw(counts)),
        latency_s=draw(floats),
    )


actions = st.one_of(
    st.builds(Search, query=ids),
    st.builds(Answer, text=ids),
    st.builds(Ask, question=ids),
    st.builds(Invalid, reason=texts),
)
turns = st.builds(Turn, call=calls(), action=actions, hits=st.lists(hits, max_size=2).map(tuple), observation=texts)
rewards = st.lists(st.builds(Reward, name=texts, value=floats, weight=floats), max_size=3, unique_by=lambda r: r.name)
rollouts = st.builds(
    Rollout,
    id=ids,
    role=st.sampled_from(Role),
    question_id=texts,
    step=counts,
    sample=counts,
    turns=st.lists(turns, max_size=4).map(tuple),
    stop_reason=st.sampled_from(StopReason),
    rewards=rewards.map(tuple),
    bank_version=st.none() | counts,
    skills=st.lists(st.builds(LoadedSkill, id=ids, similarity=floats, loaded=st.booleans()), max_size=3).map(tuple),
    error=st.none() | texts,
)
seeds = st.builds(
    SeedAnswer,
    id=ids,
    answer=ids,
    aliases=st.lists(texts, max_size=2).map(tuple),
    type=st.sampled_from(["entity", "date", "number"]),
    passage_ids=st.lists(texts, max_size=2).map(tuple),
    hops=st.integers(1, 5),
)
checks = st.builds(Check, name=texts, verdict=st.sampled_from(Verdict), reason=texts)
questions = st.builds(
    Question,
    id=ids,
    text=texts,
    target=ids,
    aliases=st.lists(texts, max_size=2).map(tuple),
    seed=seeds,
    evidence=st.lists(passages, max_size=3).map(tuple),
    checks=st.lists(checks, max_size=3).map(tuple),
    proposal_id=st.none() | texts,
    step=counts,
)
failures = st.builds(
    Failure,
    id=ids,
    question_id=texts,
    question=texts,
    target=texts,
    aliases=st.lists(texts, max_size=2).map(tuple),
    evidence=st.lists(passages, max_size=2).map(tuple),
    prediction=st.none() | texts,
    skills=st.lists(texts, max_size=2).map(tuple),
    stop_reason=st.sampled_from(StopReason),
    cause=texts,
    step=counts,
    status=st.sampled_from(FailureStatus),
)
_examples = count()  # each hypothesis example writes to a run of its own
some = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


def a_passage(number: int) -> Passage:
    return Passage(id=f"p{number}", title=f"Title {number}", text=f"Text of passage {number}. " * 8)


def a_rollout(number: int, *, step: int = 1, role: Role = Role.SOLVER, **changes: Any) -> Rollout:
    """A rollout of three turns in which every prompt extends the last prompt and reply."""
    out, prompt, said = [], list(range(100)), [Message(role="user", content=f"question {number}")]
    for turn in range(3):
        reply = [1000 + turn, 2000 + number]
        action = Search(query=f"query {turn}") if turn < 2 else Answer(text=f"answer {number}")
        call = ModelCall(
            policy=role.value,
            policy_version=0,
            messages=tuple(said),
            prompt_ids=tuple(prompt),
            token_ids=tuple(reply),
            logprobs=(-0.1 - number / 3, -1 / 7),
            text=f"reply {turn}",
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=2),
        )
        hit = Hit(passage=a_passage(number % 5), score=1 / 3, rank=1, retriever="bm25")
        out.append(Turn(call=call, action=action, hits=(hit,) if turn < 2 else (), observation=f"observation {turn}"))
        prompt = [*prompt, *reply, 7, 8, 9]
        said = [*said, Message(role="assistant", content=f"reply {turn}"), Message(role="user", content="passages")]
    base = Rollout(
        id=f"{role.value}-{step}-{number:05d}",
        role=role,
        question_id=f"q{number // 5:05d}",
        step=step,
        sample=number % 5,
        turns=tuple(out),
        stop_reason=StopReason.ANSWERED,
        bank_version=3,
        skills=(LoadedSkill(id="s1", similarity=0.5), LoadedSkill(id="s2", similarity=0.1, loaded=False)),
    )
    return base.model_copy(update=changes)


def a_failure(number: int, **changes: Any) -> Failure:
    base = Failure(
        id=f"f{number}",
        question_id=f"q{number}",
        question="Who?",
        target="Ada",
        evidence=(a_passage(number),),
        prediction="Bob",
        stop_reason=StopReason.ANSWERED,
        step=number,
    )
    return base.model_copy(update=changes)


def an_event(skill_id: str = "s1", kind: SkillEventKind = SkillEventKind.CREATED, version: int = 1) -> SkillEvent:
    return SkillEvent(version=version, kind=kind, skill_id=skill_id, reason="because", step=1, detail={"n": [1, 2.5]})


def a_skill(skill_id: str = "s1") -> Skill:
    return Skill(id=skill_id, description="Search twice.", trigger="Two people are compared.")


def count_rows(store: Store, table: sa.Table) -> int:
    with store._read() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0


def _kind(column_type: Any, connection: sa.Connection) -> str:
    """Name of a column type, in one spelling."""
    name = str(column_type.compile(connection.dialect)).replace("_", " ").split()[0]
    return {"VARCHAR": "TEXT", "FLOAT": "DOUBLE", "REAL": "DOUBLE"}.get(name, name)


def _commit_once(location: str, step: int, barrier: Any, results: Any) -> None:
    """Child process: try to put version 1 on top of version 0 at the same moment as its siblings."""
    with Store.open(location) as store:
        barrier.wait()
        try:
            results.put(store.commit_bank("r", step=step, base_version=0, events=[an_event(f"s{step}")]))
        except BusyError as error:
            results.put(str(error))


def _open_once(location: str, barrier: Any, results: Any) -> None:
    """Child process: open the same new store at the same moment as its siblings, and write to it."""
    barrier.wait()
    with Store.open(location) as store:
        store.create_run(f"run {multiprocessing.current_process().pid}", {}, {})
    results.put("done")


def _together(target: Any, arguments: list[tuple[Any, ...]]) -> list[Any]:
    """Run ``target(*arguments[i], barrier, results)`` in a process each, and return what they put."""
    # Not "fork": SQLite forbids it while connections are open. The server imports once what every child needs.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sesa.store", "hypothesis", "pytest"])
    barrier, results = context.Barrier(len(arguments)), context.Queue()
    children = [context.Process(target=target, args=(*args, barrier, results)) for args in arguments]
    for child in children:
        child.start()
    out = [results.get(timeout=120) for _ in children]
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * len(children)
    return out


class StoreSuite:
    @pytest.fixture
    def location(self) -> str:
        """Where this test's own, still empty, store lies: a file or URL."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, location: str) -> Iterator[Store]:
        with Store.open(location) as store:
            store.create_run("r", {"run": {"steps": 2}}, {"seed": 1})
            yield store

    # -------------------------------------------------------------------------------------------------- round trips

    @some
    @given(batch=st.lists(rollouts, max_size=3, unique_by=lambda r: r.id))
    def test_rollouts_come_back_exactly(self, store: Store, batch: list[Rollout]) -> None:
        run = f"example {next(_examples)}"
        store.create_run(run, {}, {})
        store.save_rollouts(run, batch)
        loaded = store.rollouts(run)
        assert {r.id: r for r in loaded} == {r.id: r for r in batch}
        assert [r.value for r in sorted(loaded, key=lambda r: r.id)] == pytest.approx(
            [r.value for r in sorted(batch, key=lambda r: r.id)], nan_ok=True
        )
        short = store.rollouts(run, turns=False)
        assert short == [r.model_copy(update={"turns": ()}) for r in loaded]

    @some
    @given(batch=st.lists(questions, max_size=3, unique_by=lambda q: q.id))
    def test_questions_come_back_exactly(self, store: Store, batch: list[Question]) -> None:
        run = f"example {next(_examples)}"
        store.create_run(run, {}, {})
        store.save_questions(run, batch)
        assert {q.id: q for q in store.questions(run)} == {q.id: q for q in batch}

    @some
    @given(batch=st.lists(failures, max_size=3, unique_by=lambda f: f.id))
    def test_failures_come_back_exactly_and_in_order(self, store: Store, batch: list[Failure]) -> None:
        run = f"example {next(_examples)}"
        store.create_run(run, {}, {})
        assert store.save_failures(run, batch, 100) == 0
        assert store.failures(run) == batch

    def test_any_character_is_kept(self, store: Store) -> None:
        odd = "\x00 \x1a \x1a0 \x1a1 \x00\x1a \ufffe \U0001f600 'quoted' \\ %s :name"
        turn = a_rollout(1).turns[0].model_copy(update={"observation": odd, "action": Search(query=odd)})
        rollout = a_rollout(1, id=odd, question_id=odd, error=odd, turns=(turn,))
        store.save_rollouts("r", [rollout])
        assert store.rollouts("r", question_id=odd) == store.rollouts("r", ids=[odd]) == [rollout]

    def test_prompts_are_stored_as_what_they_add(self, store: Store) -> None:
        rollout = a_rollout(1)
        store.save_rollouts("r", [rollout])
        assert store.rollouts("r") == [rollout]
        with store._read() as connection:
            rows = connection.execute(sa.select(schema.turns).order_by(schema.turns.c.position)).mappings().all()
        assert [row["prompt_shared"] for row in rows] == [0, 102, 107]
        assert [len(row["prompt_ids"]) // 4 for row in rows] == [100, 3, 3]
        assert [row["messages_shared"] for row in rows] == [0, 1, 3]

    def test_the_other_records_come_back(self, store: Store) -> None:
        seeds = [SeedAnswer(id="b", answer="Ada"), SeedAnswer(id="a", answer="1843", type="date", aliases=("1843 AD",))]
        store.save_step_seeds("r", 1, seeds)
        assert store.step_seeds("r", 1) == seeds
        assert store.step_seeds("r", 2) == []
        version = PolicyVersion(policy="solver", version=1, path="w", step=1, sha256="ab")
        store.save_version("r", version)
        store.save_version("r", version.model_copy(update={"published": True}))
        store.save_version("r", PolicyVersion(policy="proposer", version=0, path="base"))
        assert store.versions("r", "solver") == [version.model_copy(update={"published": True})]
        assert [v.policy for v in store.versions("r")] == ["proposer", "solver"]
        stats = TrainStats(policy="solver", step=1, version=1, loss=0.5, dropped={"no variance": 2})
        store.save_stats("r", stats.model_copy(update={"loss": 0.25}))
        store.save_stats("r", stats)
        assert store.stats("r", 1) == store.stats("r") == [stats]

    def test_chosen_seeds_stay(self, store: Store) -> None:
        store.save_step_seeds("r", 1, [SeedAnswer(id="a", answer="Ada")])
        store.save_step_seeds("r", 1, [SeedAnswer(id="b", answer="Bob"), SeedAnswer(id="c", answer="Cy")])
        assert [s.id for s in store.step_seeds("r", 1)] == ["a"]

    def test_nan_is_kept(self, store: Store) -> None:
        store.save_metrics("r", 1, {"loss": math.nan, "rate": 0.1 + 0.2, "most": math.inf})
        loaded = store.metrics("r")[1]
        assert math.isnan(loaded["loss"]) and loaded["rate"] == 0.1 + 0.2 and loaded["most"] == math.inf
        lost = TrainStats(policy="solver", step=1, version=1, loss=math.nan)
        store.save_stats("r", lost)
        assert math.isnan(store.stats("r")[0].loss or 0.0)

    # -------------------------------------------------------------------------------------------------- runs, steps

    def test_runs(self, store: Store) -> None:
        store.create_run("second", {}, {})
        assert [run.id for run in store.runs()] == ["r", "second"]
        assert store.run("latest").id == "second"
        assert store.run("r").config == {"run": {"steps": 2}} and store.run("r").facts == {"seed": 1}
        before = store.run("r").updated
        store.heartbeat("r")
        assert store.run("r").updated > before
        store.set_run_status("r", "finished")
        assert store.run("r").status == "finished"
        with pytest.raises(ValueError, match="running, finished"):
            store.set_run_status("r", "done")

    def test_a_run_is_never_overwritten(self, store: Store) -> None:
        with pytest.raises(StoreError, match="--resume r"):
            store.create_run("r", {}, {})
        assert store.run("r").facts == {"seed": 1}

    def test_an_unknown_run_names_the_nearest(self, store: Store) -> None:
        store.create_run("2026-01-01-abc", {}, {})
        for use in (lambda: store.run("2026-01-01-abd"), lambda: store.heartbeat("2026-01-01-abd")):
            with pytest.raises(NotFoundError, match="did you mean 2026-01-01-abc"):
                use()
        with pytest.raises(NotFoundError, match="holds no run 'x'"):
            store.save_rollouts("x", [a_rollout(1)])

    def test_latest_of_an_empty_store(self, location: str) -> None:
        with Store.open(location) as store, pytest.raises(NotFoundError, match="no runs yet"):
            store.run("latest")

    def test_nodes(self, store: Store) -> None:
        store.commit_node("r", 1, "propose", {"proposals": 3})
        store.commit_node("r", 1, "validate", {"valid": 1})
        store.commit_node("r", 1, "propose", {"proposals": 4})
        assert store.nodes("r", 1) == {"propose": {"proposals": 4}, "validate": {"valid": 1}}
        assert store.nodes("r", 2) == {}
        assert store.run("r").steps_done == 0
        store.commit_node("r", 1, FINAL_NODE, {})
        store.commit_node("r", 2, "propose", {})
        assert store.run("r").steps_done == 1
        assert store.steps("r") == [1, 2]

    def test_log(self, store: Store) -> None:
        store.log("r", 1, "alarm", "valid share fell")
        store.log("r", None, "resume", "resumed")
        assert [(e.step, e.kind, e.message) for e in store.log_entries("r")] == [
            (1, "alarm", "valid share fell"),
            (None, "resume", "resumed"),
        ]
        assert [e.kind for e in store.log_entries("r", kind="resume")] == ["resume"]
        assert [e.step for e in store.log_entries("r", step=1)] == [1]

    # ----------------------------------------------------------------------------------------- rollouts, idempotence

    def test_saved_twice_is_saved_once(self, store: Store) -> None:
        rollout = a_rollout(1, rewards=(Reward(name="correct", value=1.0),))
        shorter = rollout.model_copy(update={"turns": rollout.turns[:1], "rewards": (), "error": "again"})
        longer = rollout.model_copy(update={"turns": (*rollout.turns, rollout.turns[0])})
        for again in (rollout, shorter, longer):
            store.save_rollouts("r", [again, again])
            assert store.rollouts("r") == [rollout]
        assert count_rows(store, schema.rollouts) == 1
        assert count_rows(store, schema.turns) == 3
        assert count_rows(store, schema.rollout_skills) == 2
        assert count_rows(store, schema.passages) == 1

    def test_runs_do_not_see_each_other(self, store: Store) -> None:
        store.create_run("other", {}, {})
        store.save_rollouts("r", [a_rollout(1)])
        store.save_rollouts("other", [a_rollout(1, error="theirs")])
        assert [r.error for r in store.rollouts("r")] == [None]
        assert [r.error for r in store.rollouts("other")] == ["theirs"]

    def test_filters_and_pages(self, store: Store) -> None:
        batch = [a_rollout(i) for i in range(10)] + [a_rollout(i, step=2) for i in range(3)]
        batch += [a_rollout(i, role=Role.PROPOSER, stop_reason=StopReason.MAX_TURNS) for i in range(2)]
        store.save_rollouts("r", list(reversed(batch)))
        ordered = sorted(batch, key=lambda r: (r.step, r.role, r.question_id, r.sample, r.id))
        assert store.rollouts("r") == ordered
        assert store.rollouts("r", limit=4, offset=3) == ordered[3:7]
        assert store.rollouts("r", offset=12) == ordered[12:]
        assert store.rollouts("r", step=2, role=Role.SOLVER) == [r for r in ordered if r.step == 2]
        assert store.rollouts("r", question_id="q00001") == [r for r in ordered if r.question_id == "q00001"]
        assert store.rollouts("r", stop_reason=StopReason.MAX_TURNS) == [r for r in ordered if r.role is Role.PROPOSER]
        wanted = [ordered[5].id, ordered[1].id, "absent"]
        assert store.rollouts("r", ids=wanted) == [ordered[1], ordered[5]]
        assert store.rollouts("r", ids=wanted, limit=1, offset=1) == [ordered[5]]
        assert store.rollouts("r", ids=[]) == []
        assert len(store.rollouts("r", ids=[r.id for r in ordered] + [f"none {i}" for i in range(40_000)])) == 15
        assert store.rollout_ids("r", step=1, role=Role.SOLVER) == {r.id for r in batch[:10]}
        assert store.count_rollouts("r") == 15 and store.count_rollouts("r", step=2) == 3
        rows = store.rollout_rows("r", limit=2)
        assert [row.id for row in rows] == [r.id for r in ordered[:2]]
        row = store.rollout_rows("r", role=Role.SOLVER, limit=1)[0]
        assert (row.answer, row.searches, row.turns, row.sampled_tokens, row.value) == ("answer 0", 2, 3, 6, None)
        assert len(store.rollout_rows("r", skill_id="s1")) == 15 and store.rollout_rows("r", skill_id="s2") == []
        assert store.rollout("r", ordered[0].id) == ordered[0]
        with pytest.raises(NotFoundError, match="no rollout 'x'"):
            store.rollout("r", "x")

    def test_question_filters(self, store: Store) -> None:
        def question(name: str, step: int, *verdicts: Verdict) -> Question:
            checks = tuple(Check(name=f"c{i}", verdict=v) for i, v in enumerate(verdicts))
            return Question(
                id=name, text="Who?", target="Ada", seed=SeedAnswer(id="a", answer="Ada"), checks=checks, step=step
            )

        batch = [question("a", 1, Verdict.PASS), question("b", 1, Verdict.PASS, Verdict.FAIL), question("c", 2)]
        store.save_questions("r", batch)
        assert store.questions("r") == batch
        assert store.questions("r", status=Verdict.PASS) == batch[:1]
        assert store.questions("r", step=1, status=Verdict.FAIL) == batch[1:2]
        assert store.questions("r", ids=["c", "a"]) == [batch[0], batch[2]]
        assert store.questions("r", limit=1, offset=1) == batch[1:2]
        asked = question("c", 2, Verdict.PASS).model_copy(update={"proposal_id": "p1"})
        store.save_questions("r", [asked])
        assert store.questions("r", proposal_id="p1") == [asked]
        assert [q.id for q in store.questions("r", status=Verdict.PASS)] == ["a", "c"]

    def test_rewards_change_the_value(self, store: Store) -> None:
        store.save_rollouts("r", [a_rollout(1), a_rollout(2)])
        first, second = a_rollout(1).id, a_rollout(2).id
        parts = [Reward(name="correct", value=1.0, weight=0.5), Reward(name="f1", value=0.3, weight=0.5)]
        store.save_rewards("r", {first: parts, second: []})
        store.save_rewards(
            "r", {first: [Reward(name="correct", value=0.0, weight=0.5), Reward(name="format", value=0.1)]}
        )
        loaded = store.rollout("r", first)
        assert [(p.name, p.value) for p in loaded.rewards] == [("correct", 0.0), ("f1", 0.3), ("format", 0.1)]
        assert [row.value for row in store.rollout_rows("r")] == [loaded.value, None]
        with pytest.raises(StoreError, match="refused a write"):
            store.save_rewards(
                "r", {first: [Reward(name="correct", value=9.0)], "absent": [Reward(name="x", value=1.0)]}
            )
        assert store.rollout("r", first) == loaded

    def test_a_batch_is_written_whole_or_not_at_all(self, store: Store) -> None:
        twice = (Reward(name="correct", value=1.0), Reward(name="correct", value=0.0))
        with pytest.raises(StoreError, match="two rewards have one name"):
            store.save_rollouts("r", [a_rollout(1), a_rollout(2, rewards=twice)])
        turn = a_rollout(3).turns[0]
        wide = turn.model_copy(update={"call": turn.call.model_copy(update={"prompt_ids": (2**31,)})})
        with pytest.raises(StoreError, match="32 bits"):
            store.save_rollouts("r", [a_rollout(1), a_rollout(3, turns=(wide,))])
        assert [count_rows(store, t) for t in (schema.rollouts, schema.turns, schema.passages)] == [0, 0, 0]

    def test_trained_rows(self, store: Store) -> None:
        store.save_rollouts("r", [a_rollout(1), a_rollout(2)])
        used = TrainedRow(
            rollout_id=a_rollout(1).id, policy="solver", version=1, step=1, sampled_tokens=6, trained_tokens=6,
            sequences=1, advantage=-0.7,
        )  # fmt: skip
        left = TrainedRow(rollout_id=a_rollout(2).id, policy="solver", version=1, step=1, dropped="no variance")
        store.save_trained("r", [used.model_copy(update={"sequences": 2}), left])
        store.save_trained("r", [used])
        assert store.trained("r") == store.trained("r", step=1, policy="solver") == [used, left]
        assert store.trained("r", rollout_id=used.rollout_id) == [used]
        assert store.trained("r", step=2) == []

    # ------------------------------------------------------------------------------------------------ failures, bank

    def test_the_queue_drops_the_oldest(self, store: Store) -> None:
        assert store.save_failures("r", [a_failure(i) for i in range(4)], 3) == 1
        assert store.save_failures("r", [a_failure(i) for i in range(6)], 3) == 2
        assert store.save_failures("r", [a_failure(i) for i in range(6)], 3) == 0
        assert store.failure_counts("r") == {"pending": 3, "consolidated": 0, "dropped": 3}
        by_status = {s: [f.id for f in store.failures("r", status=s)] for s in FailureStatus}
        assert by_status[FailureStatus.PENDING] == ["f3", "f4", "f5"]
        assert by_status[FailureStatus.DROPPED] == ["f0", "f1", "f2"]
        assert [f.id for f in store.failures("r", limit=2)] == ["f0", "f1"]
        assert store.failures("r", ids=["f5"]) == [a_failure(5)]
        # Those consolidated no longer wait: the queue has room again.
        used = {"f3": FailureStatus.CONSOLIDATED, "f4": FailureStatus.CONSOLIDATED}
        store.commit_bank("r", step=1, base_version=0, events=[], failures_used=used)
        store.save_failures("r", [a_failure(6)], 3)
        assert [f.id for f in store.failures("r", status=FailureStatus.PENDING)] == ["f5", "f6"]
        # A failure is never pending again because its step ran again.
        store.save_failures("r", [a_failure(3)], 3)
        assert store.failures("r", ids=["f3"])[0].status is FailureStatus.CONSOLIDATED

    def test_bank_versions(self, store: Store) -> None:
        assert store.bank_version("r") == 0
        assert store.commit_bank("r", step=0, base_version=0, events=[an_event()], skills=[a_skill()]) == 1
        credit = an_event(kind=SkillEventKind.CREDITED, version=99)
        edited = a_skill().model_copy(update={"description": "Other."})
        assert store.commit_bank("r", step=1, base_version=1, events=[credit, credit], skills=[edited]) == 2
        assert store.bank_version("r") == 2
        assert [store.bank_version("r", step=s) for s in (0, 1, 2)] == [0, 1, 2]
        assert [(e.version, e.kind.value) for e in store.bank_events("r")] == [
            (1, "created"),
            (2, "credited"),
            (2, "credited"),
        ]
        assert store.bank_events("r", upto=1) == [an_event()]
        assert store.bank_events("r", skill_id="none") == []
        assert store.skill_texts("r") == {"s1": a_skill()}

    def test_a_resumed_step_commits_once(self, store: Store) -> None:
        store.save_failures("r", [a_failure(1)], 9)
        for _ in range(2):
            used = {"f1": FailureStatus.CONSOLIDATED}
            assert store.commit_bank("r", step=1, base_version=0, events=[an_event()], failures_used=used) == 1
        assert len(store.bank_events("r")) == 1

    def test_a_change_made_beside_the_loop_is_not_taken_for_its_own(self, store: Store) -> None:
        assert store.commit_bank("r", step=1, base_version=0, events=[an_event("x")], author="human") == 1
        with pytest.raises(BusyError, match="at version 1, not 0"):
            store.commit_bank("r", step=1, base_version=0, events=[an_event()])
        assert store.commit_bank("r", step=1, base_version=1, events=[an_event()]) == 2

    def test_a_bank_commit_is_whole(self, store: Store) -> None:
        store.save_failures("r", [a_failure(1)], 9)
        used = {"f1": FailureStatus.CONSOLIDATED, "absent": FailureStatus.CONSOLIDATED}
        with pytest.raises(NotFoundError, match="no failure 'absent'"):
            store.commit_bank("r", step=1, base_version=0, events=[an_event()], skills=[a_skill()], failures_used=used)
        assert store.bank_version("r") == 0 and store.bank_events("r") == [] and store.skill_texts("r") == {}
        assert store.failures("r") == [a_failure(1)]

    def test_one_of_several_threads_commits(self, store: Store) -> None:
        results: list[int | str] = []
        barrier = threading.Barrier(4)

        def commit(step: int) -> None:
            barrier.wait()
            try:
                results.append(store.commit_bank("r", step=step, base_version=0, events=[an_event(f"s{step}")]))
            except BusyError as error:
                results.append(str(error))

        threads = [threading.Thread(target=commit, args=(step,)) for step in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [r for r in results if isinstance(r, int)] == [1]
        assert sum("at version 1, not 0" in r for r in results if isinstance(r, str)) == 3, results
        assert store.bank_version("r") == 1 and len(store.bank_events("r")) == 1

    def test_one_of_several_processes_commits(self, store: Store, location: str) -> None:
        results = _together(_commit_once, [(location, step) for step in range(3)])
        assert [r for r in results if isinstance(r, int)] == [1]
        assert sum("at version 1, not 0" in r for r in results if isinstance(r, str)) == 2, results
        assert store.bank_version("r") == 1 and len(store.bank_events("r")) == 1

    # ------------------------------------------------------------------------------------------- schema, durability

    def test_processes_may_open_a_new_store_together(self, location: str) -> None:
        assert _together(_open_once, [(location,)] * 3) == ["done"] * 3
        with Store.open(location) as store:
            assert len(store.runs()) == 3

    def test_migrations_lead_to_the_schema(self, store: Store) -> None:
        with store._read() as connection:
            inspector = sa.inspect(connection)
            assert set(inspector.get_table_names()) == set(schema.metadata.tables)
            for name, table in schema.metadata.tables.items():
                found = {c["name"]: c for c in inspector.get_columns(name)}
                assert list(found) == [c.name for c in table.columns], name
                for column in table.columns:
                    where = f"{name}.{column.name}"
                    assert found[column.name]["nullable"] == column.nullable, where
                    present, wanted = found[column.name]["type"], column.type
                    assert _kind(present, connection) == _kind(wanted, connection), where
                key = inspector.get_pk_constraint(name)["constrained_columns"]
                assert key == [c.name for c in table.primary_key], name
                links = {tuple(f["constrained_columns"]): f["referred_table"] for f in inspector.get_foreign_keys(name)}
                wanted_links = {tuple(f.column_keys): f.referred_table.name for f in table.foreign_key_constraints}
                assert links == wanted_links, name
                indexes = {i["name"]: i["column_names"] for i in inspector.get_indexes(name)}
                assert indexes == {i.name: [c.name for c in i.columns] for i in table.indexes}, name

    def test_migrated_from_version_1(self, location: str, monkeypatch: pytest.MonkeyPatch) -> None:
        newest = migrations.MIGRATIONS
        monkeypatch.setattr(migrations, "MIGRATIONS", newest[:1])
        with Store.open(location) as store:
            store.create_run("r", {}, {})
            store.save_rollouts("r", [a_rollout(1)])
            with store._read() as connection:
                assert sa.inspect(connection).get_indexes("rollouts") == []
        monkeypatch.setattr(migrations, "MIGRATIONS", newest)
        with Store.open(location) as store:
            assert store.rollouts("r") == [a_rollout(1)]
            with store._read() as connection:
                versions = connection.scalars(sa.select(schema.schema_version.c.version)).all()
                assert len(sa.inspect(connection).get_indexes("rollouts")) == 4
            assert versions == list(range(1, len(newest) + 1))

    def test_a_migration_that_fails_leaves_nothing(self, location: str, monkeypatch: pytest.MonkeyPatch) -> None:
        broken = (*migrations.MIGRATIONS, "CREATE TABLE half (id INTEGER); CREATE TABLE half (id INTEGER)")
        with Store.open(location) as store:
            store.create_run("r", {}, {})
        monkeypatch.setattr(migrations, "MIGRATIONS", broken)
        with pytest.raises(StoreError, match="half"):
            Store.open(location)
        monkeypatch.undo()
        with Store.open(location) as store, store._read() as connection:
            assert [run.id for run in store.runs()] == ["r"]
            assert "half" not in sa.inspect(connection).get_table_names()

    def test_a_newer_store_is_refused(self, store: Store, location: str) -> None:
        newer = len(migrations.MIGRATIONS) + 1
        with store._write() as connection:
            connection.execute(schema.schema_version.insert(), {"version": newer, "applied": "later"})
        with pytest.raises(StoreError, match=rf"newer SESA \(schema {newer}, .*upgrade") as caught:
            Store.open(location)
        assert "\n" not in str(caught.value)

    def test_an_absent_store_is_not_made_for_a_reader(self, location: str) -> None:
        with pytest.raises(NotFoundError, match="start"):
            Store.open(location, create=False)
        with pytest.raises(NotFoundError, match="start"):
            Store.open(location, create=False)

    def test_kill_in_the_middle_of_a_write(self, store: Store, location: str) -> None:
        script = textwrap.dedent(
            """
            import sys
            from store_suite import a_rollout
            from sesa.store import Store
            store = Store.open(sys.argv[1])
            store.save_rollouts("r", [a_rollout(i) for i in range(20)])
            many = [a_rollout(i, step=2) for i in range(6000)]
            print("writing", flush=True)
            store.save_rollouts("r", many)
            print("written", flush=True)
            """
        )
        child = subprocess.Popen(
            [sys.executable, "-c", script, location], stdout=subprocess.PIPE, text=True, cwd=__file__.rsplit("/", 1)[0]
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "writing\n"
        time.sleep(self.seconds_into_the_write)
        child.kill()
        assert child.stdout.read() == "", "the write had ended before the kill; the test shows nothing"
        child.wait()
        assert store.rollouts("r") == [a_rollout(i) for i in range(20)]
        assert count_rows(store, schema.turns) == 60
        store.save_rollouts("r", [a_rollout(i, step=2) for i in range(5)])
        assert store.count_rollouts("r", step=2) == 5

    seconds_into_the_write = 0.5
