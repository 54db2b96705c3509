"""Short ways to write down rollouts, questions and failures in tests; every record is a real one."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sesa.types import (
    Answer,
    Ask,
    Failure,
    Hit,
    Invalid,
    LoadedSkill,
    ModelCall,
    Passage,
    Question,
    Reward,
    Role,
    Rollout,
    Search,
    SeedAnswer,
    StopReason,
    Turn,
)


class HashingEncoder:
    """Bag of hashed words as unit vectors: equal texts are equal, texts with common words are near."""

    def __init__(self, dimension: int = 256) -> None:
        self.dimension = dimension
        self.encoded: list[str] = []

    def encode(self, texts: list[str]) -> NDArray[np.float32]:
        self.encoded += texts
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in re.findall(r"\w+", text.lower()) or ["-"]:
                digest = hashlib.sha256(word.encode()).digest()
                vectors[row, int.from_bytes(digest[:4], "big") % self.dimension] += 1.0 if digest[4] % 2 else -1.0
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.where(norms > 0, vectors / np.maximum(norms, 1e-9), 1 / np.sqrt(self.dimension)).astype(np.float32)


def call(text: str = "text", finish_reason: str = "stop", sampled: bool = True) -> ModelCall:
    ids = (1, 2, 3) if sampled else ()
    return ModelCall(
        policy="p",
        policy_version=0,
        token_ids=ids,
        logprobs=(-0.5,) * len(ids),
        text=text if sampled else "",
        finish_reason=finish_reason,
    )


def passage(key: str, text: str = "A passage.", title: str = "Title") -> Passage:
    return Passage(id=key, title=title, text=text)


def search(query: str, *hits: Passage, sampled: bool = True, observation: str = "") -> Turn:
    found = tuple(Hit(passage=p, score=1.0, rank=i, retriever="bm25") for i, p in enumerate(hits, 1))
    return Turn(call=call(query, sampled=sampled), action=Search(query=query), hits=found, observation=observation)


def answer(text: str, finish_reason: str = "stop") -> Turn:
    return Turn(call=call(text, finish_reason), action=Answer(text=text))


def ask(question: str, finish_reason: str = "stop") -> Turn:
    return Turn(call=call(question, finish_reason), action=Ask(question=question))


def malformed(text: str = "???") -> Turn:
    return Turn(call=call(text), action=Invalid(reason="no action"), observation="Write an action.")


def proposal(*turns: Turn, stop: StopReason = StopReason.ASKED, error: str | None = None) -> Rollout:
    return Rollout(id="proposal", role=Role.PROPOSER, question_id="q", turns=turns, stop_reason=stop, error=error)


def attempt(
    *turns: Turn,
    stop: StopReason = StopReason.ANSWERED,
    key: str = "r",
    correct: float | None = None,
    skills: tuple[str, ...] = (),
    considered: tuple[str, ...] = (),
    question_id: str = "q",
) -> Rollout:
    return Rollout(
        id=key,
        role=Role.SOLVER,
        question_id=question_id,
        turns=turns,
        stop_reason=stop,
        rewards=() if correct is None else (Reward(name="correct", value=correct),),
        skills=(
            *(LoadedSkill(id=s, similarity=0.5) for s in skills),
            *(LoadedSkill(id=s, similarity=0.1, loaded=False) for s in considered),
        ),
    )


def question(target: str = "Paris", *aliases: str, text: str = "What is the capital of France?") -> Question:
    seed = SeedAnswer(id="s", answer=target, aliases=aliases)
    return Question(id="q", text=text, target=target, aliases=aliases, seed=seed)


def failure(key: str = "f0", **changes: Any) -> Failure:
    values: dict[str, Any] = {
        "id": key,
        "question_id": f"question of {key}",
        "question": "Which river flows through the home town of Pierre Bouvier?",
        "target": "Saint Lawrence",
        "aliases": ("St. Lawrence River",),
        "prediction": "Seine",
        "stop_reason": StopReason.ANSWERED,
        "evidence": (passage("p0", "Pierre Bouvier grew up in a suburb on the island.", "Pierre Bouvier"),),
    }
    return Failure(**(values | changes))
