"""Rewards as pure functions; each part is a named `Reward`, and a rollout's return is their weighted sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sesa.config import RewardSection
from sesa.text import comparable
from sesa.types import Invalid, Question, Reward, Role, Rollout, Search, StopReason, Verdict

# HotpotQA's script gives no partial credit to these: "yes" and "yes and no" share a token but not a meaning.
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})


def exact_match(prediction: str | None, golds: Sequence[str]) -> float:
    """1.0 where the normalised prediction equals any normalised gold, else 0.0; None (no answer) scores 0.0.

    Formula: SQuAD 1.1 (arXiv 1606.05250), maximum over the target and its aliases (arXiv 2607.29468).
    Raises TypeError where ``golds`` is one string instead of a list of them, ValueError where it is empty.
    """
    _check_golds(golds)
    if prediction is None:
        return 0.0
    return float(comparable(prediction) in {comparable(gold) for gold in golds})


def f1(prediction: str | None, golds: Sequence[str]) -> float:
    """Token F1 in [0, 1] of the normalised texts, maximum over golds; yes and no match exactly or not at all.

    Formula: SQuAD 1.1 (arXiv 1606.05250) with the yes/no rule of HotpotQA (arXiv 1809.09600). Raises as `exact_match`.
    """
    _check_golds(golds)
    return 0.0 if prediction is None else max(_f1(comparable(prediction), comparable(gold)) for gold in golds)


def frontier(p: float | None, low: float, high: float, penalty: float) -> Reward | None:
    """Proposer reward for a question that its solver group answered with success rate ``p``.

    Formula (SESA, arXiv 2607.29468): -penalty where p is 0 or 1, else 4 (low + p)(high - p).
    None where p is None: fewer than two rollouts finished, so there is nothing to reward.
    """
    if p is None:
        return None
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"success rate must lie in [0, 1], got {p}")
    value = 0.0 - penalty if p in (0.0, 1.0) else 4.0 * (low + p) * (high - p)
    return Reward(name="frontier", value=value)


def solver_rewards(rollout: Rollout, question: Question, config: RewardSection) -> tuple[Reward, ...]:
    """Reward parts of a solver rollout: "correct", and "f1" and "format" where they are configured.

    The return is (1 - f1_weight) correct + f1_weight f1 + format_weight format; in the published settings it is
    "correct" alone. A rollout lost to the backend has no rewards at all. Raises ValueError where the rollout is not
    a solver's attempt at this question.
    """
    if rollout.role is not Role.SOLVER or rollout.question_id != question.id:
        raise ValueError(
            f"rollout {rollout.id} is a {rollout.role}'s of {rollout.question_id}, not a solver's of {question.id}"
        )
    if not rollout.finished:
        return ()
    correct = exact_match(rollout.answer, question.golds)
    parts = [Reward(name="correct", value=correct, weight=1.0 - config.f1_weight)]
    if config.f1_weight:
        parts.append(Reward(name="f1", value=f1(rollout.answer, question.golds), weight=config.f1_weight))
    if config.format_weight:
        parts.append(Reward(name="format", value=float(well_formed(rollout)), weight=config.format_weight))
    return tuple(parts)


def proposer_rewards(status: Verdict, success_rate: float | None, config: RewardSection) -> tuple[Reward, ...]:
    """Reward parts of a proposal: "frontier" for a valid question, "invalid" for a refused one.

    None for an UNKNOWN question, which is set aside (an error of a server is not the proposer's), and none for a
    valid question without a success rate: those proposals enter no update.
    """
    if status is Verdict.FAIL:
        return (Reward(name="invalid", value=0.0 - config.invalid_penalty),)
    if status is Verdict.UNKNOWN:
        return ()
    reward = frontier(success_rate, config.low, config.high, config.penalty)
    return () if reward is None else (reward,)


def well_formed(rollout: Rollout) -> bool:
    """Whether every turn held a usable action, none was cut off, and the rollout ended with an answer."""
    return rollout.stop_reason is StopReason.ANSWERED and all(
        not isinstance(turn.action, Invalid) and turn.call.finish_reason != "length" for turn in rollout.turns
    )


def substantively_wrong(rollout: Rollout) -> bool:
    """Whether a scored solver rollout failed in substance: such rollouts are distilled (arXiv 2607.29468).

    True for a wrong answer and for a search that used up its turns. False for a correct rollout, and for one that
    failed in form: malformed to the end, cut off, or lost to the backend. Raises ValueError where the rollout is
    finished but not scored yet.
    """
    if not rollout.finished:
        return False
    correct = rollout.reward("correct")
    if correct is None:
        raise ValueError(f"rollout {rollout.id} has no correct reward yet; score it before asking what went wrong")
    if correct >= 1.0 or rollout.stop_reason not in (StopReason.ANSWERED, StopReason.MAX_TURNS):
        return False
    return rollout.answer is not None or (bool(rollout.turns) and isinstance(rollout.turns[-1].action, Search))


def _f1(prediction: str, gold: str) -> float:
    if prediction != gold and (prediction in _CLOSED_ANSWERS or gold in _CLOSED_ANSWERS):
        return 0.0
    ours, theirs = prediction.split(), gold.split()
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def _check_golds(golds: Sequence[str]) -> None:
    if isinstance(golds, str) or not all(isinstance(gold, str) for gold in golds):
        raise TypeError(f"golds must be a sequence of texts, got {golds!r}")
    if not golds:
        raise ValueError("golds must hold at least the target answer")
