"""Live progress of a run: bars with an estimate on a terminal, plain lines elsewhere. All of it goes to stderr."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sesa.graphs.context import Stage

LINE_EVERY_S = 10.0
"""Seconds between plain lines of one stage."""
QUIET_AFTER_S = 60.0
"""Seconds without progress after which the stage that is waited for is named."""


class StageConsole(Stage):
    """Shows each stage of a step with its counts and the time it will still take."""

    def __init__(self) -> None:
        super().__init__()
        self.console = Console(stderr=True, highlight=False)
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._began: dict[str, tuple[float, int]] = {}
        self._shown: dict[str, float] = {}
        self._last = time.monotonic()
        self._step = ""

    def say(self, line: str) -> None:
        """One line about something that is not a stage."""
        self._last = time.monotonic()
        self.console.print(line, markup=False, soft_wrap=True)

    def bars(self, stage: str, done: int, total: int) -> None:
        """Progress of work outside the steps (reading, embedding), in the same form."""
        self.counts[stage] = (done, total)
        self.show(stage, done, total)

    def begin(self, step: str) -> None:
        """A step begins; its stages are shown under this name."""
        self.close()
        self.counts.clear()
        self._began.clear()
        self._shown.clear()
        self._step = step

    def close(self) -> None:
        """Leave the bars as they stand."""
        if self._bars is not None:
            self._bars.stop()
        self._bars, self._tasks = None, {}

    def show(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        self._last = now
        began, before = self._began.setdefault(stage, (now, done))
        if self.console.is_terminal:
            self._bar(stage, done, total)
        elif done == 0 or done == total or now - self._shown.get(stage, 0.0) >= LINE_EVERY_S:
            self._shown[stage] = now
            made = done - before  # what an earlier process, or the time before the first look, did tells no speed
            known = made > 0 and done < total and now - began >= 1.0
            left = f", about {(now - began) / made * (total - done):.0f} s left" if known else ""
            print(f"{self._step}{stage} {done}/{total or '?'}{left}", file=sys.stderr, flush=True)

    def heartbeat(self) -> None:
        """Where nothing has moved for a while, say what is waited for."""
        quiet = time.monotonic() - self._last
        if quiet >= QUIET_AFTER_S and self.counts:
            stage, (done, total) = list(self.counts.items())[-1]
            self.say(f"{self._step}waiting at {stage} {done}/{total}, nothing new for {quiet:.0f} s")

    def _bar(self, stage: str, done: int, total: int) -> None:
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._bars.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(f"{self._step}{stage}", total=total or None)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)
