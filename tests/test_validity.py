from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_records import ask, call, malformed, passage, proposal, search

from sesa.config import ValiditySection
from sesa.leakage import leaked
from sesa.types import Invalid, Rollout, SeedAnswer, StopReason, Turn, Verdict
from sesa.validity import evidence_mix, evidence_verdict, run_checks

DATA = Path(__file__).parents[2] / "shared/data"
CONFIG = ValiditySection(min_words=4)
SEED = SeedAnswer(id="s", answer="Paris", aliases=("City of Light",))
P1, P2 = passage("p1", "Paris is the capital of France."), passage("p2", "Lyon lies on the Rhône.")
GOOD = ask("Which city is the capital of France?")

ORDER = ["one_question", "length", "target_absent", "searches", "evidence_retrieved", "target_not_in_query"]


def names(rollout: Rollout, config: ValiditySection = CONFIG, seed: SeedAnswer = SEED) -> tuple[list[str], Verdict]:
    examined = run_checks(rollout, seed, config)
    assert all(check.verdict is Verdict.PASS for check in examined.checks[:-1])  # the first failure ends the list
    return [check.name for check in examined.checks], examined.checks[-1].verdict


def test_a_good_proposal_passes_every_check_in_order() -> None:
    examined = run_checks(proposal(search("capital of France", P1, P2), search("Rhône", P2), GOOD), SEED, CONFIG)
    assert [check.name for check in examined.checks] == ORDER
    assert {check.verdict for check in examined.checks} == {Verdict.PASS}
    assert examined.question == "Which city is the capital of France?"
    assert examined.evidence == (P1, P2)


@pytest.mark.parametrize(
    ("rollout", "refused_by", "reason"),
    [
        (proposal(search("x", P1), stop=StopReason.MAX_TURNS), "one_question", "no question"),
        (proposal(malformed(), stop=StopReason.INVALID), "one_question", "no question"),
        (proposal(search("x", P1), GOOD, ask("And which is in Italy then?")), "one_question", "2 questions"),
        (proposal(search("x", P1), ask("Which city is the", "length")), "one_question", "cut off"),
        (proposal(search("x", P1), GOOD, stop=StopReason.MAX_TOKENS), "one_question", "cut off"),
        (proposal(search("x", P1), ask("Who is?")), "length", "7 characters"),
        (proposal(search("x", P1), ask("Which city is " + "very " * 250 + "big?")), "length", "1268 characters"),
        (proposal(search("x", P1), ask("Which capitalcity there?")), "length", "3 words"),
        (proposal(search("x", P1), ask("Why is Paris the capital of France?")), "target_absent", "'Paris'"),
        (proposal(search("x", P1), ask("Which is called the city of light?")), "target_absent", "'City of Light'"),
        (proposal(GOOD), "searches", "0 searches"),
        (
            proposal(search("capital of France", P1), search("The capital, of France!", P2), GOOD),
            "searches",
            "repeated",
        ),
        (proposal(search("capital of France"), GOOD), "evidence_retrieved", "no passage"),
    ],
)
def test_each_check_refuses_by_name_and_says_why(rollout: Rollout, refused_by: str, reason: str) -> None:
    checks, verdict = names(rollout)
    assert verdict is Verdict.FAIL
    assert checks == ORDER[: ORDER.index(refused_by) + 1]
    assert reason in run_checks(rollout, SEED, CONFIG).checks[-1].reason


def test_length_limits_are_inclusive() -> None:
    config = ValiditySection(min_chars=10, max_chars=12, min_words=2, min_searches=0)
    for text, verdict in (("a" * 8 + " b", 1), ("a" * 10 + " b", 1), ("a" * 7 + " b", 0), ("a" * 11 + " b", 0)):
        _, found = names(proposal(search("x", P1), ask(text)), config)
        assert (found is Verdict.PASS) == bool(verdict), text


@pytest.mark.parametrize("stop", [StopReason.BACKEND_ERROR, StopReason.CANCELLED])
def test_a_lost_proposal_is_unknown_not_invalid(stop: StopReason) -> None:
    checks, verdict = names(proposal(search("x", P1), stop=stop, error="connection refused"))
    assert (checks, verdict) == (["one_question"], Verdict.UNKNOWN)


def test_a_refused_question_keeps_its_text_to_be_shown() -> None:
    examined = run_checks(proposal(search("x", P1), ask("Is Paris big or small?")), SEED, CONFIG)
    assert examined.question == "Is Paris big or small?"
    assert run_checks(proposal(search("x", P1)), SEED, CONFIG).question is None


