"""The tables of the run store, as the newest migration leaves them, and the two column types that keep values exact.

Everything is keyed by ``run_id``. Columns that are filtered or sorted by are real columns; the rest of a record is
JSON. Token ids are little-endian int32, log-probabilities float64: what the server returned comes back bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.types import TypeDecorator

_ESCAPE = "\x1a"


class ExactText(TypeDecorator[str]):
    """Text that comes back as it was given, on every database.

    PostgreSQL refuses U+0000, which a model can sample, so it is escaped with U+001A (and that with itself). The
    collation is by code point, so that rows come in one order everywhere.
    """

    impl = sa.Text
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> Any:
        kind = postgresql.TEXT(collation="C") if dialect.name == "postgresql" else sa.Text()
        return dialect.type_descriptor(kind)

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        if value is None or ("\x00" not in value and _ESCAPE not in value):
            return value
        return value.replace(_ESCAPE, _ESCAPE + "1").replace("\x00", _ESCAPE + "0")

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> str | None:
        if value is None or _ESCAPE not in value:
            return value
        return value.replace(_ESCAPE + "0", "\x00").replace(_ESCAPE + "1", _ESCAPE)


class ExactFloat(TypeDecorator[float]):
    """A float64 in which NaN survives: SQLite stores NaN as NULL, so NULL reads as NaN and the column is nullable."""

    impl = sa.Double
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: sa.Dialect) -> float | None:
        return None if value is None or math.isnan(value) else value

    def process_result_value(self, value: float | None, dialect: sa.Dialect) -> float:
        return math.nan if value is None else value


metadata = sa.MetaData()


def _table(name: str, *columns: sa.Column[Any], key: tuple[str, ...], parent: str = "runs") -> sa.Table:
    """A table keyed by (run_id, *key) whose rows belong to a run, or to a rollout of it."""
    references = ["runs.id"] if parent == "runs" else ["rollouts.run_id", "rollouts.id"]
    own = ["run_id"] if parent == "runs" else ["run_id", "rollout_id"]
    return sa.Table(
        name,
        metadata,
        sa.Column("run_id", ExactText, nullable=False),
        *columns,
        sa.PrimaryKeyConstraint("run_id", *key),
        sa.ForeignKeyConstraint(own, references, ondelete="CASCADE"),
    )


def _text(name: str, *, optional: bool = False) -> sa.Column[Any]:
    return sa.Column(name, ExactText, nullable=optional)


def _int(name: str, *, optional: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger, nullable=optional)


def _float(name: str) -> sa.Column[Any]:
    return sa.Column(name, ExactFloat, nullable=True)


def _flag(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.Boolean, nullable=False)


def _blob(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.LargeBinary, nullable=False)


schema_version = sa.Table("sesa_schema", metadata, sa.Column("version", sa.Integer, primary_key=True), _text("applied"))

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", ExactText, primary_key=True),
    _text("status"),
    _text("created"),
    _text("updated"),
    _text("config"),
    _text("facts"),
)

step_nodes = _table("step_nodes", _int("step"), _text("node"), _text("counts"), _text("at"), key=("step", "node"))

step_seeds = _table("step_seeds", _int("step"), _int("position"), _text("body"), key=("step", "position"))

# Each distinct passage once per run; ``key`` is a digest of id, title and text (codec.passage_key).
passages = _table("passages", _text("key"), _text("id"), _text("title"), _text("text"), key=("key",))

questions = _table(
    "questions",
    _text("id"),
    _int("step"),
    _text("status"),
    _text("refused_by", optional=True),
    _text("text"),
    _text("target"),
    _text("proposal_id", optional=True),
    _text("evidence"),
    _text("body"),
    key=("id",),
)

# ``value`` is NULL until the rollout has a reward.
rollouts = _table(
    "rollouts",
    _text("id"),
    _int("step"),
    _text("role"),
    _text("question_id"),
    _int("sample"),
    _text("stop_reason"),
    sa.Column("value", sa.Double, nullable=True),
    _int("turns"),
    _int("searches"),
    _int("sampled_tokens"),
    _text("answer", optional=True),
    _int("bank_version", optional=True),
    _text("error", optional=True),
    key=("id",),
)

# A prompt mostly repeats the turn before it. ``prompt_shared`` leading ids are those of the previous turn's prompt
# and reply, ``messages_shared`` leading messages those of its messages; the columns beside hold only what is new.
turns = _table(
    "turns",
    _text("rollout_id"),
    _int("position"),
    _text("policy"),
    _int("policy_version"),
    _text("text"),
    _text("action_kind"),
    _text("action"),
    _text("observation"),
    _text("hits"),
    _text("finish_reason"),
    _int("prompt_tokens"),
    _int("completion_tokens"),
    _float("latency_s"),
    _blob("token_ids"),
    _blob("logprobs"),
    _int("prompt_shared"),
    _blob("prompt_ids"),
    _int("messages_shared"),
    _text("messages"),
    key=("rollout_id", "position"),
    parent="rollouts",
)

rollout_skills = _table(
    "rollout_skills",
    _text("rollout_id"),
    _int("position"),
    _text("skill_id"),
    _float("similarity"),
    _flag("loaded"),
    key=("rollout_id", "position"),
    parent="rollouts",
)

rewards = _table(
    "rewards",
    _text("rollout_id"),
    _text("name"),
    _int("position"),
    _float("value"),
    _float("weight"),
    key=("rollout_id", "name"),
    parent="rollouts",
)

trained = _table(
    "trained",
    _text("rollout_id"),
    _text("policy"),
    _int("version"),
    _int("step"),
    _int("sampled_tokens"),
    _int("trained_tokens"),
    _int("sequences"),
    sa.Column("advantage", sa.Double, nullable=True),
    _text("dropped", optional=True),
    key=("rollout_id",),
    parent="rollouts",
)

# ``seq`` is the order of arrival in the pending queue.
failures = _table(
    "failures",
    _text("id"),
    _int("seq"),
    _int("step"),
    _text("status"),
    _text("cause"),
    _text("question_id"),
    _text("evidence"),
    _text("body"),
    key=("id",),
)

bank_versions = _table(
    "bank_versions",
    _int("version"),
    _int("base_version"),
    _int("step"),
    _text("author"),
    _text("at"),
    key=("version",),
)

skill_events = _table(
    "skill_events",
    _int("version"),
    _int("position"),
    _text("kind"),
    _text("skill_id"),
    _int("step"),
    _text("reason"),
    _text("detail"),
    key=("version", "position"),
)

skills = _table("skills", _text("id"), _int("version"), _text("body"), key=("id",))

policy_versions = _table(
    "policy_versions",
    _text("policy"),
    _int("version"),
    _text("path"),
    _int("step"),
    _text("sha256"),
    _flag("published"),
    key=("policy", "version"),
)

train_stats = _table("train_stats", _text("policy"), _int("step"), _text("body"), key=("policy", "step"))

metrics = _table("metrics", _int("step"), _text("name"), _float("value"), key=("step", "name"))

log = sa.Table(
    "log",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("run_id", ExactText, nullable=False),
    _int("step", optional=True),
    _text("at"),
    _text("kind"),
    _text("message"),
    sa.ForeignKeyConstraint(["run_id"], ["runs.id"], ondelete="CASCADE"),
)

sa.Index("rollouts_in_order", *(rollouts.c[n] for n in ("run_id", "step", "role", "question_id", "sample", "id")))
sa.Index("rollouts_by_question", rollouts.c.run_id, rollouts.c.question_id)
sa.Index("rollouts_by_stop", rollouts.c.run_id, rollouts.c.stop_reason, rollouts.c.step)
sa.Index("rollouts_by_value", rollouts.c.run_id, rollouts.c.value)
sa.Index("rollout_skills_by_skill", rollout_skills.c.run_id, rollout_skills.c.skill_id)
sa.Index("questions_in_order", questions.c.run_id, questions.c.step, questions.c.id)
sa.Index("questions_by_status", questions.c.run_id, questions.c.status, questions.c.step)
sa.Index("questions_by_proposal", questions.c.run_id, questions.c.proposal_id)
sa.Index("trained_by_step", trained.c.run_id, trained.c.step, trained.c.policy)
sa.Index("failures_in_order", failures.c.run_id, failures.c.status, failures.c.seq)
sa.Index("skill_events_by_skill", skill_events.c.run_id, skill_events.c.skill_id)
sa.Index("log_by_run", log.c.run_id, log.c.id)
