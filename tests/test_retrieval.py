"""Retrievers: BM25, fusion, opening and caching of indexes, the batching front."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from embedded_corpus import embedded_corpus
from hypothesis import given
from hypothesis import strategies as st

from sesa.config import CorpusSection, RetrievalSection, RunConfig
from sesa.corpus import Corpus
from sesa.errors import DataError
from sesa.jsonl import write_rows
from sesa.retrieval import AsyncSearch, corpus_info, open_local, open_retriever
from sesa.retrieval import build as build_indexes
from sesa.retrieval.base import as_hits
from sesa.retrieval.hybrid import HybridRetriever
from sesa.retrieval.progress import shown
from sesa.types import Hit, Passage

TEXTS = {
    "ada": "Ada Lovelace wrote the first program for the analytical engine.",
    "babbage": "Charles Babbage designed the analytical engine in London.",
    "turing": "Alan Turing described a universal machine in 1936.",
    "blank": "Nothing in this passage is about computing.",
}
CORPUS = Corpus.of([Passage(id=k, title=k.title(), text=v) for k, v in TEXTS.items()], "test")


def ids(hits: Sequence[Hit]) -> list[str]:
    return [hit.passage.id for hit in hits]


# ------------------------------------------------------------------------------------------------------------ BM25


def test_bm25_finds_and_ranks(tmp_path: Path) -> None:
    bm25 = open_local("bm25", CORPUS, tmp_path)
    engine, turing, none, blank = bm25.search(["analytical engine Babbage", "Turing 1936", "zebra", " "], 3)
    assert ids(engine) == ["babbage", "ada"] and [h.rank for h in engine] == [1, 2]
    assert engine[0].score > engine[1].score > 0 and engine[0].retriever == "bm25"
    assert ids(turing) == ["turing"] and none == [] and blank == []
    assert bm25.search([], 3) == [] and len(bm25.search(["the analytical engine"], 1)[0]) == 1
    assert len(bm25.search(["engine machine"], 100)[0]) == 3
    with pytest.raises(ValueError, match="at least 1"):
        bm25.search(["x"], 0)


def test_equal_scores_keep_the_order_of_the_corpus(tmp_path: Path) -> None:
    same = Corpus.of([Passage(id=f"p{i}", title="", text="a black cat") for i in range(40)], "test")
    for k in (1, 7, 40):
        assert ids(open_local("bm25", same, tmp_path).search(["cat"], k)[0]) == [f"p{i}" for i in range(k)]


def test_bm25_is_stored_reopened_and_rebuilt_for_another_corpus(tmp_path: Path) -> None:
    first = open_local("bm25", CORPUS, tmp_path).search(["engine"], 3)
    (folder,) = (f for f in (tmp_path / "index").iterdir() if f.is_dir())
    written = folder.stat().st_mtime_ns
    assert open_local("bm25", CORPUS, tmp_path).search(["engine"], 3) == first
    assert folder.stat().st_mtime_ns == written
    other = Corpus.of([*CORPUS.passages, Passage(id="new", title="Engine", text="engine engine")], "test")
    assert ids(open_local("bm25", other, tmp_path).search(["engine"], 1)[0]) == ["new"]
    assert len([f for f in (tmp_path / "index").iterdir() if f.is_dir()]) == 2


@pytest.mark.parametrize("content", ["{", "{}", "[]", "3", "null"])
def test_a_damaged_bm25_index_is_named(tmp_path: Path, content: str) -> None:
    open_local("bm25", CORPUS, tmp_path)
    params = next((tmp_path / "index").rglob("params.index.json"))
    params.write_text(content)
    with pytest.raises(DataError, match=r"damaged.*delete the folder") as caught:
        open_local("bm25", CORPUS, tmp_path)
    assert str(params.parent) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["the of and", "!!!"])
def test_a_corpus_without_a_word_to_index(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="test: holds no word to index"):
        open_local("bm25", Corpus.of([Passage(id="1", title="", text=text)], "test"), tmp_path)
    assert not [f for f in (tmp_path / "index").iterdir() if f.is_dir()]


def test_a_folder_of_another_length_is_refused(tmp_path: Path) -> None:
    from sesa.retrieval import bm25

    bm25.build(CORPUS, tmp_path / "x")
    with pytest.raises(DataError, match="indexes 4 passages, the corpus has 1"):
        bm25.load(Corpus.of(CORPUS.passages[:1], "test"), tmp_path / "x")


def test_the_embedded_corpus_is_searched_well(tmp_path: Path) -> None:
    bm25 = open_local("bm25", embedded_corpus(), tmp_path)
    questions = {
        "Who assassinated Abraham Lincoln?": "Booth",
        "What is the capital of Albania?": "Tirana",
        "Who was the first person to walk on the Moon?": "Armstrong",
    }
    for question, answer in questions.items():
        assert any(answer in hit.passage.text for hit in bm25.search([question], 3)[0]), question
    start = time.process_time()
    for _ in range(20):
        bm25.search(["Who was the first person to walk on the Moon?"], 3)
    assert (time.process_time() - start) / 20 < 0.05


# ---------------------------------------------------------------------------------------------------------- fusion


class Fixed:
    """A retriever that returns the same ranking for every query."""

    name = "fixed"

    def __init__(self, ranking: Sequence[str]) -> None:
        self.ranking = ranking
        self.depths: list[int] = []

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        self.depths.append(k)
        passages = [Passage(id=i, title="", text=i) for i in self.ranking[:k]]
        return [as_hits(passages, [1.0] * len(passages), self.name) for _ in queries]


RANKING = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8)


@given(RANKING, RANKING, st.integers(1, 10))
def test_fusion_adds_reciprocal_ranks(one: list[str], two: list[str], k: int) -> None:
    (hits,) = HybridRetriever([Fixed(one), Fixed(two)]).search(["q"], k)
    expected = {i: sum(1 / (61 + r.index(i)) for r in (one, two) if i in r) for i in {*one, *two}}
    assert len(hits) == min(k, len(expected)) and [h.rank for h in hits] == list(range(1, len(hits) + 1))
    assert all(h.score == pytest.approx(expected[h.passage.id]) for h in hits)
    assert [h.score for h in hits] == pytest.approx(sorted(expected.values(), reverse=True)[:k])


def test_fusion_searches_fifty_deep_and_refuses_zero() -> None:
    parts = [Fixed("ab"), Fixed("ba")]
    HybridRetriever(parts).search(["q"], 3)
    HybridRetriever(parts).search(["q"], 80)
    assert parts[0].depths == parts[1].depths == [50, 80]


# --------------------------------------------------------------------------------------------------- configuration


def config(tmp_path: Path, **retrieval: object) -> RunConfig:
    write_rows(tmp_path / "passages.jsonl", (p.model_dump() for p in CORPUS.passages))
    return RunConfig(
        corpus=CorpusSection(path=str(tmp_path / "passages.jsonl"), cache=str(tmp_path / "cache")),
        retrieval=RetrievalSection.model_validate({"kind": "bm25", **retrieval}),
    )


def test_build_and_info_report_what_exists(tmp_path: Path) -> None:
    before = corpus_info(config(tmp_path))
    assert not before["indexes"]["bm25"]["built"] and before["passages"] == before["titles"] == 4
    stages: set[str] = set()
    built = build_indexes(config(tmp_path), lambda stage, done, total: stages.add(stage))
    assert built["indexes"]["bm25"]["built"] and built["indexes"]["bm25"]["bytes"] > 100
    assert not built["indexes"]["dense"]["built"] and stages == {"index words"}
    assert built["fingerprint"] == before["fingerprint"]


def test_a_local_retriever_needs_a_corpus(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a corpus"):
        open_retriever(config(tmp_path), None)


def test_progress_off_a_terminal_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with shown() as progress:
        for done in range(1, 101):
            progress("embed passages", done, 100)
    out, err = capsys.readouterr()
    assert out == "" and err == "embed passages: 100 of 100\n"


def test_importing_retrieval_is_cheap() -> None:
    heavy = "{'torch', 'faiss', 'sentence_transformers', 'transformers', 'bm25s', 'langgraph', 'fastapi'}"
    code = f"import sys, sesa.retrieval; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout == "[]\n"


# -------------------------------------------------------------------------------------------------------- batching


class Slow:
    """Counts the batches it is given; a query "bad" fails its batch."""

    name = "slow"

    def __init__(self) -> None:
        self.batches: list[tuple[list[str], int]] = []
        self.threads: set[int] = set()

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        self.batches.append((list(queries), k))
        self.threads.add(threading.get_ident())
        time.sleep(0.02)
        if "bad" in queries:
            raise DataError("bad query")
        return [as_hits([Passage(id=q, title="", text=q)] * k, [1.0] * k, "slow") for q in queries]


async def test_concurrent_queries_share_batches_and_get_their_own_hits() -> None:
    slow = Slow()
    search = AsyncSearch(slow, max_batch=16)
    results = await asyncio.gather(*(search.search(f"q{i}", 2) for i in range(100)))
    assert [ids(r) for r in results] == [[f"q{i}"] * 2 for i in range(100)]
    assert len(slow.batches) == 7 and max(len(q) for q, _ in slow.batches) == 16
    assert len(slow.threads) == 1 and threading.get_ident() not in slow.threads


async def test_queries_that_arrive_meanwhile_wait_for_the_next_batch() -> None:
    slow = Slow()
    search = AsyncSearch(slow)
    first = asyncio.create_task(search.search("first", 1))
    await asyncio.sleep(0.012)
    rest = [asyncio.create_task(search.search(f"q{i}", 1)) for i in range(5)]
    await asyncio.gather(first, *rest)
    assert [q for q, _ in slow.batches] == [["first"], [f"q{i}" for i in range(5)]]
    assert ids(await search.search("alone", 1)) == ["alone"], "a new batch starts after a pause"


async def test_different_depths_do_not_mix() -> None:
    slow = Slow()
    search = AsyncSearch(slow)
    results = await asyncio.gather(*(search.search(f"q{i}", 1 + i % 3) for i in range(9)))
    assert [len(r) for r in results] == [1, 2, 3] * 3 and sorted(k for _, k in slow.batches) == [1, 2, 3]


async def test_an_error_reaches_its_batch_only_and_cancelled_searches_are_left_out() -> None:
    slow = Slow()
    search = AsyncSearch(slow)
    gone = asyncio.create_task(search.search("gone", 1))
    await asyncio.sleep(0)
    gone.cancel()
    outcome = await asyncio.gather(search.search("bad", 1), search.search("with bad", 1), return_exceptions=True)
    assert all(isinstance(error, DataError) for error in outcome)
    assert ids(await search.search("good", 1)) == ["good"]
    assert [q for q, _ in slow.batches] == [["bad", "with bad"], ["good"]]
    search.close()
