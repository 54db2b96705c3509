"""Connections, transactions and the translation of database errors. Of the tables it knows ``runs`` alone."""

from __future__ import annotations

import re
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL

from sesa.errors import BusyError, DependencyError, NotFoundError, SesaError, StorageFullError, StoreError
from sesa.store import migrations, schema

BUSY_TIMEOUT_S = 30
"""How long a write waits for another process's before it raises BusyError."""

_CHUNK = 500  # most values in one IN (...): well under every database's limit

Row = Mapping[str, Any]
_T = TypeVar("_T")


def now() -> str:
    """The time as stored: ISO 8601 in UTC, which sorts as text."""
    return datetime.now(UTC).isoformat()


def chunks(values: Sequence[_T], size: int = _CHUNK) -> Iterator[Sequence[_T]]:
    """``values`` in pieces that fit one IN (...)."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


class Database:
    """An open store: one engine, short transactions, safe to use from several threads and processes."""

    def __init__(self, engine: sa.Engine, name: str) -> None:
        self.name = name
        self._engine = engine
        self._reader = engine
        if engine.dialect.name == "postgresql":
            # A rollout is read with several statements, which must see one state; SQLite's BEGIN gives that already.
            self._reader = engine.execution_options(isolation_level="REPEATABLE READ")
        self._writer = engine.execution_options(sesa_write=True)

    def close(self) -> None:
        """Close all connections. The store can be opened again at once."""
        self._engine.dispose()

    @contextmanager
    def _read(self, run_id: str | None = None) -> Iterator[sa.Connection]:
        """A transaction that sees one state of the store. Rows are decoded within it.

        Raises NotFoundError for a run it does not hold, StoreError where what the block decodes is unreadable.
        """
        with _decoding(self.name), _translated(self.name), self._reader.begin() as connection:
            if run_id is not None:
                self._require_run(connection, run_id, lock=False)
            yield connection

    @contextmanager
    def _write(self, run_id: str | None = None) -> Iterator[sa.Connection]:
        """A transaction that holds the run: writers of one run come one after the other, in every process."""
        with _translated(self.name), self._writer.begin() as connection:
            if run_id is not None:
                self._require_run(connection, run_id, lock=True)
            yield connection

    def _require_run(self, connection: sa.Connection, run_id: str, *, lock: bool) -> None:
        query = sa.select(schema.runs.c.id).where(schema.runs.c.id == run_id)
        if connection.scalar(query.with_for_update() if lock else query) is None:
            known = list(connection.scalars(sa.select(schema.runs.c.id).order_by(schema.runs.c.created.desc())))
            raise NotFoundError(nearest(self.name, "run", run_id, known))

    def _insert(self, connection: sa.Connection, table: sa.Table, rows: Sequence[Row], *, update: bool = False) -> None:
        """Insert ``rows``; those whose primary key exists are left as they are, or overwritten with ``update``."""
        if not rows:
            return
        make = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
        statement: Any = make(table)
        if update:
            key = {column.name for column in table.primary_key}
            rest = {name: statement.excluded[name] for name in rows[0] if name not in key}
            statement = statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=rest)
        else:
            statement = statement.on_conflict_do_nothing(index_elements=list(table.primary_key))
        connection.execute(statement, list(rows))


def nearest(place: str, kind: str, name: str, known: Sequence[str]) -> str:
    """The message for something that was named and does not exist, with the nearest that do."""
    import difflib  # only for the message

    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or list(known[:3])
    return f"{place}: holds no {kind} {name!r}; " + (
        f"did you mean {', '.join(near)}?" if near else f"it holds no {kind}"
    )


# ------------------------------------------------------------------------------------------------------------ opening


def connect(location: str | Path, *, create: bool) -> Database:
    """Open the store at a file or URL and bring its schema up to date.

    Raises NotFoundError where there is none and ``create`` is off, StoreError where it cannot be used (no database,
    read-only, of a newer version, unreachable), StorageFullError, BusyError, DependencyError (PostgreSQL driver).
    """
    url = _url(location)
    name = url.database or "" if url.get_backend_name() == "sqlite" else url.render_as_string(hide_password=True)
    engine = _sqlite(url, create=create) if url.get_backend_name() == "sqlite" else _postgresql(url)
    database = Database(engine, name)
    try:
        with database._read() as connection:
            current = migrations.stored_version(connection, name) == len(migrations.MIGRATIONS)
        if not current:
            if url.get_backend_name() == "sqlite":
                _use_wal(engine, name)
            with database._write() as connection:
                migrations.migrate(connection, name, create=create)
    except SesaError:
        database.close()
        raise
    return database


def _url(location: str | Path) -> URL:
    text = str(location)
    if "://" not in text:
        return URL.create("sqlite", database=text)
    try:
        url = sa.make_url(text)
    except (sa.exc.ArgumentError, ValueError):
        shown = re.sub(r"(://[^/:@]*):.*@", r"\1:***@", text)
        raise StoreError(f"{shown}: is no database URL; expected a file, sqlite:///FILE or postgresql://…") from None
    if url.get_backend_name() == "sqlite":
        if not url.database or url.database == ":memory:":
            raise StoreError(f"{text}: names no file; a store is shared by processes, e.g. sqlite:///runs/sesa.sqlite")
        return URL.create("sqlite", database=url.database)
    if url.get_backend_name() != "postgresql":
        raise StoreError(f"{url.get_backend_name()}: no supported database; use SQLite (a file) or postgresql://…")
    return url.set(drivername="postgresql+psycopg")


def _sqlite(url: URL, *, create: bool) -> sa.Engine:
    path = Path(url.database or "")
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise StoreError(
            f"{path}: the store cannot be opened: {error.strerror}; check the permissions of its folder"
        ) from None
    if is_folder:
        raise StoreError(f"{path}: is a folder; name the store's file in it")
    if not create and not exists:
        raise NotFoundError(
            f"{path}: no store there; start a run with `python training/run.py`, or name another --root"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{path.parent}: the store's folder cannot be made: {error.strerror}") from None
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})

    @sa.event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _record: object) -> None:
        # The driver's own transactions start late and end at DDL; ours are explicit (see _begin).
        connection.isolation_level = None
        for pragma in (
            f"busy_timeout = {BUSY_TIMEOUT_S * 1000}",
            "synchronous = NORMAL",  # with WAL: nothing committed is lost when a process is killed
            "foreign_keys = ON",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        # IMMEDIATE takes the write lock at once: a transaction that read first could not wait for it later.
        write = connection.get_execution_options().get("sesa_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _use_wal(engine: sa.Engine, name: str) -> None:
    """Switch the file to a write-ahead log, so that readers and the writer do not wait for each other.

    The file remembers it. The switch does not honour the busy timeout, so when several processes open a new store
    at once it is tried again here.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    pooled = engine.raw_connection()
    try:
        while True:
            try:
                pooled.driver_connection.execute("PRAGMA journal_mode = WAL")  # type: ignore[union-attr]
            except sqlite3.Error as error:
                if not error.sqlite_errorname.startswith("SQLITE_BUSY") or time.monotonic() > deadline:
                    raise _translate(error, name) from error
                time.sleep(0.02)
            else:
                return
    finally:
        pooled.close()


