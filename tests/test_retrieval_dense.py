"""Dense retrieval with the real encoder: vectors, resuming a cut-off build, caching, quietness."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from embedded_corpus import embedded_corpus
from hypothesis import given
from hypothesis import strategies as st

from sesa.corpus import Corpus
from sesa.errors import DataError, NotFoundError
from sesa.retrieval import dense, get_encoder, open_local
from sesa.retrieval.base import Array
from sesa.retrieval.encoder import Encoder
from sesa.types import Passage

pytestmark = pytest.mark.real

QUESTIONS = ["Who shot Abraham Lincoln?", "What does an aardvark eat?", "Which number is the mean of 2 and 4?"]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.of(embedded_corpus().passages[::40], "sample")


class Counting(Encoder):
    """The real encoder; counts the passages it embeds and stops like a killed process after ``limit``."""

    def __init__(self, limit: int = 10**9) -> None:
        super().__init__(get_encoder().folder)
        self.embedded = 0
        self.limit = limit

    def encode_bulk(self, texts: Sequence[str]) -> Array:
        if self.embedded + len(texts) > self.limit:
            raise KeyboardInterrupt
        self.embedded += len(texts)
        return super().encode_bulk(texts)


def test_vectors_are_unit_float32_and_independent_of_the_batch() -> None:
    encoder = get_encoder()
    assert encoder is get_encoder()
    texts = [f"{'word ' * (1 + 7 * i % 90)}{i}" for i in range(70)]
    together = encoder.encode(texts)
    assert together.shape == (70, 384) and together.dtype == np.float32
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    alone = np.concatenate([encoder.encode([text]) for text in texts[::9]])
    assert np.abs(together[::9] - alone).max() < 2e-6
    assert encoder.encode([]).shape == (0, 384)
    bulk = encoder.encode_bulk(texts)
    assert np.allclose(np.linalg.norm(bulk, axis=1), 1, atol=1e-5) and (bulk * together).sum(1).min() > 0.99


def test_the_model_itself_gives_the_same_vectors() -> None:
    from sentence_transformers import SentenceTransformer

    reference = SentenceTransformer(str(get_encoder().folder), device="cpu").encode(
        QUESTIONS, normalize_embeddings=True
    )
    assert np.abs(get_encoder().encode(QUESTIONS) - reference).max() < 2e-6


def test_many_threads_encode_at_once() -> None:
    encoder = Encoder(get_encoder().folder)
    texts = [[f"{'long ' * (i * 11 % 70)}text {i} {j}" for j in range(1 + i % 3)] for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(encoder.encode, texts))
    for text, vectors in zip(texts, results, strict=True):
        assert np.abs(encoder.encode(text) - vectors).max() < 2e-6


def test_dense_search_finds_what_is_meant(corpus: Corpus, tmp_path: Path) -> None:
    whole = Corpus.of([p for p in embedded_corpus().passages if p.title in ("Aardvark", "Abacus")], "two articles")
    hits = open_local("dense", whole, tmp_path).search(["What insects does it feed on?", "", "adding with beads"], 3)
    assert {h.passage.title for h in hits[0]} == {"Aardvark"} and "termites" in hits[0][0].passage.text
    assert hits[1] == [] and {h.passage.title for h in hits[2]} == {"Abacus"}
    assert [h.rank for h in hits[0]] == [1, 2, 3] and hits[0][0].score >= hits[0][1].score > 0
    hybrid = open_local("hybrid", whole, tmp_path).search(["termites"], 3)
    assert hybrid[0][0].passage.title == "Aardvark" and hybrid[0][0].retriever == "hybrid"


@given(st.integers(1, 3000))
def test_every_passage_is_in_one_shard(n: int) -> None:
    few = Corpus.of((Passage(id=str(i), title="", text="x" * (i * 37 % 101 + 1)) for i in range(n)), "x")
    shards = list(dense._shards(few))
    assert sorted(place for shard in shards for place in shard) == list(range(n)) and all(shards)
    assert max(map(len, shards)) <= dense._SHARD + dense._STRIPE


def test_a_cut_off_build_goes_on_where_it_was(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_SHARD", 16)
    monkeypatch.setattr(dense, "_STRIPE", 4)
    n = len(corpus)
    cut = Counting(limit=n // 2)
    with pytest.raises(KeyboardInterrupt):
        dense.build(corpus, cut, tmp_path / "index")
    assert not (tmp_path / "index").exists() and 0 < cut.embedded <= n // 2
    shards = sorted((tmp_path / "index.shards").iterdir())
    shards[0].write_bytes(b"torn")
    torn = len(np.load(shards[1]))
    second = Counting()
    steps: list[tuple[int, int]] = []
    dense.build(corpus, second, tmp_path / "index", lambda _, done, total: steps.append((done, total)))
    assert abs(cut.embedded + second.embedded - torn - n) <= 1 and steps[-1] == (n, n)
    assert not (tmp_path / "index.shards").exists()

    fresh = Counting()
    dense.build(corpus, fresh, tmp_path / "fresh")
    resumed, whole = (dense.load(corpus, fresh, tmp_path / name).search(QUESTIONS, 5) for name in ("index", "fresh"))
    assert [[h.passage.id for h in hits] for hits in resumed] == [[h.passage.id for h in hits] for hits in whole]


def test_the_index_is_reopened_without_embedding(corpus: Corpus, tmp_path: Path) -> None:
    encoder = Counting()
    folder = dense.folder_for(corpus, encoder, tmp_path)
    dense.build(corpus, encoder, folder)
    before = encoder.embedded
    code = (
        "import sys\nfrom pathlib import Path\nfrom sesa.corpus import read_passages, Corpus\n"
        "from sesa.retrieval import dense, get_encoder\n"
        f"c = Corpus.of(read_passages(Path({str(tmp_path / 'c.jsonl')!r})), 'x')\n"
        f"r = dense.load(c, get_encoder(), Path({str(folder)!r}))\n"
        "assert 'torch' not in sys.modules\n"
        "hits = r.search(['Who shot Abraham Lincoln?'], 2)\n"
        "print(len(hits[0]))\n"
    )
    from sesa.jsonl import write_rows

    write_rows(tmp_path / "c.jsonl", (p.model_dump() for p in corpus.passages))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", ""), "and nothing is printed by the model"
    assert encoder.embedded == before == len(corpus)


def test_another_corpus_or_encoder_has_another_index(corpus: Corpus, tmp_path: Path) -> None:
    encoder = get_encoder()
    shutil.copytree(encoder.folder, tmp_path / "other")
    config = tmp_path / "other/sentence_bert_config.json"
    config.write_text(config.read_text().replace("256", "128"))
    other = get_encoder(str(tmp_path / "other"))
    smaller = Corpus.of(corpus.passages[1:], "x")
    folders = {dense.folder_for(c, e, tmp_path) for c in (corpus, smaller) for e in (encoder, other)}
    assert other.fingerprint != encoder.fingerprint and len(folders) == 4


def test_damaged_and_foreign_indexes_and_encoders_are_named(corpus: Corpus, tmp_path: Path) -> None:
    encoder = get_encoder()
    few = Corpus.of(corpus.passages[:5], "few")
    dense.build(few, encoder, tmp_path / "i")
    with pytest.raises(DataError, match="holds 5 vectors"):
        dense.load(corpus, encoder, tmp_path / "i")
    (tmp_path / "i/flat.faiss").write_bytes(b"IxFI garbage")
    with pytest.raises(DataError, match=r"damaged.*build again"):
        dense.load(few, encoder, tmp_path / "i")
    with pytest.raises(NotFoundError, match=r"modules\.json"):
        get_encoder(str(tmp_path))
