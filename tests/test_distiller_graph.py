"""The distiller's graph: tries again while a reply is out of form, and comes back as a rollout whatever happens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rollout_records import answer, attempt, failure, passage, search
from self_play import RUN, open_context, scripted_config, solver_script

from sesa.candidates import parse_candidates
from sesa.config import SamplingSection
from sesa.errors import BadReplyError, ServerError
from sesa.graphs.distiller import DistilContext, distil_failures
from sesa.graphs.step import open_graph, run_step
from sesa.llm import ScriptedModel
from sesa.store import Store
from sesa.types import Answer, FailureStatus, Invalid, Message, Role, Rollout, StopReason

GOOD = json.dumps(
    {"skills": [{"trigger": "t", "description": "d", "avoidance": "not x", "query_template": "TOWN river"}]}
)


def replies(*texts: str) -> Callable[[Sequence[Message], int], str]:
    """The n-th text for the n-th try; tries differ by their seed."""
    return lambda messages, seed: texts[seed - 5]


async def distilled(script: Callable[[Sequence[Message], int], str], tries: int = 3) -> tuple[Rollout, ScriptedModel]:
    model = ScriptedModel("solver", script)
    base = Rollout(id="d", role=Role.DISTILLER, question_id="q", step=3, stop_reason=StopReason.CANCELLED)
    tried = attempt(search("first query", passage("a", "Alpha is a town.", "Alpha")), answer("Seine"))
    rollout = await distil_failures(
        DistilContext(
            base=base,
            model=model,
            failures=[failure()],
            rollouts=[tried],
            sampling=SamplingSection(max_tokens=400),
            tries=tries,
            seed=5,
            passage_words=90,
        )
    )
    return rollout, model


async def test_a_good_reply_is_taken_at_once() -> None:
    rollout, model = await distilled(replies(GOOD))
    assert rollout.stop_reason is StopReason.ANSWERED and rollout.error is None
    assert len(model.calls) == len(rollout.turns) == 1
    assert rollout.turns[0].action == Answer(text=GOOD)
    (skill,) = parse_candidates(rollout.turns[-1].call.text, [failure()], rollout.step)
    assert (skill.trigger, skill.avoidance, skill.provenance) == ("t", "not x", ("f0",))


async def test_a_reply_out_of_form_is_asked_for_again_with_another_seed() -> None:
    rollout, model = await distilled(replies("Search more.", GOOD[:-5], GOOD))
    assert rollout.stop_reason is StopReason.ANSWERED and rollout.error is None
    assert [type(t.action) for t in rollout.turns] == [Invalid, Invalid, Answer]
    assert all("not valid JSON" in t.action.reason for t in rollout.turns[:2] if isinstance(t.action, Invalid))
    assert [c.text for c in model.calls] == ["Search more.", GOOD[:-5], GOOD]  # what was refused is kept too
    assert model.calls[0].messages == model.calls[2].messages  # a refused reply is not put in front of the next try


@pytest.mark.parametrize("tries", [1, 2, 3])
async def test_a_model_that_never_follows_the_form_is_given_up_after_its_tries(tries: int) -> None:
    rollout, model = await distilled(lambda messages, seed: '{"skills": [{"trigger": ""}]}', tries)
    assert rollout.stop_reason is StopReason.INVALID and len(model.calls) == tries
    assert rollout.error is not None and "skills.0.trigger" in rollout.error


@pytest.mark.parametrize("error", [ServerError("http://h: gone"), BadReplyError("http://h: no text")])
async def test_a_server_error_is_recorded_and_not_tried_again(error: Exception) -> None:
    def script(messages: Sequence[Message], seed: int) -> str:
        if seed == 6:
            raise error
        return "out of form"

    rollout, _ = await distilled(script)
    assert rollout.stop_reason is StopReason.BACKEND_ERROR and rollout.error == str(error)
    assert [t.call.text for t in rollout.turns] == ["out of form"]


async def test_the_distiller_reads_question_right_answer_given_answer_and_searches() -> None:
    _, model = await distilled(replies(GOOD))
    shown = model.calls[0].messages[-1].content
    for part in ("home town of Pierre Bouvier", "Saint Lawrence", "Seine", "first query", "Alpha is a town."):
        assert part in shown


# --------------------------------------------------------------------------------------------------- within a step


async def consolidated(folder: Path, script: Callable[[Sequence[Message], int], str]) -> tuple[Store, int]:
    """One step in which ``script`` plays the distiller; the store, and how many failures were collected."""
    store = Store.open(folder / "sesa.sqlite")
    context = open_context(scripted_config(distiller__every="1", distiller__min_pending="1"), store)
    context.distiller = ScriptedModel("distiller", script)
    async with open_graph(folder / "checkpoints.sqlite") as graph:
        await run_step(graph, context, 1)
    collected = int(store.nodes(RUN, 1)["collect"]["failures"])
    assert collected > 0
    return store, collected


async def test_a_refusal_of_the_distiller_is_recorded_and_admits_nothing(tmp_path: Path) -> None:
    """Seen elsewhere: a reply without JSON was admitted by default."""
    store, collected = await consolidated(tmp_path, lambda messages, seed: "I cannot help with that.")
    counts = store.nodes(RUN, 1)["consolidate"]
    assert counts["distillations"] == counts["out_of_form"] == collected and counts["admitted"] == 0
    assert counts["active_after"] == counts["active_before"]
    calls = store.rollouts(RUN, step=1, role=Role.DISTILLER)
    assert all(r.stop_reason is StopReason.INVALID and len(r.turns) == 3 for r in calls)
    assert {t.call.text for r in calls for t in r.turns} == {"I cannot help with that."}
    # Not consolidated, since nothing was learnt from them; not pending, or the same reply would be paid for again.
    assert {f.status for f in store.failures(RUN)} == {FailureStatus.DROPPED}
    store.close()


async def test_a_lost_distillation_leaves_its_failures_in_the_queue(tmp_path: Path) -> None:
    def script(messages: Sequence[Message], seed: int) -> str:
        raise ServerError("http://h: gone")

    store, collected = await consolidated(tmp_path, script)
    counts = store.nodes(RUN, 1)["consolidate"]
    assert counts["lost"] == counts["distillations"] == collected
    assert len(store.failures(RUN, status=FailureStatus.PENDING)) == collected
    assert "finish" in store.nodes(RUN, 1)
    store.close()


async def test_lessons_become_skills_of_the_next_version(tmp_path: Path) -> None:
    store, _ = await consolidated(tmp_path, solver_script)
    counts = store.nodes(RUN, 1)["consolidate"]
    assert counts["admitted"] > 0 and counts["active_after"] == counts["active_before"] + counts["admitted"]
    assert not store.failures(RUN, status=FailureStatus.PENDING)
    assert {r.policy_versions for r in store.rollouts(RUN, role=Role.DISTILLER)} == {(0,)}
    store.close()
