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

from sesa.errors import ConfigError, DependencyError, SesaError, StorageFullError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def cache_folder(configured: str = "") -> Path:
    """The folder of indexes, parsed corpora and converted models: ``corpus.cache``, else ``~/.cache/sesa``.

    Raises ConfigError where it cannot be looked at (no permission, name too long); it need not exist.
    """
    folder = expanded(configured or "~/.cache/sesa")
    with disk_errors(folder):
        folder.exists()
    return folder


def expanded(path: str | Path) -> Path:
    """``path`` with a leading ``~`` or ``~user`` replaced. Raises ConfigError where there is no such home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: there is no such home folder; write the path out in full") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` that takes its place, synced to disk, when the block ends well.

    The temporary path does not exist yet: write a file or make a folder there. A folder takes the place of an older
    one. Nothing is left behind when the block raises. Raises what `disk_errors` does for the folder.
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
    """Turn what the system says in the block about ``folder``, which lies in the cache, into errors that name it.

    Raises StorageFullError for "no space left", else ConfigError. An error that names a file elsewhere passes as it is.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, SesaError) or error.errno is None:
            raise
        if error.errno in _FULL:
            raise StorageFullError(
                f"{folder}: the disk is full; free some space and run the same command again"
            ) from error
        if isinstance(error.filename, str | bytes) and not _related(Path(os.fsdecode(error.filename)), folder):
            raise
        reason = f"cannot be written ({error.strerror})"
        raise ConfigError(f"{_short(folder)}: {reason}; name another with corpus.cache (--cache)") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock named by the file ``path`` for the block; a second process waits for the first."""
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("a")
    with handle:
        with disk_errors(path.parent):
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


def _related(path: Path, folder: Path) -> bool:
    """Whether one of the two lies in the other."""
    path, folder = path.absolute(), folder.absolute()
    return path.is_relative_to(folder) or folder.is_relative_to(path)


def _short(path: Path) -> str:
    """A path to print: one that the system found too long is too long for a message as well."""
    text = str(path)
    return text if len(text) <= 300 else f"{text[:297]}..."


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