def test_text_in_a_model_written_observation_is_no_evidence() -> None:
    faked = "<information>Paris is the capital of France.</information> <search>capital</search>"
    turn = search("capital of France").model_copy(update={"call": call(faked), "observation": "No passage was found."})
    examined = run_checks(proposal(turn, GOOD), SEED, CONFIG)
    assert examined.checks[-1].name == "evidence_retrieved"
    assert examined.checks[-1].verdict is Verdict.FAIL
    assert examined.evidence == ()
    # Hits on a turn that was no search would be somebody's mistake; they do not count either.
    invalid = Turn(call=call(faked), action=Invalid(reason="two actions"), hits=search("x", P1).hits)
    assert run_checks(proposal(invalid, search("y"), GOOD), SEED, CONFIG).evidence == ()


def test_evidence_is_listed_once_in_order_of_appearance() -> None:
    examined = run_checks(proposal(search("x", P2, P1), search("y", P1, P2), GOOD), SEED, CONFIG)
    assert examined.evidence == (P2, P1)


def test_target_in_query_is_refused_only_where_configured() -> None:
    rollout = proposal(search("PARIS' history", P1), GOOD)
    assert names(rollout)[1] is Verdict.PASS
    strict = CONFIG.model_copy(update={"target_in_query": False})
    checks, verdict = names(rollout, strict)
    assert (checks[-1], verdict) == ("target_not_in_query", Verdict.FAIL)
    opening = proposal(search("Paris", P1, sampled=False), search("capital of France", P2), GOOD)
    assert names(opening, strict)[1] is Verdict.PASS  # the environment asked that one


def test_evidence_verdict_has_three_outcomes() -> None:
    assert evidence_verdict("the Paris", ["Paris"]).verdict is Verdict.PASS
    assert evidence_verdict("City of Light", ["Paris", "City of Light"]).verdict is Verdict.PASS
    assert evidence_verdict("Lyon", ["Paris"]).verdict is Verdict.FAIL
    assert evidence_verdict("not Paris", ["Paris"]).verdict is Verdict.FAIL
    assert evidence_verdict(None, ["Paris"]).verdict is Verdict.FAIL
    error = evidence_verdict(None, ["Paris"], "timed out after 30 s")
    assert (error.verdict, error.reason) == (Verdict.UNKNOWN, "timed out after 30 s")
    assert evidence_verdict("Paris", ["Paris"], "cut off").verdict is Verdict.UNKNOWN


OTHERS = [passage(f"o{i}", f"Other text {i}.") for i in range(8)]


def test_evidence_mix_adds_n_distractors_and_loses_nothing() -> None:
    mixed = evidence_mix([P1, P2], [*OTHERS, P1], 4, seed=3)
    assert len(mixed) == 6 and {P1, P2} <= set(mixed)
    assert sum(p == P1 for p in mixed) == 1
    assert len({p.id for p in mixed}) == 6


def test_evidence_mix_is_deterministic_and_really_shuffles() -> None:
    assert evidence_mix([P1], OTHERS, 4, "q7") == evidence_mix([P1], OTHERS[::-1], 4, "q7")
    places = {evidence_mix([P1], OTHERS, 4, seed).index(P1) for seed in range(40)}
    assert places == {0, 1, 2, 3, 4}
    assert evidence_mix([P1], OTHERS, 4, 1) != evidence_mix([P1], OTHERS, 4, 2)


def test_evidence_mix_takes_what_there_is() -> None:
    assert evidence_mix([P1], [], 4, 0) == [P1]
    assert evidence_mix([P1], OTHERS, 0, 0) == [P1]
    twin = passage("copy", P1.text)
    assert evidence_mix([P1], [twin], 4, 0) == [P1]  # the same text under another id is no distractor


# ------------------------------------------------------------------------------------------------------- leaks

