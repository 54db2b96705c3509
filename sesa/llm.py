"""Model calls. One protocol, four implementations:

- `PolicyClient`: a trained policy on its vLLM server, token ids and log-probabilities kept;
- `OpenAIPolicyClient`: the same over the official library, for the benchmark that compares the two;
- `RouterModel`: judge and distiller on any endpoint that LiteLLM speaks to, text only;
- `ScriptedModel`: a function in the place of a model, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from sesa.chat_template import ChatTemplate, Template
from sesa.config import SamplingSection
from sesa.openai_client import OpenAIPolicyClient
from sesa.policy_client import PolicyClient
from sesa.router import RouterModel
from sesa.scripted import ByteTemplate, ScriptedModel
from sesa.types import Message, ModelCall

__all__ = [
    "ByteTemplate",
    "ChatModel",
    "ChatTemplate",
    "OpenAIPolicyClient",
    "PolicyClient",
    "RouterModel",
    "ScriptedModel",
    "Template",
]


@runtime_checkable
class ChatModel(Protocol):
    """Anything that replies to chat messages. ``version`` is the weights version that now replies."""

    name: str
    version: int

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

        With ``prompt_ids`` these are the prompt, and ``messages`` only their readable form; models without ids go
        by the messages. ``stop`` strings end the reply and stay in it. ``schema`` is a JSON schema that the reply
        must follow. Raises ServerError (ContextOverflowError, ServerBusyError) and BadReplyError.
        """
        ...
