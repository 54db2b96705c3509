"""The run store: what every run did, exactly, in SQLite (one file, WAL mode) or PostgreSQL (by URL).

Each method is one transaction. Writes are idempotent by primary key, so a step that was cut off can run again:
rollouts and failures that exist are left as they are, everything else is overwritten with the same values.
"""

from __future__ import annotations

from pathlib import Path

from sesa.store.bank import BankStore
from sesa.store.database import connect, nearest
from sesa.store.policies import PolicyStore
from sesa.store.rollouts import RolloutRow, RolloutStore
from sesa.store.runs import FINAL_NODE, LogEntry, RunRow, RunStore

__all__ = ["FINAL_NODE", "LogEntry", "RolloutRow", "RunRow", "Store", "nearest", "store_location"]

FILE = "sesa.sqlite"


class Store(RunStore, RolloutStore, BankStore, PolicyStore):
    """The open store; see the parts for its methods. May be shared by threads; other processes open their own."""

    @classmethod
    def open(cls, url_or_path: str | Path, *, create: bool = True) -> Store:
        """Open the store at a file or SQLAlchemy URL, create it or bring its schema up to date.

        Raises NotFoundError where there is none and ``create`` is off, StoreError where it cannot be used,
        BusyError, StorageFullError, DependencyError.
        """
        database = connect(url_or_path, create=create)
        return cls(database._engine, database.name)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def store_location(root: str | Path, store: str = "") -> str | Path:
    """Where the store of a run lies: ``store`` (the configuration's run.store) or a file in the ``root`` folder."""
    return store or Path(root) / FILE
