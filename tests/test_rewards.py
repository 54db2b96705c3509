from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_records import answer, attempt, malformed, proposal, question, search

from sesa.config import RewardSection
from sesa.rewards import exact_match, f1, frontier, proposer_rewards, solver_rewards, substantively_wrong, well_formed
from sesa.text import comparable, longest_shared_run, normalise
from sesa.types import Reward, StopReason, Verdict

PAPER = RewardSection()


# prediction, gold, exact match, F1
PAIRS: list[tuple[str, str, float, float]] = [
    ("Paris", "Paris", 1, 1),
    ("paris", "Paris", 1, 1),
    ("  Paris \n", "Paris", 1, 1),
    ("Paris.", "Paris", 1, 1),
    ("Paris, France", "Paris", 0, 2 / 3),
    ("The Beatles", "Beatles", 1, 1),
    ("a cat", "the cat", 1, 1),
    ("An Officer and a Gentleman", "officer and gentleman", 1, 1),
    ("Theodore", "Odore", 0, 0),  # "the" inside a word is no article
    ("Anna", "nna", 0, 0),
    ("The The", "The The", 1, 1),
    ("The", "A", 0, 0),
    ("!!!", "!!!", 1, 1),
    ("!!!", "???", 0, 0),
    ("", "Paris", 0, 0),
    (".", "Paris", 0, 0),
    ("Spider-Man", "SpiderMan", 1, 1),
    ("Spider-Man", "Spider Man", 0, 0),
    ("Jean-Luc Godard", "Jean‐Luc Godard", 1, 1),  # hyphen-minus and the Unicode hyphen
    ("2001-2002", "2001–2002", 1, 1),
    ("−5", "-5", 1, 1),
    ("O'Brien", "O’Brien", 1, 1),
    ("Hawai'i", "Hawaiʻi", 1, 1),
    ("Beyoncé", "Beyonce", 0, 0),  # the published scripts keep accents
    ("Beyoncé", unicodedata.normalize("NFD", "Beyoncé"), 1, 1),
    ("MÉLIÈS", "Méliès", 1, 1),
    ("STRASSE", "Straße", 1, 1),
    ("Żołnierz", "żołnierz", 1, 1),
    ("$100", "100", 1, 1),
    ("€100", "100", 1, 1),
    ("£1.5 million", "1.5 million", 1, 1),
    ("1,000", "1000", 1, 1),
    ("1,000", "1000.0", 0, 0),
    ("50%", "50", 1, 1),
    ("50 percent", "50", 0, 2 / 3),
    ("247.3\xa0million", "247.3 million", 1, 1),
    ("1st", "1st", 1, 1),
    ("1st", "first", 0, 0),
    ("the 3rd", "3rd", 1, 1),
    ("21 May 1998", "May 21, 1998", 0, 1),  # the same words in another order
    ("May 21 1998", "May 21, 1998", 1, 1),
    ("1998", "May 1998", 0, 2 / 3),
    ("yes", "Yes", 1, 1),
    ("no", "yes", 0, 0),
    ("yes, it is", "yes", 0, 0),  # yes and no match whole or not at all
    ("no", "no one", 0, 0),
    ("AT&T", "ATT", 1, 1),
    ("Guns N' Roses", "Guns N Roses", 1, 1),
    ("Marvel™", "Marvel", 1, 1),
    ("ＡＢＣ", "abc", 1, 1),
    ("John F. Kennedy", "John F Kennedy", 1, 1),
    ("John Kennedy", "John F Kennedy", 0, 4 / 5),
    ("new york new york", "new york", 0, 2 / 3),
    ("東京", "東京", 1, 1),
    ("東京都", "東京", 0, 0),
    ("zero\u200bwidth", "zerowidth", 1, 1),
]


@pytest.mark.parametrize(("prediction", "gold", "exact", "overlap"), PAIRS)
def test_exact_match_and_f1_on_pairs(prediction: str, gold: str, exact: float, overlap: float) -> None:
    assert exact_match(prediction, [gold]) == exact
    assert f1(prediction, [gold]) == pytest.approx(overlap)


