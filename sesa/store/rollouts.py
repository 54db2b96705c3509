"""Questions, rollouts with their turns and calls, rewards and the account of trained tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa

from sesa.errors import NotFoundError
from sesa.store import codec, schema
from sesa.store.database import Database, chunks
from sesa.store.queries import conditions, existing_ids, page_of, passages_of, rewards_of, rollouts_of
from sesa.types import Question, Record, Reward, Role, Rollout, StopReason, TrainedRow, Verdict


class RolloutRow(Record):
    """A rollout as listed, without its turns. ``value`` is None until it has a reward."""

    id: str
    role: Role
    question_id: str
    step: int
    sample: int
    stop_reason: StopReason
    value: float | None
    turns: int
    searches: int
    sampled_tokens: int
    answer: str | None
    bank_version: int | None
    error: str | None


_ORDER = ("step", "role", "question_id", "sample", "id")


class RolloutStore(Database):
    # --------------------------------------------------------------------------------------------------- questions

    def save_questions(self, run_id: str, questions: Sequence[Question]) -> None:
        """Record questions; one that exists is overwritten, since its checks grow."""
        evidence = [p for question in questions for p in question.evidence]
        rows = [codec.question_row(run_id, question) for question in questions]
        with self._write(run_id) as connection:
            self._insert(connection, schema.passages, codec.passage_rows(run_id, evidence))
            self._insert(connection, schema.questions, rows, update=True)

    def questions(
        self,
        run_id: str,
        *,
        step: int | None = None,
        ids: Iterable[str] | None = None,
        status: Verdict | None = None,
        proposal_id: str | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[Question]:
        """The questions that meet all conditions, by step and id."""
        table = schema.questions
        where = conditions(table, run_id, step=step, status=status, proposal_id=proposal_id)
        with self._read() as connection:
            rows = page_of(connection, table, where, ("step", "id"), ids, limit, offset)
            passages = passages_of(connection, run_id, codec.evidence_keys(rows))
            return [codec.question_of(row, passages) for row in rows]

    # ---------------------------------------------------------------------------------------------------- rollouts

    def save_rollouts(self, run_id: str, rollouts: Sequence[Rollout]) -> None:
        """Record rollouts, each with its turns, calls, skills and rewards. One that exists is left as it is, whole.

        Raises StoreError for two rewards of one name and for token ids beyond 32 bits; nothing is written then.
        """
        first = {rollout.id: rollout for rollout in reversed(rollouts)}
        with self._write(run_id) as connection:
            known = existing_ids(connection, run_id, list(first))
            new = [rollout for rollout in first.values() if rollout.id not in known]
            hits = (hit.passage for rollout in new for turn in rollout.turns for hit in turn.hits)
            self._insert(connection, schema.passages, codec.passage_rows(run_id, hits))
            self._insert(connection, schema.rollouts, [codec.rollout_row(run_id, r) for r in new])
            for table, rows_of in (
                (schema.turns, codec.turn_rows),
                (schema.rollout_skills, codec.skill_rows),
                (schema.rewards, codec.reward_rows),
            ):
                self._insert(connection, table, [row for rollout in new for row in rows_of(run_id, rollout)])

    def rollouts(
        self,
        run_id: str,
        *,
        step: int | None = None,
        role: Role | None = None,
        question_id: str | None = None,
        ids: Iterable[str] | None = None,
        stop_reason: StopReason | None = None,
        limit: int | None = None,
        offset: int = 0,
        turns: bool = True,
    ) -> list[Rollout]:
        """The rollouts that meet all conditions, by step, role, question, sample and id; ``turns`` can be left out."""
        where = conditions(
            schema.rollouts, run_id, step=step, role=role, question_id=question_id, stop_reason=stop_reason
        )
        with self._read() as connection:
            rows = page_of(connection, schema.rollouts, where, _ORDER, ids, limit, offset)
            out: list[Rollout] = []
            for part in chunks(rows):
                out += rollouts_of(connection, run_id, part, turns=turns)
        return out

    def rollout(self, run_id: str, rollout_id: str) -> Rollout:
        """One rollout. Raises NotFoundError."""
        found = self.rollouts(run_id, ids=[rollout_id])
        if not found:
            raise NotFoundError(
                f"{self.name}: run {run_id} has no rollout {rollout_id!r}; see `sesa rollouts list --run {run_id}`"
            )
        return found[0]

    def rollout_rows(
        self,
        run_id: str,
        *,
        step: int | None = None,
        role: Role | None = None,
        question_id: str | None = None,
        stop_reason: StopReason | None = None,
        skill_id: str | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[RolloutRow]:
        """As ``rollouts``, in the short form of a listing; ``skill_id``: only those that loaded this skill."""
        table, used = schema.rollouts, schema.rollout_skills
        where = conditions(table, run_id, step=step, role=role, question_id=question_id, stop_reason=stop_reason)
        if skill_id is not None:
            loaded = sa.select(used.c.rollout_id).where(
                used.c.run_id == run_id, used.c.skill_id == skill_id, used.c.loaded
            )
            where.append(table.c.id.in_(loaded))
        with self._read() as connection:
            rows = page_of(connection, table, where, _ORDER, None, limit, offset)
            return [RolloutRow.model_validate({n: row[n] for n in RolloutRow.model_fields}) for row in rows]

    def count_rollouts(
        self,
        run_id: str,
        *,
        step: int | None = None,
        role: Role | None = None,
        question_id: str | None = None,
        stop_reason: StopReason | None = None,
    ) -> int:
        """Number of rollouts that meet all conditions."""
        table = schema.rollouts
        where = conditions(table, run_id, step=step, role=role, question_id=question_id, stop_reason=stop_reason)
        with self._read() as connection:
            return connection.scalar(sa.select(sa.func.count()).select_from(table).where(*where)) or 0

    def rollout_ids(self, run_id: str, *, step: int | None = None, role: Role | None = None) -> set[str]:
        """Ids of the rollouts that are recorded: what a resumed step need not pay again."""
        table = schema.rollouts
        with self._read() as connection:
            return set(
                connection.scalars(sa.select(table.c.id).where(*conditions(table, run_id, step=step, role=role)))
            )

    # ----------------------------------------------------------------------------------------- rewards and training

    def save_rewards(self, run_id: str, rewards: Mapping[str, Sequence[Reward]]) -> None:
        """Set reward parts of rollouts (id → parts). A part whose name exists is overwritten, a new one comes last.

        Raises StoreError for a rollout that is not recorded; nothing is written then.
        """
        table = schema.rewards
        with self._write(run_id) as connection:
            old = rewards_of(connection, run_id, list(rewards))
            rows, values = [], []
            for rollout_id, parts in rewards.items():
                merged = {r.name: r for r in (*old.get(rollout_id, ()), *parts)}
                rows += [
                    {"run_id": run_id, "rollout_id": rollout_id, "position": i, **reward.model_dump()}
                    for i, reward in enumerate(merged.values())
                ]
                if merged:
                    value = sum(r.value * r.weight for r in merged.values())
                    values.append({"of": rollout_id, "new": value})
            self._insert(connection, table, rows, update=True)
            if values:
                target = schema.rollouts
                update = target.update().where(target.c.run_id == run_id, target.c.id == sa.bindparam("of"))
                connection.execute(update.values(value=sa.bindparam("new")), values)

    def save_trained(self, run_id: str, rows: Sequence[TrainedRow]) -> None:
        """Record what an update did with each rollout; a rollout that has a row gets the new one."""
        with self._write(run_id) as connection:
            self._insert(
                connection, schema.trained, [{"run_id": run_id, **row.model_dump()} for row in rows], update=True
            )

    def trained(
        self, run_id: str, *, step: int | None = None, policy: str | None = None, rollout_id: str | None = None
    ) -> list[TrainedRow]:
        """The token accounts that meet all conditions, by step, policy and rollout."""
        table = schema.trained
        where = conditions(table, run_id, step=step, policy=policy, rollout_id=rollout_id)
        columns = [table.c[name] for name in TrainedRow.model_fields]
        query = sa.select(*columns).where(*where).order_by(table.c.step, table.c.policy, table.c.rollout_id)
        with self._read() as connection:
            return [TrainedRow.model_validate(dict(row)) for row in connection.execute(query).mappings()]
