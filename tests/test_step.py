"""The step graph with scripted policies: what it stores, and that a kill anywhere changes nothing."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from self_play import RUN, ScriptedPublisher, play, scripted_config, solver_script

from sesa.errors import ServerError
from sesa.graphs.consolidating import step_metrics
from sesa.graphs.step import NODES
from sesa.graphs.updating import relocate
from sesa.skills import Bank
from sesa.store import Store
from sesa.types import FailureStatus, Message, PolicyVersion, Role, StopReason, Verdict

TIMES = {"at", "created", "updated", "applied"}
SCRIPT = Path(__file__).with_name("self_play.py")
STEPS = 3


def rows(store: Path) -> dict[str, list[tuple[object, ...]]]:
    """Every table, every column but the times, sorted."""
    with sqlite3.connect(store) as db:
        tables = [
            name
            for (name,) in db.execute(
                "select name from sqlite_master where type = 'table' and name not like 'sqlite_%'"
            )
        ]
        found = {}
        for table in tables:
            columns = [c[1] for c in db.execute(f"pragma table_info({table})") if c[1] not in TIMES]
            found[table] = sorted(db.execute(f"select {', '.join(columns)} from {table}"), key=repr)
    return found


@pytest.fixture(scope="module")
async def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[object, ...]]]:
    folder = tmp_path_factory.mktemp("whole")
    await play(folder, STEPS)
    return rows(folder / "sesa.sqlite")


async def test_a_step_leaves_every_stage_in_the_store(tmp_path: Path) -> None:
    ctx = await play(tmp_path, 2)
    nodes = ctx.store.nodes(RUN, 2)
    assert set(nodes) == set(NODES)
    proposals = ctx.store.rollouts(RUN, step=1, role=Role.PROPOSER)
    questions = ctx.store.questions(RUN, step=1)
    assert len(proposals) == len(questions) == 6
    assert all(r.stop_reason is StopReason.ASKED for r in proposals)
    valid = [q for q in questions if q.status is Verdict.PASS]
    assert valid
    assert all(q.checks[-1].name == "evidence_check" for q in valid)
    attempts = ctx.store.rollouts(RUN, step=1, role=Role.SOLVER)
    assert {r.bank_version for r in attempts} == {1}
    assert all(len(r.turns) == 2 and r.turns[0].hits and r.rewards for r in attempts)
    assert all(r.skills and r.skills[0].loaded for r in attempts)
    assert nodes["consolidate"]["distillations"] > 0
    assert nodes["consolidate"]["admitted"] + sum(nodes["consolidate"]["refused"].values()) > 0
    versions = {v.version for v in ctx.store.versions(RUN, "solver") if v.published}
    assert versions == {0, 1, 2}
    assert {r.policy_versions for r in ctx.store.rollouts(RUN, step=2, role=Role.SOLVER)} == {(1,)}
    failures = ctx.store.failures(RUN)
    assert {f.prediction for f in failures} == {"Paris"}
    assert any(f.status is FailureStatus.CONSOLIDATED for f in failures)


async def test_credit_equals_what_the_rollouts_say(tmp_path: Path) -> None:
    ctx = await play(tmp_path, 3)
    bank = Bank.from_store(ctx.store, RUN)
    attempts = ctx.store.rollouts(RUN, role=Role.SOLVER)
    for skill in bank.skills.values():
        users = [r for r in attempts if any(s.loaded and s.id == skill.id for s in r.skills)]
        assert skill.counters.retrieved == len(users)
        assert skill.counters.helpful == sum(r.reward("correct") == 1.0 for r in users)


async def test_a_rollout_of_a_step_sees_the_bank_of_the_step_before(tmp_path: Path) -> None:
    ctx = await play(tmp_path, 3)
    for step in (1, 2, 3):
        expected = ctx.store.bank_version(RUN, step=step)
        assert {r.bank_version for r in ctx.store.rollouts(RUN, step=step, role=Role.SOLVER)} == {expected}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("node", NODES)
async def test_killed_at_any_node_and_resumed_it_ends_the_same(
    node: str, when: str, tmp_path: Path, uninterrupted: dict[str, list[tuple[object, ...]]]
) -> None:
    killed = subprocess.run([sys.executable, SCRIPT, tmp_path, str(STEPS), node, when], check=False)
    assert killed.returncode == -9
    await play(tmp_path, STEPS)
    assert rows(tmp_path / "sesa.sqlite") == uninterrupted


@pytest.mark.parametrize("stored", [3, 8, 14, 25])
async def test_killed_within_a_fan_out_and_resumed_it_ends_the_same(
    stored: int, tmp_path: Path, uninterrupted: dict[str, list[tuple[object, ...]]]
) -> None:
    killed = subprocess.run([sys.executable, SCRIPT, tmp_path, str(STEPS), "rollouts", str(stored)], check=False)
    assert killed.returncode == -9
    await play(tmp_path, STEPS)
    assert rows(tmp_path / "sesa.sqlite") == uninterrupted


async def test_without_its_checkpoints_the_store_alone_leads_to_the_same_end(
    tmp_path: Path, uninterrupted: dict[str, list[tuple[object, ...]]]
) -> None:
    subprocess.run([sys.executable, SCRIPT, tmp_path, str(STEPS), "solve", "before"], check=False)
    for file in tmp_path.glob("checkpoints.sqlite*"):
        file.unlink()
    await play(tmp_path, STEPS)
    assert rows(tmp_path / "sesa.sqlite") == uninterrupted


async def test_the_bank_never_reaches_a_proposer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen elsewhere: what the solver reads must reach the proposer through its reward alone."""
    from sesa import skills

    real = skills.seed_skills
    marked = [s.model_copy(update={"description": f"ZEBRAMARK {s.description}"}) for s in real()]
    monkeypatch.setattr("sesa.consolidation.seed_skills", lambda: marked)
    ctx = await play(tmp_path, 2)
    calls = {
        role: [t.call for r in ctx.store.rollouts(RUN, role=role) for t in r.turns]
        for role in (Role.PROPOSER, Role.SOLVER)
    }
    assert any("ZEBRAMARK" in m.content for call in calls[Role.SOLVER] for m in call.messages)
    template = ctx.proposer.template
    for call in calls[Role.PROPOSER]:
        assert all("ZEBRAMARK" not in m.content for m in call.messages)
        assert "ZEBRAMARK" not in template.decode(call.prompt_ids)


