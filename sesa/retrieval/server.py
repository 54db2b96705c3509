"""Serve a retriever by the ``/retrieve`` interface that search-RL projects use (see `sesa.retrieval.http`)."""

from __future__ import annotations

import errno
import socket
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, Field

from sesa.errors import BusyError
from sesa.retrieval.base import Retriever
from sesa.retrieval.batching import AsyncSearch
from sesa.types import Hit


class RetrieveRequest(BaseModel):
    """Body of POST /retrieve."""

    queries: list[str] = Field(max_length=1024)
    topk: Annotated[int, Field(ge=1, le=1000)] = 3
    return_scores: bool = False


def create_app(retriever: Retriever) -> FastAPI:
    """The application: POST /retrieve and GET /health. Requests that arrive together share one encoder pass."""
    app = FastAPI(title="SESA retriever", docs_url=None, redoc_url=None)
    search = AsyncSearch(retriever)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "retriever": retriever.name}

    @app.post("/retrieve")
    async def retrieve(request: RetrieveRequest) -> dict[str, Any]:
        results = await search.search_many(request.queries, request.topk)
        return {"result": [[_row(hit, request.return_scores) for hit in hits] for hits in results]}

    return app


def serve(retriever: Retriever, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve until interrupted. Raises BusyError when the port is taken."""
    import uvicorn

    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise BusyError(f"{host}:{port}: the port is in use; stop what uses it or choose another --port") from None
        raise
    with listener:
        uvicorn.Server(uvicorn.Config(create_app(retriever), log_level="warning")).run(sockets=[listener])


def _row(hit: Hit, with_score: bool) -> dict[str, Any]:
    document = {"id": hit.passage.id, "contents": f'"{hit.passage.title}"\n{hit.passage.text}'}
    return {"document": document, "score": hit.score} if with_score else document
