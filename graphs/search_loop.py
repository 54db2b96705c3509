"""The rollout of a searching policy as a state machine: act → (search | correct) → act … until it ends.

    START → act → search → act
              ↘ correct → act
              ↘ END

Errors of a server end this rollout and are recorded on it; they never reach its siblings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import Runtime

from sesa.agents.actions import CUT_OFF
from sesa.agents.conversation import Conversation
from sesa.agents.search_agent import SearchAgent
from sesa.config import SamplingSection
from sesa.errors import BadReplyError, ContextOverflowError, ServerError
from sesa.graphs.context import Policy, Searcher
from sesa.types import Answer, Ask, Invalid, Rollout, Search, StopReason, Turn


@dataclass(frozen=True)
class RolloutContext:
    """What one rollout runs with. ``base`` is the empty rollout that is being filled."""

    base: Rollout
    agent: SearchAgent
    policy: Policy
    searcher: Searcher
    sampling: SamplingSection
    max_turns: int
    top_k: int
    seed: int


class LoopState(TypedDict, total=False):
    conversation: Conversation
    turns: tuple[Turn, ...]
    stop: StopReason | None
    error: str | None


async def act(state: LoopState, runtime: Runtime[RolloutContext]) -> LoopState:
    """One assistant turn."""
    ctx = runtime.context
    turns = state.get("turns", ())
    conversation = state.get("conversation") or ctx.agent.open(ctx.policy.template)
    try:
        call, action = await ctx.agent.act(ctx.policy, conversation, ctx.sampling, ctx.seed + len(turns))
    except ContextOverflowError as error:
        return {"stop": StopReason.MAX_TOKENS, "error": str(error)}
    except (ServerError, BadReplyError) as error:
        return {"stop": StopReason.BACKEND_ERROR, "error": str(error)}
    turns = (*turns, Turn(call=call, action=action))
    return {"conversation": conversation, "turns": turns, "stop": _stop(turns, ctx.max_turns)}


async def search(state: LoopState, runtime: Runtime[RolloutContext]) -> LoopState:
    """Answer a search with passages."""
    ctx, turn = runtime.context, state["turns"][-1]
    assert isinstance(turn.action, Search)
    try:
        hits = await ctx.searcher.search(turn.action.query, ctx.top_k)
    except (ServerError, BadReplyError) as error:
        return {"stop": StopReason.BACKEND_ERROR, "error": str(error)}
    return _observed(state, turn.model_copy(update={"hits": tuple(hits)}), ctx.agent.observe(hits))


async def correct(state: LoopState, runtime: Runtime[RolloutContext]) -> LoopState:
    """Answer a malformed turn with a short correction."""
    turn = state["turns"][-1]
    assert isinstance(turn.action, Invalid)
    return _observed(state, turn, runtime.context.agent.correct(turn.action.reason))


def _observed(state: LoopState, turn: Turn, observation: str) -> LoopState:
    conversation = state["conversation"].after(turn.call, observation)
    shown = conversation.messages[-1].content  # as the policy sees it, special tokens broken up
    return {
        "conversation": conversation,
        "turns": (*state["turns"][:-1], turn.model_copy(update={"observation": shown})),
    }


def _stop(turns: tuple[Turn, ...], max_turns: int) -> StopReason | None:
    """Why the rollout ends after these turns, None where it goes on."""
    action = turns[-1].action
    if isinstance(action, Answer):
        return StopReason.ANSWERED
    if isinstance(action, Ask):
        return StopReason.ASKED
    if isinstance(action, Invalid) and action.reason == CUT_OFF:
        return StopReason.MAX_TOKENS
    if len(turns) >= max_turns:
        malformed = all(isinstance(turn.action, Invalid) for turn in turns)
        return StopReason.INVALID if malformed else StopReason.MAX_TURNS
    return None


def _next(state: LoopState) -> Literal["search", "correct", "__end__"]:
    if state["stop"] is not None:
        return "__end__"
    return "search" if isinstance(state["turns"][-1].action, Search) else "correct"


def _after_tool(state: LoopState) -> Literal["act", "__end__"]:
    return "__end__" if state["stop"] is not None else "act"


def build(name: str) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled loop. No checkpointer, not even that of a graph around it: a rollout cut off is run again whole."""
    graph = StateGraph(LoopState, context_schema=RolloutContext)
    graph.add_node("act", act)
    graph.add_node("search", search)
    graph.add_node("correct", correct)
    graph.add_edge(START, "act")
    graph.add_conditional_edges("act", _next, ["search", "correct", END])
    graph.add_conditional_edges("search", _after_tool, ["act", END])
    graph.add_edge("correct", "act")
    return graph.compile(name=name, checkpointer=False)


async def run_loop(graph: CompiledStateGraph[Any, Any, Any, Any], context: RolloutContext) -> Rollout:
    """Run one rollout to its end and return its record."""
    limit = 2 * context.max_turns + 2  # supersteps: a turn and its observation, start and end
    state = await graph.ainvoke({}, {"recursion_limit": limit}, context=context)
    return context.base.model_copy(
        update={"turns": state.get("turns", ()), "stop_reason": state["stop"], "error": state.get("error")}
    )
