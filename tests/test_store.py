"""The store on SQLite: the common suite, and what is particular to a file."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from store_suite import StoreSuite, a_rollout

from sesa.errors import BusyError, SesaError, StorageFullError, StoreError
from sesa.store import Store, schema, store_location
from sesa.types import StopReason


class TestSQLite(StoreSuite):
    @pytest.fixture
    def location(self, tmp_path: Path) -> str:
        return str(tmp_path / "runs" / "store.sqlite")


def refused(location: str | Path) -> str:
    """The message with which opening a store fails: one line, ours."""
    with pytest.raises(SesaError) as caught:
        Store.open(location)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, StoreError)
    return str(caught.value)


def test_the_location_of_a_run() -> None:
    assert store_location("runs") == Path("runs/sesa.sqlite")
    assert store_location("runs", "postgresql://h/d") == "postgresql://h/d"


def test_write_ahead_log_and_foreign_keys(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/s.sqlite") as store, store._read() as connection:
        values = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "foreign_keys")]
    assert values == ["wal", 1]


def test_no_store(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is no database " * 100)
    assert "no SQLite database" in refused(tmp_path / "text")
    assert (tmp_path / "text").read_text().startswith("this is")
    assert "is a folder" in refused(tmp_path)
    assert "cannot be made" in refused(tmp_path / "text" / "below" / "s.sqlite")
    assert "mysql" in refused("mysql://host/db")
    assert "is no database URL" in refused("://")
    message = refused("postgresql://user:secret@host:notaport/x")
    assert "is no database URL" in message and "secret" not in message
    assert "cannot be opened" in refused(tmp_path / ("x" * 5000))
    assert "names no file" in refused("sqlite://")
    assert "names no file" in refused("sqlite:///:memory:")


def test_another_programs_database(tmp_path: Path) -> None:
    path = tmp_path / "bookmarks.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE bookmarks (id INTEGER)")
    connection.close()
    assert "another program's database (it holds bookmarks)" in refused(path)


def test_a_damaged_store(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with Store.open(path) as store:
        store.create_run("r", {}, {})
    data = bytearray(path.read_bytes())
    data[100:4096] = b"\xff" * 3996
    path.write_bytes(data)
    assert "damaged" in refused(path)


@pytest.mark.parametrize(
    ("change", "read"),
    [
        ("UPDATE runs SET config = '{nope'", lambda store: store.runs()),
        ("UPDATE runs SET facts = '[]'", lambda store: store.run("r")),
        ('UPDATE turns SET action = \'{"kind": "dance"}\'', lambda store: store.rollouts("r")),
        ("UPDATE turns SET token_ids = x'00'", lambda store: store.rollouts("r")),
        ('UPDATE turns SET hits = \'[["gone", 1, 1, "bm25"]]\'', lambda store: store.rollouts("r")),
        ("UPDATE rollouts SET role = 'king'", lambda store: store.rollout_rows("r")),
    ],
)
def test_an_unreadable_row(tmp_path: Path, change: str, read: Callable[[Store], object]) -> None:
    with Store.open(tmp_path / "s.sqlite") as store:
        store.create_run("r", {}, {})
        store.save_rollouts("r", [a_rollout(1)])
        with sqlite3.connect(tmp_path / "s.sqlite") as connection:
            assert connection.execute(change).rowcount
        connection.close()
        with pytest.raises(StoreError, match=r"s\.sqlite: holds an unreadable row .*restore it from a copy") as caught:
            read(store)
        assert "\n" not in str(caught.value)


def test_a_number_beyond_the_databases_range(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s.sqlite") as store:
        store.create_run("r", {}, {})
        for read in (store.rollout_rows, store.questions, store.stats):
            with pytest.raises(StoreError, match="beyond the 64 bits"):
                read("r", step=2**70)
        with pytest.raises(StoreError, match="beyond the 64 bits"):
            store.log("r", 2**70, "alarm", "x")


def test_a_folder_that_may_not_be_looked_into(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir()
    (tmp_path / "shut").chmod(0)
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    child = context.Process(target=_open_as_nobody, args=(tmp_path / "shut" / "s.sqlite", results))
    child.start()
    message = results.get(timeout=60)
    child.join()
    (tmp_path / "shut").chmod(0o755)
    assert "cannot be opened: Permission denied" in message and "\n" not in message


def test_a_folder_without_write_permission(tmp_path: Path) -> None:
    """As an ordinary user: root may write anywhere."""
    with Store.open(tmp_path / "closed" / "s.sqlite") as store:
        store.create_run("r", {}, {})
    (tmp_path / "closed" / "s.sqlite").chmod(0o444)
    (tmp_path / "closed").chmod(0o555)
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    for name in ("s.sqlite", "new.sqlite", "new/s.sqlite"):
        child = context.Process(target=_open_as_nobody, args=(tmp_path / "closed" / name, results))
        child.start()
        message = results.get(timeout=60)
        child.join()
        assert "cannot be" in message and name.split("/")[0] in message and "\n" not in message


def _open_as_nobody(path: Path, results: Any) -> None:
    """Child process: an ordinary user opens the store."""
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        Store.open(path)
    except StoreError as error:
        results.put(str(error))
    else:
        results.put("opened")


def test_a_full_disk(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s.sqlite") as store:
        store.create_run("r", {}, {})
        store.save_rollouts("r", [a_rollout(0)])
        store.close()  # so that the next connection has the limit
        sa.event.listen(store._engine, "connect", lambda c, _: c.execute("PRAGMA max_page_count = 100"))
        with pytest.raises(StorageFullError, match=r"s\.sqlite: the disk is full; free some space") as caught:
            store.save_rollouts("r", [a_rollout(i) for i in range(2000)])
        assert "\n" not in str(caught.value)
        assert store.rollouts("r") == [a_rollout(0)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True
    ).returncode == 0  # fmt: skip
    if not mounted:
        pytest.skip("a file system of 2 MiB cannot be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    with Store.open(small_disk / "s.sqlite") as store:
        store.create_run("r", {}, {})
        store.save_rollouts("r", [a_rollout(0)])
        with pytest.raises(StorageFullError):
            store.save_rollouts("r", [a_rollout(i) for i in range(2000)])
        assert store.rollouts("r") == [a_rollout(0)]
    (small_disk / "ballast").write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize))
    with pytest.raises(StorageFullError):
        Store.open(small_disk / "second.sqlite")
    (small_disk / "ballast").unlink()
    with Store.open(small_disk / "s.sqlite") as store:
        assert store.rollouts("r") == [a_rollout(0)]


def test_a_store_that_another_process_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sesa.store.database.BUSY_TIMEOUT_S", 0.2)
    with Store.open(tmp_path / "s.sqlite") as store:
        store.create_run("r", {}, {})
        other = sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(BusyError, match="another process"):
            store.heartbeat("r")
        assert store.run("r").id == "r", "readers do not wait for the writer"
        other.execute("ROLLBACK")
        other.close()
        store.heartbeat("r")


def test_a_hundred_thousand_rollouts_page_quickly(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s.sqlite") as store:
        store.create_run("r", {}, {})
        row = {"run_id": "r", "role": "solver", "turns": 0, "searches": 0, "sampled_tokens": 9, "answer": None,
               "bank_version": 1, "error": None, "value": 0.5}  # fmt: skip
        rows = [
            {**row, "id": f"o{i:06d}", "step": i // 1000, "question_id": f"q{i // 5}", "sample": i % 5,
             "stop_reason": "max_turns" if i % 100 == 0 else "answered"}
            for i in range(100_000)
        ]  # fmt: skip
        with store._write("r") as connection:
            connection.execute(schema.rollouts.insert(), rows)

        def timed(**conditions: object) -> float:
            start = time.perf_counter()
            assert len(store.rollout_rows("r", limit=50, **conditions)) in (10, 50)  # type: ignore[arg-type]
            return time.perf_counter() - start

        store.rollout_rows("r", limit=1)
        seconds = {
            "first page": timed(),
            "last page": timed(offset=99_950),
            "one step": timed(step=77),
            "rare stop": timed(stop_reason=StopReason.MAX_TURNS, offset=900),
            "rare stop of a step": timed(stop_reason=StopReason.MAX_TURNS, step=50),
        }
        start = time.perf_counter()
        assert len(store.rollouts("r", step=99, limit=50, turns=False)) == 50
        seconds["full records"] = time.perf_counter() - start
        print(seconds)
        assert max(seconds.values()) < 0.25, seconds
