"""Seed answers: the targets that the proposer poses questions about, extracted from a corpus or read from a file."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from sesa.chunking import sentences
from sesa.config import CorpusSection
from sesa.corpus import Corpus, Progress
from sesa.errors import ConfigError
from sesa.files import cache_folder, expanded, locked
from sesa.jsonl import read_rows, text_field, write_rows
from sesa.types import Passage, SeedAnswer

# Part of the key of extracted seeds in the cache: raise it when other seeds would come out of an unchanged corpus.
VERSION = 1
_REMEDY = "mend the file, or set corpus.skip_bad = true to leave such rows out"

Kind = Literal["entity", "date", "number"]
_KINDS: tuple[Kind, ...] = get_args(Kind)

_MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
_YEAR = r"(?:1\d{3}|20\d{2})"
_DATE = re.compile(
    rf"\b(?:{_MONTH} \d{{1,2}}, {_YEAR}|\d{{1,2}} {_MONTH} {_YEAR}|{_MONTH} {_YEAR}"
    rf"|(?<=\b[Ii]n ){_YEAR}(?! to| and|[–-])|(?<=\b[Ss]ince ){_YEAR}|\d{{1,4}} (?:BCE?|AD|CE)"
    r"|\d{1,2}(?:st|nd|rd|th) century)\b"
)
_UNIT_NAMES = (
    "percent|per cent|km|km²|km2|kilometres|kilometers|metres|meters|square miles|sq mi|miles|mi|feet|ft|inches|cm|mm|"
    "kg|kilograms|tonnes|tons|pounds|grams|litres|hectares|acres|years|days|months|weeks|hours|minutes|seconds|degrees|"
    "°C|°F|K|volts|watts|people|inhabitants|members|soldiers|troops|men|women|children|students|species|islands|"
    "countries|states|provinces|languages|seats|votes|points|goals|matches|games|episodes|films|books|songs|albums|"
    "copies|dollars|euros"
)
# Longest first: an alternation takes the first that fits.
_UNIT = "|".join(sorted(_UNIT_NAMES.split("|"), key=len, reverse=True))
_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
_QUANTITY = re.compile(
    rf"(?<![\w.,$€£–-])(?:[$€£](?:{_NUMBER})(?: (?:million|billion|trillion))?"
    rf"|(?:{_NUMBER}) (?:million|billion|trillion)(?: (?:{_UNIT}))?|(?:{_NUMBER}) (?:{_UNIT})|(?:{_NUMBER})%"
    r"|\d{1,3}(?:,\d{3})+)(?![\w%²])"
)
_WORD = r"(?:(?:[A-ZÀ-ÖØ-Þ]\.)+|(?:Dr|St|Mt|Ft|Jr|Sr|Wm)\.|[A-ZÀ-ÖØ-Þ][\w'’&-]*)"
# Names go on over small words ("Battle of the Nile", "Vasco da Gama") but do not end in one.
_LINK = "of the|of|de la|de|da|del|di|du|van der|van den|van|von der|von|al|el|bin|ibn|la|le"
_NAME = re.compile(rf"(?<!\w){_WORD}(?: (?:(?:{_LINK}) )?{_WORD})*")
_TOKEN = re.compile(r"[$€£°]?\w+(?:[.'’,-]\w+)*%?")
_TRAILING = re.compile(r"['’]s?$|[,&-]+$")
_LONGEST = 6
# Never the first or last word of a name, nor a name by themselves.
_STOP_NAMES = (
    "a an the this that these those he she it they we you i his her its their our my your who what when where why how "
    "which there here in on at by for from with without under over after before during while since until as if and or "
    "although though because but nor so yet however moreover furthermore therefore thus also both either neither each "
    "every all some any many most more few several other another such only even not no one two three four five six "
    "seven eight nine ten first second third today according despite like unlike to of into through between among "
    "about against monday tuesday wednesday thursday friday saturday sunday january february march april may june july "
    "august september october november december ii iii iv vi vii viii ix xi xii bc ad bce ce mr mrs ms dr sir lord "
    "lady king queen president prime minister saint st north south east west northern southern eastern western us uk "
    "note see chapter section part table figure vol ed eds pp isbn p"
)
_STOP = frozenset(_STOP_NAMES.split())


def load_seeds(section: CorpusSection, corpus: Corpus, progress: Progress | None = None) -> list[SeedAnswer]:
    """The seeds of a run: read from ``section.seeds`` where set, else extracted from the corpus once and cached.

    Raises NotFoundError and DataError (file, line, reason, remedy).
    """
    if section.seeds:
        return matching(read_seeds(expanded(section.seeds), skip_bad=section.skip_bad), section)
    cached = cache_folder(section.cache) / "seeds" / f"{corpus.fingerprint[:16]}-v{VERSION}.jsonl"
    if not cached.is_file():
        with locked(cached.with_suffix(".lock")):
            if not cached.is_file():
                write_rows(cached, (seed.model_dump(mode="json") for seed in extract_seeds(corpus, progress=progress)))
    return matching(read_seeds(cached), section)


def matching(seeds: list[SeedAnswer], section: CorpusSection) -> list[SeedAnswer]:
    """The seeds that ``seed_pattern`` lets through. Raises ConfigError for a bad pattern and where none is left."""
    if not section.seed_pattern:
        return seeds
    pattern = re.compile(section.seed_pattern)  # the configuration has made sure that it is one
    chosen = [seed for seed in seeds if pattern.fullmatch(seed.answer)]
    if not chosen:
        raise ConfigError(f"corpus.seed_pattern: {section.seed_pattern!r} matches none of {len(seeds)} seed answers")
    return chosen


def read_seeds(path: Path, *, skip_bad: bool = False) -> list[SeedAnswer]:
    """Read JSONL seed answers: answer; and optionally id, type, aliases, passage_ids, hops. Others are ignored.

    An id that is not given is a hash of the answer. An answer or id that occurs again is a bad row.
    Raises NotFoundError; DataError naming the first bad row and their number.
    """
    seen: set[str] = set()

    def parse(row: Mapping[str, Any]) -> SeedAnswer:
        seed = _seed(row)
        if seed.id in seen:
            raise ValueError(f"id: {seed.id!r} ({seed.answer}) occurs for the second time")
        seen.add(seed.id)
        return seed

    return read_rows(path, parse, skip_bad=skip_bad, remedy=_REMEDY)[0]


def extract_seeds(
    corpus: Corpus, *, max_passages: int = 20, limit: int = 50_000, progress: Progress | None = None
) -> list[SeedAnswer]:
    """Names, dates and quantities that occur in 1 to ``max_passages`` passages, each with those passages.

    By rule: runs of capitalised words whose capital is not owed to the start of a sentence, article titles, dates from
    a year upwards, numbers with a unit. What occurs in more passages is too general to ask for. Deterministic; ordered
    by a hash of the answer, so that any prefix is a fair sample; at most ``limit`` (paper: 50,000 seeds).
    """
    candidates = _candidates(corpus, progress)
    lengths: dict[str, set[int]] = defaultdict(set)
    for key in candidates:
        lengths[key.split(" ", 1)[0]].add(key.count(" ") + 1)
    found: dict[str, list[str]] = defaultdict(list)
    for passage in _counted(corpus, "place seed answers", progress):
        for key in _runs(passage.text, lengths) & candidates.keys():
            found[key].append(passage.id)
    seeds = [
        SeedAnswer(id=_seed_id(answer), answer=answer, type=kind, passage_ids=tuple(ids))
        for key, (answer, kind) in candidates.items()
        if 1 <= len(ids := found.get(key, ())) <= max_passages
    ]
    return sorted(seeds, key=lambda seed: seed.id)[:limit]


def _candidates(corpus: Corpus, progress: Progress | None) -> dict[str, tuple[str, Kind]]:
    """Token key -> (answer as written, type), in order of appearance."""
    usage = _Capitals(passage.text for passage in corpus.passages)
    out: dict[str, tuple[str, Kind]] = {}
    alone: Counter[str] = Counter()

    def add(answer: str, kind: Kind) -> None:
        key = _key(answer)
        if key and key.count(" ") < _LONGEST:
            out.setdefault(key, (answer, kind))

    for passage in _counted(corpus, "find seed answers", progress):
        for match in _DATE.finditer(passage.text):
            add(match.group(), "date")
        for match in _QUANTITY.finditer(passage.text):
            add(match.group(), "number")
        title = re.sub(r" \(.*\)$", "", passage.title)
        if title and usage.is_name(title.split()[0]) and not title.startswith("List of"):
            add(title, "entity")
        for name in _names(passage.text, usage):
            if " " in name:
                add(name, "entity")
            else:
                alone[name] += 1
    for name, count in alone.items():
        # A single word that mostly stands inside longer names is a first name or half of something.
        if count >= 2 and 2 * count >= usage.count(name):
            add(name, "entity")
    return out


def _names(text: str, usage: _Capitals) -> Iterator[str]:
    for sentence in sentences(text):
        for match in _NAME.finditer(sentence):
            words = match.group().split()
            # The capital of a sentence's first word tells nothing; how the word is written elsewhere does.
            doubtful = not any(ch.isalnum() for ch in sentence[: match.start()])
            while words and (_stops(words[0]) or words[0].islower() or (doubtful and not usage.is_name(words[0]))):
                doubtful = False
                words = words[1:]
            while words and (_stops(words[-1]) or words[-1].islower()):
                words = words[:-1]
            name = _TRAILING.sub("", " ".join(words))
            single = len(words) == 1
            if len(name) > 3 and len(words) <= _LONGEST and not (single and not usage.is_name(name)):
                yield name


class _Capitals:
    """How often each word stands capitalised inside a sentence, and how often in small letters."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._capital: Counter[str] = Counter()
        self._small: Counter[str] = Counter()
        for text in texts:
            end = 0
            for match in _TOKEN.finditer(text):
                word = match.group()
                if word[0].islower():
                    self._small[word] += 1
                elif end and text[end : match.start()] in (" ", " (", ", "):
                    self._capital[_bare(word)] += 1
                end = match.end()

    def count(self, word: str) -> int:
        """How often the word stands capitalised inside a sentence."""
        return self._capital[_bare(word)]

    def is_name(self, word: str) -> bool:
        """A capital inside a sentence, and small letters rare beside it."""
        word = _bare(word)
        return self._capital[word] > 3 * self._small[word.lower()]


