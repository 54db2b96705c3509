"""Writing files so that a reader never sees half of one, the cache folder, and where packaged data lie."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sesa.errors import DependencyError, StorageFullError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def cache_folder(configured: str = "") -> Path:
    """The folder of indexes, parsed corpora and converted models: ``corpus.cache``, else ``~/.cache/sesa``."""
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "sesa"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` that takes its place, synced to disk, when the block ends well.

    The temporary path does not exist yet: write a file or make a folder there. A folder takes the place of an older
    one. Nothing is left behind when the block raises. A full disk is a StorageFullError that names the folder.
    """
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        holder = Path(tempfile.mkdtemp(prefix=f".{path.name[:40]}.", dir=path.parent))
        try:
            new = holder / path.name
            yield new
            for file in [new, *new.rglob("*")] if new.is_dir() else [new]:
                _sync(file)
            if path.is_dir():
                path.replace(holder / "old")
            new.replace(path)
            _sync(path.parent)
        finally:
            shutil.rmtree(holder, ignore_errors=True)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn "no space left" in the block into a StorageFullError that names ``folder``."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL and not isinstance(error, StorageFullError):
            raise StorageFullError(
                f"{folder}: the disk is full; free some space and run the same command again"
            ) from error
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock named by the file ``path`` for the block; a second process waits for the first."""
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("a")
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def package_folder(package: str) -> Path:
    """Folder of an installed top-level package, found without importing it.

    Raises DependencyError naming the package when it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        name = package.replace("_", "-")
        raise DependencyError(f"{package}: the package is not installed; run `pip install {name}`")
    return Path(next(iter(spec.submodule_search_locations)))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
