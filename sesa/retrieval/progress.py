"""Progress of a long build on stderr: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sesa.retrieval.base import Progress

_EVERY_S = 15.0


@contextmanager
def shown() -> Iterator[Progress]:
    """Yield a `Progress` callback that draws on stderr until the block ends."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, object] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total or None)
            bars.update(tasks[stage], completed=done)  # type: ignore[arg-type]

        yield advance


def _lines() -> Progress:
    started: dict[str, float] = {}
    printed: dict[str, float] = {}

    def advance(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        begun = started.setdefault(stage, now)
        if done != total and now - printed.get(stage, begun) < _EVERY_S:
            return
        printed[stage] = now
        left = f", about {(now - begun) / done * (total - done):.0f} s left" if 0 < done < total else ""
        print(f"{stage}: {done}{f' of {total}' if total else ''}{left}", file=sys.stderr, flush=True)

    return advance