def _postgresql(url: URL) -> sa.Engine:
    given = url.query.get("options", ())
    options = " ".join([*([given] if isinstance(given, str) else given), f"-c lock_timeout={BUSY_TIMEOUT_S * 1000}"])
    try:
        return sa.create_engine(url, pool_pre_ping=True, connect_args={"connect_timeout": 10, "options": options})
    except ModuleNotFoundError:
        raise DependencyError("PostgreSQL needs psycopg: pip install 'sesa[postgres]'") from None


# ------------------------------------------------------------------------------------------------------------- errors


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """Turn the errors of the database drivers into ours, each one line that names the store and the remedy."""
    try:
        yield
    except sa.exc.TimeoutError as error:
        raise BusyError(f"{name}: all connections are in use; lower run.concurrency") from error
    except sa.exc.DBAPIError as error:
        raise _translate(error.orig or error, name) from error
    except OverflowError as error:
        raise StoreError(f"{name}: a number is beyond the 64 bits that the store holds; give a smaller one") from error


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Turn what decoding a damaged row raises into a StoreError."""
    try:
        yield
    except SesaError:
        raise
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise _unreadable(name, f"{place}: {first['msg']}" if place else first["msg"]) from error
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(name, f"{type(error).__name__}: {error}") from error


def _unreadable(name: str, reason: str) -> StoreError:
    return StoreError(f"{name}: holds an unreadable row ({' '.join(reason.split())}); restore it from a copy")


def _translate(cause: BaseException, name: str) -> SesaError:
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    code = getattr(cause, "sqlite_errorname", None) or getattr(cause, "sqlstate", None) or ""
    full = StorageFullError(f"{name}: the disk is full; free some space and resume (what was committed is intact)")
    if code in ("SQLITE_FULL", "53100"):
        return full
    if code.startswith("SQLITE_IOERR") and shutil.disk_usage(Path(name).resolve().parent).free < 1 << 20:
        return full
    if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")) or code in ("55P03", "40P01", "40001"):
        return BusyError(f"{name}: another process has held the store for {BUSY_TIMEOUT_S} s; end it, then try again")
    if code in ("SQLITE_NOTADB", "SQLITE_CORRUPT"):
        return StoreError(
            f"{name}: is damaged or no SQLite database ({lines[0]}); name another store or restore a copy"
        )
    if code.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return StoreError(f"{name}: cannot be written ({lines[0]}); check the permissions of the file and its folder")
    kinds = {kind.__name__ for kind in type(cause).__mro__}  # of sqlite3 or psycopg: both name them as PEP 249 does
    if "IntegrityError" in kinds:
        return StoreError(f"{name}: refused a write: {lines[0]}")
    if lines[0].startswith("Could not decode to UTF-8"):
        return _unreadable(name, lines[0])
    if "OperationalError" in kinds and not code:
        return StoreError(f"{name}: cannot be reached ({lines[0]}); check the URL and that the server runs")
    return StoreError(f"{name}: {lines[0]}")
