"""The embedded corpus, parsed once per test session."""

from __future__ import annotations

import tempfile
from functools import cache

from sesa.config import CorpusSection
from sesa.corpus import Corpus, load_corpus


@cache
def embedded_corpus() -> Corpus:
    with tempfile.TemporaryDirectory() as folder:
        return load_corpus(CorpusSection(cache=folder))