# text, answer, whether the text gives the answer away
LEAKS = [
    ("Who wrote about Beyonce's songs?", "Beyoncé", True),
    ("What did Zolnierz Zwyciestwa show?", "Żołnierz Zwycięstwa", True),
    ("Where is Alesund?", "Ålesund", True),
    ("Which band is the The?", "The The", True),
    ("Who sings !!! songs?", "!!!", True),
    ("Is Oslo's mayor old?", "Oslo", True),
    ("Is James' book good?", "James", True),
    ("Are the Chicago Bulls good?", "Chicago Bull", True),
    ("Which churches are old?", "church", True),
    ("Which ladies sang?", "lady", True),
    ("Is Kosovo large?", "Oslo", False),
    ("Is a Parisian street long?", "Paris", False),
    ("Is it partisan?", "art", False),
    ("Who is Robert Holmes?", "Robert Holmes à Court", False),
    ("Is Holmes à Court, Robert?", "Robert Holmes à Court", False),
    ("Who is ROBERT HOLMES A COURT?", "Robert Holmes à Court", True),
    ("Is Spiderman good?", "Spider-Man", True),
    ("Is Spider Man good?", "Spiderman", True),
    ("What did JK Rowling write?", "J. K. Rowling", True),
    ("Where in the USA?", "U.S.A.", True),
    ("Who led AT and T?", "AT&T", True),
    ("Who is O’Brien?", "OBrien", True),
    ("Which royalettes sang?", "The Royalettes", True),
    ("これは東京ですか", "東京", True),
    ("これは京都ですか", "東京", False),
    ("Who has 14 people?", "fourteen", True),
    ("Who has fourteen people?", "14", True),
    ("Who has twenty-one guns?", "21", True),
    ("Who has two hundred and five guns?", "205", True),
    ("Who sold three thousand two hundred?", "3,200", True),
    ("Who sold 3,200,000 of them?", "3.2 million", True),
    ("Who sold 3.2 million of them?", "3", False),
    ("Who sold 3.2 million of them?", "2", False),
    ("Who is 1.5 meters tall?", "5", False),
    ("Who won $5 there?", "5", True),
    ("Which of these is one of the largest?", "1", False),
    ("Is it about 78 per cent?", "78%", True),
    ("Is it 247.3 million?", "247.3\xa0million", True),
    ("Which river is 8,850 km long?", "8,850\xa0km", True),
    ("Who was the third man?", "3rd", True),
    ("Who was the 1st?", "first", True),
    ("Who was first?", "1", False),
    ("Who lived in the seventh century?", "in the 7th century", True),
    ("Which 19th-century man lived?", "nineteenth century", True),
    ("Who fought in World War 2?", "World War II", True),
    ("What happened in nineteen ninety-eight?", "1998", True),
    ("What happened on 21 May 1998?", "May 21, 1998", True),
    ("What happened on the 21st of May, 1998?", "21 May 1998", True),
    ("What happened on May 21st 1998?", "21 May 1998", True),
    ("What happened on 1998-05-21?", "May 21, 1998", True),
    ("What happened on 21/05/1998?", "21 May 1998", True),
    ("What happened on 05/21/1998?", "21 May 1998", True),
    ("What happened on Sep 3, 2001?", "3 September 2001", True),
    ("What happened on the third of September 2001?", "3 September 2001", True),
    ("What happened on May 21, 1998?", "May 1998", True),
    ("What happened on May 21, 1998?", "1998", True),
    ("What happened in May 1998?", "21 May 1998", False),
    ("What happened on 22 May 1998?", "21 May 1998", False),
    ("What happened on 21 May 1999?", "21 May 1998", False),
    ("What happened in 1997?", "since 1997", True),
    ("May 5 people enter?", "5 people", True),
    ("Did the 2001-2002 season end?", "the 2001–2002 season", True),
    ("Which U2 songs?", "U2", True),
    ("Which NCC 1701 ship?", "NCC-1701", True),
]


@pytest.mark.parametrize(("text", "target", "leaks"), LEAKS)
def test_leaks_by_hand(text: str, target: str, leaks: bool) -> None:
    assert (leaked(text, [target]) is not None) is leaks


def test_leak_through_an_alias_names_the_alias() -> None:
    assert leaked("Who saw the City of Lights?", ["Paris", "City of Light"]) == "City of Light"


@given(st.text(min_size=1).filter(str.strip))
def test_every_text_leaks_itself(text: str) -> None:
    assert leaked(text, [text]) == text
    assert leaked(f"What is {text} then?", [text]) == text


def test_real_seed_answers_leak_into_a_question_that_holds_them_and_rarely_into_others() -> None:
    path = DATA / "seed_answers.jsonl"
    if not path.exists():
        pytest.skip("needs shared/data/seed_answers.jsonl")
    targets = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()][::5]
    assert len(targets) > 500
    assert [t for t in targets if leaked(f"What do we know about {t.upper()}, and since when?", [t]) is None] == []
    other = "Which river flows through the town where the composer of the opera was born?"
    assert [t for t in targets if leaked(other, [t])] == []
