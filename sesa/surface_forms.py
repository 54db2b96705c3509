"""One form for numbers and dates: "twenty-one" and "21", "3.2 million" and "3200000", "May 21st" and "21 May".

Works on folded tokens (lower case, no punctuation), as `sesa.leakage` makes them. English only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

_ISO_DATE = re.compile(r"\b(\d{4})-(\d{1,2})-(\d{1,2})\b")
_SLASH_DATE = re.compile(r"\b(\d{1,2})/(\d{1,2})/(\d{4})\b")
_MONTH_NAMES = "january february march april may june july august september october november december"
_UNIT_NAMES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS_NAMES = "twenty thirty forty fifty sixty seventy eighty ninety"
_ORDINAL_NAMES = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth"
)
_MONTHS = _MONTH_NAMES.split()
_MONTH_OF = {name[:3]: name for name in _MONTHS} | {name: name for name in _MONTHS} | {"sept": "september"}
_UNITS = {word: value for value, word in enumerate(_UNIT_NAMES.split())}
_TENS = {word: 10 * value for value, word in enumerate(_TENS_NAMES.split(), start=2)}
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_ORDINALS = {word: value for value, word in enumerate(_ORDINAL_NAMES.split(), start=1)} | {
    word[:-1] + "ieth": value for word, value in _TENS.items()
}
_ROMAN = {"ii": "2", "iii": "3", "iv": "4", "vi": "6", "vii": "7", "viii": "8", "ix": "9", "xi": "11", "xii": "12"}


def spell_dates(text: str) -> str:
    """The text with dates in figures (1998-05-21, 21/05/1998) written as "21 may 1998", where they can be told."""
    text = _ISO_DATE.sub(lambda m: _written_date(m[3], m[2], m[1], m[0]), text)
    return _SLASH_DATE.sub(_read_slashes, text)


def canonical(tokens: Sequence[str]) -> list[str]:
    """The tokens with numbers as digits, ordinals as "3rd" without its ending's letters, dates as day month year."""
    return _dates(_numbers([_ROMAN.get(token, token) if i else token for i, token in enumerate(tokens)]))


def _numbers(tokens: list[str]) -> list[str]:
    out: list[str] = []
    i = 0
    while i < len(tokens):
        value, length, ordinal = _read_number(tokens, i)
        if length == 0 or (length == 1 and tokens[i] == "one"):  # "one of the": a pronoun more often than a number
            out.append(tokens[i])
            i += 1
            continue
        if length == 1 and 10 <= value <= 20 and not ordinal and tokens[i].isalpha():  # nineteen ninety-eight
            tail, more, ordinal = _read_number(tokens, i + 1)
            if more and 10 <= tail < 100 and tokens[i + 1].isalpha():
                value, length = value * 100 + tail, length + more
            else:
                ordinal = False
        text = str(value.numerator) if value.denominator == 1 else str(float(value))
        out.append(f"{text}th" if ordinal else text)
        i += length
    return out


def _read_number(tokens: Sequence[str], start: int) -> tuple[Fraction, int, bool]:
    """(value, tokens read, whether it is an ordinal) of the number that begins at ``start``; 0 tokens: none does."""
    total, current, i = Fraction(0), Fraction(0), start
    last = ""  # kind of the last token read: a number ends where the next token does not extend it
    while i < len(tokens):
        token = tokens[i]
        digits = re.fullmatch(r"(\d+(?:\.\d+)?)(st|nd|rd|th)?", token)
        if digits and not last:
            current, last = Fraction(digits[1]), "digits"
            if digits[2]:
                return current, 1, True
        elif token in _ORDINALS and (not last or (last == "tens" and _ORDINALS[token] < 10) or last == "hundred"):
            return total + current + _ORDINALS[token], i + 1 - start, True
        elif token in _UNITS and (
            not last or (last == "tens" and 0 < _UNITS[token] < 10) or last in ("hundred", "scale")
        ):
            current, last = current + _UNITS[token], "units"
        elif token in _TENS and last in ("", "hundred", "scale"):
            current, last = current + _TENS[token], "tens"
        elif token == "hundred" and last in ("units", "digits") and current < 100:
            current, last = current * 100, "hundred"
        elif token in _SCALES and last:
            total, current, last = total + current * _SCALES[token], Fraction(0), "scale"
        elif token == "and" and last in ("hundred", "scale") and _continues(tokens, i + 1):
            pass
        else:
            break
        i += 1
    return total + current, i - start, False


def _continues(tokens: Sequence[str], i: int) -> bool:
    return i < len(tokens) and (tokens[i] in _UNITS or tokens[i] in _TENS)


def _dates(tokens: list[str]) -> list[str]:
    """Month names beside a day or a year in full, the day before the month: "may 21 1998", "21 of may 1998"."""
    out: list[str] = []
    i = 0
    while i < len(tokens):
        month = _MONTH_OF.get(tokens[i])
        before, after = (out[-1] if out else ""), (tokens[i + 1] if i + 1 < len(tokens) else "")
        if month is None:
            out.append(tokens[i])
        elif _is_day(before) or (before == "of" and len(out) > 1 and _is_day(out[-2])):
            if before == "of":
                out.pop()
            out[-1:] = [_day(out[-1]), month]
        elif _is_day(after):
            out += [_day(after), month]
            i += 1
        else:
            out.append(month if re.fullmatch(r"\d{3,4}", after) else tokens[i])
        i += 1
    return out


def _is_day(token: str) -> bool:
    return re.fullmatch(r"\d{1,2}(?:th)?", token) is not None and 1 <= int(_day(token)) <= 31


def _day(token: str) -> str:
    return token.removesuffix("th")


def _written_date(day: str, month: str, year: str, otherwise: str) -> str:
    if not (1 <= int(month) <= 12 and 1 <= int(day) <= 31):
        return otherwise
    return f" {int(day)} {_MONTHS[int(month) - 1]} {year} "


def _read_slashes(match: re.Match[str]) -> str:
    first, second, year = match.groups()
    # 21/05/1998 and 05/21/1998 can be told apart; 05/06/1998 cannot and is left as it is.
    if int(first) > 12:
        return _written_date(first, second, year, match[0])
    return _written_date(second, first, year, match[0]) if int(second) > 12 else match[0]
