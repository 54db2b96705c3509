"""What every retriever is, and the words a passage is indexed by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sesa.types import Hit, Passage

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) while something long runs."""

Array = npt.NDArray[np.float32]


class Retriever(Protocol):
    """Finds passages for queries. Implementations are safe to call from several threads."""

    name: str

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Best ``k`` passages of each query, best first, ranks from 1; fewer where fewer match.

        A blank query has no hits. Equal scores are ordered by place in the corpus, so results are reproducible.
        Raises ValueError for ``k`` < 1, ServerError and BadReplyError where passages come over the network.
        """
        ...


def indexed_text(passage: Passage) -> str:
    """What is embedded and counted of a passage: the title tells what its pronouns stand for."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


def as_hits(passages: Sequence[Passage], scores: Sequence[float], retriever: str) -> list[Hit]:
    """Hits in the given order with ranks from 1."""
    return [
        Hit(passage=passage, score=float(score), rank=rank, retriever=retriever)
        for rank, (passage, score) in enumerate(zip(passages, scores, strict=True), start=1)
    ]


def answerable(queries: Sequence[str], k: int) -> list[int]:
    """Places of the queries that are not blank. Raises ValueError for ``k`` < 1."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    return [place for place, query in enumerate(queries) if query.strip()]
