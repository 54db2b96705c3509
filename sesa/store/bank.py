"""The queue of failures, and the skill bank as a sequence of committed versions. Events are the truth."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa

from sesa.errors import BusyError, NotFoundError
from sesa.store import codec, schema
from sesa.store.database import Database, chunks, now
from sesa.store.queries import conditions, page_of, passages_of
from sesa.types import Failure, FailureStatus, Skill, SkillEvent


class BankStore(Database):
    # ---------------------------------------------------------------------------------------------------- failures

    def save_failures(self, run_id: str, failures: Sequence[Failure], queue_limit: int) -> int:
        """Queue failures; those that exist are left as they are, whatever became of them.

        The oldest pending ones beyond ``queue_limit`` become dropped in the same transaction (arXiv 2607.29468);
        returns how many.
        """
        table = schema.failures
        of_run = table.c.run_id == run_id
        first = {failure.id: failure for failure in reversed(failures)}
        with self._write(run_id) as connection:
            known: set[str] = set()
            for part in chunks(list(first)):
                known.update(connection.scalars(sa.select(table.c.id).where(of_run, table.c.id.in_(part))))
            new = [failure for failure in reversed(first.values()) if failure.id not in known]
            last = connection.scalar(sa.select(sa.func.max(table.c.seq)).where(of_run)) or 0
            rows = [codec.failure_row(run_id, failure, last + i) for i, failure in enumerate(new, 1)]
            evidence = (p for failure in new for p in failure.evidence)
            self._insert(connection, schema.passages, codec.passage_rows(run_id, evidence))
            self._insert(connection, table, rows)
            pending = sa.select(table.c.id).where(of_run, table.c.status == FailureStatus.PENDING.value)
            waiting = list(connection.scalars(pending.order_by(table.c.seq.desc())))
            dropped = waiting[queue_limit:]
            for part in chunks(dropped):
                too_many = table.update().where(of_run, table.c.id.in_(part))
                connection.execute(too_many.values(status=FailureStatus.DROPPED.value))
        return len(dropped)

    def failure_counts(self, run_id: str) -> dict[FailureStatus, int]:
        """Number of failures by status; every status is there."""
        table = schema.failures
        query = sa.select(table.c.status, sa.func.count()).where(table.c.run_id == run_id).group_by(table.c.status)
        with self._read() as connection:
            found = {FailureStatus(status): int(count) for status, count in connection.execute(query)}
        return {status: found.get(status, 0) for status in FailureStatus}

    def failures(
        self,
        run_id: str,
        *,
        status: FailureStatus | None = None,
        ids: Iterable[str] | None = None,
        limit: int | None = None,
    ) -> list[Failure]:
        """The failures that meet all conditions, oldest first."""
        table = schema.failures
        with self._read() as connection:
            rows = page_of(connection, table, conditions(table, run_id, status=status), ("seq", "id"), ids, limit, 0)
            passages = passages_of(connection, run_id, codec.evidence_keys(rows))
            return [codec.failure_of(row, passages) for row in rows]

    # -------------------------------------------------------------------------------------------------------- bank

    def commit_bank(
        self,
        run_id: str,
        *,
        step: int,
        base_version: int,
        events: Sequence[SkillEvent],
        skills: Sequence[Skill] = (),
        failures_used: Mapping[str, FailureStatus] | None = None,
        author: str = "step",
    ) -> int:
        """Commit bank version ``base_version + 1``: its events, the text of the skills it created, the failures used.

        One transaction, compare-and-set: it succeeds only on top of ``base_version``. Where the bank has moved on
        and ``author`` has already committed for ``step`` (a resumed step), that version is returned and nothing is
        written; otherwise BusyError. ``author`` tells the step loop ("step") from commits made beside it
        ("human", "import"), which are never taken for the loop's own. Events are stored with the version they
        become part of, whatever their ``version`` says. Raises NotFoundError for a failure that is not recorded.
        """
        versions = schema.bank_versions
        with self._write(run_id) as connection:
            of_run = versions.c.run_id == run_id
            current = connection.scalar(sa.select(sa.func.max(versions.c.version)).where(of_run)) or 0
            if current != base_version:
                own = sa.select(sa.func.max(versions.c.version))
                done = connection.scalar(own.where(of_run, versions.c.step == step, versions.c.author == author))
                if done is not None:
                    return int(done)
                raise BusyError(
                    f"{self.name}: run {run_id}: the skill bank is at version {current}, not {base_version}: another "
                    "process has changed it; read the bank again and repeat the change"
                )
            version = current + 1
            self._insert(
                connection,
                versions,
                [
                    {
                        "run_id": run_id,
                        "version": version,
                        "base_version": base_version,
                        "step": step,
                        "author": author,
                        "at": now(),
                    }
                ],
            )
            event_rows = [
                {
                    "run_id": run_id,
                    "version": version,
                    "position": i,
                    "kind": event.kind.value,
                    "skill_id": event.skill_id,
                    "step": event.step,
                    "reason": event.reason,
                    "detail": codec.dumps(event.detail),
                }
                for i, event in enumerate(events)
            ]
            self._insert(connection, schema.skill_events, event_rows)
            skill_rows = [
                {"run_id": run_id, "id": skill.id, "version": version, "body": skill.model_dump_json()}
                for skill in skills
            ]
            self._insert(connection, schema.skills, skill_rows)
            self._mark_failures(connection, run_id, failures_used or {})
        return version

    def _mark_failures(self, connection: sa.Connection, run_id: str, used: Mapping[str, FailureStatus]) -> None:
        table = schema.failures
        for failure_id, status in used.items():
            update = table.update().where(table.c.run_id == run_id, table.c.id == failure_id)
            if connection.execute(update.values(status=status.value)).rowcount == 0:
                raise NotFoundError(
                    f"{self.name}: run {run_id} has no failure {failure_id!r}; save it before it is used"
                )

    def bank_version(self, run_id: str, *, step: int | None = None) -> int:
        """The current version of the bank, 0 where nothing was committed.

        With ``step``: the version every rollout of that step sees, that is the newest one committed for an earlier
        step. Priming a bank therefore commits with a step below the first.
        """
        versions = schema.bank_versions
        query = sa.select(sa.func.max(versions.c.version)).where(versions.c.run_id == run_id)
        if step is not None:
            query = query.where(versions.c.step < step)
        with self._read() as connection:
            return connection.scalar(query) or 0

    def bank_events(self, run_id: str, *, upto: int | None = None, skill_id: str | None = None) -> list[SkillEvent]:
        """The events of the bank in their order, all or those up to and including version ``upto``."""
        table = schema.skill_events
        columns = (table.c[n] for n in ("version", "kind", "skill_id", "reason", "step", "detail"))
        query = sa.select(*columns).where(*conditions(table, run_id, skill_id=skill_id))
        if upto is not None:
            query = query.where(table.c.version <= upto)
        with self._read() as connection:
            rows = connection.execute(query.order_by(table.c.version, table.c.position)).mappings()
            return [SkillEvent.model_validate({**row, "detail": json.loads(row["detail"])}) for row in rows]

    def skill_texts(self, run_id: str) -> dict[str, Skill]:
        """Every skill ever committed, as it was created: id → skill. Its present state follows from the events."""
        table = schema.skills
        query = (
            sa.select(table.c.id, table.c.body).where(table.c.run_id == run_id).order_by(table.c.version, table.c.id)
        )
        with self._read() as connection:
            return {skill_id: Skill.model_validate_json(body) for skill_id, body in connection.execute(query)}
