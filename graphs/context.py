"""What the graphs are given at run time. Training reaches the step graph through the two protocols here, so the same
graph runs with a scripted updater in tests and never imports `sesa.training`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sesa.config import RunConfig
from sesa.llm import ChatModel, Template
from sesa.skill_index import Encoder
from sesa.skills import Bank
from sesa.store import Store
from sesa.types import Hit, Passage, PolicyVersion, Rollout, SeedAnswer, TrainedRow, TrainStats


class Policy(ChatModel, Protocol):
    """A trained policy behind a server: a chat model that takes exact prompt ids."""

    template: Template


class Searcher(Protocol):
    """The search tool. Raises ServerError or BadReplyError when passages come over the network."""

    async def search(self, query: str, k: int) -> list[Hit]: ...


class UpdateOutcome(Protocol):
    """What an update did; ``version`` is None when nothing could be trained."""

    @property
    def stats(self) -> TrainStats: ...
    @property
    def version(self) -> PolicyVersion | None: ...
    @property
    def trained(self) -> Sequence[TrainedRow]: ...


class Updater(Protocol):
    """Trains a policy on groups of rollouts. Blocking; the same call made twice trains once."""

    def update(
        self, policy: str, step: int, groups: Sequence[Sequence[Rollout]], base: PolicyVersion
    ) -> UpdateOutcome: ...


class Publisher(Protocol):
    """Makes a policy's server serve a version. Publishing the version that is served already changes nothing."""

    async def publish(self, version: PolicyVersion) -> None: ...

    async def ensure_alive(self, since: float | None = None) -> Sequence[str]:
        """Restarts servers that died; their names, and those of servers restarted after the monotonic time ``since``.

        Raises ServerError where one cannot be brought back.
        """
        ...


class Stage:
    """How far the stages of a step are. This one counts and shows nothing; a front end overrides ``show``."""

    def __init__(self) -> None:
        self.counts: dict[str, tuple[int, int]] = {}

    def start(self, stage: str, total: int, done: int = 0) -> None:
        """A stage of ``total`` parts begins, ``done`` of which an earlier process finished."""
        self.counts[stage] = (done, total)
        self.show(stage, done, total)

    def tick(self, stage: str) -> None:
        """One more part of the stage is stored."""
        done, total = self.counts.get(stage, (0, 0))  # a resumed fan-out may tick before its start was seen
        self.counts[stage] = (done + 1, max(total, done + 1))
        self.show(stage, *self.counts[stage])

    def show(self, stage: str, done: int, total: int) -> None:
        """Called at each change."""


@dataclass
class RunContext:
    """One run's parts. ``updater`` is None where training is off; ``seeds`` is the pool of target answers; the caches
    hold what all rollouts of a step share.
    """

    config: RunConfig
    run_id: str
    store: Store
    proposer: Policy
    solver: Policy
    searcher: Searcher
    seeds: Sequence[SeedAnswer]
    encoder: Encoder
    updater: Updater | None
    publisher: Publisher
    distiller: ChatModel | None = None
    stage: Stage = field(default_factory=Stage)
    bank_cache: dict[int, Bank] = field(default_factory=dict)
    step_passages: dict[int, list[tuple[int, tuple[Passage, ...]]]] = field(default_factory=dict)

    def bank(self, step: int) -> Bank:
        """The bank that every rollout of ``step`` sees."""
        version = self.store.bank_version(self.run_id, step=step)
        if version not in self.bank_cache:
            self.bank_cache.clear()
            self.bank_cache[version] = Bank.from_store(self.store, self.run_id, version)
        return self.bank_cache[version]

    def call_seed(self, *parts: object) -> int:
        """A 31-bit sampling seed that depends on the run's seed and on what the call is, not on when it is made."""
        text = ":".join(map(str, (self.config.run.seed, *parts)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