@cache
def _bare(word: str) -> str:
    return _TRAILING.sub("", word).rstrip(".")


def _stops(word: str) -> bool:
    return _bare(word).lower() in _STOP


def _key(answer: str) -> str:
    return " ".join(_TOKEN.findall(answer))


def _runs(text: str, lengths: Mapping[str, set[int]]) -> set[str]:
    """Runs of tokens that begin with a known first token and have a length known for it."""
    tokens = _TOKEN.findall(text)
    # "Babbage's" holds "Babbage".
    plain = [token[:-2] if token.endswith(("'s", "’s")) else token for token in tokens]
    runs: set[str] = set()
    for i, first in enumerate(tokens):
        for n in lengths.get(first, ()):
            runs.add(" ".join(tokens[i : i + n]))
            if plain[min(i + n, len(tokens)) - 1] is not tokens[min(i + n, len(tokens)) - 1]:
                runs.add(" ".join([*tokens[i : i + n - 1], plain[min(i + n, len(tokens)) - 1]]))
        if plain[i] is not first and 1 in lengths.get(plain[i], ()):
            runs.add(plain[i])
    return runs


def _counted(corpus: Corpus, stage: str, progress: Progress | None) -> Iterator[Passage]:
    for count, passage in enumerate(corpus.passages, start=1):
        yield passage
        if progress and (count % 1000 == 0 or count == len(corpus)):
            progress(stage, count, len(corpus))


def _seed(row: Mapping[str, Any]) -> SeedAnswer:
    answer = text_field(row, "answer")
    kind = row.get("type", "entity")
    if kind not in _KINDS:
        raise ValueError(f"type: must be one of {', '.join(_KINDS)}, got {kind!r}")
    hops = row.get("hops", 1)
    if not isinstance(hops, int) or isinstance(hops, bool) or hops < 1:
        raise ValueError(f"hops: must be a number from 1, got {hops!r}")
    return SeedAnswer(
        id=text_field(row, "id", default="") or _seed_id(answer),
        answer=answer,
        aliases=_strings(row, "aliases"),
        type=kind,
        passage_ids=_strings(row, "passage_ids"),
        hops=hops,
    )


def _strings(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = row.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise ValueError(f"{name}: must be a list of strings")
    return tuple(value)


def _seed_id(answer: str) -> str:
    return "a" + hashlib.sha256(answer.encode()).hexdigest()[:12]
