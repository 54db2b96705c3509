"""Sentence borders and chunks: a text becomes pieces of about so many words that begin and end at sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

# A stop, closing quotes or brackets, white space, then something that can begin a sentence.
_BORDER = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+(?=[\"'“‘(\[]*[A-Z0-9À-ÖØ-Þ])|\n+")
_ABBREVIATED = (
    "mr mrs ms dr prof rev fr st sts mt ft sgt lt col gen capt cmdr adm maj hon jr sr bros vs v no nos vol vols pp p "
    "ch fig figs ed eds al ca c cf viz approx est e.g i.e u.s u.k d.c a.d b.c jan feb mar apr jun jul aug sep sept oct "
    "nov dec inc ltd co corp dept univ op art sec km cm mm lb oz"
)
_ABBREVIATIONS = frozenset(_ABBREVIATED.split())
_LAST_WORD = re.compile(r"([\w.]+)\.$")


def sentences(text: str) -> list[str]:
    """Split English prose into sentences; line breaks always separate. White space inside is collapsed.

    Abbreviations, initials ("J. S. Bach") and numbers ("No. 5") do not end a sentence.
    """
    pieces: list[str] = []
    start = 0
    for border in _BORDER.finditer(text):
        before = text[start : border.start()]
        if "\n" not in border.group() and _abbreviated(before):
            continue
        pieces.append(text[start : border.end()])
        start = border.end()
    pieces.append(text[start:])
    return [sentence for piece in pieces if (sentence := " ".join(piece.split()))]


def chunks(parts: Sequence[str], words: int = 100) -> list[str]:
    """Join sentences to chunks of about ``words`` words and equal length, in order; none is cut unless it is longer
    than two chunks.

    All words of ``parts`` occur in the result, in order. Equal length instead of filling up avoids a stump at the end.
    """
    units = [unit for part in parts for unit in _cut(part.split(), 2 * words)]
    total = sum(len(unit) for unit in units)
    if not total:
        return []
    target = total / max(1, round(total / words))
    out: list[str] = []
    current: list[str] = []
    done = 0
    for unit in units:
        # The border nearest to the next multiple of the target decides, so that errors do not add up.
        border = target * (len(out) + 1)
        if current and done + len(current) + len(unit) / 2 > border:
            out.append(" ".join(current))
            done += len(current)
            current = []
        current.extend(unit)
    return [*out, " ".join(current)]


def _abbreviated(text: str) -> bool:
    match = _LAST_WORD.search(text)
    if not match:
        return False
    word = match.group(1)
    return (len(word) == 1 and word.isupper()) or word.lower() in _ABBREVIATIONS


def _cut(unit: list[str], limit: int) -> list[list[str]]:
    if len(unit) <= limit:
        return [unit] if unit else []
    size = math.ceil(len(unit) / math.ceil(2 * len(unit) / limit))
    return [unit[at : at + size] for at in range(0, len(unit), size)]
