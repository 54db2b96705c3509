"""Recall of dense, BM25 and fused retrieval: how often one of the first k passages holds a gold answer.

Usage: python benchmarks/retrieval_recall.py [--data DIR] [--questions questions_nq.jsonl] [--cache DIR]

DIR holds passages.jsonl and question files with the fields question and answers. A passage holds an answer when the
normalised answer occurs in its normalised title and text, on word borders.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sesa.config import CorpusSection
from sesa.corpus import load_corpus
from sesa.files import cache_folder
from sesa.jsonl import read_rows
from sesa.retrieval import open_local
from sesa.retrieval.opening import LocalKind
from sesa.retrieval.progress import shown
from sesa.text import normalise

KINDS: tuple[LocalKind, ...] = ("bm25", "dense", "hybrid")
DEPTHS = (3, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--questions", nargs="+", default=["questions_nq.jsonl"])
    parser.add_argument("--cache", default="")
    args = parser.parse_args()

    corpus = load_corpus(CorpusSection(path=str(args.data / "passages.jsonl"), cache=args.cache))
    contents = {p.id: f" {normalise(f'{p.title} {p.text}')} " for p in corpus.passages}
    for name in args.questions:
        rows, _ = read_rows(args.data / name, _question, skip_bad=False, remedy="mend the file")
        questions = [question for question, _ in rows]
        golds = [[f" {text} " for answer in answers if (text := normalise(answer))] for _, answers in rows]
        print(f"{name}: {len(questions)} questions, {len(corpus)} passages")
        for kind in KINDS:
            with shown() as progress:
                retriever = open_local(kind, corpus, cache_folder(args.cache), progress=progress)
            retriever.search(questions[:1], 1)
            start = time.perf_counter()
            results = retriever.search(questions, max(DEPTHS))
            each = (time.perf_counter() - start) / len(questions)
            recalls = {
                depth: sum(
                    any(gold in contents[hit.passage.id] for hit in hits[:depth] for gold in accepted)
                    for hits, accepted in zip(results, golds, strict=True)
                )
                / len(questions)
                for depth in DEPTHS
            }
            figures = "  ".join(f"recall@{depth} {recall:.3f}" for depth, recall in recalls.items())
            print(f"  {kind:7s} {figures}  {1000 * each:.1f} ms per query, in one batch")


def _question(row: Mapping[str, Any]) -> tuple[str, list[str]]:
    if not isinstance(row.get("question"), str) or not isinstance(row.get("answers"), list):
        raise ValueError("needs question (a string) and answers (a list)")
    return row["question"], row["answers"]


if __name__ == "__main__":
    main()
