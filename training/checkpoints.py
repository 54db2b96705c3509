"""Weight versions on disk: written whole or not at all, with a manifest that says what they are and came from."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from pydantic import ValidationError

from sesa.errors import DataError, StorageFullError
from sesa.types import PolicyVersion, Record, TrainStats

MANIFEST = "manifest.json"
OPTIMIZER = "optimizer.pt"
OPTIMIZER_STATES_KEPT = 2  # the newest, and the one before it in case the newest has to be made again

_WEIGHTS = (".safetensors", ".safetensors.index.json")
_NOT_COPIED = (*_WEIGHTS, ".bin", ".bin.index.json", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx")


class Manifest(Record):
    """What a version folder holds.

    ``files`` maps each file to its SHA-256. ``fingerprint`` identifies the update (base, step, settings, batch) that
    made it: the same update never has to be made twice. ``reference`` is the folder of the policy's first weights.
    """

    policy: str
    version: int
    step: int
    base_version: int
    fingerprint: str
    reference: str
    sha256: str
    files: dict[str, str]
    stats: TrainStats


def version_folder(run_dir: Path, policy: str, version: int) -> Path:
    return run_dir / "weights" / policy / f"v{version:04d}"


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a version folder, or None where there is none that can be read."""
    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


def damage(folder: Path, manifest: Manifest) -> str | None:
    """What is wrong with the files of a version, or None. Reads every byte.

    An absent optimizer state is no damage: older versions give theirs up (see ``prune``).
    """
    for name, expected in manifest.files.items():
        path = folder / name
        if name == OPTIMIZER and not path.exists():
            continue
        if not path.is_file():
            return f"{path} is missing"
        if sha256(path) != expected:
            return f"{path} does not match the checksum in {MANIFEST}"
    return None


def find(folder: Path, fingerprint: str) -> Manifest | None:
    """The manifest of a version that this very update wrote before, complete and undamaged; else None."""
    manifest = read_manifest(folder)
    if manifest is None or manifest.fingerprint != fingerprint or not (folder / OPTIMIZER).is_file():
        return None
    return manifest if damage(folder, manifest) is None else None


def check_base(base: PolicyVersion) -> Manifest | None:
    """Verify the weights an update starts from; their manifest, or None for weights that did not come from here.

    DataError when the folder is missing or its weights are damaged.
    """
    folder = Path(base.path)
    if not folder.is_dir():
        raise DataError(
            f"{folder}: the weights of {base.policy} version {base.version} are missing; resume from another"
        )
    manifest = read_manifest(folder)
    if manifest is None:
        if base.version > 0 and (folder / MANIFEST).exists():
            raise DataError(f"{folder / MANIFEST}: cannot be read; restore it or go back to an earlier version")
        return None
    if base.sha256 and base.sha256 != manifest.sha256:
        raise DataError(
            f"{folder}: holds other weights than {base.policy} version {base.version} of the run; restore it"
        )
    problem = damage(folder, manifest)
    if problem is not None:
        raise DataError(
            f"{problem}; {base.policy} version {base.version} cannot be trained on: go back to an earlier one"
        )
    return manifest


def weights_digest(folder: Path) -> str:
    """SHA-256 over the names and checksums of a folder's weight files."""
    return _digest({path.name: sha256(path) for path in sorted(folder.iterdir()) if path.name.endswith(_WEIGHTS)})


def write_version(
    folder: Path, base: Path, save: Callable[[Path], None], manifest: Callable[..., Manifest]
) -> Manifest:
    """Write a version folder atomically, replacing what is there.

    ``save`` writes weights and optimizer state into an empty folder. Everything else (configuration, tokenizer, chat
    template) is copied from ``base``, so that a served version differs from its base in the weights alone.
    ``manifest`` is called with ``files`` and ``sha256``. StorageFullError when the disk is full; nothing of this
    version is left behind then.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent)
    temporary = folder.parent / f".{folder.name}.tmp-{os.getpid()}"
    try:
        with storage_errors(folder):
            temporary.mkdir()
            save(temporary)
            for source in sorted(base.iterdir()):
                if source.is_file() and source.name != MANIFEST and not source.name.endswith(_NOT_COPIED):
                    shutil.copyfile(source, temporary / source.name)
            names = sorted(path.name for path in temporary.iterdir())
            files = {name: sha256(temporary / name) for name in names}
            weights = {name: digest for name, digest in files.items() if name.endswith(_WEIGHTS)}
            written = manifest(files=files, sha256=_digest(weights))
            (temporary / MANIFEST).write_text(written.model_dump_json(indent=1), encoding="utf-8")
            for path in temporary.iterdir():
                _sync(path)
            _sync(temporary)
            if folder.exists():
                folder.rename(folder.parent / f".{folder.name}.old-{os.getpid()}")
            temporary.rename(folder)
            _sync(folder.parent)
    finally:
        sweep(folder.parent)
    return written


def prune(policy_folder: Path, keep: int, protect: Collection[int]) -> list[int]:
    """Delete all but the newest ``keep`` versions and those in ``protect``; the deleted ones, ascending.

    Kept versions older than the newest two lose their optimizer state, which is two thirds of their size: only the
    newest is trained on.
    """
    sweep(policy_folder)
    versions = list_versions(policy_folder)
    kept = set(versions[-keep:]) | set(protect)
    for version in versions[:-OPTIMIZER_STATES_KEPT]:
        (policy_folder / f"v{version:04d}" / OPTIMIZER).unlink(missing_ok=True)
    deleted = [version for version in versions if version not in kept]
    for version in deleted:
        _remove(policy_folder / f"v{version:04d}")
    return deleted


def list_versions(policy_folder: Path) -> list[int]:
    """Numbers of the versions on disk, ascending."""
    found = policy_folder.iterdir() if policy_folder.is_dir() else ()
    return sorted(int(match[1]) for path in found if (match := re.fullmatch(r"v(\d{4,})", path.name)))


def sweep(policy_folder: Path) -> None:
    """Remove what a write that was cut off left behind."""
    if policy_folder.is_dir():
        for path in policy_folder.iterdir():
            if re.fullmatch(r"\.v\d{4,}\.(tmp|old)-\d+", path.name):
                shutil.rmtree(path)


@contextlib.contextmanager
def storage_errors(target: Path) -> Iterator[None]:
    """Turn a full disk, however a library reports it, into StorageFullError."""
    try:
        yield
    except Exception as error:
        if not any(_disk_full(cause) for cause in _chain(error)):
            raise
        raise StorageFullError(
            f"{target}: the disk is full; free some space and resume, earlier versions are intact"
        ) from error


def require_space(target: Path, needed: int) -> None:
    """StorageFullError when fewer than ``needed`` bytes are free where ``target`` will be written."""
    free = _free(target)
    if free < needed:
        raise StorageFullError(
            f"{target}: a version takes {needed / 1e9:.2f} GB, only {free / 1e9:.2f} GB are free; free some and resume"
        )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(files: dict[str, str]) -> str:
    return hashlib.sha256("".join(f"{name} {files[name]}\n" for name in sorted(files)).encode()).hexdigest()


def _disk_full(error: BaseException) -> bool:
    """safetensors quotes the system in an error of its own type."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or "No space left on device" in str(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those it was raised in handling of: torch covers a failed write with one that does not say why."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _free(target: Path) -> int:
    existing = next(path for path in (target, *target.parents) if path.exists())
    return shutil.disk_usage(existing).free


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Delete a version so that a cut-off deletion cannot leave half of one under its name."""
    doomed = folder.parent / f".{folder.name}.old-{os.getpid()}"
    folder.rename(doomed)
    shutil.rmtree(doomed)
