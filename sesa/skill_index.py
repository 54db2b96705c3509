"""Dense search over the texts of skills: exact cosine similarity, deterministic."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sesa.types import Skill

# A text's float32 vector depends on its neighbours in the encoder's batch by some 1e-7, and so do float32 products on
# their shapes. Similarities are therefore summed in float64 and rounded before they are ranked, so that a question
# finds the same skills alone, within a batch and after a resume.
DECIMALS = 4

_embeddings: weakref.WeakKeyDictionary[Any, dict[str, NDArray[np.float32]]] = weakref.WeakKeyDictionary()


class Encoder(Protocol):
    """Turns n texts into unit vectors, float32 of shape (n, d)."""

    def encode(self, texts: list[str]) -> NDArray[np.float32]: ...


class SkillIndex:
    """The embeddings of some skills under one encoder: ``ids`` (n) and ``vectors`` (n, d), float64."""

    def __init__(self, skills: Sequence[Skill], encoder: Encoder) -> None:
        self.encoder = encoder
        self.ids = tuple(skill.id for skill in skills)
        self.vectors = embed([skill.text for skill in skills], encoder)

    def nearest(self, texts: Sequence[str], n: int) -> list[list[tuple[str, float]]]:
        """Per text the ``n`` nearest skills as (id, cosine similarity), nearest first, ties by id."""
        if not self.ids:
            return [[] for _ in texts]
        distinct = list(dict.fromkeys(texts))
        queries = np.asarray(self.encoder.encode(distinct), dtype=np.float64)
        scores = np.round(queries @ self.vectors.T, DECIMALS)
        found = {text: self._ranked(row, n) for text, row in zip(distinct, scores, strict=True)}
        return [list(found[text]) for text in texts]

    def _ranked(self, scores: NDArray[np.float64], n: int) -> list[tuple[str, float]]:
        if n < len(self.ids):
            threshold = np.partition(scores, -n)[-n]
            candidates = np.flatnonzero(scores >= threshold)  # with all ties at the border, for the ids to decide
        else:
            candidates = np.arange(len(self.ids))
        ranked = sorted((-float(scores[i]), self.ids[i]) for i in candidates)
        return [(key, -score) for score, key in ranked[:n]]


def embed(texts: Sequence[str], encoder: Encoder) -> NDArray[np.float64]:
    """Unit vectors (n, d) of skill texts, each computed once per process and encoder; (0, 0) for no texts.

    One text at a time: in a batch a vector would depend on which other skills happened to be new to this process.
    """
    if not texts:
        return np.zeros((0, 0))
    cache = _embeddings.setdefault(encoder, {})
    for text in texts:
        if text not in cache:
            cache[text] = np.array(encoder.encode([text])[0], dtype=np.float32)
    return np.stack([cache[text] for text in texts]).astype(np.float64)
