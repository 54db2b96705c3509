"""What a search shows of a passage: the part that fits the query best."""

from __future__ import annotations

from sesa.chunking import sentences
from sesa.text import words as terms


def snippet(text: str, query: str, limit: int) -> str:
    """At most ``limit`` words of ``text`` on one line, from the start of the sentence whose words match ``query`` best.

    Counted are the distinct words of the query within the window; the earliest of the best windows is taken. A text
    that fits is given whole. Windows begin at sentences, or half a window before a match that lies deep in a long one.
    """
    tokens = text.split()
    if len(tokens) <= limit:
        return " ".join(tokens)
    wanted = set(terms(query))
    matches = [wanted.intersection(terms(token)) for token in tokens]
    starts = {0}
    at = 0
    for sentence in sentences(text):
        starts.add(at)
        at += len(sentence.split())
    starts |= {max(0, place - limit // 2) for place, found in enumerate(matches) if found}

    def gain(start: int) -> tuple[int, int]:
        window = matches[start : start + limit]
        return len(set().union(*window)), -start

    best = max((min(start, len(tokens) - limit) for start in starts), key=gain)
    return " ".join(tokens[best : best + limit])