def test_best_gold_counts_and_no_answer_scores_zero() -> None:
    assert exact_match("NYC", ["New York City", "NYC"]) == 1.0
    assert f1("York", ["Leeds", "New York"]) == pytest.approx(2 / 3)
    assert exact_match(None, ["Paris"]) == f1(None, ["Paris"]) == 0.0


def test_a_target_that_is_no_list_is_an_error_and_not_a_mismatch() -> None:
    with pytest.raises(TypeError, match="sequence of texts"):
        exact_match("Paris", "Paris")
    with pytest.raises(TypeError, match="sequence of texts"):
        exact_match("Paris", [["Paris"]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="at least the target"):
        f1("Paris", [])


@given(st.text(), st.text())
def test_scores_agree_and_are_symmetric(a: str, b: str) -> None:
    exact = exact_match(a, [b])
    assert exact == exact_match(b, [a])
    assert f1(a, [b]) == pytest.approx(f1(b, [a]))
    assert 0.0 <= f1(a, [b]) <= 1.0
    if exact and comparable(a):
        assert f1(a, [b]) == 1.0
    assert exact_match(a, [a]) == 1.0


@given(st.text())
def test_normalised_text_has_single_spaces_and_no_ascii_punctuation(text: str) -> None:
    out = normalise(text)
    assert out == " ".join(out.split())
    assert not set(out) & set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


def test_longest_shared_run_counts_words() -> None:
    assert longest_shared_run("Search the name, then stop!", "then stop. Search the name of it") == 3
    assert longest_shared_run("a b c d", "x b c d", at_least=3) == 3
    assert longest_shared_run("a b c d", "x b c d", at_least=4) == 0
    assert longest_shared_run("", "a b") == longest_shared_run("a", "") == 0


# ------------------------------------------------------------------------------------------------ frontier reward


@pytest.mark.parametrize(
    ("p", "value"), [(0.0, -1.0), (0.2, 0.64), (0.4, 0.96), (0.5, 1.0), (0.6, 0.96), (0.8, 0.64), (1.0, -1.0)]
)
def test_frontier_boundary_values_are_pinned(p: float, value: float) -> None:
    reward = frontier(p, low=0.0, high=1.0, penalty=1.0)
    assert reward is not None
    assert (reward.name, reward.weight) == ("frontier", 1.0)
    assert reward.value == pytest.approx(value, abs=1e-12)


def test_frontier_with_other_bounds_and_penalty() -> None:
    assert frontier(0.5, low=0.1, high=0.8, penalty=0.3).value == pytest.approx(4 * 0.6 * 0.3)  # type: ignore[union-attr]
    assert frontier(0.0, low=0.1, high=0.8, penalty=0.3).value == -0.3  # type: ignore[union-attr]
    # A rate above h earns less than nothing by the formula; it is not clipped.
    assert frontier(0.9, low=0.0, high=0.8, penalty=0.3).value == pytest.approx(-0.36)  # type: ignore[union-attr]


def test_a_reward_of_zero_stays_zero() -> None:
    reward = frontier(1.0, low=0.0, high=1.0, penalty=0.0)
    assert reward is not None and str(reward.value) == "0.0"
    assert frontier(0.8, low=0.0, high=0.8, penalty=1.0).value == 0.0  # type: ignore[union-attr]


def test_frontier_without_a_rate_gives_nothing_and_nonsense_is_refused() -> None:
    assert frontier(None, 0.0, 1.0, 1.0) is None
    with pytest.raises(ValueError, match="success rate"):
        frontier(1.2, 0.0, 1.0, 1.0)


def test_proposer_is_paid_for_valid_fined_for_invalid_and_left_alone_for_unknown() -> None:
    assert [r.name for r in proposer_rewards(Verdict.PASS, 0.5, PAPER)] == ["frontier"]
    assert proposer_rewards(Verdict.FAIL, None, PAPER) == (Reward(name="invalid", value=-0.1),)
    assert proposer_rewards(Verdict.UNKNOWN, None, PAPER) == ()
    assert proposer_rewards(Verdict.PASS, None, PAPER) == ()  # fewer than two solver rollouts came back
    assert str(proposer_rewards(Verdict.FAIL, None, RewardSection(invalid_penalty=0.0))[0].value) == "0.0"


# -------------------------------------------------------------------------------------------------- solver rewards


def test_published_settings_reward_correctness_alone() -> None:
    right = solver_rewards(attempt(search("x"), answer("the paris")), question(), PAPER)
    assert right == (Reward(name="correct", value=1.0, weight=1.0),)
    wrong = solver_rewards(attempt(answer("Lyon")), question(), PAPER)
    assert wrong == (Reward(name="correct", value=0.0, weight=1.0),)


def test_aliases_count_and_the_last_answer_is_the_answer() -> None:
    assert solver_rewards(attempt(answer("NYC")), question("New York", "NYC"), PAPER)[0].value == 1.0
    assert solver_rewards(attempt(answer("Paris"), answer("Lyon")), question(), PAPER)[0].value == 0.0


def test_weighted_parts_sum_to_the_return() -> None:
    config = RewardSection(f1_weight=0.5, format_weight=0.1)
    rollout = attempt(answer("New York City"))
    parts = solver_rewards(rollout, question("New York"), config)
    assert [r.name for r in parts] == ["correct", "f1", "format"]
    scored = rollout.model_copy(update={"rewards": parts})
    assert scored.value == pytest.approx(0.5 * 0 + 0.5 * 0.8 + 0.1 * 1)


@pytest.mark.parametrize("stop", [StopReason.BACKEND_ERROR, StopReason.CANCELLED])
def test_a_lost_rollout_has_no_rewards(stop: StopReason) -> None:
    assert solver_rewards(attempt(stop=stop), question(), RewardSection(f1_weight=0.5, format_weight=1.0)) == ()


def test_rollouts_without_an_answer_score_zero() -> None:
    for stop in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.INVALID):
        assert solver_rewards(attempt(search("x"), stop=stop), question(), PAPER)[0].value == 0.0


