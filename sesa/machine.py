"""What this process may use of the machine: cores and memory, container limits included."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def cores() -> list[int]:
    """Numbers of the processor cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def memory_bytes() -> tuple[int, int]:
    """(total, available) bytes of memory, of the container where it has less than the machine."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    limit, used = _number("memory.max"), _number("memory.current")
    if limit is not None and used is not None and limit < total:
        # The page cache counts as used and is given back on demand.
        return limit, min(available, limit - used + (_inactive_file() or 0))
    return total, available


def _number(name: str) -> int | None:
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file() -> int | None:
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), None)
