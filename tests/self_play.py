"""A whole self-play run on scripted policies: the real graphs, store, bank and retriever; replies by rule.

Run as a script it plays some steps and, if asked, kills its own process at a given place:

    python tests/self_play.py FOLDER STEPS [NODE before|after | rollouts N]
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from rollout_records import HashingEncoder

from sesa.config import RunConfig, load_config
from sesa.consolidation import prime
from sesa.graphs.context import RunContext
from sesa.graphs.step import build, run_step
from sesa.graphs.updating import POLICIES, served_version
from sesa.llm import ScriptedModel
from sesa.store import Store
from sesa.types import Hit, Message, Passage, PolicyVersion, Rollout, SeedAnswer, TrainedRow, TrainStats

RUN = "run-a"
CITIES = ("Lisbon", "Oslo", "Vienna", "Prague", "Dublin", "Athens", "Warsaw", "Madrid")
RIVERS = ("Tagus", "Akerselva", "Danube", "Vltava", "Liffey", "Kifisos", "Vistula", "Manzanares")
PASSAGES = tuple(
    Passage(id=f"p{n}", title=city, text=f"{city} lies on the river {river} and is a capital.")
    for n, (city, river) in enumerate(zip(CITIES, RIVERS, strict=True))
)
SEEDS = tuple(SeedAnswer(id=f"seed-{n}", answer=city, passage_ids=(f"p{n}",)) for n, city in enumerate(CITIES))


def scripted_config(**changes: str) -> RunConfig:
    """Small numbers, every stage on."""
    return load_config(
        None,
        {
            "proposer.seeds": "3",
            "proposer.proposals": "2",
            "solver.rollouts": "4",
            "validity.min_words": "4",
            "validity.distractors": "1",
            "distiller.every": "2",
            "distiller.min_pending": "2",
            "bank.min_similarity": "0.0",
            "run.concurrency": "3",
            **{key.replace("__", "."): value for key, value in changes.items()},
        },
    )


class WordSearch:
    """The search tool over PASSAGES: most common words first."""

    async def search(self, query: str, k: int) -> list[Hit]:
        words = set(re.findall(r"\w+", query.lower()))
        scored = sorted(
            ((len(words & set(re.findall(r"\w+", p.text.lower()))), p) for p in PASSAGES),
            key=lambda x: (-x[0], x[1].id),
        )
        return [
            Hit(passage=p, score=float(score), rank=rank, retriever="words")
            for rank, (score, p) in enumerate(scored[:k], 1)
            if score
        ]


def proposer_script(messages: Sequence[Message], seed: int) -> str:
    """Search for the answer, then ask for the city on its river; every fifth reply is malformed or gives it away."""
    target = re.findall(r"[Aa]nswer: (.+)", messages[-1].content)[-1]
    if "lies on the river" not in messages[-1].content:
        return f"<search>{target}</search>"
    if seed % 5 == 0:
        return f"<question>Is {target} on a river in Europe?</question>"
    river = re.findall(rf"{target} lies on the river (\w+)", messages[-1].content)[0]
    return f"<question>Which capital city lies on the river {river}? (wording {seed % 3})</question>"


def solver_script(messages: Sequence[Message], seed: int) -> str:
    """Search for the question, read the city off the passage; about half of the answers are wrong."""
    last = messages[-1].content
    if "skills" in messages[0].content and "JSON" in messages[0].content:  # it plays the distiller too
        lesson = f"Compare the river in lesson {seed % 7} with the passage before answering"
        trigger = f"Questions about rivers of kind {seed % 7}"
        return json.dumps(
            {"skills": [{"trigger": trigger, "description": lesson, "avoidance": "", "query_template": "RIVER city"}]}
        )
    reading = messages[0].content.startswith("Answer the question from the passages")
    if "[1]" not in last:
        question = re.findall(r"Question: (.+)", last)[-1]
        return f"<search>{question}</search>"
    asked = next(m.content for m in reversed(messages) if "Question:" in m.content)
    river = re.findall(r"river (\w+)\?", asked)[-1]
    city = re.findall(rf"(\w+) lies on the river {river}", last)
    if reading or seed % 2:
        return f"<answer>{city[0] if city else 'unknown'}</answer>"
    return "<answer>Paris</answer>"


@dataclass(frozen=True)
class Outcome:
    stats: TrainStats
    version: PolicyVersion | None
    trained: tuple[TrainedRow, ...]


class ScriptedUpdater:
    """In the place of GRPO: the next version, and an honest account of the tokens it was given."""

    def update(self, policy: str, step: int, groups: Sequence[Sequence[Rollout]], base: PolicyVersion) -> Outcome:
        rollouts = [r for group in groups for r in group if r.rewards]
        tokens = sum(r.sampled_tokens for r in rollouts)
        number = base.version + 1
        stats = TrainStats(
            policy=policy,
            step=step,
            version=number,
            loss=0.5,
            grad_norm=1.0,
            groups=len(groups),
            trained_tokens=tokens,
            sampled_tokens=tokens,
            ratio_mean=1.0,
        )
        rows = tuple(
            TrainedRow(
                rollout_id=r.id,
                policy=policy,
                version=number,
                step=step,
                sampled_tokens=r.sampled_tokens,
                trained_tokens=r.sampled_tokens,
                sequences=1,
                advantage=r.value,
                dropped=None,
            )
            for r in rollouts
        )
        version = PolicyVersion(policy=policy, version=base.version + 1, path=f"weights/{base.version + 1}", step=step)
        return Outcome(stats, version, rows)


class ScriptedPublisher:
    """Sets the version that the scripted policies report."""

    def __init__(self, models: dict[str, ScriptedModel]) -> None:
        self.models = models

    async def publish(self, version: PolicyVersion) -> None:
        self.models[version.policy].version = version.version

    async def ensure_alive(self, since: float | None = None) -> Sequence[str]:
        return []


def open_context(config: RunConfig, store: Store) -> RunContext:
    """The run as it stands in the store, created on first use."""
    if not store.runs():
        store.create_run(RUN, config.model_dump(mode="json"), {})
        for policy in POLICIES:
            store.save_version(RUN, PolicyVersion(policy=policy, version=0, path="base", published=True))
    if config.bank.enabled and store.bank_version(RUN) == 0:
        plan = prime(config.bank)
        store.commit_bank(RUN, step=0, base_version=0, events=plan.events, skills=plan.skills)
    models = {
        "proposer": ScriptedModel("proposer", proposer_script),
        "solver": ScriptedModel("solver", solver_script),
    }
    for name, model in models.items():
        model.version = served_version(store, RUN, name).version
    return RunContext(
        config=config,
        run_id=RUN,
        store=store,
        proposer=models["proposer"],
        solver=models["solver"],
        searcher=WordSearch(),
        seeds=SEEDS,
        encoder=HashingEncoder(),
        updater=ScriptedUpdater(),
        publisher=ScriptedPublisher(models),
    )


async def play(folder: Path, steps: int, config: RunConfig | None = None) -> RunContext:
    """Play the steps that are owed, with a checkpointer in ``folder``."""
    store = Store.open(folder / "sesa.sqlite")
    context = open_context(config or scripted_config(), store)
    async with AsyncSqliteSaver.from_conn_string(str(folder / "checkpoints.sqlite")) as saver:
        graph = build(saver)
        for step in range(1, steps + 1):
            await run_step(graph, context, step)
    return context


def kill_at_node(node: str, when: str) -> None:
    """Kill this process at the commit of ``node`` in step 2 (so that there is something before it)."""
    commit = Store.commit_node

    def commit_node(self: Store, run_id: str, step: int, name: str, counts: Any) -> None:
        if (step, name, when) == (2, node, "before"):
            os.kill(os.getpid(), signal.SIGKILL)
        commit(self, run_id, step, name, counts)
        if (step, name, when) == (2, node, "after"):
            os.kill(os.getpid(), signal.SIGKILL)

    Store.commit_node = commit_node  # type: ignore[method-assign]


def kill_after_rollouts(limit: int) -> None:
    """Kill this process once ``limit`` rollouts are stored."""
    save, count = Store.save_rollouts, [0]

    def save_rollouts(self: Store, run_id: str, rollouts: Sequence[Rollout]) -> None:
        save(self, run_id, rollouts)
        count[0] += len(rollouts)
        if count[0] >= limit:
            os.kill(os.getpid(), signal.SIGKILL)

    Store.save_rollouts = save_rollouts  # type: ignore[method-assign]


def main(arguments: Sequence[str]) -> None:
    folder, steps, *kill = arguments
    if kill and kill[0] == "rollouts":
        kill_after_rollouts(int(kill[1]))
    elif kill:
        kill_at_node(kill[0], kill[1])
    asyncio.run(play(Path(folder), int(steps)))


if __name__ == "__main__":
    main(sys.argv[1:])
