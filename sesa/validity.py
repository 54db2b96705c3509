"""What makes a proposed question acceptable: one named check each, in the order of arXiv 2510.18821.

Every check returns a `Check`; the first that does not pass ends the list. UNKNOWN is for errors of a server: such a
question is neither valid nor invalid, and its proposer is neither rewarded nor punished.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sesa.config import ValiditySection
from sesa.leakage import leaked
from sesa.rewards import exact_match
from sesa.text import comparable
from sesa.types import Ask, Check, Passage, Rollout, Search, SeedAnswer, StopReason, Verdict


class Examined(NamedTuple):
    """What `run_checks` found: the checks made, the question where there is exactly one, the evidence retrieved."""

    checks: tuple[Check, ...]
    question: str | None
    evidence: tuple[Passage, ...]


def run_checks(rollout: Rollout, seed: SeedAnswer, config: ValiditySection) -> Examined:
    """Run the checks that need no model on one proposal, up to the first that does not pass.

    The question text is given whenever there is exactly one, also where a check refused it, so that it can be shown.
    """
    question = _question(rollout)
    evidence = retrieved_evidence(rollout)
    checks = [one_question(rollout)]
    if question is not None and checks[0].verdict is Verdict.PASS:
        text = question
        rest: list[Callable[[], Check]] = [
            lambda: length(text, config),
            lambda: target_absent(text, seed),
            lambda: searches(rollout, config),
            lambda: evidence_retrieved(evidence),
            lambda: target_not_in_query(rollout, seed, config),
        ]
        for check in rest:
            checks.append(check())
            if checks[-1].verdict is not Verdict.PASS:
                break
    return Examined(tuple(checks), question, evidence)


def one_question(rollout: Rollout) -> Check:
    """Exactly one question was produced and its reply was not cut off; UNKNOWN where the backend lost the rollout."""
    name = "one_question"
    if not rollout.finished:
        return _unknown(name, f"the proposal was lost: {rollout.error or rollout.stop_reason}")
    asked = [turn for turn in rollout.turns if isinstance(turn.action, Ask)]
    if any(turn.call.finish_reason == "length" for turn in asked) or rollout.stop_reason is StopReason.MAX_TOKENS:
        return _fail(name, "the reply was cut off by the token limit")
    if len(asked) != 1:
        return _fail(name, f"{len(asked)} questions were produced" if asked else "no question was produced")
    return _pass(name)


def length(question: str, config: ValiditySection) -> Check:
    """The question has between min_chars and max_chars characters and at least min_words words."""
    chars, count = len(question.strip()), len(question.split())
    if not config.min_chars <= chars <= config.max_chars:
        return _fail("length", f"{chars} characters; {config.min_chars} to {config.max_chars} are allowed")
    if count < config.min_words:
        return _fail("length", f"{count} words; at least {config.min_words} are asked for")
    return _pass("length")


def target_absent(question: str, seed: SeedAnswer) -> Check:
    """Neither the target nor an alias, in any spelling that `sesa.leakage` knows, occurs in the question."""
    found = leaked(question, (seed.answer, *seed.aliases))
    return _pass("target_absent") if found is None else _fail("target_absent", f"the question gives away {found!r}")


def searches(rollout: Rollout, config: ValiditySection) -> Check:
    """At least min_searches searches were made, no two of them identical after normalising."""
    queries = rollout.searches
    if len(queries) < config.min_searches:
        return _fail("searches", f"{len(queries)} searches; at least {config.min_searches} are asked for")
    seen: set[str] = set()
    for query in queries:
        key = comparable(query)
        if key in seen:
            return _fail("searches", f"the query {query!r} was repeated")
        seen.add(key)
    return _pass("searches")


def evidence_retrieved(evidence: Sequence[Passage]) -> Check:
    """The retriever returned at least one passage; what the model wrote itself never counts (`retrieved_evidence`)."""
    return _pass("evidence_retrieved") if evidence else _fail("evidence_retrieved", "no passage was retrieved")


def target_not_in_query(rollout: Rollout, seed: SeedAnswer, config: ValiditySection) -> Check:
    """Where target_in_query is off: no query that the proposer wrote contains the target or an alias.

    An opening search issued by the environment (a turn without sampled text) is not the proposer's.
    """
    if not config.target_in_query:
        for turn in rollout.turns:
            if isinstance(turn.action, Search) and (turn.call.token_ids or turn.call.text):
                found = leaked(turn.action.query, (seed.answer, *seed.aliases))
                if found is not None:
                    return _fail("target_not_in_query", f"the query {turn.action.query!r} contains {found!r}")
    return _pass("target_not_in_query")


def evidence_verdict(prediction: str | None, golds: Sequence[str], error: str | None = None) -> Check:
    """Verdict of the evidence check on the answer of a model that read the evidence and could not search.

    An exact match passes, anything else fails; an error of the model or its server is UNKNOWN.
    """
    if error is not None:
        return _unknown("evidence_check", error)
    if prediction is None:
        return _fail("evidence_check", "no answer was given from the evidence")
    if exact_match(prediction, golds) == 1.0:
        return _pass("evidence_check")
    return _fail("evidence_check", f"answered {prediction[:200]!r} from the evidence")


def retrieved_evidence(rollout: Rollout) -> tuple[Passage, ...]:
    """Passages that the retriever returned to the rollout's searches, each once, in order of appearance.

    Read from the hits alone: text that the model wrote inside an observation tag is not evidence.
    """
    found: dict[str, Passage] = {}
    for turn in rollout.turns:
        if isinstance(turn.action, Search):
            for hit in turn.hits:
                found.setdefault(hit.passage.id, hit.passage)
    return tuple(found.values())


def evidence_mix(evidence: Sequence[Passage], others: Sequence[Passage], n: int, seed: int | str) -> list[Passage]:
    """The evidence with ``n`` distractors from ``others`` (fewer where there are fewer), shuffled by ``seed``.

    Passages of ``others`` that are evidence too are left out. The same arguments always give the same list.
    """
    rng = random.Random(f"evidence-mix:{seed}")
    own = {passage.id for passage in evidence} | {passage.text for passage in evidence}
    pool = {passage.id: passage for passage in others if passage.id not in own and passage.text not in own}
    candidates = [pool[key] for key in sorted(pool)]  # the order in which other questions finished must not matter
    mixed = [*evidence, *rng.sample(candidates, min(n, len(candidates)))]
    rng.shuffle(mixed)
    return mixed


def _question(rollout: Rollout) -> str | None:
    asked = [turn.action.question for turn in rollout.turns if isinstance(turn.action, Ask)]
    return asked[0].strip() or None if len(asked) == 1 else None


def _pass(name: str) -> Check:
    return Check(name=name, verdict=Verdict.PASS)


def _fail(name: str, reason: str) -> Check:
    return Check(name=name, verdict=Verdict.FAIL, reason=reason)


def _unknown(name: str, reason: str) -> Check:
    return Check(name=name, verdict=Verdict.UNKNOWN, reason=reason)
