"""Finding passages: dense, lexical and fused retrieval behind one protocol, locally or over HTTP."""

from sesa.retrieval.base import Progress, Retriever
from sesa.retrieval.batching import AsyncSearch
from sesa.retrieval.encoder import Encoder, get_encoder
from sesa.retrieval.opening import build, corpus_info, open_local, open_retriever

__all__ = [
    "AsyncSearch",
    "Encoder",
    "Progress",
    "Retriever",
    "build",
    "corpus_info",
    "get_encoder",
    "open_local",
    "open_retriever",
]
