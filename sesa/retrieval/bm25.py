"""Lexical retrieval: BM25 by `bm25s`, whose index is mapped from disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sesa.corpus import Corpus
from sesa.errors import DataError
from sesa.files import replacing
from sesa.retrieval.base import Progress, answerable, as_hits, indexed_text
from sesa.types import Hit

# Part of the index's key: raise it when tokens or parameters change.
VERSION = 1


class BM25Retriever:
    """BM25 (Lucene's form, k1 1.5, b 0.75) over title and text. A passage without a word of the query is no hit."""

    name = "bm25"

    def __init__(self, corpus: Corpus, index: Any) -> None:
        self._passages = corpus.passages
        self._index = index

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """See `Retriever.search`."""
        hits: list[list[Hit]] = [[] for _ in queries]
        for place in answerable(queries, k):
            hits[place] = self._search_one(queries[place], k)
        return hits

    def _search_one(self, query: str, k: int) -> list[Hit]:
        import numpy as np

        (tokens,) = _tokens([query])
        if not tokens:
            return []
        scores = self._index.get_scores(tokens)
        # Not the library's own top k: it leaves the order of equal scores to chance, and equal scores are common.
        count = min(k, len(scores))
        floor = np.partition(scores, -count)[-count]
        places = np.flatnonzero((scores >= floor) & (scores > 0))
        best = places[np.argsort(-scores[places], kind="stable")[:k]]
        return as_hits([self._passages[i] for i in best], scores[best].tolist(), self.name)


def folder_for(corpus: Corpus, cache: Path) -> Path:
    """Where the index lies: its name changes with the corpus and the way words are counted."""
    return cache / "index" / f"{corpus.fingerprint[:16]}-bm25-v{VERSION}"


def build(corpus: Corpus, folder: Path, progress: Progress | None = None) -> None:
    """Index the corpus and write it to ``folder``, all or nothing. Two cores: about 3 s per 20,000 passages.

    Raises DataError for a corpus without an indexable word; ConfigError and StorageFullError as `replacing` does.
    """
    import bm25s

    tokens = _tokens([indexed_text(passage) for passage in corpus.passages])
    if not any(tokens):
        raise DataError(
            f"{corpus.source}: holds no word to index, only stop words and signs; set corpus.path to another file"
        )
    if progress:
        progress("index words", len(corpus) // 2, len(corpus))
    index = bm25s.BM25()
    index.index(tokens, show_progress=False)
    with replacing(folder) as new:
        index.save(str(new), show_progress=False)
    if progress:
        progress("index words", len(corpus), len(corpus))


def load(corpus: Corpus, folder: Path) -> BM25Retriever:
    """Open an index written by ``build``; its arrays stay on disk until they are read.

    Raises DataError when the index is damaged or belongs to another corpus.
    """
    import bm25s

    try:
        index = bm25s.BM25.load(str(folder), mmap=True, show_progress=False)
        count = int(index.scores["num_docs"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise DataError(f"{folder}: the index is damaged ({error}); delete the folder and build again") from error
    if count != len(corpus):
        raise DataError(f"{folder}: indexes {count} passages, the corpus has {len(corpus)}; delete it and build again")
    return BM25Retriever(corpus, index)


def _tokens(texts: Sequence[str]) -> list[list[str]]:
    import bm25s

    tokens: list[list[str]] = bm25s.tokenize(
        list(texts), stopwords="en", token_pattern=r"(?u)\b\w+\b", return_ids=False, show_progress=False
    )
    return tokens
