"""Published policy versions and what their updates did."""

from __future__ import annotations

import sqlalchemy as sa

from sesa.store import schema
from sesa.store.database import Database
from sesa.store.queries import conditions
from sesa.types import PolicyVersion, TrainStats


class PolicyStore(Database):
    def save_version(self, run_id: str, version: PolicyVersion) -> None:
        """Record a set of weights; saved again when it is published."""
        with self._write(run_id) as connection:
            self._insert(connection, schema.policy_versions, [{"run_id": run_id, **version.model_dump()}], update=True)

    def versions(self, run_id: str, policy: str | None = None) -> list[PolicyVersion]:
        """The versions of one policy or of all, by policy and version."""
        table = schema.policy_versions
        query = sa.select(*(table.c[name] for name in PolicyVersion.model_fields))
        query = query.where(*conditions(table, run_id, policy=policy)).order_by(table.c.policy, table.c.version)
        with self._read() as connection:
            return [PolicyVersion.model_validate(dict(row)) for row in connection.execute(query).mappings()]

    def save_stats(self, run_id: str, stats: TrainStats) -> None:
        """Record what an update of a policy did; a policy has one record per step."""
        row = {"run_id": run_id, "policy": stats.policy, "step": stats.step, "body": stats.model_dump_json()}
        with self._write(run_id) as connection:
            self._insert(connection, schema.train_stats, [row], update=True)

    def stats(self, run_id: str, step: int | None = None) -> list[TrainStats]:
        """The updates of one step or of all, by step and policy."""
        table = schema.train_stats
        query = sa.select(table.c.body).where(*conditions(table, run_id, step=step))
        with self._read() as connection:
            bodies = connection.scalars(query.order_by(table.c.step, table.c.policy))
            return [TrainStats.model_validate_json(body) for body in bodies]
