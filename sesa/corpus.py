"""The corpus: passages read from JSONL or from a Wikipedia dump, with a fingerprint that indexes are keyed by."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from sesa import wikidump
from sesa.config import CorpusSection
from sesa.errors import DataError, NotFoundError
from sesa.files import cache_folder, expanded, locked, package_folder, sha256_of
from sesa.jsonl import open_source, read_rows, text_field, write_rows
from sesa.types import Passage

# The sample of the English dump that gensim carries: 205 pages, of which 106 are no redirects.
_EMBEDDED = "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_REMEDY = "mend the file, or set corpus.skip_bad = true to leave such rows out"

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) while something long runs; total is 0 where it is not known."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Passages in file order. ``fingerprint`` is the SHA-256 of their content, ids and order included."""

    passages: tuple[Passage, ...]
    fingerprint: str
    source: str

    def __len__(self) -> int:
        return len(self.passages)

    @cached_property
    def by_id(self) -> Mapping[str, Passage]:
        return {passage.id: passage for passage in self.passages}

    @classmethod
    def of(cls, passages: Iterable[Passage], source: str) -> Corpus:
        """Build a corpus from passages. Raises DataError when there are none or an id occurs twice."""
        kept = tuple(passages)
        if not kept:
            raise DataError(f"{source}: holds no passages")
        digest = hashlib.sha256()
        ids: set[str] = set()
        for passage in kept:
            if passage.id in ids:
                raise DataError(f"{source}: the passage id {passage.id!r} occurs twice; ids must be unique")
            ids.add(passage.id)
            digest.update(orjson.dumps([passage.id, passage.title, passage.text]))
        return cls(kept, digest.hexdigest(), source)


def load_corpus(section: CorpusSection, progress: Progress | None = None) -> Corpus:
    """Read the configured corpus; a dump is parsed once and then read back from the cache.

    ``section.path`` is "embedded", a JSONL file of passages (fields id, title, text; or id and contents, as wiki-18
    is published), or a Wikipedia XML dump; both may be packed with bzip2 or gzip. What a file is, its content tells.
    The whole corpus is held in memory: about 1.5 KB a passage of 100 words.
    Raises NotFoundError and DataError (file, line, reason, remedy).
    """
    path = embedded_dump() if section.path == "embedded" else expanded(section.path)
    with open_source(path) as file:
        try:
            head = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
        except (OSError, EOFError, zlib.error) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{path}: cut off or damaged, nothing of it can be read ({reason}); get it again") from None
    if not head:
        raise DataError(f'{path}: is empty; set corpus.path to a file of passages, a Wikipedia dump or "embedded"')
    if head.startswith(b"<"):
        return Corpus.of(_parsed_dump(path, section, progress), section.path)
    if not head.startswith(b"{"):
        raise DataError(f"{path}:1: neither JSONL passages (a line begins with {{) nor a Wikipedia XML dump")
    return Corpus.of(read_passages(path, skip_bad=section.skip_bad), section.path)


def read_passages(path: Path, *, skip_bad: bool = False, remedy: str = _REMEDY) -> list[Passage]:
    """Read a JSONL file of passages. Further fields are ignored; a repeated id is a bad row. ``remedy`` ends messages.

    Raises NotFoundError; DataError naming the first bad row and their number.
    """
    ids: set[str] = set()

    def parse(row: Mapping[str, Any]) -> Passage:
        passage = _passage(row)
        if passage.id in ids:
            raise ValueError(f"id: {passage.id!r} occurs for the second time")
        ids.add(passage.id)
        return passage

    return read_rows(path, parse, skip_bad=skip_bad, remedy=remedy)[0]


def embedded_dump() -> Path:
    """The dump sample inside the installed gensim package; gensim itself is not imported.

    Raises NotFoundError when the installed gensim does not carry it.
    """
    path = package_folder("gensim") / _EMBEDDED
    if not path.is_file():
        raise NotFoundError(
            f"{path}: this gensim lacks the dump sample; install gensim from its wheel, or set corpus.path"
        )
    return path


def _passage(row: Mapping[str, Any]) -> Passage:
    if "text" not in row and "contents" in row:
        # wiki-18 as published for search agents: one field, the quoted title on its first line.
        title, _, text = text_field(row, "contents").partition("\n")
        return Passage(
            id=text_field(row, "id"), title=title.strip().strip('"'), text=text_field({"text": text}, "text")
        )
    return Passage(id=text_field(row, "id"), title=text_field(row, "title", default=""), text=text_field(row, "text"))


def _parsed_dump(path: Path, section: CorpusSection, progress: Progress | None) -> list[Passage]:
    key = f"{sha256_of(path)[:16]}-v{wikidump.READER_VERSION}{'-skip' if section.skip_bad else ''}"
    name = re.sub(r"[^\w.-]+", "_", path.name)[:60]
    cached = cache_folder(section.cache) / "corpus" / f"{name}-{key}.jsonl"
    if not cached.is_file():
        with locked(cached.with_suffix(".lock")):
            if not cached.is_file():
                write_rows(cached, (p.model_dump() for p in _parse(path, section.skip_bad, progress)))
    return read_passages(cached, remedy="delete this file, and the dump is parsed again")


def _parse(path: Path, skip_bad: bool, progress: Progress | None) -> Iterable[Passage]:
    """The passages of a dump. A page that comes again is the same page. Raises DataError where no article has text."""
    seen: set[str] = set()
    empty = True
    for count, article in enumerate(wikidump.read_articles(path, skip_bad=skip_bad), start=1):
        if article.id not in seen:
            seen.add(article.id)
            passages = wikidump.passages_of(article)
            empty = empty and not passages
            yield from passages
        if progress:
            progress("read articles", count, 0)
    if empty:
        raise DataError(f"{path}: no article of this dump has text; use a pages-articles dump, which holds the texts")
