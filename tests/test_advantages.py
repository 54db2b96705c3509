"""Group-relative advantages and what is left out of an update."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny_policy import call, rollout

from sesa.errors import DataError
from sesa.training.advantages import Drop, Scale, group_advantages, select, unusable
from sesa.types import Rollout, StopReason

returns = st.lists(st.floats(-2, 2), min_size=2, max_size=6)


def good(name: str, value: float, version: int = 0) -> Rollout:
    return rollout(name, [call([1, 2], [3, 4], version=version)], value)


def test_pinned_values() -> None:
    one_of_four = [[1.0, 0.0, 0.0, 0.0]]  # mean 0.25, sample standard deviation 0.5
    assert group_advantages(one_of_four, "group")[0] == pytest.approx([0.75 / 0.5001] + [-0.25 / 0.5001] * 3, abs=1e-12)
    assert group_advantages(one_of_four, "none")[0] == pytest.approx([0.75, -0.25, -0.25, -0.25], abs=1e-12)
    two = [[1.0, 0.0], [3.0, 1.0]]
    spread = statistics.stdev([1.0, 0.0, 3.0, 1.0]) + 1e-4
    assert group_advantages(two, "batch") == [
        pytest.approx([0.5 / spread, -0.5 / spread]),
        pytest.approx([1 / spread, -1 / spread]),
    ]


def test_same_as_the_trainer_library() -> None:
    torch = pytest.importorskip("torch")
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.0], [0.2, 0.9, 0.9, 0.1]])
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    assert torch.tensor(group_advantages(rewards.tolist(), "group")) == pytest.approx(expected, abs=1e-6)


@given(st.lists(returns, min_size=1, max_size=4), st.sampled_from(["group", "batch", "none"]))
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order(groups: list[list[float]], scale: Scale) -> None:
    for group, advantages in zip(groups, group_advantages(groups, scale), strict=True):
        assert math.fsum(advantages) == pytest.approx(0, abs=1e-6)
        ranked = sorted(zip(group, advantages, strict=True))
        assert [a for _, a in ranked] == sorted(advantages)


@given(returns, st.floats(-5, 5), st.floats(0.5, 4))
def test_group_scaling_ignores_shift_and_scale(group: list[float], shift: float, factor: float) -> None:
    assume(statistics.stdev(group) > 0.1)
    moved = [factor * value + shift for value in group]
    for a, b in zip(group_advantages([group, moved], "group")[0], group_advantages([moved], "group")[0], strict=True):
        assert a == pytest.approx(b, rel=1e-2, abs=1e-6)


@given(st.lists(returns, min_size=2, max_size=4))
def test_groups_do_not_influence_each_other_unless_scaled_by_batch(groups: list[list[float]]) -> None:
    scales: tuple[Scale, ...] = ("group", "none")
    for scale in scales:
        together = group_advantages(groups, scale)
        assert together == [group_advantages([group], scale)[0] for group in groups]


def test_a_single_return_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two"):
        group_advantages([[1.0]], "group")


def test_zero_variance_groups_are_dropped_and_counted() -> None:
    groups = [[good("a", 1), good("b", 1)], [good("c", 1), good("d", 0)], [good("e", 0), good("f", 0)]]
    selection = select(groups, 0, "group")
    assert [r.id for r, _ in selection.kept] == ["c", "d"]
    assert selection.dropped == {"zero_variance": 2}
    assert selection.reasons == dict.fromkeys("abef", Drop.ZERO_VARIANCE)
    assert selection.groups == 1


def test_lost_rollouts_do_not_enter_mean_or_deviation() -> None:
    lost = rollout("x", [call([1], [2])], 100.0, StopReason.BACKEND_ERROR)
    selection = select([[good("a", 1), lost, good("b", 0)]], 0, "none")
    assert [(r.id, a) for r, a in selection.kept] == [("a", pytest.approx(0.5)), ("b", pytest.approx(-0.5))]
    assert selection.dropped == {"backend_error": 1}
    assert selection.reasons == {"x": Drop.BACKEND_ERROR}


def test_a_group_with_one_usable_rollout_is_dropped_as_too_few() -> None:
    selection = select([[good("a", 1), good("b", 0, version=3)]], 0, "group")
    assert selection.kept == ()
    assert selection.dropped == {"stale_version": 1, "too_few_rollouts": 1}
    assert selection.reasons == {"a": Drop.TOO_FEW, "b": Drop.STALE_VERSION}


def test_every_exclusion_has_its_name() -> None:
    ok = call([1, 2], [3])
    cases = {
        rollout("r", [ok], 1, StopReason.CANCELLED): Drop.CANCELLED,
        rollout("r", [], 1): Drop.NO_TOKENS,
        rollout("r", [call([1], [])], 1): Drop.NO_TOKENS,
        rollout("r", [call([], [3])], 1): Drop.NO_PROMPT,
        rollout("r", [ok, call([1, 2, 3], [4], version=1)], 1): Drop.MIXED_VERSIONS,
        rollout("r", [call([1], [2], version=2)], 1): Drop.STALE_VERSION,
        rollout("r", [call([1], [2], [math.nan])], 1): Drop.MISSING_LOGPROBS,
        rollout("r", [call([1], [2], [-math.inf])], 1): Drop.MISSING_LOGPROBS,
        rollout("r", [ok], 1).model_copy(update={"rewards": ()}): Drop.NO_REWARD,
        rollout("r", [ok], math.nan): Drop.BAD_REWARD,
    }
    assert {r: unusable(r, 0) for r in cases} == cases
    assert unusable(rollout("r", [ok], 0.0), 0) is None


def test_a_turn_issued_by_the_environment_has_no_version_to_mix() -> None:
    opening = call([1], [], version=0)
    assert unusable(rollout("r", [opening, call([1, 5], [2], version=4)], 1), 4) is None


def test_batch_deviation_includes_groups_without_variance() -> None:
    groups = [[good("a", 1), good("b", 0)], [good("c", 5), good("d", 5)]]
    selection = select(groups, 0, "batch")
    assert {r.id: a for r, a in selection.kept}["a"] == pytest.approx(0.5 / (statistics.stdev([1, 0, 5, 5]) + 1e-4))


def test_one_rollout_in_two_groups_is_refused() -> None:
    with pytest.raises(DataError, match="rollout a occurs 2 times"):
        select([[good("a", 1), good("b", 0)], [good("a", 1), good("c", 0)]], 0, "group")


def test_no_groups_select_nothing() -> None:
    selection = select([], 0, "batch")
    assert (selection.kept, selection.groups, selection.dropped) == ((), 0, {})
