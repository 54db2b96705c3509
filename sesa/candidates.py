"""The distiller's reply: the JSON schema it is held to, and its strict reading."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from sesa.errors import BadReplyError
from sesa.skills import new_skill
from sesa.types import Failure, Skill, SkillSource

_Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]

# For structured output. The lengths in characters keep a weak model from running on until its token limit.
CANDIDATE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "skills": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "trigger": {"type": "string", "minLength": 1, "maxLength": 160},
                    "description": {"type": "string", "minLength": 1, "maxLength": 240},
                    "avoidance": {"type": "string", "maxLength": 160},
                    "query_template": {"type": "string", "maxLength": 100},
                },
                "required": ["trigger", "description", "avoidance", "query_template"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["skills"],
    "additionalProperties": False,
}


class _Candidate(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    trigger: _Text
    description: _Text
    avoidance: str = ""
    query_template: str = ""


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    skills: list[_Candidate]


def parse_candidates(
    json_text: str, failures: Sequence[Failure], step: int, source: SkillSource = SkillSource.DISTILLED
) -> list[Skill]:
    """The candidate skills of one distiller reply, with the failures it was given as provenance.

    Accepts JSON as CANDIDATE_SCHEMA says, bare or in one fenced block. Raises BadReplyError, which names the place,
    for anything else: no JSON, JSON cut off, missing, empty or unknown fields. Nothing is admitted by default.
    """
    fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", json_text, re.DOTALL)
    try:
        data = json.loads(fenced.group(1) if fenced else json_text)
        reply = _Reply.model_validate(data)
    except json.JSONDecodeError as error:
        shown = " ".join(json_text.split())[:80]
        raise BadReplyError(
            f"distiller reply: not valid JSON at character {error.pos} ({shown!r}); ask again"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "reply"
        raise BadReplyError(f"distiller reply: {place}: {first['msg']}; ask again") from None
    sources = [failure.id for failure in failures]
    return [new_skill(**item.model_dump(), source=source, provenance=sources, step=step) for item in reply.skills]
