"""One server that a run has started: its command, its log, its readiness, its end."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import aiohttp

from sesa.errors import BusyError, ServerError, StorageFullError

HEARTBEAT_S = 10.0
POLL_S = 0.25
HEALTH_TIMEOUT_S = 20.0
# Lines that say what went wrong, rather than where: an exception's last line, a refused argument, a full disk.
_TELLING = re.compile(
    r"\b(\w*(Error|Exception)|error): |\bValue error, |\bKilled\b|No space left|out of memory", re.IGNORECASE
)
# Last words that only point to earlier ones.
_POINTING = ("Engine core initialization failed", "WorkerProc initialization failed", "root cause above")


class ServerProcess:
    """A started server. The process group of the guard holds everything it starts."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], url: str, log: Path) -> None:
        """``env`` is the whole environment. ``log`` is appended to."""
        self.name = name
        self.command = list(command)
        self.env = dict(env)
        self.url = url
        self.log = log
        self.started_at = 0.0
        self.ready_at = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._log_from = 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        """Process id of the guard, which leads the group of the server."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Starts the process; `wait_ready` waits for it. Raises ServerError where the log cannot be written."""
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                self._log_from = log.tell()
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    # Not the current folder first on the path: a file there could hide a standard module.
                    "-P",
                    "-m",
                    "sesa.process_guard",
                    str(os.getpid()),
                    *self.command,
                    env=self.env,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # Ctrl-C reaches the run alone, which then ends its servers in order.
                    start_new_session=True,
                )
        except OSError as error:
            raise ServerError(f"{self.name}: cannot be started with its log in {self.log}: {error.strerror}") from None
        self.started_at = time.monotonic()

    async def wait_ready(self, limit_s: float, progress: Callable[[str], None]) -> None:
        """Waits until ``/health`` answers 200, with a line to ``progress`` every 10 seconds.

        On failure stops the server and raises ServerError with the line of its log that says most; the last lines
        go to ``progress``.
        """
        said = self.started_at
        while True:
            if not self.alive:
                code = self._process.returncode if self._process else None
                raise await self._failed(f"ended while starting (exit code {code})", progress)
            waited = time.monotonic() - self.started_at
            if await healthy(self.url, timeout_s=2.0):
                self.ready_at = time.monotonic()
                progress(f"{self.name}: ready on {self.url} after {waited:.0f} s")
                return
            if waited > limit_s:
                raise await self._failed(f"was not ready within {limit_s:.0f} s (serving.ready_timeout_s)", progress)
            if time.monotonic() - said >= HEARTBEAT_S:
                said = time.monotonic()
                progress(f"{self.name}: starting, {waited:.0f} of at most {limit_s:.0f} s; {self._last_line()}")
            await asyncio.sleep(POLL_S)

    async def stop(self, limit_s: float = 20.0) -> None:
        """Ends the server and all it started: asked first, killed after ``limit_s``."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), limit_s)
            except TimeoutError:
                self._kill_group()
                await self._process.wait()

    def kill(self) -> None:
        """Ends the server at once, for use where nothing can be awaited."""
        if self.alive:
            self._kill_group()

    def last_lines(self, count: int = 20) -> list[str]:
        """The last lines this server wrote since it was started."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(self._log_from, log.seek(0, os.SEEK_END) - 65536))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        return [line.rstrip() for line in lines if line.strip()][-count:]

    def _last_line(self) -> str:
        lines = self.last_lines(1)
        return lines[0][-160:] if lines else "nothing in its log yet"

    async def _failed(self, what: str, progress: Callable[[str], None]) -> ServerError:
        await self.stop()
        lines = self.last_lines(400)
        line = telling_line(lines)
        for shown in lines[-20:]:
            progress(f"{self.name}| {shown}")
        if "No space left" in line:
            raise StorageFullError(f"{self.name} {what}: the disk is full; see {self.log}")
        return ServerError(f"{self.name} {what}: {line[:300]} (log: {self.log})")

    def _kill_group(self) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def telling_line(lines: Sequence[str]) -> str:
    """The line of a server's log that says most about why it failed: the last error that does not point elsewhere."""
    errors = [line for line in lines if _TELLING.search(line)]
    causes = [line for line in errors if not any(words in line for words in _POINTING)]
    return (causes or errors or lines or ["its log is empty"])[-1].strip()


async def healthy(url: str, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
    """Whether ``GET url/health`` answers 200 in time."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.get(f"{url}/health") as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def free_ports(host: str, first: int, count: int) -> list[int]:
    """``count`` ports to bind on ``host``: from ``first`` on, or any free ones where ``first`` is 0.

    Raises BusyError where one of the wanted ports is in use, ServerError where ``host`` is no address of this machine.
    """
    held: list[socket.socket] = []
    try:
        for offset in range(count):
            port = first + offset if first else 0
            probe = socket.socket()
            held.append(probe)
            # As the server itself binds: a port in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except (OSError, OverflowError) as error:
                if port and isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                    raise BusyError(f"{host}:{port}: in use; end what listens there or set serving.port") from None
                raise ServerError(f"serving.host, serving.port: cannot bind {host}:{port}: {error}") from None
        return [probe.getsockname()[1] for probe in held]
    finally:
        for probe in held:
            probe.close()
