"""Reading JSONL files row by row, with one policy for rows that are unusable.

All bad rows are counted and the first is named; the whole file is refused unless the caller asked to skip them.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import orjson

from sesa.errors import DataError, NotFoundError
from sesa.files import replacing

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BadRows:
    """How many rows of a file were unusable, of how many; ``first`` is "FILE:LINE: reason" of the first one."""

    count: int = 0
    rows: int = 0
    first: str = ""


def read_rows(
    path: Path, parse: Callable[[Mapping[str, Any]], T], *, skip_bad: bool, remedy: str
) -> tuple[list[T], BadRows]:
    """Parse every row of a JSONL file (plain, .gz or .bz2 by content). Blank lines are not rows.

    ``parse`` turns one JSON object into a record and raises ValueError with the reason when it cannot. ``remedy``
    ends the message. Raises DataError when there are bad rows and ``skip_bad`` is false, or when no row is left.
    """
    records: list[T] = []
    rows = bad = 0
    first = ""
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        rows += 1
        try:
            records.append(parse(_object(line)))
        except ValueError as error:
            bad += 1
            first = first or f"{path}:{number}: {' '.join(str(error).split())}"
    outcome = BadRows(bad, rows, first)
    if bad and not skip_bad:
        count = "the only row" if rows == 1 else f"{bad} of {rows} rows"
        raise DataError(f"{first}; {count} unusable; {remedy}")
    if not rows:
        raise DataError(f"{path}: is empty: it holds no rows; write one JSON object a line")
    if not records:
        raise DataError(f"{first}; no row is left; {remedy}")
    if bad:
        log.warning("%s: skipped %d of %d rows; the first: %s", path, bad, rows, first)
    return records, outcome


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write ``rows`` as JSONL, all or nothing."""
    with replacing(path) as new, new.open("wb") as file:
        file.writelines(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)


def text_field(row: Mapping[str, Any], name: str, *, default: str | None = None) -> str:
    """The string ``row[name]`` without surrounding white space.

    Raises ValueError where it is absent (and has no default), is not a string, or is empty (and default is not "").
    """
    value = row.get(name, default)
    if value is None:
        raise ValueError(f"{name}: missing")
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be a string, got {_short(value)}")
    if not value.strip() and default != "":
        raise ValueError(f"{name}: is empty")
    return value.strip()


def open_source(path: Path) -> IO[bytes] | bz2.BZ2File | gzip.GzipFile:
    """Open a file for reading, unpacking gzip or bzip2, which are told by content and not by name.

    Raises NotFoundError when it is not there, DataError when it cannot be read or is no regular file: a pipe or a
    device would block, and a source is read more than once.
    """
    try:
        if not path.is_file() and path.exists():
            raise DataError(f"{path}: is no regular file; name a file")
        with path.open("rb") as file:
            magic = file.read(3)
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if magic == b"BZh":
        return bz2.open(path)
    if magic[:2] == b"\x1f\x8b":
        return gzip.open(path)
    return path.open("rb")


def _lines(path: Path) -> Iterator[bytes]:
    read = 0
    with open_source(path) as file:
        try:
            for line in file:
                read += 1
                yield line.removeprefix(codecs.BOM_UTF8) if read == 1 else line
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{path}:{read + 1}: the compressed file is cut off or damaged: {error}") from None


def _object(line: bytes) -> Mapping[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8 at byte {error.start}") from None
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {_short(value)}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
