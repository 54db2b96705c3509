"""Dense retrieval: unit vectors of the passages in a FAISS index, searched by inner product (cosine)."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sesa.corpus import Corpus
from sesa.errors import DataError
from sesa.files import disk_errors, replacing
from sesa.retrieval.base import Array, Progress, answerable, as_hits, indexed_text
from sesa.retrieval.encoder import Encoder
from sesa.types import Hit

log = logging.getLogger(__name__)

# Raised when the file layout or the choice of index changes.
VERSION = 1
_FILE = "flat.faiss"
# A cut-off build repeats at most this many passages, a few seconds' work.
_SHARD = 512
# Passages of one length are batched together (no padding) and every shard gets batches of all lengths, so that the
# rate, and with it the estimate of the time left, is the same from the first shard to the last.
_STRIPE = 32
_FLAT_LIMIT = 100_000


class DenseRetriever:
    """Nearest passages by cosine. The encoder is loaded with the first query, not when the index is opened."""

    name = "dense"

    def __init__(self, corpus: Corpus, index: Any, encoder: Encoder) -> None:
        self._passages = corpus.passages
        self._index = index
        self.encoder = encoder

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """See `Retriever.search`; the queries are encoded in one batch."""
        hits: list[list[Hit]] = [[] for _ in queries]
        asked = answerable(queries, k)
        if not asked:
            return hits
        vectors = self.encoder.encode([queries[place] for place in asked])
        _one_thread()
        scores, places = self._index.search(vectors, min(k, len(self._passages)))
        for place, row_scores, row_places in zip(asked, scores, places, strict=True):
            best = sorted(zip(row_scores.tolist(), row_places.tolist(), strict=True), key=lambda hit: (-hit[0], hit[1]))
            hits[place] = as_hits([self._passages[i] for _, i in best], [score for score, _ in best], self.name)
        return hits


def folder_for(corpus: Corpus, encoder: Encoder, cache: Path) -> Path:
    """Where the index lies: its name changes with the corpus, the encoder and the layout."""
    return cache / "index" / f"{corpus.fingerprint[:16]}-dense-{encoder.fingerprint}-v{VERSION}"


def build(corpus: Corpus, encoder: Encoder, folder: Path, progress: Progress | None = None) -> None:
    """Embed the corpus and write the index to ``folder``.

    Embeddings are kept in shards beside the folder until the index stands, so a build that is cut off goes on where
    it was. Memory: the model, one float32 matrix (n, d) and the index of the same size.
    """
    unfinished = folder.with_name(f"{folder.name}.shards")
    shards = list(_shards(corpus))
    vectors: Array | None = None
    done = 0
    for number, places in enumerate(shards):
        part = _shard(unfinished / f"{number:05d}.npy", len(places))
        if part is None:
            part = encoder.encode_bulk([indexed_text(corpus.passages[i]) for i in places])
            with replacing(unfinished / f"{number:05d}.npy") as new:
                np.save(new, part)
        if vectors is None:
            vectors = np.empty((len(corpus), part.shape[1]), np.float32)
        vectors[places] = part
        done += len(places)
        if progress:
            progress("embed passages", done, len(corpus))
    assert vectors is not None, "a corpus is never empty"
    encoder.release_bulk()
    _write(vectors, folder)
    shutil.rmtree(unfinished)


def load(corpus: Corpus, encoder: Encoder, folder: Path) -> DenseRetriever:
    """Open an index written by ``build``; nothing is embedded and the encoder is not loaded.

    Raises DataError when the index is damaged or belongs to another corpus.
    """
    import faiss

    try:
        index = faiss.read_index(str(folder / _FILE), faiss.IO_FLAG_MMAP)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[-200:]
        raise DataError(f"{folder}: the index is damaged ({reason}); delete the folder and build again") from error
    if index.ntotal != len(corpus):
        raise DataError(f"{folder}: holds {index.ntotal} vectors, the corpus has {len(corpus)} passages; delete it")
    return DenseRetriever(corpus, index, encoder)


def _one_thread() -> None:
    """Keep FAISS to one thread: the model server and the encoder use the cores, a third pool makes them all wait."""
    import faiss

    # The setting belongs to the calling thread, hence before each search and not once.
    faiss.omp_set_num_threads(1)


def _shards(corpus: Corpus) -> Iterator[list[int]]:
    order = sorted(range(len(corpus)), key=lambda i: (len(corpus.passages[i].text), i))
    stripes = [order[at : at + _STRIPE] for at in range(0, len(order), _STRIPE)]
    count = min(len(stripes), -(-len(order) // _SHARD))
    for number in range(count):
        yield [place for stripe in stripes[number::count] for place in stripe]


def _shard(path: Path, rows: int) -> Array | None:
    """A finished shard, or None where it must be computed (again)."""
    if not path.is_file():
        return None
    try:
        part: Array = np.load(path)
    except (ValueError, EOFError, OSError) as error:
        log.warning("%s: unreadable (%s); computed again", path, error)
        return None
    return part if part.shape[0] == rows else None


def _write(vectors: Array, folder: Path) -> None:
    import faiss

    with disk_errors(folder.parent), replacing(folder) as new:
        new.mkdir()
        index = _index_for(*vectors.shape)
        index.add(vectors)
        try:
            faiss.write_index(index, str(new / _FILE))
        except RuntimeError as error:
            # FAISS reports a failed write as text only; what the disk says is in there.
            raise OSError(28 if "No space left" in str(error) else 5, str(error), str(folder)) from error


def _index_for(count: int, dim: int) -> Any:
    """The kind of index for ``count`` vectors. The one place where HNSW and IVF join; exact search until then."""
    import faiss

    if count > _FLAT_LIMIT:
        log.warning(
            "an exact index of %d vectors takes %.1f GB of memory and %.0f ms per query",
            count,
            count * dim * 4 / 1e9,
            count * dim / 4e6,
        )
    return faiss.IndexFlatIP(dim)
