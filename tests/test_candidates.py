from __future__ import annotations

import json

import pytest
from rollout_records import failure

from sesa.candidates import CANDIDATE_SCHEMA, parse_candidates
from sesa.errors import BadReplyError
from sesa.types import SkillSource

ITEM = {"trigger": "asks about rivers", "description": "Find the town first", "avoidance": "", "query_template": "x"}


def reply(*items: object) -> str:
    return json.dumps({"skills": list(items)})


def test_candidates_carry_their_sources_and_step() -> None:
    skills = parse_candidates(reply(ITEM, {**ITEM, "avoidance": " not the sea "}), [failure("f1"), failure("f2")], 7)
    assert [s.avoidance for s in skills] == ["", "not the sea"]
    assert {s.provenance for s in skills} == {("f1", "f2")}
    assert {s.created_step for s in skills} == {7} and {s.source for s in skills} == {SkillSource.DISTILLED}
    assert len({s.id for s in skills}) == 2


def test_one_fenced_block_is_accepted() -> None:
    assert len(parse_candidates(f"```json\n{reply(ITEM)}\n```\n", [failure()], 0)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON at character 0"),
        ("Sure, here is a skill.", "not valid JSON"),
        (reply(ITEM)[:-9], "not valid JSON"),
        (f"{reply(ITEM)} {reply(ITEM)}", "not valid JSON"),
        (json.dumps([ITEM]), "reply: Input should be"),
        (json.dumps({"skill": [ITEM]}), "skills: Field required"),
        (reply({**ITEM, "trigger": "  "}), "skills.0.trigger: String should have at least 1 character"),
        (reply(ITEM, {**ITEM, "description": 5}), "skills.1.description: Input should be a valid string"),
        (reply({**ITEM, "score": 1.0}), "skills.0.score: Extra inputs"),
        (reply("text"), "skills.0: Input should be"),
    ],
)
def test_anything_else_is_a_one_line_error_that_names_the_place(text: str, message: str) -> None:
    with pytest.raises(BadReplyError, match="distiller reply") as caught:
        parse_candidates(text, [failure()], 0)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_schema_and_reader_ask_for_the_same_fields() -> None:
    item = CANDIDATE_SCHEMA["properties"]["skills"]["items"]
    assert set(item["required"]) == set(item["properties"]) == set(ITEM)
    assert item["additionalProperties"] is False
