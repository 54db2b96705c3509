"""The wire form of a policy call: vLLM's ``POST /v1/completions`` with token ids in and out.

Shared by every client of a policy server, so that they send the same request and accept the same replies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sesa.config import SamplingSection
from sesa.errors import BadReplyError, ContextOverflowError, ServerBusyError, ServerError, TransitError
from sesa.types import Message, ModelCall, Usage

# Worth another try: the server is busy, or something between it and us failed.
BUSY_STATUS = frozenset({429, 502, 503, 504})

# Replies that the server broke off (a request aborted, an engine that failed): no sample of the policy.
BROKEN_OFF = ("abort", "error", None)

# vLLM's words for a prompt over the context, and for one that fills it: no request of ours asks for 0 tokens.
_CONTEXT_FULL = ("maximum context length", "max_tokens must be at least 1, got 0")


def completion_request(
    model: str,
    prompt_ids: Sequence[int],
    sampling: SamplingSection,
    seed: int,
    stop: Sequence[str],
    schema: dict[str, Any] | None,
) -> dict[str, Any]:
    """The body of one call.

    ``top_k``, ``min_p`` and ``repetition_penalty`` are sent although neutral: a server takes values that are not
    sent from the model's generation_config.json, and the trainer knows nothing of them. The stop string stays in
    the text, because the ids contain it.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt_ids),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": seed,
        "logprobs": 0,
        "return_token_ids": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": True,
    }
    if stop:
        body["stop"] = list(stop)
    if schema is not None:
        body["structured_outputs"] = {"json": schema}
    return body


def read_completion(
    url: str,
    reply: Any,
    *,
    policy: str,
    policy_version: int,
    sent_ids: list[int],
    messages: Sequence[Message],
    latency_s: float,
) -> ModelCall:
    """The record of one parsed reply.

    Raises BadReplyError naming ``url`` and the field where anything promised is missing, of another length, not a
    finite number, or where the server saw another prompt than was sent; TransitError where the server broke it off.
    """
    if not isinstance(reply, dict):
        raise BadReplyError(f"{url}: the reply is a JSON {type(reply).__name__}, not an object; is this a vLLM server?")
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise BadReplyError(f"{url}: choices: one expected, got {_short(choices)}")
    choice: dict[str, Any] = choices[0]
    held = choice.get("logprobs")
    usage = reply.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return build_call(
        url,
        policy=policy,
        policy_version=policy_version,
        sent_ids=sent_ids,
        messages=messages,
        prompt_ids=choice.get("prompt_token_ids"),
        token_ids=choice.get("token_ids"),
        logprobs=held.get("token_logprobs") if isinstance(held, dict) else held,
        text=choice.get("text"),
        finish_reason=choice.get("finish_reason"),
        prompt_tokens=usage.get("prompt_tokens", len(sent_ids)),
        completion_tokens=usage.get("completion_tokens"),
        latency_s=latency_s,
    )


def build_call(
    url: str,
    *,
    policy: str,
    policy_version: int,
    sent_ids: list[int],
    messages: Sequence[Message],
    prompt_ids: Any,
    token_ids: Any,
    logprobs: Any,
    text: Any,
    finish_reason: Any,
    prompt_tokens: Any,
    completion_tokens: Any,
    latency_s: float,
) -> ModelCall:
    """Checks the fields of a reply and makes the record; raises as `read_completion` does."""
    if finish_reason in BROKEN_OFF:
        # First of all, because such a reply may lack its ids as well.
        raise TransitError(f"{url}: the reply was broken off by the server (finish_reason {_short(finish_reason)})")
    if finish_reason not in ("stop", "length"):
        raise BadReplyError(f"{url}: finish_reason: stop or length expected, got {_short(finish_reason)}")
    if prompt_ids != sent_ids:
        _ids(url, "prompt_token_ids", prompt_ids)
        raise BadReplyError(f"{url}: prompt_token_ids: {len(prompt_ids)} ids that are not the {len(sent_ids)} ids sent")
    _ids(url, "token_ids", token_ids)
    if not isinstance(logprobs, list):
        raise BadReplyError(f"{url}: logprobs.token_logprobs: a list expected, got {_short(logprobs)}")
    if len(logprobs) != len(token_ids):
        raise BadReplyError(f"{url}: {len(token_ids)} token_ids but {len(logprobs)} log-probabilities")
    for place, value in enumerate(logprobs):
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise BadReplyError(
                f"{url}: logprobs.token_logprobs[{place}]: a finite number expected, got {_short(value)}"
            )
    if not isinstance(text, str):
        raise BadReplyError(f"{url}: text: a string expected, got {_short(text)}")
    if completion_tokens is not None and completion_tokens != len(token_ids):
        raise BadReplyError(
            f"{url}: usage counts {_short(completion_tokens)} sampled tokens but there are {len(token_ids)}"
        )
    if not isinstance(prompt_tokens, int):
        raise BadReplyError(f"{url}: usage.prompt_tokens: a number expected, got {_short(prompt_tokens)}")
    return ModelCall(
        policy=policy,
        policy_version=policy_version,
        messages=tuple(messages),
        prompt_ids=tuple(sent_ids),
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        text=text,
        finish_reason=finish_reason,
        usage=Usage(prompt_tokens=prompt_tokens, completion_tokens=len(token_ids)),
        latency_s=latency_s,
    )


def refusal(url: str, status: int, reply: Any) -> ServerError:
    """The error for a reply whose status is not 200; ``reply`` is its parsed JSON, or its raw text.

    ContextOverflowError where the prompt leaves no room for a token, ServerBusyError where another try is right.
    """
    message = _refusal_text(reply)
    detail = f"{url}: HTTP {status}: {message}"
    if status == 400 and any(wording in message for wording in _CONTEXT_FULL):
        return ContextOverflowError(detail)
    if status in BUSY_STATUS:
        return ServerBusyError(detail)
    if status == 404:
        return ServerError(f"{detail}; check the address and the name of the served model")
    return ServerError(detail)


def _refusal_text(reply: Any) -> str:
    error = reply.get("error", reply.get("detail", reply)) if isinstance(reply, dict) else reply
    if isinstance(error, dict):
        error = error.get("message", error)
    return _short(error, 300) or "no reason given"


def _ids(url: str, field: str, value: Any) -> None:
    if not isinstance(value, list):
        raise BadReplyError(
            f"{url}: {field}: a list of ids expected, got {_short(value)}; vLLM 0.10 or later returns them"
        )
    if any(type(item) is not int or item < 0 for item in value):
        raise BadReplyError(f"{url}: {field}: holds something that is not a token id")


def _short(value: Any, limit: int = 80) -> str:
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
