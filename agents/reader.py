"""The reader of the evidence check: answers a question from given passages, without a search tool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sesa import prompts
from sesa.agents.actions import STOP, parse_action
from sesa.agents.conversation import Conversation
from sesa.agents.search_agent import passage_line
from sesa.config import SamplingSection
from sesa.llm import ChatModel, Template
from sesa.types import Answer, ModelCall, Passage, Turn

GREEDY = SamplingSection(temperature=0.0, max_tokens=48)
SAMPLED = SamplingSection(temperature=1.0, max_tokens=48)


@dataclass(frozen=True)
class Reading:
    """The reader's call and its answer; ``answer`` is None where the reply held none."""

    turn: Turn
    answer: str | None


async def read_evidence(
    model: ChatModel,
    template: Template,
    question: str,
    passages: Sequence[Passage],
    words: int,
    seed: int,
    number: int = 0,
) -> Reading:
    """Answer ``question`` from ``passages``, greedily for ``number`` 0, else sampled. Raises what the model raises."""
    block = "\n".join(f"[{n}] {passage_line(p, words, question)}" for n, p in enumerate(passages, 1))
    messages = prompts.load("evidence").messages(question=question, passages=block)
    conversation = Conversation.start(template, messages)
    call: ModelCall = await model.generate(
        conversation.messages,
        sampling=SAMPLED if number else GREEDY,
        seed=seed + number,
        stop=STOP,
        prompt_ids=conversation.prompt_ids,
    )
    action = parse_action(call.text, call.finish_reason, "answer")
    return Reading(Turn(call=call, action=action), action.text if isinstance(action, Answer) else None)
