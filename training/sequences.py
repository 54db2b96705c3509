"""Joins the calls of a rollout into token sequences to train on. Nothing is re-tokenised: ids are the server's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sesa.types import ModelCall, Rollout


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One training row, three aligned tuples of length L.

    ``mask[i]`` is True where the policy sampled ``ids[i]``; ``logprobs[i]`` is then its log-probability in nats at
    sampling time, and 0.0 elsewhere (prompts, skills, passages, corrections).
    """

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    rollout_id: str

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.mask) == len(self.logprobs):
            raise ValueError(
                f"rollout {self.rollout_id}: {len(self.ids)} ids, {len(self.mask)} mask entries and "
                f"{len(self.logprobs)} log-probabilities must be equally many"
            )
        if self.ids and self.mask[0]:
            raise ValueError(
                f"rollout {self.rollout_id}: the first token of a sequence has no predecessor to predict it"
            )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sampled(self) -> tuple[int, ...]:
        """Positions of the sampled tokens, ascending."""
        return tuple(i for i, sampled in enumerate(self.mask) if sampled)

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(self.mask)


class _Builder:
    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.logprobs: list[float] = []

    def continues(self, prompt: Sequence[int]) -> bool:
        return len(prompt) >= len(self.ids) and list(prompt[: len(self.ids)]) == self.ids

    def add(self, call: ModelCall) -> None:
        given = call.prompt_ids[len(self.ids) :]
        self.ids += [*given, *call.token_ids]
        self.mask += [False] * len(given) + [True] * len(call.token_ids)
        self.logprobs += [0.0] * len(given) + list(call.logprobs)

    def build(self) -> TokenSequence:
        return TokenSequence(tuple(self.ids), tuple(self.mask), tuple(self.logprobs), self.rollout_id)


def join_calls(calls: Iterable[ModelCall], rollout_id: str) -> tuple[TokenSequence, ...]:
    """Join calls, in order, into the fewest sequences that hold exactly the tokens the policy saw and sampled.

    A call whose prompt extends the previous prompt plus reply token for token continues that sequence; any other
    starts a new one (a history that was shortened, or a template that renders earlier turns differently). Calls that
    sampled nothing add nothing. ``ValueError`` when the trained tokens would not be exactly the sampled ones, or when
    a reply has no prompt in front of it.
    """
    calls = [call for call in calls if call.token_ids]
    built: list[TokenSequence] = []
    current: _Builder | None = None
    for call in calls:
        if current is None or not current.continues(call.prompt_ids):
            if current is not None:
                built.append(current.build())
            current = _Builder(rollout_id)
        current.add(call)
    if current is not None:
        built.append(current.build())
    trained, sampled = sum(s.tokens for s in built), sum(len(call.token_ids) for call in calls)
    if trained != sampled:
        raise ValueError(f"rollout {rollout_id}: {trained} tokens to train on but {sampled} sampled")
    return tuple(built)


def rollout_sequences(rollout: Rollout) -> tuple[TokenSequence, ...]:
    """The sequences of a rollout; see ``join_calls``."""
    return join_calls((turn.call for turn in rollout.turns), rollout.id)
