"""Fusion of retrievers by rank."""

from __future__ import annotations

from collections.abc import Sequence

from sesa.retrieval.base import Retriever, as_hits
from sesa.types import Hit, Passage


class HybridRetriever:
    """Reciprocal rank fusion: score(d) = sum over retrievers of 1 / (c + rank(d)), c = 60, each searched 50 deep.

    Source: Cormack, Clarke and Buettcher, SIGIR 2009. It needs ranks only, so scores of any scale fuse.
    """

    name = "hybrid"

    def __init__(self, parts: Sequence[Retriever], *, constant: int = 60, depth: int = 50) -> None:
        self._parts = tuple(parts)
        self._constant = constant
        self._depth = depth

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """See `Retriever.search`."""
        depth = max(k, self._depth)
        lists = [part.search(queries, depth) for part in self._parts] if k > 0 else [self._parts[0].search(queries, k)]
        return [self._fuse([ranking[place] for ranking in lists], k) for place in range(len(queries))]

    def _fuse(self, rankings: Sequence[Sequence[Hit]], k: int) -> list[Hit]:
        scores: dict[str, float] = {}
        passages: dict[str, Passage] = {}
        for ranking in rankings:
            for hit in ranking:
                passages.setdefault(hit.passage.id, hit.passage)
                scores[hit.passage.id] = scores.get(hit.passage.id, 0.0) + 1 / (self._constant + hit.rank)
        # Equal sums are common (ranks swapped between two retrievers): the first retriever's order decides.
        best = sorted(scores, key=lambda name: -scores[name])[:k]
        return as_hits([passages[name] for name in best], [scores[name] for name in best], self.name)
