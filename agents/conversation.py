"""A conversation with a policy: its readable messages and the exact ids that go with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sesa.llm import Template
from sesa.types import Message, ModelCall


@dataclass(frozen=True)
class Conversation:
    """``prompt_ids`` are the ids of ``messages`` with the generation prompt: the start of it rendered once, each reply
    as it was sampled, each observation appended. None of it is ever tokenised a second time.
    """

    template: Template
    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]

    @classmethod
    def start(cls, template: Template, messages: Sequence[Message]) -> Conversation:
        """Messages may hold text of any origin (passages, questions, skills): special tokens in it are broken up."""
        safe = _neutralised(template, messages)
        return cls(template, safe, tuple(template.start(safe)))

    def after(self, call: ModelCall, observation: str) -> Conversation:
        """The conversation once ``call`` has been answered with ``observation``."""
        (user,) = _neutralised(self.template, [Message(role="user", content=observation)])
        ids = self.template.extend(self.prompt_ids, call.token_ids, [user])
        reply = Message(role="assistant", content=call.text)
        return Conversation(self.template, (*self.messages, reply, user), tuple(ids))


def _neutralised(template: Template, messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(Message(role=m.role, content=template.neutralise(m.content)) for m in messages)