async def test_skills_stand_before_the_first_query(tmp_path: Path) -> None:
    ctx = await play(tmp_path, 1)
    bank = Bank.from_store(ctx.store, RUN, 1)
    for rollout in ctx.store.rollouts(RUN, role=Role.SOLVER):
        loaded = bank.skills[next(s.id for s in rollout.skills if s.loaded)]
        first = rollout.turns[0].call.messages[-1].content
        assert loaded.description in first
        assert first.index(loaded.description) < first.index("Question:")


async def test_without_a_bank_nothing_is_loaded_or_credited(tmp_path: Path) -> None:
    ctx = await play(tmp_path, 1, scripted_config(bank__enabled="false"))
    assert all(r.bank_version is None and not r.skills for r in ctx.store.rollouts(RUN, role=Role.SOLVER))
    assert ctx.store.bank_version(RUN) == 0


async def test_metrics_are_recomputed_from_rows(tmp_path: Path) -> None:
    ctx = await play(tmp_path, 2)
    assert ctx.store.metrics(RUN) == {step: step_metrics(ctx, step) for step in (1, 2)}
    attempts = ctx.store.rollouts(RUN, step=2, role=Role.SOLVER)
    success = sum(r.reward("correct") or 0 for r in attempts) / len(attempts)
    assert ctx.store.metrics(RUN)[2]["solver/success"] == pytest.approx(success)


class Outage:
    """A solver whose server is gone from the ``first`` call on, for ``calls`` calls."""

    def __init__(self, first: int, calls: int) -> None:
        self.first, self.last, self.count = first, first + calls, 0

    def __call__(self, messages: Sequence[Message], seed: int) -> str:
        self.count += 1
        if self.first <= self.count < self.last:
            raise ServerError("http://127.0.0.1:1: connection refused")
        return solver_script(messages, seed)


async def test_a_server_that_cannot_come_back_stops_the_run_and_loses_nothing(
    tmp_path: Path, uninterrupted: dict[str, list[tuple[object, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dead(self: ScriptedPublisher, since: float | None = None) -> Sequence[str]:
        raise ServerError("solver: its server died 3 times (serving.restarts)")

    with monkeypatch.context() as patch:
        patch.setattr(ScriptedPublisher, "ensure_alive", dead)
        patch.setattr("self_play.solver_script", Outage(20, 10**6))
        with pytest.raises(ServerError, match="died 3 times"):
            await play(tmp_path, STEPS)
    # A run that stops ends its process, and with it every hold on the checkpoint file; this one lives on, and writes
    # that were cancelled may still hold it. The store is what the resumed run goes by.
    for file in tmp_path.glob("checkpoints.sqlite*"):
        file.unlink()
    await play(tmp_path, STEPS)
    assert rows(tmp_path / "sesa.sqlite") == uninterrupted


async def test_a_restarted_server_gets_the_lost_rollouts_again(
    tmp_path: Path, uninterrupted: dict[str, list[tuple[object, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def restarted(self: ScriptedPublisher, since: float | None = None) -> Sequence[str]:
        return ["solver"]

    monkeypatch.setattr(ScriptedPublisher, "ensure_alive", restarted)
    monkeypatch.setattr("self_play.solver_script", Outage(20, 1))
    ctx = await play(tmp_path, STEPS)
    logged = ctx.store.log_entries(RUN, kind="restart")
    assert len(logged) == 1
    found = rows(tmp_path / "sesa.sqlite")
    found["log"], uninterrupted = [], {**uninterrupted, "log": []}
    assert found == uninterrupted


async def test_a_rollout_lost_in_passing_is_recorded_and_enters_no_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("self_play.solver_script", Outage(20, 2))
    ctx = await play(tmp_path, 1)
    lost = [r for r in ctx.store.rollouts(RUN) if not r.finished]
    assert lost
    assert all(r.stop_reason is StopReason.BACKEND_ERROR and "refused" in (r.error or "") for r in lost)
    assert not any(r.rewards for r in lost)


def test_a_run_that_was_moved_is_found_where_it_lies_now(tmp_path: Path) -> None:
    old, new, model = tmp_path / "old", tmp_path / "new", tmp_path / "model"
    with Store.open(tmp_path / "sesa.sqlite") as store:
        store.create_run(RUN, {}, {})
        store.save_version(RUN, PolicyVersion(policy="solver", version=0, path=str(tmp_path / "gone")))
        store.save_version(RUN, PolicyVersion(policy="solver", version=1, path=str(old / "weights/solver/v0001")))
        store.save_version(RUN, PolicyVersion(policy="solver", version=2, path=str(old / "weights/solver/v0002")))
        (new / "weights/solver/v0001").mkdir(parents=True)
        model.mkdir()
        relocate(store, RUN, new, model)
        paths = [v.path for v in store.versions(RUN, "solver")]
    assert paths == [str(model), str(new / "weights/solver/v0001"), str(old / "weights/solver/v0002")]
