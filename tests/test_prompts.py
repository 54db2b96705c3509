"""Prompt files: their header, their substitution, and what each shipped one renders to.

The golden files hold every shipped prompt as a model would see it. After an intended change of a prompt, write them
anew and look at the difference before committing it:

    python tests/test_prompts.py
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sesa import prompts
from sesa.agents.proposer import proposer
from sesa.config import load_config
from sesa.errors import ConfigError, NotFoundError
from sesa.prompts import Prompt, load, names, parse
from sesa.types import SeedAnswer

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).with_name("golden") / "prompts"
SHIPPED = tuple(names())

SAMPLE = """---
variables: [answer, passages]
---
## system
Reply with JSON such as {"skills": []} and {nothing} else.
## user
Target: {answer}
## observation
{passages}

Target: {answer}
"""


def sample(text: str = SAMPLE) -> Prompt:
    return parse("sample", text.encode())


def rendered(prompt: Prompt) -> str:
    """The prompt with every variable shown as «name»: its messages, then its further sections."""
    values = {name: f"«{name}»" for name in prompt.variables}
    parts = [f"[{message.role}]\n{message.content}" for message in prompt.messages(**values)]
    parts += [f"[section {name}]\n{prompt.section(name, **values)}" for name in prompt.sections]
    return "\n\n".join(parts) + "\n"


# -------------------------------------------------------------------------------------------- header and variables


def test_a_file_is_its_messages_and_sections() -> None:
    prompt = sample()
    assert prompt.variables == {"answer", "passages"}
    assert [(m.role, m.content) for m in prompt.messages(answer="Rome")] == [
        ("system", 'Reply with JSON such as {"skills": []} and {nothing} else.'),
        ("user", "Target: Rome"),
    ]
    assert prompt.section("observation", answer="Rome", passages="[1] A.") == "[1] A.\n\nTarget: Rome"
    assert prompt.sha256 == hashlib.sha256(SAMPLE.encode()).hexdigest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SAMPLE.removeprefix("---\n"), "must start with"),
        (SAMPLE.replace("variables: [answer, passages]", "variables: answer, passages"), "must start with"),
        (SAMPLE.replace("\n", "\r\n"), "must start with"),
        ("\n" + SAMPLE, "must start with"),
        ("", "must start with"),
        (SAMPLE.replace("[answer, passages]", "[answer, passages, reason]"), "declares reason but never uses it"),
        (SAMPLE + "## observation\nagain\n", "'## observation' occurs twice"),
        (SAMPLE.replace("## system", "Some text\n## system"), "text before the first '## section'"),
        ("---\nvariables: []\n---\n## observation\nno message\n", "has no message"),
    ],
)
def test_a_malformed_file_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"prompts/sample\.md") as caught:
        sample(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_utf8_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"prompts/sample\.md: byte \d+ is not UTF-8"):
        parse("sample", SAMPLE.encode() + b"\xff")


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"prompts/sample\.md: variable 'answer' was not given"):
        sample().messages()
    with pytest.raises(ConfigError, match="variable 'passages' was not given"):
        sample().section("observation", answer="Rome")


def test_an_undeclared_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"prompts/sample\.md: does not declare skills"):
        sample().messages(answer="Rome", skills="s")
    with pytest.raises(ConfigError, match="does not declare name"):
        sample().section("observation", answer="a", passages="p", name="n")


def test_an_unknown_section_and_an_unknown_prompt_are_named() -> None:
    with pytest.raises(ConfigError, match="has no section '## correction'"):
        sample().section("correction")
    with pytest.raises(NotFoundError, match=r"no prompt 'solvr'; there are: distiller, .*solver_small"):
        load("solvr")
    with pytest.raises(NotFoundError, match="no prompt"):
        load("../prompts/solver")


# ------------------------------------------------------------------------------------------------- substitution


def test_a_value_that_looks_like_a_variable_is_left_alone() -> None:
    filled = sample().section("observation", passages="{answer} and {passages}", answer="{passages}")
    assert filled == "{answer} and {passages}\n\nTarget: {passages}"


@given(passages=st.text(), answer=st.text())
def test_substitution_is_one_pass_whatever_the_values_hold(passages: str, answer: str) -> None:
    assert sample().section("observation", passages=passages, answer=answer) == f"{passages}\n\nTarget: {answer}"


@given(value=st.text(alphabet="#\n- usermtyabl:[]{}", max_size=40))
def test_a_value_never_becomes_a_message_or_a_section(value: str) -> None:
    assert len(sample().messages(answer=value)) == 2


# ---------------------------------------------------------------------------------------------- the shipped prompts


def test_every_shipped_prompt_has_its_golden_file() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(SHIPPED)
    assert {"distiller", "evidence", "judge", "proposer", "proposer_small", "solver", "solver_small"} <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_prompt_renders_as_its_golden_file_says(name: str) -> None:
    assert rendered(load(name)) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert load(name).sha256 == hashlib.sha256((ROOT / "prompts" / f"{name}.md").read_bytes()).hexdigest()


@pytest.mark.parametrize("name", SHIPPED)
def test_roles_of_a_shipped_prompt_alternate_and_end_with_the_user(name: str) -> None:
    roles = [role for role, _ in load(name).chat]
    assert roles[0] == "system"
    assert roles[1:] == ["user", "assistant"] * (len(roles) // 2 - 1) + ["user"]


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("proposer")])
def test_a_proposer_prompt_has_no_place_for_a_skill(name: str) -> None:
    prompt = load(name)
    assert prompt.variables == {"answer", "passages", "reason"}
    assert "skill" not in rendered(prompt).lower()


def test_what_the_proposer_is_given_is_its_target_alone() -> None:
    agent = proposer(load_config(), SeedAnswer(id="s", answer="Rome", aliases=("Roma",)))
    assert agent.variables == {"answer": "Rome"}


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("solver")])
def test_skills_stand_before_the_question_in_a_solver_prompt(name: str) -> None:
    whole = "\n".join(message.content for message in load(name).messages(question="Q?", skills="SKILLS\n\n"))
    assert whole.index("SKILLS") < whole.index("Q?")


def test_a_prompt_is_read_once() -> None:
    assert prompts.load("solver") is prompts.load("solver")


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for stale in GOLDEN.iterdir():
        stale.unlink()
    for shipped in names():
        (GOLDEN / f"{shipped}.txt").write_text(rendered(load(shipped)), encoding="utf-8")
