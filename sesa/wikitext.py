"""From wiki mark-up to plain sentences.

`mwparserfromhell` does the parsing; what is decided here is which of its nodes are prose. Dropped: references, tables,
files, categories, link lists, formulas and templates, except the few that carry words of the sentence they stand in
({{convert|5|km}} is "5 km").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from html import unescape
from typing import Any

# Tags whose content is not prose.
_NO_PROSE = (
    "ref references gallery math table timeline score chem code syntaxhighlight source imagemap templatedata pre "
    "hiero inputbox indicator section graph maplink mapframe style"
)
_DROPPED_TAGS = frozenset(_NO_PROSE.split())
# Everything under these headings, down to the next heading of the same or a higher level, is left out.
_NO_PROSE_UNDER = (
    "see also,references,external links,further reading,notes,bibliography,sources,citations,footnotes,notes and "
    "references,references and notes,works cited,gallery,literature,primary sources,secondary sources,"
    "discography,filmography,publications,selected bibliography,selected works,endnotes,general references"
)
_DROPPED_SECTIONS = frozenset(_NO_PROSE_UNDER.split(","))
_DISAMBIGUATION = re.compile(
    r"\{\{\s*(?:disambig\w*|dab|hndis|geodis|disambiguation[ _]page|human name disambiguation|"
    r"[\w /-]+[ _]disambiguation|set index article|surname|given name)\s*[|}]",
    re.IGNORECASE,
)
_EMPTY_BRACKETS = re.compile(r"\s*[(\[][\s,;:–—-]*[)\]]")
_LOOSE_BRACKET = re.compile(r"([(\[])[\s,;:]+")
_LOOSE_END = re.compile(r"[\s,;:]+([)\]])")
_SPACE_BEFORE = re.compile(r"[ \t\xa0]+([,.;:!?])")
_SPACES = re.compile(r"[ \t\xa0\u2009\u202f]+")
# A line that still holds this has mark-up that its author broke; what is prose in it cannot be told.
_BROKEN = re.compile(r"\{\{|\}\}|\[\[|\]\]|\'\'\'|</?ref|\bthumb\||^\||!!|\{\||\|\}")
_MAGIC_WORD = re.compile(r"__[A-Z]+__")
# A list item shorter than this is an entry of an index, not a statement.
_MIN_LINE_WORDS = 6


def is_disambiguation(title: str, wikitext: str) -> bool:
    """Whether a page only lists the meanings of a word (or the bearers of a name)."""
    return title.endswith("(disambiguation)") or _DISAMBIGUATION.search(wikitext) is not None


def sections(wikitext: str) -> Iterator[str]:
    """Yield the prose of each section in order, one paragraph or list item a line; empty sections are left out."""
    import mwparserfromhell
    from mwparserfromhell.nodes import Heading

    skipping_below = 7
    parts: list[str] = []
    for node in mwparserfromhell.parse(wikitext).nodes:
        if not isinstance(node, Heading):
            if skipping_below == 7:
                parts.append(_render(node))
            continue
        if prose := _tidy("".join(parts)):
            yield prose
        parts = []
        if node.level <= skipping_below:
            dropped = _tidy(_render_all(node.title), min_words=0).lower() in _DROPPED_SECTIONS
            skipping_below = node.level if dropped else 7
    if prose := _tidy("".join(parts)):
        yield prose


def _render_all(code: Any) -> str:
    return "".join(_render(node) for node in code.nodes) if code is not None else ""


def _render(node: Any) -> str:
    from mwparserfromhell import nodes

    if isinstance(node, nodes.Text):
        return str(node.value)
    if isinstance(node, nodes.Wikilink):
        return _link(node)
    if isinstance(node, nodes.ExternalLink):
        return _render_all(node.title)
    if isinstance(node, nodes.HTMLEntity):
        return str(node.normalize())
    if isinstance(node, nodes.Tag):
        return _tag(node)
    if isinstance(node, nodes.Template):
        return _template(node)
    return ""  # comments, arguments of templates, headings inside tags


def _link(node: Any) -> str:
    target = str(node.title).strip()
    prefix = target.lstrip(":").partition(":")[0].strip()
    # "File:", "Category:", "de:" name pages of other namespaces or languages; a colon in a title has a space after it.
    if ":" in target and not target.startswith(":") and not target[len(prefix) + 1 :].startswith(" "):
        return ""
    return _render_all(node.text) if node.text is not None else target.lstrip(":")


def _tag(node: Any) -> str:
    name = str(node.tag).strip().lower()
    if name in _DROPPED_TAGS:
        return ""
    if name in ("br", "hr"):
        return "\n"
    if node.wiki_markup and name in ("li", "dd", "dt"):
        return ""  # the bullet; the words of the item follow as text
    return _render_all(node.contents)


def _template(node: Any) -> str:
    name = " ".join(str(node.name).strip().replace("_", " ").lower().split())
    values = [_render_all(p.value).strip() for p in node.params if not p.showkey]
    if name.startswith(("lang-", "lang ")) and values:
        return values[0]
    if name in _SIGNS:
        return _SIGNS[name]
    rule = _TEMPLATES.get(name)
    return rule(values) if rule and values else ""


def _convert(values: list[str]) -> str:
    if len(values) >= 4 and values[1] in ("to", "and", "by", "x", "×", "-", "–"):
        gap = " " if values[1].isalpha() else ""
        return f"{gap.join(values[:3])} {values[3]}"
    return " ".join(values[:2])


def _last(values: list[str]) -> str:
    return values[-1]


def _first(values: list[str]) -> str:
    return values[0]


_MONTH_NAMES = "January February March April May June July August September October November December"
_MONTHS = _MONTH_NAMES.split()


def _date(values: list[str]) -> str:
    parts = [v for v in values if v.isdigit()][:3]
    if len(parts) == 3 and 1 <= int(parts[1]) <= 12:
        return f"{int(parts[2])} {_MONTHS[int(parts[1]) - 1]} {parts[0]}"
    return parts[0] if parts else ""


_SIGNS = {
    "'s": "'s",
    "nbsp": " ",
    "thinsp": " ",
    "spaced ndash": " – ",
    "snd": " – ",
    "spnd": " – ",
    "mdashb": "—",
    "mdash": "—",
    "ndash": "–",
    "--": "—",
}
_TEMPLATES: dict[str, Callable[[list[str]], str]] = {
    "convert": _convert,
    "cvt": _convert,
    "lang": _last,
    "nowrap": _first,
    "nobr": _first,
    "nobreak": _first,
    "small": _first,
    "smaller": _first,
    "sc": _first,
    "vanchor": _first,
    "nihongo": _first,
    "angbr": _first,
    "frac": lambda v: " ".join([*v[:-2], "/".join(v[-2:])]) if len(v) > 1 else f"1/{v[0]}",
    "abbr": _first,
    "tooltip": _first,
    "transl": _last,
    "transliteration": _last,
    "circa": lambda v: f"c. {v[0]}",
    "c.": lambda v: f"c. {v[0]}",
    "as of": lambda v: "as of " + " ".join(v[:1]),
    "val": lambda v: v[0],
    "formatnum": _first,
    "sic": _first,
    "ship": lambda v: " ".join(v[:2]),
    "uss": lambda v: f"USS {v[0]}",
    "hms": lambda v: f"HMS {v[0]}",
    "birth date": _date,
    "death date": _date,
    "start date": _date,
    "quote": _first,
    "blockquote": _first,
    "cquote": _first,
}


def _tidy(text: str, min_words: int = _MIN_LINE_WORDS) -> str:
    """Repair what removed mark-up leaves behind (empty brackets, lonely commas) and drop lines that state nothing."""
    text = _EMPTY_BRACKETS.sub("", _MAGIC_WORD.sub("", unescape(text)))
    text = _LOOSE_END.sub(r"\1", _LOOSE_BRACKET.sub(r"\1", text))
    lines = (_SPACE_BEFORE.sub(r"\1", _SPACES.sub(" ", line)).strip(" *#:;,") for line in text.splitlines())
    return "\n".join(line for line in lines if line and len(line.split()) >= min_words and not _BROKEN.search(line))
