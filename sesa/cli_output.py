"""What the commands print: results on stdout (tables, text, JSON), progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from sesa.errors import ConfigError


def print_json(value: Any) -> None:
    """Print JSON with stable keys; NaN and infinities, which JSON does not have, become null."""
    import orjson

    options = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
    sys.stdout.write(orjson.dumps(value, option=options).decode())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on a terminal; elsewhere tab-separated lines under a line of column names, nothing cut off."""
    cells = [[one_line(cell(value)) for value in row] for row in rows]
    if not sys.stdout.isatty():
        for line in (columns, *cells):
            print("\t".join(line))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number < len(columns) - 1, overflow="fold")
    for line in cells:
        table.add_row(*(Text(text) for text in line))
    Console().print(table)


def cell(value: object) -> str:
    """A value as shown in a table or after a label."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    return str(value)


def number(value: float) -> str:
    """A number with four significant digits, integers as they are."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def visible(text: str) -> str:
    """Text of a model or a corpus with control characters spelled out: it must not drive the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str, most: int | None = None) -> str:
    """Text on one line, cut with an ellipsis beyond ``most`` characters."""
    flat = " ".join(visible(text).split())
    return flat if most is None or len(flat) <= most else flat[: most - 1] + "…"


MOST_SHOWN = 600
"""Characters of an error that are shown: it may quote a value, key or id of any length."""


def outside(error: OSError | OverflowError) -> str:
    """What the system refused of what it was given: a path that cannot be used, a number beyond all bounds."""
    if isinstance(error, OverflowError):
        return f"a number is too large: {error}; give a smaller one"
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}; name another path or mend its permissions"


def short(text: str, most: int) -> str:
    """Text on one line, cut beyond ``most`` characters on a terminal; whole where a program reads it."""
    return one_line(text, most if sys.stdout.isatty() else None)


def indented(text: str, by: int) -> str:
    """Every line of a text, indented."""
    return "\n".join(" " * by + line for line in visible(text).splitlines() or [""])


def note(text: str) -> None:
    """A line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def choice(value: str | None, allowed: Sequence[str], option: str) -> str | None:
    """``value``, if it is one of ``allowed``. Raises ConfigError naming the option and what it takes."""
    if value is None or value in allowed:
        return value
    raise ConfigError(f"{option}: no such value {value!r}; it takes one of {', '.join(allowed)}")
