"""The policy client on the official OpenAI library: same interface and checks as `PolicyClient`, more overhead.

No configuration selects it: runs use `PolicyClient`. It is the other arm of the comparison that
`benchmarks/rollout_overhead.py` makes, and is held to the same tests, so that the comparison is of equals.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sesa.completions import build_call, refusal
from sesa.errors import BadReplyError, TransitError
from sesa.policy_client import PolicyClient, SilenceError
from sesa.types import Message, ModelCall

# What the library knows by name; the rest of a request goes through extra_body.
_NAMED = ("model", "prompt", "max_tokens", "temperature", "top_p", "seed", "logprobs", "stop")


class OpenAIPolicyClient(PolicyClient):
    """A `ChatModel` over ``openai.AsyncOpenAI``; retries and limits are this project's, not the library's."""

    _library: Any = None

    async def close(self) -> None:
        if self._library is not None:
            await self._library.close()
            self._library = None
        await super().close()

    async def _call(self, body: dict[str, Any], messages: Sequence[Message], version: int) -> ModelCall:
        import openai
        from openai.types import Completion, CompletionChoice

        if self._library is None:
            self._library = openai.AsyncOpenAI(
                base_url=f"{self.base_url}/v1", api_key="none", max_retries=0, timeout=self.timeout_s
            )
        named = {key: body[key] for key in _NAMED if key in body}
        extra = {key: value for key, value in body.items() if key not in named}
        started = time.perf_counter()
        try:
            reply = await self._library.completions.create(**named, extra_body=extra)
        except openai.APITimeoutError:
            raise SilenceError(
                f"{self.url}: no reply within {self.timeout_s:g} s; raise serving.request_timeout_s or look at its log"
            ) from None
        except openai.APIStatusError as error:
            found = refusal(self.url, error.status_code, error.body or error.response.text)
            raise (TransitError(str(found)) if error.status_code == 500 else found) from None
        except openai.APIConnectionError as error:
            raise TransitError(f"{self.url}: {error.__cause__ or error}; is the server running?") from None
        except (openai.APIResponseValidationError, ValueError) as error:
            raise BadReplyError(f"{self.url}: the reply is not JSON ({error})") from None
        if not isinstance(reply, Completion):
            raise BadReplyError(f"{self.url}: the reply is not JSON of a completion: it begins {str(reply)[:60]!r}")
        choices = reply.choices or []
        if len(choices) != 1 or not isinstance(choices[0], CompletionChoice):
            raise BadReplyError(f"{self.url}: choices: one expected, got {len(choices)}")
        choice = choices[0]
        fields: dict[str, Any] = choice.model_extra or {}
        return build_call(
            self.url,
            policy=self.name,
            policy_version=version,
            sent_ids=body["prompt"],
            messages=messages,
            prompt_ids=fields.get("prompt_token_ids"),
            token_ids=fields.get("token_ids"),
            logprobs=getattr(choice.logprobs, "token_logprobs", None),
            text=choice.text,
            finish_reason=choice.finish_reason,
            prompt_tokens=reply.usage.prompt_tokens if reply.usage else len(body["prompt"]),
            completion_tokens=reply.usage.completion_tokens if reply.usage else None,
            latency_s=time.perf_counter() - started,
        )
