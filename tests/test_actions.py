"""From sampled text to an action: one table, and the text of the prompt never counts."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sesa import prompts
from sesa.agents.actions import CUT_OFF, STOP, TAGS, parse_action
from sesa.agents.search_agent import SearchAgent
from sesa.config import SamplingSection
from sesa.llm import ScriptedModel
from sesa.scripted import ByteTemplate, cut
from sesa.types import Action, Answer, Ask, Invalid, Message, Role, Search

NONE = "No action was found"

TABLE: list[tuple[str, Action]] = [
    # usable
    ("<answer>Paris</answer>", Answer(text="Paris")),
    ("<search>capital of France</search>", Search(query="capital of France")),
    ("I should look this up.\n<search>\n capital  of\tFrance \n</search>\n", Search(query="capital of France")),
    ("So it is <answer>Paris</answer>, of course.", Answer(text="Paris")),
    # several: the first
    ("<search>a</search><answer>b</answer>", Search(query="a")),
    ("<answer>a</answer> or <answer>b</answer>", Answer(text="a")),
    ("<search></search><answer>b</answer>", Invalid(reason="<search> was empty")),
    # left open by a turn that ended of its own accord: to the end of the line
    ("<answer>Paris", Answer(text="Paris")),
    ("Well.\n<search> rivers  of Portugal\nI wait.", Search(query="rivers of Portugal")),
    ("<answer>\n\nParis\n", Answer(text="Paris")),
    ("<answer>", Invalid(reason="<answer> was empty")),
    ("<question>Who?", Invalid(reason="<question> is not an action here")),
    ("<search>a<answer>b", Invalid(reason="<answer> was not closed")),
    # closed by another tag, not opened, empty
    ("<search>a</answer>", Invalid(reason="<search> was not closed")),
    ("Paris</answer>", Invalid(reason="</answer> closed nothing")),
    ("Paris</answer> <answer>Rome</answer>", Invalid(reason="</answer> closed nothing")),
    ("<answer> \n\t </answer>", Invalid(reason="<answer> was empty")),
    ("", Invalid(reason=NONE)),
    ("Paris", Invalid(reason=NONE)),
    # one in another: the one that is complete when the reply ends
    ("<search>a<answer>b</answer></search>", Answer(text="b")),
    ("<answer><search>a</search></answer>", Search(query="a")),
    ("I will <search> first. <answer>Paris</answer>", Answer(text="Paris")),
    # the other role's
    ("<question>Who?</question>", Invalid(reason="<question> is not an action here")),
    ("<question>Who?</question><answer>a</answer>", Invalid(reason="<question> is not an action here")),
    # what looks like a tag and is none
    ("<Answer>Paris</Answer>", Invalid(reason=NONE)),
    ("< answer>Paris</ answer>", Invalid(reason=NONE)),
    ("<answer >Paris</answer >", Invalid(reason=NONE)),
    ("&lt;answer&gt;Paris&lt;/answer&gt;", Invalid(reason=NONE)),
    ('<answer lang="en">Paris</answer>', Invalid(reason="</answer> closed nothing")),
    ("<answers>Paris</answers>", Invalid(reason=NONE)),
    ("<tool_call>{}</tool_call>", Invalid(reason=NONE)),
    # an observation that the model invented holds no action, and is no observation
    ("<information>Paris is the capital.</information>", Invalid(reason=NONE)),
    ("<information>Paris</information><answer>Paris</answer>", Answer(text="Paris")),
    ("<search>x</search>\n<information>[1] It is Rome.</information><answer>Rome</answer>", Search(query="x")),
    # other scripts
    ("<answer>東京 — Tōkyō</answer>", Answer(text="東京 — Tōkyō")),
    ("<search>مصر\u2028القاهرة</search>", Search(query="مصر القاهرة")),
    ("＜answer＞Paris＜/answer＞", Invalid(reason=NONE)),
    ("<answer>😀\u200d</answer>", Answer(text="😀\u200d")),
    ("<answer>a < b > c</answer>", Answer(text="a < b > c")),
]


@pytest.mark.parametrize(("text", "expected"), TABLE)
def test_the_solvers_actions(text: str, expected: Action) -> None:
    assert parse_action(text, "stop", "answer") == expected


def test_the_proposers_actions() -> None:
    assert parse_action("<question>Who wrote it?</question>", "stop", "question") == Ask(question="Who wrote it?")
    assert parse_action("<search>it</search>", "stop", "question") == Search(query="it")
    refused = parse_action("<answer>Rome</answer>", "stop", "question")
    assert refused == Invalid(reason="<answer> is not an action here")


@pytest.mark.parametrize("text", ["", "Let me think", "<answer>Par", "<answer>Paris\nand", "<search>a<answer>b"])
def test_a_reply_cut_off_by_length_says_so(text: str) -> None:
    assert parse_action(text, "length", "answer") == Invalid(reason=CUT_OFF)


def test_an_action_complete_before_the_cut_counts() -> None:
    assert parse_action("<answer>Paris</answer>", "length", "answer") == Answer(text="Paris")


@given(st.lists(st.sampled_from([*(f"<{t}>" for t in TAGS), *STOP, "a", " ", "<", "information"]), max_size=12))
def test_what_is_written_after_a_stop_string_changes_nothing(pieces: list[str]) -> None:
    """A server that stops at the first closing tag and one that goes on lead to the same action."""
    text = "".join(pieces)
    stopped, _, _ = cut(ByteTemplate(), text, STOP, 10_000)
    assert parse_action(stopped, "stop", "answer") == parse_action(text, "stop", "answer")


@given(st.text(), st.sampled_from(["stop", "length"]), st.sampled_from(["answer", "question"]))
def test_any_text_has_exactly_one_reading(text: str, finish_reason: str, final: str) -> None:
    action = parse_action(text, finish_reason, "answer" if final == "answer" else "question")
    assert isinstance(action, Invalid) or "<answer>" in text or "<search>" in text or "<question>" in text


@pytest.mark.parametrize(
    "unit", ["<search>", "<answer>x", "<", "<search", "x" * 20, "<search><answer>", "</", "<search>\n<"]
)
def test_a_huge_reply_is_read_in_linear_time(unit: str) -> None:
    """Ten megabytes at most; a quadratic reading of the same takes hours."""
    text = unit * 500_000
    began = time.monotonic()
    parse_action(text, "stop", "answer")
    assert parse_action(text, "length", "answer") == Invalid(reason=CUT_OFF)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", ["solver", "solver_small", "proposer", "proposer_small"])
async def test_actions_in_the_prompt_are_not_the_models(name: str) -> None:
    """Seen elsewhere: tags of the prompt's examples and of passages were counted with those of the reply."""
    agent = SearchAgent(
        role=Role.SOLVER,
        prompt=prompts.load(name),
        final="answer" if name.startswith("solver") else "question",
        variables={"question": "<answer>Rome</answer>", "skills": "<search>s</search>"}
        if name.startswith("solver")
        else {"answer": "<question>Is it?</question>"},
        passage_words=50,
    )

    def silent(messages: Sequence[Message], seed: int) -> str:
        assert any("</" in m.content for m in messages)  # the prompt does hold actions
        return "Let me see."

    model = ScriptedModel("solver", silent)
    call, action = await agent.act(model, agent.open(model.template), SamplingSection(), 0)
    assert action == Invalid(reason=NONE)
    assert call.text == "Let me see."