def test_scoring_against_another_question_is_refused() -> None:
    with pytest.raises(ValueError, match="not a solver's of q"):
        solver_rewards(attempt(answer("Paris"), question_id="other"), question(), PAPER)
    with pytest.raises(ValueError, match="not a solver's of q"):
        solver_rewards(proposal(), question(), PAPER)


def test_well_formed_needs_every_turn_whole() -> None:
    assert well_formed(attempt(search("x"), answer("y")))
    assert not well_formed(attempt(malformed(), answer("y")))
    assert not well_formed(attempt(answer("y", finish_reason="length")))
    assert not well_formed(attempt(search("x"), stop=StopReason.MAX_TURNS))


def test_substantively_wrong_is_a_wrong_answer_or_an_exhausted_search() -> None:
    out_of_turns = StopReason.MAX_TURNS
    assert substantively_wrong(attempt(answer("Lyon"), correct=0.0))
    assert substantively_wrong(attempt(search("x"), search("y"), stop=out_of_turns, correct=0.0))
    assert not substantively_wrong(attempt(answer("Paris"), correct=1.0))
    assert not substantively_wrong(attempt(search("x"), malformed(), stop=out_of_turns, correct=0.0))
    assert not substantively_wrong(attempt(malformed(), stop=StopReason.INVALID, correct=0.0))
    assert not substantively_wrong(attempt(search("x"), stop=StopReason.MAX_TOKENS, correct=0.0))
    assert not substantively_wrong(attempt(stop=out_of_turns, correct=0.0))
    assert not substantively_wrong(attempt(stop=StopReason.BACKEND_ERROR))
    with pytest.raises(ValueError, match="no correct reward"):
        substantively_wrong(attempt(answer("Lyon")))
