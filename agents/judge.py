"""The judge: decides whether an answer means the same as the reference. Its verdict is parsed strictly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from sesa import prompts
from sesa.config import SamplingSection
from sesa.llm import ChatModel
from sesa.types import Check, ModelCall, Verdict

VERDICT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"verdict": {"enum": ["correct", "incorrect"]}, "reason": {"type": "string", "maxLength": 300}},
    "required": ["verdict", "reason"],
    "additionalProperties": False,
}
_GREEDY = SamplingSection(temperature=0.0, max_tokens=160)


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    verdict: Literal["correct", "incorrect"]
    reason: str


async def judge(model: ChatModel, question: str, golds: Sequence[str], prediction: str) -> tuple[ModelCall, Check]:
    """PASS, FAIL, or UNKNOWN for a reply that is not exactly the promised JSON. Raises what the model raises."""
    messages = prompts.load("judge").messages(
        question=question, golds=json.dumps(list(golds), ensure_ascii=False), prediction=prediction
    )
    call = await model.generate(messages, sampling=_GREEDY, schema=VERDICT_SCHEMA)
    return call, read_verdict(call.text)


def read_verdict(text: str) -> Check:
    """A judge's reply as a check. Words are never searched for: "incorrect" contains "correct"."""
    try:
        reply = _Reply.model_validate_json(text)
    except ValidationError:
        return Check(name="judge", verdict=Verdict.UNKNOWN, reason=f"unreadable verdict: {text[:120]!r}")
    verdict = Verdict.PASS if reply.verdict == "correct" else Verdict.FAIL
    return Check(name="judge", verdict=verdict, reason=reply.reason)
