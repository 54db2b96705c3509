"""The client that carries the policy calls: ids in, ids and log-probabilities out, over one plain HTTP post.

It is lean on purpose. At 64 calls in flight the official client spends over twice the processor time of this one
(`benchmarks/rollout_overhead.py` measures both), and a rollout loop on two cores pays for every millisecond.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from sesa.chat_template import Template
from sesa.completions import completion_request, read_completion, refusal
from sesa.config import SamplingSection
from sesa.errors import BadReplyError, ConfigError, ServerBusyError, ServerError, TransitError
from sesa.types import Message, ModelCall

# Longest pause between two tries of one call, in seconds.
MAX_BACKOFF_S = 8.0
CONNECT_TIMEOUT_S = 10.0


class SilenceError(TransitError):
    """No reply within the limit. Tried again only where the server has come back since: it would take as long."""


class PolicyClient:
    """One policy's server. A `ChatModel`; use it from one event loop, and `close` it."""

    def __init__(
        self,
        name: str,
        base_url: str,
        template: Template,
        *,
        model: str | None = None,
        version: int = 0,
        timeout_s: float = 300.0,
        retries: int = 2,
        recover: Callable[[float], Awaitable[bool]] | None = None,
    ) -> None:
        """``model`` is the served name (the policy's own by default). ``timeout_s`` bounds each try of a call.

        ``recover`` is asked after a failure in transit, with the monotonic time at which the call began; it answers
        True when the server has come back since, and the call is then made once more.
        """
        self.name = name
        self.model = model or name
        self.version = version
        self.template = template
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.url = f"{self.base_url}/v1/completions"
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"{name}: {base_url!r} is no server address; write http://HOST:PORT")
        self.timeout_s = timeout_s
        self.retries = retries
        self._recover = recover
        self._session: aiohttp.ClientSession | None = None
        self._in_flight: dict[str, int] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        sampling: SamplingSection,
        seed: int = 0,
        stop: tuple[str, ...] = (),
        prompt_ids: Sequence[int] | None = None,
        schema: dict[str, Any] | None = None,
    ) -> ModelCall:
        """One sampled reply.

        ``prompt_ids``, where given, are the prompt and ``messages`` only its readable form. Raises
        ContextOverflowError where the prompt fills the context, ServerBusyError and ServerError where the server
        did not serve, BadReplyError where its reply is not what was promised.
        """
        sent = self.template.start(messages) if prompt_ids is None else list(prompt_ids)
        began = time.monotonic()
        failures = 0
        async with self._admitted() as (model, version):
            body = completion_request(model, sent, sampling, seed, stop, schema)
            while True:
                started = time.monotonic()
                try:
                    return await self._call(body, messages, version)
                except ServerBusyError as error:
                    failures += 1
                    if failures > self.retries:
                        raise ServerBusyError(f"{error} (tried {failures} times)") from None
                except TransitError as error:
                    failures += 1
                    if self._recover is not None and await self._recover(started):
                        began, failures = started, 0
                    elif isinstance(error, SilenceError):
                        raise
                    elif failures > self.retries:
                        waited = time.monotonic() - began
                        raise ServerError(f"{error} (tried {failures} times in {waited:.0f} s)") from None
                await asyncio.sleep(backoff_s(failures))

    @asynccontextmanager
    async def exclusive(self, timeout_s: float) -> AsyncIterator[None]:
        """Holds back new calls and waits until those in flight have ended, so that every call has one version.

        Raises ServerError, with calls admitted again, where they have not ended within ``timeout_s``.
        """
        self._open.clear()
        try:
            try:
                await asyncio.wait_for(self._idle.wait(), timeout_s)
            except TimeoutError:
                count = sum(self._in_flight.values())
                raise ServerError(
                    f"{self.base_url}: {count} calls of {self.name} had not ended after {timeout_s:.0f} s;"
                    " raise serving.request_timeout_s"
                ) from None
            yield
        finally:
            self._open.set()

    async def drained(self, model: str, timeout_s: float) -> bool:
        """Waits until no call to the served name ``model`` is in flight; False where that takes over ``timeout_s``."""
        limit = time.monotonic() + timeout_s
        while self._in_flight.get(model):
            if time.monotonic() > limit:
                return False
            await asyncio.sleep(0.05)
        return True

    async def close(self) -> None:
        """Closes the connections. The client opens new ones when it is used again."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[tuple[str, int]]:
        # The served name and the version are read together, after the wait: they belong to the weights that answer.
        await self._open.wait()
        model, version = self.model, self.version
        self._in_flight[model] = self._in_flight.get(model, 0) + 1
        self._idle.clear()
        try:
            yield model, version
        finally:
            self._in_flight[model] -= 1
            if not self._in_flight[model]:
                del self._in_flight[model]
            if not self._in_flight:
                self._idle.set()

    async def _call(self, body: dict[str, Any], messages: Sequence[Message], version: int) -> ModelCall:
        started = time.perf_counter()
        status, raw = await self._post(orjson.dumps(body))
        try:
            reply = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            if status != 200:
                raise _raised(refusal(self.url, status, raw.decode(errors="replace")), status) from None
            start = " ".join(raw[:60].decode(errors="replace").split())
            raise BadReplyError(f"{self.url}: the reply is not JSON ({error}): it begins {start!r}") from None
        if status != 200:
            raise _raised(refusal(self.url, status, reply), status)
        return read_completion(
            self.url,
            reply,
            policy=self.name,
            policy_version=version,
            sent_ids=body["prompt"],
            messages=messages,
            latency_s=time.perf_counter() - started,
        )

    async def _post(self, data: bytes) -> tuple[int, bytes]:
        if self._session is None:
            # No limit of connections: the caller bounds what is in flight.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=CONNECT_TIMEOUT_S),
                headers={"Content-Type": "application/json"},
            )
        try:
            async with self._session.post(self.url, data=data) as response:
                return response.status, await response.read()
        except aiohttp.ConnectionTimeoutError:
            raise TransitError(f"{self.url}: no connection within {CONNECT_TIMEOUT_S:g} s; is it reachable?") from None
        except TimeoutError:
            raise SilenceError(
                f"{self.url}: no reply within {self.timeout_s:g} s; raise serving.request_timeout_s or look at its log"
            ) from None
        except aiohttp.InvalidURL:
            raise ConfigError(f"{self.url}: not a valid address") from None
        except aiohttp.ClientError as error:
            raise TransitError(f"{self.url}: {_reason(error)}; is the server running?") from None


def backoff_s(failures: int) -> float:
    """Pause before the next try: 0.25 s doubled per failure up to `MAX_BACKOFF_S`, spread so that callers disperse."""
    return min(MAX_BACKOFF_S, 0.25 * 2.0**failures) * random.uniform(0.5, 1.0)


def _raised(error: ServerError, status: int) -> ServerError:
    """A 500 may be the last word of a dying engine, so it counts as a failure in transit: the server is looked at."""
    return TransitError(str(error)) if status == 500 else error


def _reason(error: aiohttp.ClientError) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect ({error.os_error.strerror or error.os_error})"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the reply was cut off"
    return f"the connection failed ({str(error) or type(error).__name__})"
