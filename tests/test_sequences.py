"""Joining calls into token sequences: exactly the sampled tokens are trained on, and nothing is re-tokenised."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import call, rollout

from sesa.training.sequences import TokenSequence, join_calls, rollout_sequences
from sesa.types import ModelCall

ids = st.lists(st.integers(0, 5), max_size=6)
replies = st.lists(st.tuples(st.integers(0, 5), st.floats(-9, 0)), max_size=6)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[ModelCall, bool]]:
    """Calls of one rollout, each with whether it starts over; small vocabularies make chance extensions likely."""
    calls: list[tuple[ModelCall, bool]] = []
    context: list[int] = []
    for _ in range(draw(st.integers(0, 5))):
        restart = not calls or draw(st.booleans())
        given_ids = draw(ids.filter(bool))
        prompt = given_ids if restart else context + given_ids
        reply = draw(replies)
        calls.append((call(prompt, [t for t, _ in reply], [p for _, p in reply]), restart))
        context = prompt + [t for t, _ in reply]
    return calls


@given(histories())
def test_trained_tokens_are_exactly_the_sampled_ones_in_order(history: list[tuple[ModelCall, bool]]) -> None:
    calls = [c for c, _ in history]
    sequences = join_calls(calls, "r")
    trained = [(s.ids[i], s.logprobs[i]) for s in sequences for i in s.sampled]
    assert trained == [pair for c in calls for pair in zip(c.token_ids, c.logprobs, strict=True)]
    assert sum(s.tokens for s in sequences) == sum(len(c.token_ids) for c in calls)


@given(histories())
def test_every_sampled_token_keeps_the_context_it_was_sampled_in(history: list[tuple[ModelCall, bool]]) -> None:
    calls = [c for c, _ in history if c.token_ids]
    contexts = [(c.prompt_ids + c.token_ids[:k]) for c in calls for k in range(len(c.token_ids))]
    assert [s.ids[:i] for s in join_calls(calls, "r") for i in s.sampled] == contexts


@given(histories())
def test_ids_mask_and_logprobs_stay_aligned_and_zero_off_the_mask(history: list[tuple[ModelCall, bool]]) -> None:
    for s in join_calls([c for c, _ in history], "r"):
        assert len(s.ids) == len(s.mask) == len(s.logprobs) == len(s)
        assert all(p == 0.0 for p, sampled in zip(s.logprobs, s.mask, strict=True) if not sampled)
        assert s.tokens > 0
        assert not s.mask[0]


@given(histories())
def test_sequences_are_no_more_than_restarts(history: list[tuple[ModelCall, bool]]) -> None:
    assert len(join_calls([c for c, _ in history], "r")) <= sum(restart for _, restart in history)


def test_three_turns_that_extend_each_other_are_one_sequence() -> None:
    calls = [call([1, 2], [3]), call([1, 2, 3, 9, 9], [4, 5]), call([1, 2, 3, 9, 9, 4, 5, 8], [6])]
    (sequence,) = join_calls(calls, "r")
    assert sequence.ids == (1, 2, 3, 9, 9, 4, 5, 8, 6)
    assert sequence.sampled == (2, 5, 6, 8)


def test_a_changed_history_starts_a_new_sequence() -> None:
    first, second = join_calls([call([1, 2], [3]), call([1, 7, 3, 9], [4])], "r")
    assert (first.ids, second.ids) == ((1, 2, 3), (1, 7, 3, 9, 4))


def test_a_dropped_turn_separator_is_seen_as_a_changed_history() -> None:
    # The sampled end-of-turn token 2 is missing from the next prompt: continuing would train on unsampled text.
    assert len(join_calls([call([1], [5, 2]), call([1, 5, 8], [6])], "r")) == 2


def test_a_shorter_prompt_starts_a_new_sequence() -> None:
    assert [s.ids for s in join_calls([call([1, 2, 3], [4]), call([1, 2], [4])], "r")] == [(1, 2, 3, 4), (1, 2, 4)]


def test_a_turn_without_sampled_tokens_adds_nothing() -> None:
    (sequence,) = rollout_sequences(rollout("r", [call([1, 2], []), call([1, 2, 9, 9], [4])], 1.0))
    assert sequence.ids == (1, 2, 9, 9, 4)
    assert join_calls([call([1, 2], [])], "r") == ()


def test_a_reply_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="rollout r: the first token"):
        join_calls([call([], [4])], "r")


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="rollout x: 2 ids, 2 mask entries and 1 log-probabilities"):
        TokenSequence((1, 2), (False, True), (0.0,), "x")
