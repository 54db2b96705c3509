"""What proposer and solver share: a policy that searches in turns until it commits to its final action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sesa.agents.actions import STOP, parse_action
from sesa.agents.conversation import Conversation
from sesa.config import SamplingSection
from sesa.llm import ChatModel, Template
from sesa.prompts import Prompt
from sesa.snippets import snippet
from sesa.types import Action, Hit, ModelCall, Passage, Role


@dataclass(frozen=True)
class SearchAgent:
    """A role's prompt and action grammar, bound to the variables of one task.

    ``variables`` fill the chat messages and go into observations and corrections too, where those sections ask for
    them (a small model needs to be reminded of its task beside the passages).
    """

    role: Role
    prompt: Prompt
    final: Literal["answer", "question"]
    variables: Mapping[str, str]
    passage_words: int

    def open(self, template: Template) -> Conversation:
        """The conversation before the first turn."""
        # Variables of later sections have no value yet; the chat messages do not use them.
        return Conversation.start(template, self.prompt.messages(**self.variables))

    async def act(
        self, model: ChatModel, conversation: Conversation, sampling: SamplingSection, seed: int
    ) -> tuple[ModelCall, Action]:
        """One assistant turn. Raises what the model raises."""
        call = await model.generate(
            conversation.messages, sampling=sampling, seed=seed, stop=STOP, prompt_ids=conversation.prompt_ids
        )
        return call, parse_action(call.text, call.finish_reason, self.final)

    def observe(self, hits: Sequence[Hit], query: str) -> str:
        """The observation that shows the passages of a search."""
        return self._section("observation", passages=passage_block(hits, self.passage_words, query))

    def correct(self, reason: str) -> str:
        """The observation that answers a malformed turn."""
        return self._section("correction", reason=reason)

    def _section(self, name: str, **values: str) -> str:
        return self.prompt.section(name, **self.variables, **values)


def passage_block(hits: Sequence[Hit], words: int, query: str = "") -> str:
    """Numbered passages, each cut to the ``words`` words that fit the query best."""
    if not hits:
        return "No passages were found."
    return "\n".join(f"[{n}] {passage_line(h.passage, words, query)}" for n, h in enumerate(hits, 1))


def passage_line(passage: Passage, words: int, query: str = "") -> str:
    """A passage on one line, so that it cannot pass for two: title, then the words that fit ``query`` best."""
    head, body = " ".join(passage.title.split()), snippet(passage.text, query, words)
    return f"{head}. {body}" if head else body
