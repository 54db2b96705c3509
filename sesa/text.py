"""Normalisation of answers and queries, shared by rewards, validity checks and admission."""

from __future__ import annotations

import re
import unicodedata

# Letters by Unicode category that serve as apostrophes in names (Hawaiʻi), and signs that compatibility
# normalisation would spell out ("™" becomes "TM", "´" becomes a space and a combining mark).
_DROPPED = dict.fromkeys(map(ord, "ʻʼʹʽˈ´™®©℠−"))
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalise(text: str) -> str:
    """Answer normalisation of SQuAD: lower case, no punctuation, no articles, single spaces.

    Source: the evaluation script of SQuAD 1.1 (arXiv 1606.05250), used by every data set of the evaluation. Beyond
    ASCII the same idea: compatibility forms are unified (full-width letters, composed accents), all Unicode
    punctuation, currency signs and invisible characters are removed like their ASCII kin. Accents are kept, as there.
    """
    text = unicodedata.normalize("NFKC", text.translate(_DROPPED)).casefold()
    text = "".join(ch for ch in text if not _is_punctuation(ch))
    return " ".join(_ARTICLES.sub(" ", text).split())


def comparable(text: str) -> str:
    """``normalise``, but never empty for a text that is not: "The The", "A" and "!!!" are answers too."""
    return normalise(text) or " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def words(text: str) -> list[str]:
    """Lower-case words of a text without punctuation, for counting and for finding copied runs."""
    return re.findall(r"[^\W_]+(?:['’][^\W_]+)*", unicodedata.normalize("NFKC", text).casefold())


def longest_shared_run(text: str, source: str, at_least: int = 1) -> int:
    """Length in words of the longest run of consecutive words that ``text`` shares with ``source``.

    0 where it is shorter than ``at_least``, which is found out without comparing every pair of words.
    """
    ours, theirs = words(text), words(source)
    if not _runs(ours, at_least) & _runs(theirs, at_least):
        return 0
    best = 0
    previous = [0] * (len(theirs) + 1)
    for word in ours:
        current = [0] * (len(theirs) + 1)
        for j, other in enumerate(theirs):
            if word == other:
                current[j + 1] = previous[j] + 1
                best = max(best, current[j + 1])
        previous = current
    return best


def _runs(tokens: list[str], n: int) -> set[tuple[str, ...]]:
    return {tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)}


def _is_punctuation(ch: str) -> bool:
    category = unicodedata.category(ch)
    # ASCII symbols ($ + < = > ^ ` | ~) are punctuation to SQuAD; other symbols (° ×) carry meaning and stay.
    return category[0] == "P" or category in ("Sc", "Cf") or (category[0] == "S" and ch.isascii())
