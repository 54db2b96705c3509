"""The store on a real PostgreSQL: a private cluster in a temporary folder, or none and the tests are skipped."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from store_suite import StoreSuite

from sesa.errors import StoreError
from sesa.store import Store

psycopg = pytest.importorskip("psycopg")

_numbers = count()


def _binaries() -> Path | None:
    """The folder of PostgreSQL's server programs, newest version first; Debian keeps them off the path."""
    on_path = shutil.which("initdb")
    if on_path:
        return Path(on_path).parent
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: float(p.parts[-3]))
    return found[-1].parent if found else None


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A running server, as the URL of its database "postgres"."""
    binaries = _binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server is installed here (initdb not found)")
    user: str | None = None
    if os.geteuid() == 0:  # the server refuses to run as root
        user = next((p.pw_name for p in pwd.getpwall() if p.pw_name in ("postgres", "nobody")), None)
        if user is None:
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres or nobody")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="sesa-pg-"))
    if user:
        shutil.chown(folder, user)
    data = folder / "data"

    def run(*command: str | Path) -> None:
        subprocess.run(command, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL)

    try:
        run(binaries / "initdb", "-D", data, "-U", "sesa", "-A", "trust", "-E", "UTF8", "--no-sync")
        options = f"-p {port} -h 127.0.0.1 -k {folder} -c fsync=off -c max_connections=50"
        run(binaries / "pg_ctl", "-D", data, "-o", options, "-l", folder / "log", "-w", "start")
        yield f"postgresql://sesa@127.0.0.1:{port}/postgres"
    finally:
        if (data / "postmaster.pid").exists():
            run(binaries / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
        shutil.rmtree(folder)


class TestPostgreSQL(StoreSuite):
    @pytest.fixture
    def location(self, cluster: str) -> str:
        name = f"store_{next(_numbers)}"
        with psycopg.connect(cluster, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}")  # a database of its own would take seconds
        return f"{cluster}?options=-csearch_path%3D{name}"

    def test_tables_of_another_program(self, location: str) -> None:
        with psycopg.connect(location, autocommit=True) as connection:
            connection.execute("CREATE TABLE runs (id INTEGER)")
        with pytest.raises(StoreError, match="another program's database"):
            Store.open(location)

    def test_an_unknown_database(self, cluster: str) -> None:
        with pytest.raises(StoreError, match="absent") as caught:
            Store.open(cluster.rsplit("/", 1)[0] + "/absent")
        assert "\n" not in str(caught.value)


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(StoreError, match="cannot be reached") as caught:
        Store.open(f"postgresql://someone:secret@127.0.0.1:{port}/db")
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
