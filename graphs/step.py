"""One self-play step as a state machine with a checkpointer.

    seeds → propose ⇉ → proposed → validate ⇉ → validated → solve ⇉ → score → collect
          → update_proposer → update_solver → publish → consolidate → finish

Every node commits its results to the store before it reports done, and every id is a function of the step, so a step
that was cut off anywhere goes on with what is still owed: nothing is paid twice and nothing is lost. The checkpointer
remembers the position; were its file gone, the store alone would lead to the same end.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from sesa.graphs.consolidating import consolidate, finish
from sesa.graphs.context import RunContext
from sesa.graphs.proposing import propose_one, proposed, seeds, validate_one
from sesa.graphs.solving import collect, score, solve_one, validated
from sesa.graphs.stage import StepState, committed
from sesa.graphs.updating import publish, update
from sesa.types import Role

NODES = (
    "seeds",
    "propose",
    "validate",
    "solve",
    "collect",
    "update_proposer",
    "update_solver",
    "publish",
    "consolidate",
    "finish",
)
"""What commits to the store, in order. "solve" commits in the node that joins and scores the attempts."""


def build(checkpointer: BaseCheckpointSaver[Any] | None = None) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled step graph. Its context is a RunContext."""
    graph = StateGraph(StepState, context_schema=RunContext)
    graph.add_node("seeds", seeds, destinations=("propose", "proposed"))
    graph.add_node("propose", propose_one)
    graph.add_node("proposed", proposed, defer=True, destinations=("validate", "validated"))
    graph.add_node("validate", validate_one)
    graph.add_node("validated", validated, defer=True, destinations=("solve", "score"))
    graph.add_node("solve", solve_one)
    graph.add_node("score", score, defer=True)
    graph.add_node("collect", collect)
    graph.add_node("update_proposer", update(Role.PROPOSER))
    graph.add_node("update_solver", update(Role.SOLVER))
    graph.add_node("publish", publish)
    graph.add_node("consolidate", consolidate)
    graph.add_node("finish", finish)
    graph.add_edge(START, "seeds")
    graph.add_edge("propose", "proposed")
    graph.add_edge("validate", "validated")
    graph.add_edge("solve", "score")
    chain = ("score", "collect", "update_proposer", "update_solver", "publish", "consolidate", "finish", END)
    for before, after in itertools.pairwise(chain):
        graph.add_edge(before, after)
    return graph.compile(checkpointer=checkpointer, name="step")


graph = build()


@asynccontextmanager
async def open_graph(checkpoints: Path) -> AsyncIterator[CompiledStateGraph[Any, Any, Any, Any]]:
    """The step graph with its checkpoints in an SQLite file, of which one process may have one saver open."""
    async with AsyncSqliteSaver.from_conn_string(str(checkpoints)) as saver:
        # State holds numbers and texts: nothing else is ever built from what the file says.
        saver.serde = JsonPlusSerializer(allowed_msgpack_modules=None)
        yield build(saver)


async def run_step(graph: CompiledStateGraph[Any, Any, Any, Any], ctx: RunContext, step: int) -> None:
    """Run ``step``, or what is left of it."""
    if committed(ctx, step, "finish"):
        return
    config: Any = {
        "configurable": {"thread_id": f"{ctx.run_id}:{step}"},
        "max_concurrency": ctx.config.run.concurrency,
        "recursion_limit": 50,
    }
    begun = graph.checkpointer and (await graph.aget_state(config)).next
    await graph.ainvoke(None if begun else {"step": step}, config, context=ctx)
