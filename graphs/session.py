"""The parts that rollouts need, opened together and closed together: servers, search, encoder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from sesa.collector import rare_collections
from sesa.config import RunConfig
from sesa.corpus import Corpus, load_corpus
from sesa.embedded import resolve_model
from sesa.files import cache_folder
from sesa.retrieval.base import Progress
from sesa.retrieval.batching import AsyncSearch
from sesa.retrieval.encoder import Encoder, get_encoder
from sesa.retrieval.opening import open_retriever
from sesa.router import RouterModel
from sesa.serving import Serving
from sesa.types import PolicyVersion

Say = Callable[[str], None]


@dataclass
class Parts:
    """Everything a rollout touches outside the store. ``distiller`` is None where the solver's server plays it."""

    model_dir: Path
    corpus: Corpus | None
    searcher: AsyncSearch
    encoder: Encoder
    serving: Serving
    distiller: RouterModel | None


def prepare_model(config: RunConfig, say: Say) -> Path:
    """The folder of the starting weights, made on first use."""
    return resolve_model(config.model, cache_folder(config.corpus.cache), say)


@asynccontextmanager
async def open_parts(
    config: RunConfig,
    *,
    model_dir: Path,
    corpus: Corpus | None,
    log_dir: Path,
    policies: Sequence[str],
    versions: Mapping[str, PolicyVersion],
    say: Say,
    progress: Progress,
) -> AsyncIterator[Parts]:
    """Open the retriever, then start the servers; on the way out stop what was started.

    The index is built before the servers start, so that the two do not fight for the cores.
    """
    if corpus is None and config.retrieval.kind != "http":
        corpus = load_corpus(config.corpus, progress)
    searcher = AsyncSearch(open_retriever(config, corpus, progress))
    serving = Serving(config, model_dir, log_dir, policies=tuple(policies), progress=say)
    distiller = helper_model("distiller", config)
    encoder = get_encoder(config.retrieval.encoder)
    try:
        await asyncio.gather(serving.start(versions), asyncio.to_thread(encoder.warm))
        with rare_collections():
            yield Parts(model_dir, corpus, searcher, encoder, serving, distiller)
    finally:
        await serving.close()
        searcher.close()


def helper_model(name: str, config: RunConfig) -> RouterModel | None:
    """The distiller's own endpoint, None where the solver's server plays the part."""
    section = config.distiller
    if section.endpoint == "policy":
        return None
    return RouterModel(
        name,
        section.endpoint,
        api_base=section.api_base,
        api_key_env=section.api_key_env,
        timeout_s=config.serving.request_timeout_s,
        retries=config.serving.retries,
    )
