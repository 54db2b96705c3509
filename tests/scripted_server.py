"""A server that speaks the HTTP interface of vLLM that SESA uses, with a function in the place of the model.

In a test:   async with ScriptedServer(script) as server: PolicyClient("solver", server.url, server.template)
In a shell:  python tests/scripted_server.py --port 8000 --delay-ms 50 --tokens 40
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from sesa.chat_template import ChatTemplate, Template
from sesa.scripted import ByteTemplate, cut, made_up_logprob

FAULTS = (
    "500",
    "429",
    "503",
    "400",
    "hang",
    "reset",
    "cut-off",
    "html",
    "nan",
    "null-logprob",
    "short-logprobs",
    "no-ids",
    "other-prompt",
    "abort",
    "unfinished",
    "odd-finish",
    "empty",
)


# Text, ids and log-probabilities.
FixedReply = tuple[str, list[int], list[float]]
FIXED_SEARCH, FIXED_ANSWER = "<search>Eiffel Tower</search>", "<answer>Paris</answer>"


@dataclass(frozen=True)
class Prompt:
    """What a script sees of one call."""

    text: str
    seed: int
    body: dict[str, Any]
    server: ScriptedServer


@dataclass
class ScriptedServer:
    """``script(prompt)`` returns the text of the reply. State that the control endpoints change is public."""

    script: Callable[[Prompt], str]
    template: Template = field(default_factory=ByteTemplate)
    models: tuple[str, ...] = ("solver",)
    delay_s: float = 0.0
    max_model_len: int = 4096
    port: int = 0
    # For benchmarks: a search, then an answer, each the same text of exactly this many tokens; the script is not asked.
    fixed_tokens: int = 0

    weights_path: str = ""
    weight_version: str = "default"
    methods: tuple[str, ...] = ("reload_weights", "reload_every_weight")
    paused: bool = False
    prefix_reset_succeeds: bool = True
    adapters: dict[str, str] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    control: list[str] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    _faults: list[str] = field(default_factory=list)
    _fixed: tuple[FixedReply, ...] = ()

    def __post_init__(self) -> None:
        if self.fixed_tokens:
            self._fixed = self._padded(FIXED_SEARCH), self._padded(FIXED_ANSWER)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fail_next(self, *faults: str) -> None:
        """The next calls of /v1/completions fail, one by each of ``faults`` (see FAULTS)."""
        assert set(faults) <= set(FAULTS), faults
        self._faults += faults

    async def __aenter__(self) -> ScriptedServer:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        for path, handler in (
            ("/pause", self._pause),
            ("/resume", self._resume),
            ("/collective_rpc", self._collective_rpc),
            ("/reset_prefix_cache", self._reset_prefix_cache),
            ("/update_weight_version", self._update_weight_version),
            ("/v1/load_lora_adapter", self._load_lora_adapter),
            ("/v1/unload_lora_adapter", self._unload_lora_adapter),
        ):
            app.router.add_post(path, handler)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, shutdown_timeout=0.2)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    # ------------------------------------------------------------------------------------------------- completions

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            while self.paused:
                await asyncio.sleep(0.005)
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            fault = self._faults.pop(0) if self._faults else ""
            return await self._faulty(request, fault) or self._complete(body, fault)
        finally:
            self.in_flight -= 1

    async def _faulty(self, request: web.Request, fault: str) -> web.StreamResponse | None:
        if fault in ("500", "429", "503", "400"):
            return _error(int(fault), f"scripted failure {fault}")
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "html":
            return web.Response(text="<html><body>Welcome to the proxy</body></html>", content_type="text/html")
        if fault == "empty":
            return web.json_response([])
        if fault in ("reset", "cut-off"):
            response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
            if fault == "cut-off":
                await response.prepare(request)
                await response.write(b'{"choices": [{"text": "cut')
            assert request.transport is not None
            request.transport.abort()
            return response
        return None

    def _complete(self, body: dict[str, Any], fault: str) -> web.Response:
        if body["model"] not in (*self.models, *self.adapters):
            return _error(404, f"The model `{body['model']}` does not exist. Valid aliases: {', '.join(self.models)}.")
        prompt: list[int] = body["prompt"]
        if len(prompt) == self.max_model_len:
            return _error(400, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)")
        if len(prompt) > self.max_model_len:
            return _error(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt contains"
                f" at least {len(prompt)} input tokens, which exceeds this limit.",
            )
        if self.fixed_tokens:
            text, ids, logprobs = self._fixed_reply(prompt)
            finish = "stop"
        else:
            said = self.script(Prompt(self.template.decode(prompt), body.get("seed") or 0, body, self))
            room = min(body["max_tokens"], self.max_model_len - len(prompt))
            text, ids, finish = cut(self.template, said, body.get("stop", ()), room)
            # The weights take part, so that a publication is seen in the log-probabilities.
            salt = sum(f"{self.weights_path}{self.adapters.get(body['model'], '')}".encode()) % 97
            logprobs = [made_up_logprob(len(prompt) + at + salt, token) for at, token in enumerate(ids)]
        reply = completion(body["model"], prompt, text, ids, logprobs, finish)
        _spoil(reply, fault)
        # orjson writes NaN as null, and vLLM is fast: json only where it makes a difference.
        data = json.dumps(reply).encode() if fault == "nan" else orjson.dumps(reply)
        return web.Response(body=data, content_type="application/json")

    def _fixed_reply(self, prompt: list[int]) -> FixedReply:
        search, answer = self._fixed
        # As bytes, because a benchmark must not wait for the server to look through its prompts.
        return answer if array("I", search[1]).tobytes() in array("I", prompt).tobytes() else search

    def _padded(self, action: str) -> FixedReply:
        """``action`` behind so many words of thought that both have ``fixed_tokens`` tokens."""
        ids = self.template.encode(action)
        room = self.fixed_tokens - len(ids)
        if room < 0:
            raise ValueError(f"{self.fixed_tokens} tokens are too few for {action}, which has {len(ids)}")
        ids = [*(self.template.encode("I think about it once more. ") * self.fixed_tokens)[:room], *ids]
        return self.template.decode(ids), ids, [made_up_logprob(at, token) for at, token in enumerate(ids)]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append(body)
        fault = self._faults.pop(0) if self._faults else ""
        if response := await self._faulty(request, fault):
            return response
        text = "\n".join(m["content"] for m in body["messages"])
        message = {"role": "assistant", "content": self.script(Prompt(text, body.get("seed") or 0, body, self))}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [choice],
                "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
            }
        )

    # ----------------------------------------------------------------------------------------------------- control

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        names = [*self.models, *self.adapters]
        return web.json_response(
            {
                "object": "list",
                "data": [{"id": n, "object": "model", "max_model_len": self.max_model_len} for n in names],
            }
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        ids = self.template.encode((await request.json())["prompt"])
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len})

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def _pause(self, request: web.Request) -> web.Response:
        self.control.append(f"pause {request.query['mode']}")
        self.paused = True
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self.control.append("resume")
        self.paused = False
        return web.json_response({"status": "resumed"})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        path = body["kwargs"]["weights_path"]
        self.control.append(f"{body['method']} {path}")
        if body["method"] not in self.methods:
            return _error(500, f"Call to collective_rpc method failed: 'Worker' has no attribute '{body['method']}'")
        if not Path(path).is_dir():
            return _error(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
        self.weights_path = path
        return web.json_response({"results": [None]})

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        self.control.append("reset_prefix_cache")
        return web.json_response({"success": self.prefix_reset_succeeds})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        self.weight_version = (await request.json())["new_version"]
        self.control.append(f"update_weight_version {self.weight_version}")
        return web.json_response({"success": True, "new_version": self.weight_version})

    async def _load_lora_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.control.append(f"load {body['lora_name']}")
        if body["lora_name"] in self.adapters:
            return _error(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
        self.adapters[body["lora_name"]] = body["lora_path"]
        return web.Response(text=f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    async def _unload_lora_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.control.append(f"unload {body['lora_name']}")
        if self.adapters.pop(body["lora_name"], None) is None:
            return _error(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
        return web.Response(text="Success")


def completion(
    model: str, prompt: list[int], text: str, ids: list[int], logprobs: list[float], finish: str
) -> dict[str, Any]:
    """A reply with every field that vLLM sends, so that its size and cost to parse are real."""
    tokens = [f"t{token}" for token in ids]
    choice = {
        "index": 0,
        "text": text,
        "logprobs": {
            "text_offset": list(range(len(ids))),
            "token_logprobs": list(logprobs),
            "tokens": tokens,
            "top_logprobs": [{t: p} for t, p in zip(tokens, logprobs, strict=True)],
        },
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": list(ids),
        "prompt_logprobs": None,
        "prompt_token_ids": list(prompt),
        "routed_experts": None,
    }
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 0,
        "model": model,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": "scripted",
        "usage": usage,
        "kv_transfer_params": None,
        "metrics": None,
    }


def _spoil(reply: dict[str, Any], fault: str) -> None:
    choice = reply["choices"][0]
    logprobs = choice["logprobs"]["token_logprobs"]
    if fault == "nan":
        logprobs[0] = float("nan")
    elif fault == "null-logprob":
        logprobs[-1] = None
    elif fault == "short-logprobs":
        logprobs.pop()
    elif fault == "no-ids":
        choice["token_ids"] = None
    elif fault == "other-prompt":
        choice["prompt_token_ids"] = choice["prompt_token_ids"][1:]
    elif fault == "abort":
        choice["finish_reason"] = "abort"
    elif fault == "unfinished":
        choice |= {"finish_reason": None, "token_ids": None, "logprobs": None}
    elif fault == "odd-finish":
        choice["finish_reason"] = "tool_calls"


def _error(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "ScriptedError", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


def answer_after_search(prompt: Prompt) -> str:
    """A solver of the shape that rollouts have: one search, then an answer."""
    if "<information>" in prompt.text or "<observation>" in prompt.text:
        return "<answer>Paris</answer>"
    query = re.findall(r"\w+", prompt.text)[-8:-1]
    return f"<search>{' '.join(query)}</search>"


async def _serve(server: ScriptedServer) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with server:
        print(f"ready on {server.url}", flush=True)
        await stopped.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=0, help="fixed replies of so many tokens each; 0: no padding")
    parser.add_argument("--model-dir", type=Path, default=None, help="folder of the tokenizer; default: bytes")
    parser.add_argument("--models", default="solver,proposer", help="served names")
    given = parser.parse_args()
    template: Template = ChatTemplate(given.model_dir) if given.model_dir else ByteTemplate()
    server = ScriptedServer(
        answer_after_search,
        template,
        models=tuple(given.models.split(",")),
        delay_s=given.delay_ms / 1e3,
        max_model_len=10**6,
        port=given.port,
        fixed_tokens=given.tokens,
    )
    asyncio.run(_serve(server))


if __name__ == "__main__":
    main()
