"""Whether a text gives an answer away: the answer itself, an alias, an inflection, or another spelling of it.

Texts are folded to tokens (no case, accents, punctuation; plural and possessive endings removed) and compared on
token borders, in two readings: as written, and with numbers and dates brought to one form ("twenty-one" and "21",
"May 21, 1998" and "21 May 1998"). A leak in either reading counts. The check is made to err towards finding one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

from sesa.surface_forms import canonical, spell_dates

_LETTERS = str.maketrans({"ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "æ": "ae", "œ": "oe", "ı": "i", "ħ": "h"})
_INITIALS = re.compile(r"\b(?:[^\W\d_]\.){2,}")
_POSSESSIVE = re.compile(r"(?<=\w)['’ʼ]s\b|(?<=s)['’ʼ](?!\w)")
_GROUPED = re.compile(r"(?<=\d)[,\u2009\u202f](?=\d{3}(?!\d))")
_TOKEN = re.compile(r"\d+\.\d+|\d+(?:st|nd|rd|th)?(?![^\W_])|[^\W_]+")
_NO_SPACES = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")

# Words that an answer may open with and that say nothing by themselves ("in 1997", "about $3 million").
_OPENING_WORDS = "the a an in on at by of to since until about around approximately circa from during"
_OPENINGS = frozenset(_OPENING_WORDS.split())


def leaked(text: str, golds: Iterable[str]) -> str | None:
    """The first of ``golds`` that ``text`` gives away, or None."""
    plain = _tokens(text)
    readings = (_stemmed(plain), _stemmed(canonical(plain)))
    return next((gold for gold in golds if _holds(text, readings, gold)), None)


def _holds(text: str, readings: tuple[list[str], list[str]], gold: str) -> bool:
    tokens = _tokens(gold)
    if not tokens:  # an answer of signs alone, such as "!!!"
        return _signs(gold) in _signs(text)
    while len(tokens) > 1 and tokens[0] in _OPENINGS:
        tokens = tokens[1:]
    if _NO_SPACES.search(gold):  # scripts without spaces have no token borders to respect
        return "".join(tokens) in "".join(_tokens(text))
    wanted = (_stemmed(tokens), _stemmed(canonical(tokens)))
    return any(_contains(reading, target) for reading, target in zip(readings, wanted, strict=True))


def _signs(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _tokens(text: str) -> list[str]:
    """Folded tokens: no case, accents, possessives or punctuation; digits of one number in one token."""
    text = unicodedata.normalize("NFKC", text)
    text = _INITIALS.sub(lambda m: m.group().replace(".", ""), text)
    text = _POSSESSIVE.sub("", text)
    text = unicodedata.normalize("NFKD", text.casefold().translate(_LETTERS))
    text = "".join(ch for ch in text if unicodedata.category(ch) not in ("Mn", "Cf"))
    text = re.sub(r"['’ʼʻ‘`´]", "", text).replace("&", " and ").replace("%", " percent ")
    text = re.sub(r"\bper cent\b", "percent", _GROUPED.sub("", text))
    return [unicodedata.normalize("NFC", token) for token in _TOKEN.findall(spell_dates(text))]


def _stemmed(tokens: Iterable[str]) -> list[str]:
    return [_singular(token) for token in tokens]


def _singular(token: str) -> str:
    """The token without an English plural ending; names such as "Paris" and "Jesus" stay."""
    if len(token) < 4 or not token.isalpha():
        return token
    if token.endswith("ies") and len(token) > 4:
        return token[:-3] + "y"
    if token.endswith(("sses", "xes", "ches", "shes", "zzes")):
        return token[:-2]
    return token[:-1] if token.endswith("s") and not token.endswith(("ss", "us", "is")) else token


def _contains(tokens: Sequence[str], target: Sequence[str]) -> bool:
    """Whether ``target`` occurs in ``tokens`` on token borders; longer words also where they are split differently.

    "Spider-Man" and "Spiderman", "J. K. Rowling" and "JK Rowling" are the same letters between token borders.
    """
    n = len(target)
    if any(list(tokens[i : i + n]) == list(target) for i in range(len(tokens) - n + 1)):
        return True
    joined = "".join(target)
    if len(joined) < 6 or not joined.isalpha():
        return False
    for start in range(len(tokens)):
        built = ""
        for token in tokens[start:]:
            built += token
            if built == joined:
                return True
            if not joined.startswith(built):
                break
    return False
