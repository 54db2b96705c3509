"""The rollout of a searching policy as a state machine. Each node is one turn, named by what comes before its reply.

    START → act → search → search → END
              ↘ correct ↗

Nodes without a turn of their own would only add supersteps, and with replies of a few milliseconds it is the
supersteps that a rollout pays for (`benchmarks/rollout_overhead.py`).
Errors of a server end this rollout and are recorded on it; they never reach its siblings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import Runtime
from langgraph.types import Command

from sesa.agents.actions import CUT_OFF
from sesa.agents.conversation import Conversation
from sesa.agents.search_agent import SearchAgent
from sesa.config import SamplingSection
from sesa.errors import BadReplyError, ContextOverflowError, ServerError
from sesa.graphs.context import Policy, Searcher
from sesa.types import Answer, Ask, Hit, Invalid, Rollout, Search, StopReason, Turn


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


@dataclass(frozen=True)
class Progress:
    """How far a rollout is. ``stop`` is None while it goes on."""

    conversation: Conversation
    turns: tuple[Turn, ...] = ()
    stop: StopReason | None = None
    error: str | None = None


class LoopState(TypedDict):
    """One channel, written whole: with a channel per field LangGraph takes half as long again for a rollout."""

    progress: Progress


Next = Command[Literal["search", "correct", "__end__"]]


async def act(state: LoopState, runtime: Runtime[RolloutContext]) -> Next:
    """The first turn."""
    return await _turn(runtime.context, state["progress"])


async def search(state: LoopState, runtime: Runtime[RolloutContext]) -> Next:
    """Answer a search with passages, then the next turn."""
    ctx, so_far = runtime.context, state["progress"]
    action = so_far.turns[-1].action
    assert isinstance(action, Search)
    try:
        hits = await ctx.searcher.search(action.query, ctx.top_k)
    except (ServerError, BadReplyError) as error:
        return _ended(so_far, StopReason.BACKEND_ERROR, error)
    return await _turn(ctx, _observed(so_far, ctx.agent.observe(hits, action.query), tuple(hits)))


async def correct(state: LoopState, runtime: Runtime[RolloutContext]) -> Next:
    """Answer a malformed turn with a short correction, then the next turn."""
    ctx, so_far = runtime.context, state["progress"]
    action = so_far.turns[-1].action
    assert isinstance(action, Invalid)
    return await _turn(ctx, _observed(so_far, ctx.agent.correct(action.reason)))


async def _turn(ctx: RolloutContext, so_far: Progress) -> Next:
    """Sample a reply; its action says where to go."""
    try:
        call, action = await ctx.agent.act(ctx.policy, so_far.conversation, ctx.sampling, ctx.seed + len(so_far.turns))
    except ContextOverflowError as error:
        return _ended(so_far, StopReason.MAX_TOKENS, error)
    except (ServerError, BadReplyError) as error:
        return _ended(so_far, StopReason.BACKEND_ERROR, error)
    turns = (*so_far.turns, Turn(call=call, action=action))
    stop = _stop(turns, ctx.max_turns)
    then: Literal["search", "correct", "__end__"] = (
        "__end__" if stop else "search" if isinstance(action, Search) else "correct"
    )
    return Command(goto=then, update={"progress": replace(so_far, turns=turns, stop=stop)})


def _ended(so_far: Progress, stop: StopReason, error: Exception) -> Next:
    return Command(goto="__end__", update={"progress": replace(so_far, stop=stop, error=str(error))})


def _observed(so_far: Progress, observation: str, hits: tuple[Hit, ...] = ()) -> Progress:
    turn = so_far.turns[-1]
    conversation = so_far.conversation.after(turn.call, observation)
    shown = conversation.messages[-1].content  # as the policy sees it, special tokens broken up
    turns = (*so_far.turns[:-1], turn.model_copy(update={"hits": hits, "observation": shown}))
    return replace(so_far, conversation=conversation, turns=turns)


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


def build(name: str) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled loop. No checkpointer, not even that of a graph around it: a rollout cut off is run again whole."""
    graph = StateGraph(LoopState, context_schema=RolloutContext)
    graph.add_node("act", act)
    graph.add_node("search", search)
    graph.add_node("correct", correct)
    graph.add_edge(START, "act")
    return graph.compile(name=name, checkpointer=False)


async def run_loop(graph: CompiledStateGraph[Any, Any, Any, Any], context: RolloutContext) -> Rollout:
    """Run one rollout to its end and return its record."""
    limit = context.max_turns + 2  # supersteps: the turns, start and end
    start: LoopState = {"progress": Progress(context.agent.open(context.policy.template))}
    ended: Progress = (await graph.ainvoke(start, {"recursion_limit": limit}, context=context))["progress"]
    return context.base.model_copy(update={"turns": ended.turns, "stop_reason": ended.stop, "error": ended.error})
