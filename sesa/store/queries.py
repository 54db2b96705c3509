"""Queries that several parts of the store share. All run inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from sesa.store import codec, schema
from sesa.store.database import Row, chunks
from sesa.types import LoadedSkill, Passage, Reward, Role, Rollout, StopReason


def conditions(table: sa.Table, run_id: str, **equal: Any) -> list[sa.ColumnElement[bool]]:
    """Rows of a run whose columns equal the values given; None sets no condition."""
    # str() of an enumeration's member is its plain value: psycopg would send the member's name.
    given = [
        table.c[name] == str(v) if isinstance(v, str) else table.c[name] == v
        for name, v in equal.items()
        if v is not None
    ]
    return [table.c.run_id == run_id, *given]


def page_of(
    connection: sa.Connection,
    table: sa.Table,
    where: Sequence[sa.ColumnElement[bool]],
    order: Sequence[str],
    ids: Iterable[str] | None,
    limit: int | None,
    offset: int,
) -> list[Row]:
    """One page of rows. With ``ids``, which may be many, the page is cut here instead of in the database."""
    query = sa.select(table).where(*where)
    if ids is None:
        query = query.order_by(*(table.c[name] for name in order)).limit(limit).offset(offset or None)
        return [dict(row) for row in connection.execute(query).mappings()]
    found: list[Row] = []
    for part in chunks(sorted(set(ids))):
        found += [dict(row) for row in connection.execute(query.where(table.c.id.in_(part))).mappings()]
    found.sort(key=lambda row: tuple(row[name] for name in order))
    return found[offset : None if limit is None else offset + limit]


def existing_ids(connection: sa.Connection, run_id: str, ids: Sequence[str]) -> set[str]:
    """Those of ``ids`` under which a rollout is recorded."""
    table = schema.rollouts
    found: set[str] = set()
    for part in chunks(ids):
        found.update(connection.scalars(sa.select(table.c.id).where(table.c.run_id == run_id, table.c.id.in_(part))))
    return found


def passages_of(connection: sa.Connection, run_id: str, keys: set[str]) -> dict[str, Passage]:
    """Stored passages by key."""
    table = schema.passages
    found: dict[str, Passage] = {}
    for part in chunks(sorted(keys)):
        rows = connection.execute(sa.select(table).where(table.c.run_id == run_id, table.c.key.in_(part)))
        found.update({r["key"]: Passage(id=r["id"], title=r["title"], text=r["text"]) for r in rows.mappings()})
    return found


def children_of(connection: sa.Connection, table: sa.Table, run_id: str, ids: Sequence[str]) -> dict[str, list[Row]]:
    """Rows of a table that belong to rollouts, by rollout id, in order of position."""
    grouped: dict[str, list[Row]] = {}
    for part in chunks(ids):
        query = sa.select(table).where(table.c.run_id == run_id, table.c.rollout_id.in_(part))
        for row in connection.execute(query.order_by(table.c.rollout_id, table.c.position)).mappings():
            grouped.setdefault(row["rollout_id"], []).append(dict(row))
    return grouped


def rewards_of(connection: sa.Connection, run_id: str, ids: Sequence[str]) -> dict[str, tuple[Reward, ...]]:
    """Reward parts by rollout id; rollouts without any are left out."""
    return {
        rollout_id: tuple(Reward(name=r["name"], value=r["value"], weight=r["weight"]) for r in rows)
        for rollout_id, rows in children_of(connection, schema.rewards, run_id, ids).items()
    }


def rollouts_of(connection: sa.Connection, run_id: str, rows: Sequence[Row], *, turns: bool) -> list[Rollout]:
    """The rollouts of some rows of their table, in the same order."""
    ids = [row["id"] for row in rows]
    rewards = rewards_of(connection, run_id, ids)
    skills = children_of(connection, schema.rollout_skills, run_id, ids)
    turn_rows = children_of(connection, schema.turns, run_id, ids) if turns else {}
    passages = passages_of(connection, run_id, {key for part in turn_rows.values() for key in codec.hit_keys(part)})
    return [
        Rollout(
            id=row["id"],
            role=Role(row["role"]),
            question_id=row["question_id"],
            step=row["step"],
            sample=row["sample"],
            turns=codec.turns_of(turn_rows.get(row["id"], ()), passages),
            stop_reason=StopReason(row["stop_reason"]),
            rewards=rewards.get(row["id"], ()),
            bank_version=row["bank_version"],
            skills=tuple(
                LoadedSkill(id=s["skill_id"], similarity=s["similarity"], loaded=s["loaded"])
                for s in skills.get(row["id"], ())
            ),
            error=row["error"],
        )
        for row in rows
    ]
