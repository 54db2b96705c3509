"""Corpus readers: JSONL rows, Wikipedia dumps, chunks, fingerprints, and what each says about bad input."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from embedded_corpus import embedded_corpus
from hypothesis import given
from hypothesis import strategies as st

from sesa.chunking import chunks, sentences
from sesa.config import CorpusSection
from sesa.corpus import Corpus, embedded_dump, load_corpus, read_passages
from sesa.errors import ConfigError, DataError, NotFoundError, ServerError, StorageFullError
from sesa.files import cache_folder, disk_errors, expanded, locked, replacing
from sesa.types import Passage
from sesa.wikidump import Article, passages_of, read_articles
from sesa.wikitext import is_disambiguation, sections

DATA = Path(__file__).parents[2] / "shared/data"
ROW = {"id": "p1", "title": "Ada Lovelace", "text": "Ada Lovelace wrote the first program.", "sources": ["x"]}


def rows(path: Path, *lines: Any) -> Path:
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def page(title: str, text: str, ns: str = "<ns>0</ns>", extra: str = "", number: int = 1) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return (
        f"<page><title>{title}</title>{ns}<id>{number}</id>{extra}"
        f"<revision><id>9{number}</id><text>{escaped}</text></revision></page>"
    )


def dump(*pages: str) -> bytes:
    space = 'xmlns="http://www.mediawiki.org/xml/export-0.10/"'
    names = "<siteinfo><namespaces><namespace key='1'>Talk</namespace></namespaces></siteinfo>"
    return f"<mediawiki {space}>{names}{''.join(pages)}</mediawiki>".encode()


PROSE = "The aardvark is a medium-sized mammal of Africa. It digs for ants and termites at night. " * 3


# ----------------------------------------------------------------------------------------------------------- JSONL


def test_rows_are_read_and_further_fields_ignored(tmp_path: Path) -> None:
    (passage,) = read_passages(rows(tmp_path / "p.jsonl", ROW))
    assert passage == Passage(id="p1", title="Ada Lovelace", text="Ada Lovelace wrote the first program.")


def test_wiki18_rows_and_packed_files(tmp_path: Path) -> None:
    line = json.dumps({"id": "7", "contents": '"Aaron"\nAaron is a prophet.'}).encode()
    for name, pack in (("a.jsonl.gz", gzip.compress), ("a.jsonl.bz2", bz2.compress)):
        (tmp_path / name).write_bytes(pack(line))
        corpus = load_corpus(CorpusSection(path=str(tmp_path / name)))
        assert corpus.by_id["7"] == Passage(id="7", title="Aaron", text="Aaron is a prophet.")


BAD_ROWS: list[tuple[Any, str]] = [
    (ROW, "second time"),
    ({**ROW, "id": "p2", "text": "  "}, "text: is empty"),
    ({"id": "p3", "title": "T"}, "text: missing"),
    ({**ROW, "id": 4}, "id: must be a string, got 4"),
    ({**ROW, "id": "p5", "text": ["a"]}, "text: must be a string, got ['a']"),
    ({**ROW, "id": "p6", "title": 3}, "title: must be a string"),
    ([1, 2], "must be a JSON object"),
    (b'{"id": "p8", ', "not valid JSON"),
    (b'{"id": "p9", "text": "\xff\xfe"}', "not valid UTF-8 at byte 22"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_ROWS)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, bad: Any, reason: str) -> None:
    path = rows(tmp_path / "p.jsonl", ROW, b"", bad, {**ROW, "id": "last"})
    with pytest.raises(DataError) as caught:
        read_passages(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ") and reason in message and "1 of 3 rows" in message
    assert "skip_bad" in message and "\n" not in message
    assert [p.id for p in read_passages(path, skip_bad=True)] == ["p1", "last"]


def test_all_bad_rows_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    path = rows(tmp_path / "p.jsonl", *(bad for bad, _ in BAD_ROWS))
    with pytest.raises(DataError, match="8 of 9 rows") as caught:
        read_passages(path)
    assert f"{path}:2: text: is empty" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_files_without_rows(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match="holds no rows"):
        read_passages(path)


def test_nothing_left_after_skipping_is_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no row is left"):
        read_passages(rows(tmp_path / "p.jsonl", b"nonsense"), skip_bad=True)


def test_missing_foreign_and_cut_off_files(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        load_corpus(CorpusSection(path=str(tmp_path / "none.jsonl")))
    with pytest.raises(DataError, match="is no regular file"):
        load_corpus(CorpusSection(path=str(tmp_path)))
    (tmp_path / "x.csv").write_text("id,title,text\n")
    with pytest.raises(DataError, match="neither JSONL passages"):
        load_corpus(CorpusSection(path=str(tmp_path / "x.csv")))
    many = b"".join(json.dumps({**ROW, "id": f"p{i}"}).encode() + b"\n" for i in range(5000))
    (tmp_path / "cut.gz").write_bytes(gzip.compress(many)[:-2000])
    with pytest.raises(DataError, match="cut off or damaged"):
        read_passages(tmp_path / "cut.gz")


def test_a_byte_order_mark_costs_no_row_and_an_empty_file_is_called_so(tmp_path: Path) -> None:
    path = rows(tmp_path / "p.jsonl", b"\xef\xbb\xbf" + json.dumps(ROW).encode(), {**ROW, "id": "p2"})
    assert [p.id for p in load_corpus(CorpusSection(path=str(path))).passages] == ["p1", "p2"]
    (tmp_path / "none.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match=r"none\.jsonl: is empty"):
        load_corpus(CorpusSection(path=str(tmp_path / "none.jsonl")))


def test_pipes_and_devices_are_refused_and_do_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(DataError, match="is no regular file"):
            load_corpus(CorpusSection(path=str(path)))
        with pytest.raises(DataError, match="is no regular file"):
            list(read_articles(path))


def test_fingerprint_follows_content_and_order() -> None:
    a, b = (Passage(id=i, title="t", text=f"text {i}") for i in "ab")
    prints = {Corpus.of(ps, "x").fingerprint for ps in ([a, b], [b, a], [a], [a, b.model_copy(update={"text": "c"})])}
    assert len(prints) == 4
    assert Corpus.of([a, b], "x").fingerprint == Corpus.of([a, b], "elsewhere").fingerprint
    with pytest.raises(DataError, match="occurs twice"):
        Corpus.of([a, a], "x")


# ---------------------------------------------------------------------------------------------------------- chunks


def test_sentences_do_not_end_at_abbreviations_and_initials() -> None:
    text = (
        'Dr. J. S. Bach lived in St. Ives, U.S. territory. He died in No. 5 St. James! "Why?" Nobody knows.\nNew line'
    )
    assert sentences(text) == [
        "Dr. J. S. Bach lived in St. Ives, U.S. territory.",
        "He died in No. 5 St. James!",
        '"Why?"',
        "Nobody knows.",
        "New line",
    ]


@given(st.lists(st.lists(st.text("abc.A", min_size=1, max_size=4), min_size=1, max_size=60).map(" ".join), max_size=30))
def test_chunks_keep_every_word_in_order_and_their_length(parts: list[str]) -> None:
    out = chunks(parts, 40)
    assert [w for c in out for w in c.split()] == [w for p in parts for w in p.split()]
    assert all(1 <= len(c.split()) <= 100 for c in out)


@given(st.text(max_size=300))
def test_sentences_keep_every_word(text: str) -> None:
    assert [w for s in sentences(text) for w in s.split()] == text.split()


# ------------------------------------------------------------------------------------------------------- mark-up


def test_mark_up_is_removed_and_prose_kept() -> None:
    wiki = (
        "{{Infobox person|name=Ada}}[[File:Ada.jpg|thumb|A [[portrait]] of Ada]]\n"
        "'''Ada Lovelace''' (''née'' [[George Gordon Byron|Byron]]; {{IPA|x}}) lived {{convert|5|km|mi}} from "
        "[[London]]<ref name=a>Cited [[here]]</ref>, where&nbsp;she wrote."
        "<!-- hidden --> See [http://x.org the site].\n"
        "{| class=wikitable\n! Head\n|-\n| cell of a table\n|}\n"
        "* A list item that states something about her work.\n* [[Bare]]\n"
        "== See also ==\n* A list of links that must not be read as prose at all.\n"
        "=== Deeper ===\nStill in that list of links and so not prose.\n"
        "== Death ==\nShe died in 1852 of cancer, as her father. [[Category:Women]][[de:Ada Lovelace]]\n"
    )
    lead, death = sections(wiki)
    assert lead == (
        "Ada Lovelace (née Byron) lived 5 km from London, where she wrote. See the site.\n"
        "A list item that states something about her work."
    )
    assert death == "She died in 1852 of cancer, as her father."


@pytest.mark.parametrize(
    "broken", ["{{unclosed | template [[link", "<ref>never closed", "{| table\n| cell", "]] }} |}"]
)
def test_broken_mark_up_neither_raises_nor_shows(broken: str) -> None:
    text = "\n".join(sections(f"{PROSE}\n{broken}\n\n{PROSE}"))
    assert "aardvark" in text
    assert not any(sign in text for sign in ("{{", "[[", "]]", "}}", "<ref"))


def test_disambiguation_pages_are_known_by_template_or_title() -> None:
    assert is_disambiguation("Ada", "'''Ada''' may be:\n* x\n{{disambiguation|geo}}")
    assert is_disambiguation("Ada", "{{Geodis}}") and is_disambiguation("Ada (disambiguation)", "")
    assert not is_disambiguation("Ada", "{{about|a person|others|Ada (disambiguation)}} Ada was")


# ------------------------------------------------------------------------------------------------------------ dumps


def test_only_articles_are_read(tmp_path: Path) -> None:
    path = tmp_path / "dump.xml"
    path.write_bytes(
        dump(
            page("Aardvark", PROSE),
            page("Talk:Aardvark", PROSE, ns="<ns>1</ns>", number=2),
            page("Talk:Old", PROSE, ns="", number=3),
            page("Old: a story", PROSE, ns="", number=4),
            page("Earth pig", "#REDIRECT [[Aardvark]]", number=5),
            page("Ant bear", PROSE, extra='<redirect title="Aardvark"/>', number=6),
            page("Pig", "'''Pig''' may be\n{{disambig}}", number=7),
        )
    )
    assert [a.title for a in read_articles(path)] == ["Aardvark", "Old: a story"]
    corpus = load_corpus(CorpusSection(path=str(path), cache=str(tmp_path / "cache")))
    assert {p.title for p in corpus.passages} == {"Aardvark", "Old: a story"}
    assert corpus.passages[0].id == "1-000" and corpus.passages[0].text.startswith("The aardvark is")


@pytest.mark.parametrize("packed", [False, True])
def test_a_truncated_dump_says_how_much_was_read(tmp_path: Path, packed: bool) -> None:
    whole = dump(*(page(f"Article {i}", f"{PROSE} {i * 7919}", number=i + 1) for i in range(2000)))
    path = tmp_path / "dump.xml.bz2"
    path.write_bytes(bz2.compress(whole, 1)[:-2000] if packed else whole[: len(whole) // 2])
    section = CorpusSection(path=str(path), cache=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"cut off or damaged after \d+ articles") as caught:
        load_corpus(section)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.jsonl")), "nothing half-written"
    kept = load_corpus(section.model_copy(update={"skip_bad": True}))
    assert 500 < len({p.title for p in kept.passages}) < 2000


def test_a_dump_of_which_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "dump.xml.bz2"
    path.write_bytes(bz2.compress(dump(page("Aardvark", PROSE)))[:60])
    with pytest.raises(DataError, match="cut off or damaged, nothing of it can be read"):
        load_corpus(CorpusSection(path=str(path), cache=str(tmp_path)))


def test_a_dump_without_articles(tmp_path: Path) -> None:
    path = tmp_path / "d.xml"
    path.write_bytes(dump(page("Talk:A", PROSE, ns="<ns>1</ns>")))
    with pytest.raises(DataError, match="no article"):
        list(read_articles(path))
    path.write_bytes(b"<html><body>Not found</body></html>")
    with pytest.raises(DataError, match="<html>, not <mediawiki>"):
        list(read_articles(path))


@pytest.mark.parametrize(
    "content",
    [
        b"<html><p>Not found<br></html>",
        dump(page("A", PROSE))[:200],
        b'<?xml version="1.0" encoding="no-such"?>' + dump(page("A", PROSE)),
        b'<?xml version="1.0" encoding="shift_jis"?>' + dump(page("A", PROSE)),
    ],
)
def test_what_is_no_dump_is_not_said_to_hold_articles_to_keep(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "d.xml"
    path.write_bytes(content)
    for skip_bad in (False, True):
        with pytest.raises(DataError, match="is no Wikipedia dump, or damaged at its start") as caught:
            list(read_articles(path, skip_bad=skip_bad))
        assert "skip_bad" not in str(caught.value)


def test_a_page_that_comes_twice_is_read_once_and_a_dump_without_text_is_not_cached(tmp_path: Path) -> None:
    path = tmp_path / "d.xml"
    section = CorpusSection(path=str(path), cache=str(tmp_path / "cache"))
    path.write_bytes(dump(page("Aardvark", PROSE), page("Aardvark", PROSE), page("Bee", PROSE, number=2)))
    assert [p.id for p in load_corpus(section).passages] == ["1-000", "2-000"]
    path.write_bytes(dump(page("Aardvark", "")))
    before = sorted((tmp_path / "cache").rglob("*.jsonl"))
    with pytest.raises(DataError, match=r"d\.xml: no article of this dump has text"):
        load_corpus(section)
    assert sorted((tmp_path / "cache").rglob("*.jsonl")) == before


def test_the_parsed_dump_is_cached_by_content(tmp_path: Path) -> None:
    path = tmp_path / "d.xml"
    section = CorpusSection(path=str(path), cache=str(tmp_path / "cache"))
    path.write_bytes(dump(page("Aardvark", PROSE)))
    calls: list[int] = []
    first = load_corpus(section, lambda stage, done, total: calls.append(done))
    assert calls == [1]
    assert load_corpus(section, lambda *_: calls.append(9)).fingerprint == first.fingerprint and calls == [1]
    path.write_bytes(dump(page("Aardvark", PROSE + "They are nocturnal and live alone.")))
    assert load_corpus(section).fingerprint != first.fingerprint


def test_passages_have_about_a_hundred_words_and_stable_ids() -> None:
    article = Article("42", "Aardvark", "\n== H ==\n".join(PROSE * n for n in (4, 1, 9)))
    passages = passages_of(article)
    assert passages == passages_of(article)
    assert [p.id for p in passages] == [f"42-{i:03d}" for i in range(len(passages))]
    assert all(50 <= len(p.text.split()) <= 160 and p.title == "Aardvark" for p in passages)


def test_the_embedded_corpus() -> None:
    corpus = embedded_corpus()
    lengths = sorted(len(p.text.split()) for p in corpus.passages)
    assert 4000 < len(corpus) < 6000 and 80 < lengths[len(lengths) // 2] < 120 and lengths[-1] <= 250
    assert {"Abraham Lincoln", "Alaska", "Aristotle"} <= {p.title for p in corpus.passages}
    assert not [p.id for p in corpus.passages if "{{" in p.text or "[[" in p.text or "<ref" in p.text]


def test_the_embedded_dump_is_found_without_importing_gensim() -> None:
    code = "import sys; from sesa.corpus import embedded_dump; embedded_dump(); print('gensim' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
    assert embedded_dump().stat().st_size > 10**6


@pytest.mark.skipif(not DATA.is_dir(), reason="shared data absent")
def test_the_shared_passages() -> None:
    assert len(load_corpus(CorpusSection(path=str(DATA / "passages.jsonl")))) == 22_381


# ------------------------------------------------------------------------------------------------------------ files


def test_replacing_leaves_the_old_file_when_the_block_fails(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(RuntimeError), replacing(target) as new:
        new.write_text("half")
        raise RuntimeError
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]
    for content in ("one", "two"):
        with replacing(tmp_path / "folder") as new:
            new.mkdir()
            (new / "f").write_text(content)
    assert (tmp_path / "folder/f").read_text() == "two" and len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_is_named() -> None:
    with (
        pytest.raises(StorageFullError, match="the disk is full"),
        disk_errors(Path("/dev")),
        Path("/dev/full").open("w") as f,
    ):
        f.write("x")
        f.flush()


def test_a_cache_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "d.xml"
    path.write_bytes(dump(page("Aardvark", PROSE)))
    for cache in (str(tmp_path / "file"), str(tmp_path / "file" / "below"), "/proc/none", f"{tmp_path}/{'x' * 5000}"):
        with pytest.raises(ConfigError, match=r"name another with corpus\.cache \(--cache\)") as caught:
            load_corpus(CorpusSection(path=str(path), cache=cache))
        assert str(caught.value).startswith(cache[:100]) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be written"), locked(tmp_path / "file" / "lock"):
        pass


def test_errors_of_other_places_pass_a_cache_block_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), disk_errors(tmp_path / "cache"):
        (tmp_path / "elsewhere").read_bytes()
    with pytest.raises(ServerError), disk_errors(tmp_path):
        raise ServerError("no server")


def test_a_home_folder_that_does_not_exist(tmp_path: Path) -> None:
    assert expanded("~") == Path.home() and expanded(tmp_path) == tmp_path
    for refused in (cache_folder, lambda path: load_corpus(CorpusSection(path=path))):
        with pytest.raises(ConfigError, match="~no-such-user/x: there is no such home folder"):
            refused("~no-such-user/x")
