"""The distiller's graph: distil → (again, while the reply is out of form and tries are left) → END."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import Runtime

from sesa.agents.distiller import distil
from sesa.config import SamplingSection
from sesa.errors import BadReplyError, ContextOverflowError, ServerError
from sesa.llm import ChatModel
from sesa.types import Answer, Failure, Invalid, Rollout, Skill, StopReason, Turn


@dataclass(frozen=True)
class DistilContext:
    """One call's worth of failures and the model that reads them."""

    base: Rollout
    model: ChatModel
    failures: Sequence[Failure]
    rollouts: Sequence[Rollout]
    sampling: SamplingSection
    tries: int
    seed: int
    passage_words: int


class DistilState(TypedDict, total=False):
    turns: tuple[Turn, ...]
    candidates: tuple[Skill, ...]
    problem: str | None
    hopeless: bool
    error: str | None


async def attempt(state: DistilState, runtime: Runtime[DistilContext]) -> DistilState:
    """One reply of the distiller."""
    ctx, turns = runtime.context, state.get("turns", ())
    try:
        found = await distil(
            ctx.model,
            getattr(ctx.model, "template", None),
            ctx.failures,
            ctx.rollouts,
            ctx.sampling,
            step=ctx.base.step,
            seed=ctx.seed + len(turns),
            passage_words=ctx.passage_words,
        )
    except ContextOverflowError as error:  # it will never fit: recorded as out of form, not tried again for ever
        return {"turns": turns, "problem": str(error), "hopeless": True}
    except (ServerError, BadReplyError) as error:
        return {"error": str(error), "problem": None}
    action = Answer(text=found.call.text) if found.problem is None else Invalid(reason=found.problem)
    turn = Turn(call=found.call, action=action)
    return {"turns": (*turns, turn), "candidates": found.candidates, "problem": found.problem}


def _again(state: DistilState, runtime: Runtime[DistilContext]) -> Literal["attempt", "__end__"]:
    if state.get("error") or state.get("hopeless") or state["problem"] is None:
        return "__end__"
    return "attempt" if len(state["turns"]) < runtime.context.tries else "__end__"


def _build() -> CompiledStateGraph[Any, Any, Any, Any]:
    graph = StateGraph(DistilState, context_schema=DistilContext)
    graph.add_node("attempt", attempt)
    graph.add_edge(START, "attempt")
    graph.add_conditional_edges("attempt", _again, ["attempt", END])
    return graph.compile(name="distiller", checkpointer=False)


graph = _build()


async def distil_failures(context: DistilContext) -> Rollout:
    """Run the distiller; its calls come back as a rollout of role DISTILLER.

    The candidates are not passed on from here: they are read again from the stored reply (`stored_candidates`), so
    that a resumed step sees exactly what an uninterrupted one sees.
    """
    state = await graph.ainvoke({}, {"recursion_limit": context.tries + 2}, context=context)
    if state.get("error"):
        stop = StopReason.BACKEND_ERROR
    else:
        stop = StopReason.ANSWERED if state["problem"] is None else StopReason.INVALID
    return context.base.model_copy(
        update={
            "turns": state.get("turns", ()),
            "stop_reason": stop,
            "error": state.get("error") or state.get("problem"),
        }
    )
