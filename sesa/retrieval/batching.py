"""Many concurrent searches, one pass of the encoder: the asynchronous front of a retriever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from sesa.retrieval.base import Retriever
from sesa.types import Hit


@dataclass(frozen=True)
class _Waiting:
    query: str
    k: int
    future: asyncio.Future[list[Hit]] = field(repr=False)


class AsyncSearch:
    """Gathers queries that arrive within ``window_s`` into batches of at most ``max_batch``, run in one thread.

    While a batch runs, the next one gathers, so batches grow with the load and a lone query waits no longer than the
    window. An error of the retriever reaches every caller of that batch and no other. Use it from one event loop.
    """

    def __init__(self, retriever: Retriever, max_batch: int = 64, window_s: float = 0.003) -> None:
        self.retriever = retriever
        self._max_batch = max_batch
        self._window_s = window_s
        self._waiting: list[_Waiting] = []
        self._drain: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")

    async def search(self, query: str, k: int) -> list[Hit]:
        """As `Retriever.search` for one query."""
        return (await self.search_many([query], k))[0]

    async def search_many(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """As `Retriever.search`; the queries may share their batch with those of other callers."""
        loop = asyncio.get_running_loop()
        mine = [_Waiting(query, k, loop.create_future()) for query in queries]
        self._waiting.extend(mine)
        if self._drain is None or self._drain.done():
            self._drain = loop.create_task(self._run())
        return list(await asyncio.gather(*(item.future for item in mine)))

    def close(self) -> None:
        """Let go of the thread; searches in flight still end."""
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._window_s)
        while self._waiting:
            k = self._waiting[0].k
            same = [item for item in self._waiting if item.k == k][: self._max_batch]
            taken = set(map(id, same))
            self._waiting = [item for item in self._waiting if id(item) not in taken]
            batch = [item for item in same if not item.future.done()]
            if not batch:
                continue
            try:
                results = await loop.run_in_executor(
                    self._thread, self.retriever.search, [item.query for item in batch], k
                )
            except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to those who asked
                for item in batch:
                    if not item.future.done():
                        item.future.set_exception(error)
                continue
            for item, hits in zip(batch, results, strict=True):
                if not item.future.done():
                    item.future.set_result(hits)
