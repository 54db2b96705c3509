"""The account of a step, read from stored rows alone, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from sesa.graphs.solving import grouped
from sesa.store import Store
from sesa.types import Role, Rollout, TrainStats


def step_report(store: Store, run_id: str, step: int) -> str:
    """What a step did, stage by stage."""
    return "\n".join(_lines(store, run_id, step))


def _lines(store: Store, run_id: str, step: int) -> Iterator[str]:
    nodes = store.nodes(run_id, step)
    validate, collect, bank = (nodes.get(name, {}) for name in ("validate", "collect", "consolidate"))
    yield f"step {step} of run {run_id}"
    yield f"  seeds          {nodes.get('seeds', {}).get('seeds', 0)}"
    yield f"  proposals      {_counts(nodes.get('propose', {}), 'proposals', 'stop_reasons')}"
    refused = sum(validate.get("refused", {}).values())
    yield f"  valid          {validate.get('valid', 0)}, set aside {validate.get('set_aside', 0)}"
    yield f"  refused        {refused}{_detail(validate.get('refused', {}))}"
    attempts = store.rollouts(run_id, step=step, role=Role.SOLVER, turns=False)
    groups = grouped(store.questions(run_id, step=step), attempts)
    lost = sum(not r.finished for r in attempts)
    yield f"  solved         {len(groups)} questions in {len(attempts)} rollouts, {lost} lost"
    for group in groups:
        rate = group.success_rate
        shown = "too few finished" if rate is None else f"success {rate:.2f}"
        yield f"    {group.question.id}  {shown}  {group.question.text[:70]!r} -> {group.question.target!r}"
    for role in (Role.PROPOSER, Role.SOLVER):
        yield f"  reward         {role}: {_rewards(store.rollouts(run_id, step=step, role=role, turns=False))}"
    yield f"  failures       {collect.get('failures', 0)} collected"
    yield f"  skills         {_bank(bank)}"
    for stats in store.stats(run_id, step=step):
        yield f"  update         {_update(stats)}"
    published = nodes.get("publish", {}).get("published", {})
    yield f"  published      {', '.join(f'{p} v{v:04d}' for p, v in published.items()) or 'nothing new'}"


def _counts(counts: dict[str, Any], total: str, parts: str) -> str:
    return f"{counts.get(total, 0)}{_detail(counts.get(parts, {}))}"


def _detail(parts: dict[str, int]) -> str:
    return f" ({', '.join(f'{name} {count}' for name, count in sorted(parts.items()))})" if parts else ""


def _rewards(rollouts: list[Rollout]) -> str:
    """Mean return and the mean of each of its parts over the rollouts that have one."""
    scored = [r for r in rollouts if r.rewards]
    if not scored:
        return "none given"
    names = sorted({part.name for r in scored for part in r.rewards})
    means = []
    for name in names:
        values = [part.value for r in scored for part in r.rewards if part.name == name]
        means.append(f"{name} {fmean(values):.3f} over {len(values)}")
    return f"mean {fmean(r.value for r in scored):.3f} over {len(scored)} rollouts ({', '.join(means)})"


def _bank(counts: dict[str, Any]) -> str:
    if "active_before" not in counts:
        return "the bank is off"
    changes = ", ".join(f"{name} {counts[name]}" for name in ("credited", "admitted", "retired", "evicted"))
    refused = sum(counts["refused"].values())
    calls = counts["distillations"]
    distilled = (
        f"{calls} distillations, {counts['out_of_form']} out of form, {counts['lost']} lost"
        if calls
        else "no distillation"
    )
    return (
        f"{counts['active_before']} before, {counts['active_after']} after ({changes}, refused {refused}"
        f"{_detail(counts['refused'])}; {distilled}; bank version {counts['bank_version']})"
    )


def _update(stats: TrainStats) -> str:
    dropped = f", left out{_detail(stats.dropped)}" if stats.dropped else ""
    if stats.loss is None or stats.grad_norm is None or stats.ratio_mean is None:
        return f"{stats.policy}: nothing to train on{dropped}"
    return (
        f"{stats.policy}: loss {stats.loss:.4f}, gradient norm {stats.grad_norm:.3f}, trained tokens "
        f"{stats.trained_tokens} of {stats.sampled_tokens} sampled in {stats.sequences} sequences of {stats.groups} "
        f"groups, ratio mean {stats.ratio_mean:.4f}, {stats.seconds:.0f} s{dropped}"
    )
