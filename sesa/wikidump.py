"""Reader for Wikipedia XML dumps (``pages-articles``), plain or bzip2, as a stream: memory does not grow with size."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast
from xml.etree import ElementTree

from sesa.chunking import chunks, sentences
from sesa.errors import DataError
from sesa.jsonl import open_source
from sesa.types import Passage
from sesa.wikitext import is_disambiguation, sections

# Part of the key of a parsed dump in the cache: raise it whenever the passages of an unchanged dump would change.
READER_VERSION = 2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Article:
    """One page of the article namespace, as it stands in the dump."""

    id: str
    title: str
    wikitext: str


def read_articles(path: Path, *, skip_bad: bool = False) -> Iterator[Article]:
    """Yield the articles of a dump: namespace 0, no redirects, no disambiguation pages.

    Raises DataError when the dump ends early or is damaged, saying how many articles were read before; with
    ``skip_bad`` those before the damage are kept and the rest is reported as a warning.
    """
    count = 0
    with open_source(path) as file:
        try:
            for article in _pages(cast(IO[bytes], file)):
                count += 1
                yield article
        except (ElementTree.ParseError, EOFError, OSError, zlib.error, ValueError, LookupError) as error:
            # The last two: the file declares an encoding that is unknown or that the parser cannot read.
            if not count:
                raise DataError(
                    f"{path}: is no Wikipedia dump, or damaged at its start ({error}); get a pages-articles XML file"
                ) from None
            what = f"{path}: the dump is cut off or damaged after {count} articles ({error})"
            if not skip_bad:
                raise DataError(
                    f"{what}; download it again, or set corpus.skip_bad = true to keep those articles"
                ) from None
            log.warning("%s; those articles are kept", what)
    if not count:
        raise DataError(f"{path}: no article in this dump; it must be a pages-articles XML file")


def passages_of(article: Article, words: int = 100) -> list[Passage]:
    """Cut an article into passages of about ``words`` words at sentence borders; sections are not mixed unless short.

    Ids are ``<page id>-<running number>`` and depend on the article alone.
    """
    pieces: list[list[str]] = []
    for prose in sections(article.wikitext):
        lines = sentences(prose)
        # A section too short to stand alone is read with the one before it.
        if pieces and sum(len(s.split()) for s in lines) < words // 2:
            pieces[-1].extend(lines)
        else:
            pieces.append(lines)
    texts = [text for piece in pieces for text in chunks(piece, words)]
    return [Passage(id=f"{article.id}-{i:03d}", title=article.title, text=text) for i, text in enumerate(texts)]


def _pages(file: IO[bytes]) -> Iterator[Article]:
    events = ElementTree.iterparse(file, events=("start", "end"))
    _, root = next(events)
    if _local(root.tag) != "mediawiki":
        raise ElementTree.ParseError(f"the first element is <{_local(root.tag)}>, not <mediawiki>")
    space = root.tag.removesuffix("mediawiki")
    prefixes: frozenset[str] = frozenset()
    for event, element in events:
        if event != "end":
            continue
        if element.tag == f"{space}namespaces":
            prefixes = frozenset(n.text for n in element if n.text)
        if element.tag == f"{space}page":
            article = _article(element, space, prefixes)
            root.clear()
            if article:
                yield article


def _article(page: ElementTree.Element, space: str, prefixes: frozenset[str]) -> Article | None:
    title = (page.findtext(f"{space}title") or "").strip()
    # Dumps before 2010 have no <ns>; there the prefix of the title tells.
    ns = page.findtext(f"{space}ns")
    other = ns.strip() != "0" if ns is not None else title.partition(":")[0] in prefixes
    if other or not title or page.find(f"{space}redirect") is not None:
        return None
    wikitext = page.findtext(f"{space}revision/{space}text") or ""
    if wikitext.lstrip()[:9].upper() == "#REDIRECT" or is_disambiguation(title, wikitext):
        return None
    return Article((page.findtext(f"{space}id") or title).strip(), title, wikitext)


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]
