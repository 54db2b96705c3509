"""Judge and distiller on any endpoint that LiteLLM speaks to. Text only: these roles are not trained."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from sesa.config import DistillerSection, JudgeSection, SamplingSection
from sesa.errors import BadReplyError, ConfigError, ContextOverflowError, DependencyError, ServerBusyError, ServerError
from sesa.types import Message, ModelCall, Usage


class RouterModel:
    """A `ChatModel` over ``litellm.Router``: retries with backoff, then a cooldown of the endpoint.

    No response cache is used: the library's fails on every hit, and a distiller is sampled anew on purpose.
    """

    version = 0

    def __init__(
        self,
        name: str,
        endpoint: str,
        *,
        api_base: str = "",
        api_key_env: str = "",
        timeout_s: float = 120.0,
        retries: int = 2,
    ) -> None:
        """``endpoint`` is a LiteLLM model name, e.g. ``hosted_vllm/my-model`` with ``api_base``.

        Raises ConfigError where ``api_key_env`` names a variable that is not set, or the endpoint is not known.
        """
        self.name = name
        self.endpoint = endpoint
        self.where = f"{name} ({endpoint}{f' at {api_base}' if api_base else ''})"
        if api_key_env and not os.environ.get(api_key_env):
            raise ConfigError(f"{self.where}: the environment variable {api_key_env} is not set; export the key in it")
        params: dict[str, Any] = {"model": endpoint, "api_key": os.environ.get(api_key_env) if api_key_env else None}
        if api_base:
            params["api_base"] = api_base
            # A server of one's own asks for no key, but the library refuses an empty one.
            params["api_key"] = params["api_key"] or "none"
        litellm = _import_litellm()
        try:
            self._router = litellm.Router(
                model_list=[{"model_name": name, "litellm_params": {**params, "drop_params": True}}],
                num_retries=retries,
                timeout=timeout_s,
                cache_responses=False,
            )
        except Exception as error:  # noqa: BLE001 - the library raises whatever its providers raise
            raise ConfigError(f"{self.where}: LiteLLM does not accept it: {_line(error)}") from None

    @classmethod
    def from_section(cls, name: str, section: JudgeSection | DistillerSection) -> RouterModel:
        """The model that a configuration section names."""
        return cls(name, section.endpoint, api_base=section.api_base, api_key_env=section.api_key_env)

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
        """One reply, without ids and log-probabilities; ``prompt_ids`` are ignored, the endpoint has its own tokenizer.

        Raises ServerBusyError, ContextOverflowError, ServerError, BadReplyError, each naming the endpoint.
        """
        import openai  # every error of litellm derives from one of these

        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": seed,
        }
        if stop:
            params["stop"] = list(stop)
        if schema is not None:
            form = {"name": "reply", "schema": schema, "strict": True}
            params["response_format"] = {"type": "json_schema", "json_schema": form}
        chat = [{"role": m.role, "content": m.content} for m in messages]
        started = time.perf_counter()
        try:
            reply = await self._router.acompletion(model=self.name, messages=chat, **params)
        except openai.RateLimitError as error:
            raise ServerBusyError(f"{self.where}: {_line(error)}") from None
        except openai.BadRequestError as error:
            kind = ContextOverflowError if type(error).__name__ == "ContextWindowExceededError" else ServerError
            raise kind(f"{self.where}: {_line(error)}") from None
        except (openai.OpenAIError, ValueError) as error:
            raise ServerError(f"{self.where}: {_line(error)}") from None
        text = reply.choices[0].message.content if reply.choices else None
        if not isinstance(text, str):
            raise BadReplyError(f"{self.where}: the reply holds no text")
        usage = getattr(reply, "usage", None)
        return ModelCall(
            policy=self.name,
            policy_version=0,
            messages=tuple(messages),
            text=text,
            finish_reason=reply.choices[0].finish_reason or "stop",
            usage=Usage(
                prompt_tokens=getattr(usage, "prompt_tokens", 0) or 0,
                completion_tokens=getattr(usage, "completion_tokens", 0) or 0,
            ),
            latency_s=time.perf_counter() - started,
        )


def _import_litellm() -> Any:
    # Before the import: the library would fetch its price list from the network while it is imported.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    try:
        import litellm
    except ImportError as error:
        raise DependencyError(f"litellm cannot be imported ({error}); install it: pip install litellm") from None
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    return litellm


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:299]}…"
