"""Runs, the nodes their steps have committed, metrics and the run's log."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from sesa.errors import NotFoundError, StoreError
from sesa.store import schema
from sesa.store.codec import dumps
from sesa.store.database import Database, Row, now
from sesa.types import Record, SeedAnswer

FINAL_NODE = "finish"
"""The last node of the step graph: a step is done once this node has committed."""

STATUSES = ("running", "finished", "failed", "interrupted")


class RunRow(Record):
    """A run as listed. ``updated`` is the last heartbeat; ``steps_done`` counts steps whose last node committed."""

    id: str
    status: str
    created: datetime
    updated: datetime
    config: dict[str, Any]
    facts: dict[str, Any]
    steps_done: int = 0


class LogEntry(Record):
    """A line of the run's log: an alarm, a restart, a resume. ``step`` is None outside any step."""

    id: int
    step: int | None
    at: datetime
    kind: str
    message: str


class RunStore(Database):
    def create_run(self, run_id: str, config: dict[str, Any], facts: dict[str, Any]) -> None:
        """Record a new run with status "running". Raises StoreError where the run exists: none is overwritten."""
        at = now()
        row = {"id": run_id, "status": "running", "created": at, "updated": at}
        with self._write() as connection:
            if connection.scalar(sa.select(schema.runs.c.id).where(schema.runs.c.id == run_id)) is not None:
                raise StoreError(
                    f"{self.name}: run {run_id!r} exists; resume it with --resume {run_id}, or name another"
                )
            connection.execute(schema.runs.insert(), {**row, "config": dumps(config), "facts": dumps(facts)})

    def run(self, run_id: str) -> RunRow:
        """The run, or with "latest" the newest one. Raises NotFoundError that names the nearest run ids."""
        if run_id == "latest":
            newest = self.runs()[-1:]
            if not newest:
                raise NotFoundError(f"{self.name}: holds no runs yet; start one with `python training/run.py`")
            return newest[0]
        with self._read(run_id) as connection:
            return _runs(connection, schema.runs.c.id == run_id)[0]

    def runs(self) -> list[RunRow]:
        """All runs, oldest first."""
        with self._read() as connection:
            return _runs(connection, sa.true())

    def set_run_status(self, run_id: str, status: str) -> None:
        """Set the status to running, finished, failed or interrupted; counts as a heartbeat."""
        if status not in STATUSES:
            raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {status!r}")
        self._touch(run_id, status=status)

    def heartbeat(self, run_id: str) -> None:
        """Note that the run is alive now."""
        self._touch(run_id)

    def _touch(self, run_id: str, **values: str) -> None:
        with self._write(run_id) as connection:
            connection.execute(schema.runs.update().where(schema.runs.c.id == run_id).values(updated=now(), **values))

    # ------------------------------------------------------------------------------------------------------- steps

    def commit_node(self, run_id: str, step: int, node: str, counts: Mapping[str, Any]) -> None:
        """Record that a node of the step graph has done its work, with its counts; counts as a heartbeat."""
        row = {"run_id": run_id, "step": step, "node": node, "counts": dumps(dict(counts)), "at": now()}
        with self._write(run_id) as connection:
            self._insert(connection, schema.step_nodes, [row], update=True)
            connection.execute(schema.runs.update().where(schema.runs.c.id == run_id).values(updated=row["at"]))

    def nodes(self, run_id: str, step: int) -> dict[str, dict[str, Any]]:
        """Counts by node, for the nodes of a step that have committed, in the order of their commits."""
        table = schema.step_nodes
        query = sa.select(table.c.node, table.c.counts).where(table.c.run_id == run_id, table.c.step == step)
        with self._read() as connection:
            rows = connection.execute(query.order_by(table.c.at, table.c.node))
            return {row.node: json.loads(row.counts) for row in rows}

    def steps(self, run_id: str) -> list[int]:
        """The steps of which at least one node has committed, in order."""
        table = schema.step_nodes
        query = sa.select(table.c.step).where(table.c.run_id == run_id).distinct().order_by(table.c.step)
        with self._read() as connection:
            return list(connection.scalars(query))

    def save_step_seeds(self, run_id: str, step: int, seeds: Sequence[SeedAnswer]) -> None:
        """Record the seeds chosen for a step, once: where the step has seeds, those stay."""
        table = schema.step_seeds
        rows = [
            {"run_id": run_id, "step": step, "position": i, "body": seed.model_dump_json()}
            for i, seed in enumerate(seeds)
        ]
        chosen = sa.select(table.c.position).where(table.c.run_id == run_id, table.c.step == step).limit(1)
        with self._write(run_id) as connection:
            if connection.scalar(chosen) is None:
                self._insert(connection, table, rows)

    def step_seeds(self, run_id: str, step: int) -> list[SeedAnswer]:
        """The seeds of a step in their order, empty where none were saved."""
        table = schema.step_seeds
        query = sa.select(table.c.body).where(table.c.run_id == run_id, table.c.step == step).order_by(table.c.position)
        with self._read() as connection:
            return [SeedAnswer.model_validate_json(body) for body in connection.scalars(query)]

    # ------------------------------------------------------------------------------------------- metrics and the log

    def save_metrics(self, run_id: str, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step by name; a name that exists is overwritten. NaN is kept, so that it can be seen."""
        rows = [{"run_id": run_id, "step": step, "name": n, "value": float(v)} for n, v in metrics.items()]
        with self._write(run_id) as connection:
            self._insert(connection, schema.metrics, rows, update=True)

    def metrics(self, run_id: str) -> dict[int, dict[str, float]]:
        """All metrics: step → name → value."""
        table = schema.metrics
        query = sa.select(table.c.step, table.c.name, table.c.value).where(table.c.run_id == run_id)
        out: dict[int, dict[str, float]] = {}
        with self._read() as connection:
            for step, name, value in connection.execute(query.order_by(table.c.step, table.c.name)):
                out.setdefault(step, {})[name] = value
        return out

    def log(self, run_id: str, step: int | None, kind: str, message: str) -> None:
        """Append a line to the run's log: an alarm, a restart, a resume."""
        with self._write(run_id) as connection:
            connection.execute(
                schema.log.insert(),
                {"run_id": run_id, "step": step, "at": now(), "kind": kind, "message": message},
            )

    def log_entries(self, run_id: str, *, step: int | None = None, kind: str | None = None) -> list[LogEntry]:
        """The run's log, oldest first, all or those of one step or kind."""
        table = schema.log
        query = sa.select(table.c.id, table.c.step, table.c.at, table.c.kind, table.c.message)
        query = query.where(table.c.run_id == run_id)
        if step is not None:
            query = query.where(table.c.step == step)
        if kind is not None:
            query = query.where(table.c.kind == kind)
        with self._read() as connection:
            return [LogEntry.model_validate(dict(r)) for r in connection.execute(query.order_by(table.c.id)).mappings()]


def _runs(connection: sa.Connection, which: sa.ColumnElement[bool]) -> list[RunRow]:
    nodes = schema.step_nodes
    done = sa.select(nodes.c.run_id, sa.func.count().label("steps_done"))
    done = done.where(nodes.c.node == FINAL_NODE).group_by(nodes.c.run_id)
    counts = {row.run_id: int(row.steps_done) for row in connection.execute(done)}
    rows = connection.execute(sa.select(schema.runs).where(which).order_by(schema.runs.c.created, schema.runs.c.id))
    return [_run_row(dict(row), counts.get(row["id"], 0)) for row in rows.mappings()]


def _run_row(row: Row, steps_done: int) -> RunRow:
    config, facts = json.loads(row["config"]), json.loads(row["facts"])
    return RunRow.model_validate({**row, "config": config, "facts": facts, "steps_done": steps_done})
