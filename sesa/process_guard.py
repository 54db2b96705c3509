"""Runs a server and sees to it that nothing of it outlives the run, not even after ``kill -9``.

    python -P -m sesa.process_guard RUN_PID COMMAND...

vLLM is several processes, and a killed parent takes no grandchild with it. This small process stands between: it is
the parent of everything the command starts (orphans are handed to it), notices that the run has gone, and ends them
all. A death signal alone would not do: the kernel ties it to the thread that started the child.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 0.2
# A run that ended by itself waits this long for its servers; nobody waits for those of a killed run.
GRACE_S, ORPHAN_GRACE_S = 15.0, 2.0


def guard(run_pid: int, command: list[str]) -> int:
    """Runs ``command`` until it ends, a signal asks to stop, or the process ``run_pid`` is gone.

    Returns the exit code of the command. When it returns, no descendant is left.
    """
    asked: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ask)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(command, preexec_fn=_die_with_guard)
    while child.poll() is None and not asked and os.getppid() == run_pid:
        time.sleep(POLL_S)
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(ORPHAN_GRACE_S if os.getppid() != run_pid else GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
    _kill_descendants()
    return child.wait()


def _kill_descendants() -> None:
    while left := psutil.Process().children(recursive=True):
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        # Also reaps those that became children of this process when their parent ended.
        psutil.wait_procs(left, timeout=1.0)


def _die_with_guard() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), sys.argv[2:]))
