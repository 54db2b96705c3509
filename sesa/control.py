"""The control endpoints of a vLLM server: its models, its weights, its adapters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from sesa.completions import refusal
from sesa.errors import BadReplyError, ServerError

# The worker's method that reloads, and the class it is from (see there).
RELOAD, EXTENSION = "reload_every_weight", "sesa.vllm_worker.WeightReload"
# Reading a checkpoint from disk, or an adapter; far more than either takes.
LOAD_TIMEOUT_S = 300.0
QUICK_TIMEOUT_S = 30.0
# How long blocks of ended requests may still be held when the prefix cache is reset.
RESET_LIMIT_S = 10.0


class ServerControl:
    """Control of the server at ``url``. Every method raises ServerError or BadReplyError that names the endpoint."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")

    async def served_names(self) -> list[str]:
        """Names of the models and adapters that the server serves."""
        reply = await self._send("GET", "/v1/models")
        try:
            return [str(model["id"]) for model in reply["data"]]
        except (TypeError, KeyError):
            raise BadReplyError(f"{self.url}/v1/models: no list of models; is this a vLLM server?") from None

    async def weight_version(self) -> str:
        """The label set by the last publication; "default" before the first."""
        reply = await self._send("GET", "/weight_info")
        return str(reply.get("weight_version")) if isinstance(reply, dict) else ""

    async def label(self, version: str) -> None:
        """Sets the label that `weight_version` returns."""
        await self._send("POST", "/update_weight_version", json={"new_version": version})

    async def replace_weights(self, folder: Path, version: str, drain_s: float, method: str = RELOAD) -> None:
        """Serves the weights in ``folder`` from the next call on: pause, reload, drop the prefix cache, resume.

        Calls in flight end first, within ``drain_s``. ``method`` is the worker's method that loads. Where anything
        fails the server stays paused, because it may hold new weights with cache entries of the old and must not
        answer; only a server that lacks ``method`` is left as it was.
        """
        await self._send("POST", "/pause?mode=wait", timeout_s=drain_s)
        body = {"method": method, "kwargs": {"weights_path": str(folder)}, "timeout": LOAD_TIMEOUT_S}
        try:
            await self._send("POST", "/collective_rpc", json=body, timeout_s=LOAD_TIMEOUT_S + QUICK_TIMEOUT_S)
        except ServerError as error:
            if method not in str(error):
                raise
            await self._send("POST", "/resume")
            raise ServerError(
                f"{self.url}: has no {method}; start that server with --worker-extension-cls {EXTENSION}"
            ) from None
        await self._reset_prefix_cache()
        await self.label(version)
        await self._send("POST", "/resume")

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Serves the adapter in ``folder`` as the model ``name``."""
        body = {"lora_name": name, "lora_path": str(folder)}
        await self._send("POST", "/v1/load_lora_adapter", json=body, timeout_s=LOAD_TIMEOUT_S)

    async def unload_adapter(self, name: str) -> None:
        await self._send("POST", "/v1/unload_lora_adapter", json={"lora_name": name})

    async def _reset_prefix_cache(self) -> None:
        limit = time.monotonic() + RESET_LIMIT_S
        while True:
            reply = await self._send("POST", "/reset_prefix_cache")
            if isinstance(reply, dict) and reply.get("success") is True:
                return
            if time.monotonic() > limit:
                raise ServerError(
                    f"{self.url}/reset_prefix_cache: not reset within {RESET_LIMIT_S:g} s ({reply}); its entries"
                    " belong to the weights before"
                )
            await asyncio.sleep(0.2)

    async def _send(
        self, method: str, path: str, *, json: Mapping[str, Any] | None = None, timeout_s: float = QUICK_TIMEOUT_S
    ) -> Any:
        """The parsed reply; None for an empty one and the text where it is no JSON."""
        url = f"{self.url}{path}"
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
                session.request(method, url, json=json) as response,
            ):
                status, raw = response.status, await response.read()
        except TimeoutError:
            raise ServerError(f"{url}: no reply within {timeout_s:g} s; look at the server's log") from None
        except aiohttp.ClientError as error:
            raise ServerError(f"{url}: {error or type(error).__name__}; is the server running?") from None
        try:
            reply = orjson.loads(raw) if raw else None
        except orjson.JSONDecodeError:
            reply = raw.decode(errors="replace")
        if status == 404 and path not in ("/v1/models", "/v1/unload_lora_adapter"):
            raise ServerError(
                f"{url}: HTTP 404; start that server with VLLM_SERVER_DEV_MODE=1, or let the run start it"
            )
        if status != 200:
            raise refusal(url, status, reply)
        return reply
