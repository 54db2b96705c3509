"""Which rollouts an update trains on, and their group-relative advantages."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from sesa.errors import DataError
from sesa.types import Rollout

STD_EPSILON = 1e-4  # added to the standard deviation, as TRL does
ZERO_VARIANCE = 1e-9  # spread of returns below which a group says nothing

Scale = Literal["group", "batch", "none"]


class Drop(StrEnum):
    """Why something was left out of an update. The first two count groups (and name the rollouts they cost)."""

    ZERO_VARIANCE = "zero_variance"
    TOO_FEW = "too_few_rollouts"
    BACKEND_ERROR = "backend_error"
    CANCELLED = "cancelled"
    NO_TOKENS = "no_tokens"
    NO_PROMPT = "no_prompt"
    NO_REWARD = "no_reward"
    BAD_REWARD = "bad_reward"
    MISSING_LOGPROBS = "missing_logprobs"
    MIXED_VERSIONS = "mixed_versions"
    STALE_VERSION = "stale_version"


GROUP_REASONS = frozenset({Drop.ZERO_VARIANCE, Drop.TOO_FEW})


@dataclass(frozen=True, slots=True)
class Selection:
    """What an update trains on.

    ``kept`` holds (rollout, advantage) in the order given; ``reasons`` names for every other rollout why it was left
    out; ``dropped`` counts: groups under the reasons of ``GROUP_REASONS``, rollouts under all others; ``groups`` is
    the number of groups kept.
    """

    kept: tuple[tuple[Rollout, float], ...]
    reasons: dict[str, Drop]
    dropped: dict[str, int]
    groups: int


def group_advantages(returns: Sequence[Sequence[float]], scale: Scale) -> list[list[float]]:
    """Advantages of each return within its group.

    A = r - mean(group), then divided by std(group) + 1e-4 for ``"group"`` (GRPO, arXiv 2402.03300, section 4.1.2; DAPO,
    2503.14476, equation 9, keeps it), by the standard deviation over all returns for ``"batch"``, and left as it is
    for ``"none"`` (Dr. GRPO, 2503.20783, section 3.1: dividing favours very easy and very hard questions). The
    standard deviation is the sample one (n - 1), as in TRL; a group needs at least two returns.
    """
    if any(len(group) < 2 for group in returns):
        raise ValueError("a group needs at least two returns to compare")
    batch = [value for group in returns for value in group]
    batch_std = statistics.stdev(batch) if scale == "batch" and batch else 0.0
    advantages = []
    for group in returns:
        mean = math.fsum(group) / len(group)
        std = {"group": statistics.stdev(group), "batch": batch_std, "none": 1.0 - STD_EPSILON}[scale]
        advantages.append([(value - mean) / (std + STD_EPSILON) for value in group])
    return advantages


def select(groups: Sequence[Sequence[Rollout]], version: int, scale: Scale) -> Selection:
    """Choose the rollouts to train weights ``version`` on; a rollout's return is ``Rollout.value``.

    Rollouts that cannot be trained on leave their group before its mean and deviation are taken; then groups with
    fewer than two rollouts or without variance are dropped (their advantages would be undefined or all zero).
    Raises DataError when one rollout id occurs twice: its group would be split or counted double.
    """
    seen = Counter(rollout.id for group in groups for rollout in group)
    twice = next((name for name, count in seen.items() if count > 1), None)
    if twice is not None:
        raise DataError(f"rollout {twice} occurs {seen[twice]} times in one update; give every rollout its own id")

    reasons: dict[str, Drop] = {}
    dropped: Counter[str] = Counter()
    eligible: list[list[Rollout]] = []
    for group in groups:
        rest = []
        for rollout in group:
            reason = unusable(rollout, version)
            if reason is None:
                rest.append(rollout)
            else:
                reasons[rollout.id] = reason
                dropped[reason] += 1
        if len(rest) >= 2:
            eligible.append(rest)
        else:
            dropped[Drop.TOO_FEW] += 1
            reasons.update({rollout.id: Drop.TOO_FEW for rollout in rest})

    kept: list[tuple[Rollout, float]] = []
    kept_groups = 0
    # The batch deviation is taken over every comparable group, those without variance included, as in TRL.
    values = [[rollout.value for rollout in group] for group in eligible]
    for group, returns, advantages in zip(eligible, values, group_advantages(values, scale), strict=True):
        if max(returns) - min(returns) <= ZERO_VARIANCE:
            dropped[Drop.ZERO_VARIANCE] += 1
            reasons.update({rollout.id: Drop.ZERO_VARIANCE for rollout in group})
        else:
            kept_groups += 1
            kept.extend(zip(group, advantages, strict=True))
    return Selection(tuple(kept), reasons, dict(dropped), kept_groups)


def unusable(rollout: Rollout, version: int) -> Drop | None:
    """Why a rollout cannot be trained on by itself, or None.

    Only calls that sampled tokens count: a turn that the environment issued has none. A proposal that was set aside
    carries no reward at all, which is not a return of zero.
    """
    if not rollout.finished:
        return Drop(rollout.stop_reason.value)
    calls = [turn.call for turn in rollout.turns if turn.call.token_ids]
    if not calls:
        return Drop.NO_TOKENS
    if any(not call.prompt_ids for call in calls):
        return Drop.NO_PROMPT
    versions = {call.policy_version for call in calls}
    if len(versions) > 1:
        return Drop.MIXED_VERSIONS
    if versions != {version}:
        return Drop.STALE_VERSION
    if any(not math.isfinite(logprob) for call in calls for logprob in call.logprobs):
        return Drop.MISSING_LOGPROBS
    if not rollout.rewards:
        return Drop.NO_REWARD
    return None if math.isfinite(rollout.value) else Drop.BAD_REWARD
