"""Build or re-open the configured retriever; indexes lie in the cache, keyed by corpus and encoder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from sesa.config import RunConfig
from sesa.corpus import Corpus, load_corpus
from sesa.files import cache_folder, locked
from sesa.retrieval import bm25, dense
from sesa.retrieval.base import Progress, Retriever
from sesa.retrieval.encoder import get_encoder
from sesa.retrieval.http import HttpRetriever
from sesa.retrieval.hybrid import HybridRetriever

LocalKind = Literal["bm25", "dense", "hybrid"]


def open_retriever(config: RunConfig, corpus: Corpus | None, progress: Progress | None = None) -> Retriever:
    """The retriever of ``config.retrieval`` over ``corpus`` (not needed for kind "http").

    Opens the indexes in the cache, building those that are missing first: a changed corpus or encoder has another
    key. Two processes do not build the same index twice. Raises DataError, NotFoundError, DependencyError,
    StorageFullError.
    """
    section = config.retrieval
    if section.kind == "http":
        return HttpRetriever(section.url, timeout_s=section.timeout_s)
    if corpus is None:
        raise ValueError(f"retrieval.kind = {section.kind} needs a corpus")
    return open_local(section.kind, corpus, cache_folder(config.corpus.cache), section.encoder, progress)


def open_local(
    kind: LocalKind, corpus: Corpus, cache: Path, encoder: str = "embedded", progress: Progress | None = None
) -> Retriever:
    """As `open_retriever`, for one kind of local retriever with its indexes under ``cache``."""
    if kind == "hybrid":
        return HybridRetriever([open_local(part, corpus, cache, encoder, progress) for part in ("dense", "bm25")])
    if kind == "bm25":
        folder = bm25.folder_for(corpus, cache)
        _once(folder, lambda: bm25.build(corpus, folder, progress))
        return bm25.load(corpus, folder)
    model = get_encoder(encoder)
    target = dense.folder_for(corpus, model, cache)
    _once(target, lambda: dense.build(corpus, model, target, progress))
    return dense.load(corpus, model, target)


def build(config: RunConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Parse the corpus and build the configured indexes (`sesa corpus build`); returns `corpus_info` and the seconds.

    What exists already is kept.
    """
    start = time.monotonic()
    corpus = load_corpus(config.corpus, progress)
    open_retriever(config, corpus, progress)
    return {**corpus_info(config, corpus), "seconds": round(time.monotonic() - start, 1)}


def corpus_info(config: RunConfig, corpus: Corpus | None = None) -> dict[str, Any]:
    """What the corpus holds and which of its indexes exist, with their bytes on disk. Builds no index."""
    corpus = corpus or load_corpus(config.corpus)
    cache = cache_folder(config.corpus.cache)
    folders = {
        "bm25": bm25.folder_for(corpus, cache),
        "dense": dense.folder_for(corpus, get_encoder(config.retrieval.encoder), cache),
    }
    return {
        "source": corpus.source,
        "fingerprint": corpus.fingerprint,
        "passages": len(corpus),
        "titles": len({passage.title for passage in corpus.passages}),
        "words": sum(len(passage.text.split()) for passage in corpus.passages),
        "cache": str(cache),
        "indexes": {
            kind: {"folder": str(folder), "built": folder.is_dir(), "bytes": _size(folder)}
            for kind, folder in folders.items()
        },
    }


def _once(folder: Path, build: Callable[[], None]) -> None:
    if folder.is_dir():
        return
    with locked(folder.with_name(f"{folder.name}.lock")):
        if not folder.is_dir():
            build()


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
