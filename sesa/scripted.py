"""A function in the place of a model, with ids and log-probabilities as consistent as a real server's."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from sesa.chat_template import Template, special_token_breaker
from sesa.config import SamplingSection
from sesa.types import Message, ModelCall, Usage

_START, _END = "<|im_start|>", "<|im_end|>"


class ByteTemplate:
    """A ChatML template whose tokens are the bytes of the text (ids 0-255) and two special tokens (256, 257)."""

    special_tokens: tuple[str, ...] = (_START, _END)
    eos_id = 257

    def start(self, messages: Sequence[Message]) -> list[int]:
        return self.encode("".join(map(self._turn, messages)) + f"{_START}assistant\n")

    def extend(self, prompt_ids: Sequence[int], token_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        bridge = self.encode(f"{_END}\n" + "".join(map(self._turn, messages)) + f"{_START}assistant\n")
        skip = 1 if token_ids and token_ids[-1] == self.eos_id else 0
        return [*prompt_ids, *token_ids, *bridge[skip:]]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for opened, part in enumerate(text.split(_START)):
            ids += [256] if opened else []
            for closed, piece in enumerate(part.split(_END)):
                ids += [257] if closed else []
                ids += piece.encode()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text, run = "", bytearray()
        for token in ids:
            if token < 256:
                run.append(token)
            else:
                text += run.decode(errors="replace") + self.special_tokens[token - 256]
                run.clear()
        return text + run.decode(errors="replace")

    def neutralise(self, text: str) -> str:
        return special_token_breaker(self.special_tokens)(text)

    @staticmethod
    def _turn(message: Message) -> str:
        return f"{_START}{message.role}\n{message.content}{_END}\n"


class ScriptedModel:
    """A `ChatModel` that replies what ``script(messages, seed)`` returns, after ``delay_s``.

    The script may raise one of our errors in place of a reply. Ids come from ``template``; a reply that ends of its
    own accord closes with the end-of-turn token, as a policy's does. Every call is kept in ``calls``.
    """

    def __init__(
        self,
        name: str,
        script: Callable[[Sequence[Message], int], str],
        *,
        template: Template | None = None,
        version: int = 0,
        delay_s: float = 0.0,
    ) -> None:
        self.name = name
        self.version = version
        self.template: Template = template or ByteTemplate()
        self.calls: list[ModelCall] = []
        self._script = script
        self._delay_s = delay_s

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
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        sent = self.template.start(messages) if prompt_ids is None else list(prompt_ids)
        text, token_ids, finish_reason = cut(self.template, self._script(messages, seed), stop, sampling.max_tokens)
        call = ModelCall(
            policy=self.name,
            policy_version=self.version,
            messages=tuple(messages),
            prompt_ids=tuple(sent),
            token_ids=tuple(token_ids),
            logprobs=tuple(made_up_logprob(len(sent) + at, token) for at, token in enumerate(token_ids)),
            text=text,
            finish_reason=finish_reason,
            usage=Usage(prompt_tokens=len(sent), completion_tokens=len(token_ids)),
            latency_s=self._delay_s,
        )
        self.calls.append(call)
        return call


def cut(template: Template, text: str, stop: Sequence[str], max_tokens: int) -> tuple[str, list[int], str]:
    """Text, ids and finish reason of a scripted reply, ended by the first stop string, by length, or by itself."""
    ends = [found + len(s) for s in stop if (found := text.find(s)) >= 0]
    text = text[: min(ends)] if ends else text
    ids = template.encode(text) + ([] if ends else template.encode(_END))
    if len(ids) > max_tokens:
        ids = ids[:max_tokens]
        return template.decode(ids), ids, "length"
    return text, ids, "stop"


def made_up_logprob(position: int, token: int) -> float:
    """A log-probability between -2 and 0 that depends on place and token alone."""
    digest = hashlib.blake2b(f"{position}:{token}".encode(), digest_size=4).digest()
    return -2.0 * int.from_bytes(digest) / 2**32
