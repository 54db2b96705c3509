"""Commands that read the store: runs, rollouts and skills."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sesa.cli_options import Json, Limit, Offset, Root, Run, StoreUrl, open_store
from sesa.cli_output import cell, choice, one_line, print_json, print_table, short

if TYPE_CHECKING:
    from sesa.skills import Bank
    from sesa.store import RolloutRow, RunRow, Store
    from sesa.types import Question

SHOWN = 20
"""Rollouts listed under a skill; the rest are one command away."""

runs = typer.Typer(no_args_is_help=True, help="Runs and what their steps did.")
rollouts = typer.Typer(no_args_is_help=True, help="Rollouts: every prompt, reply, passage and reward.")
skills = typer.Typer(no_args_is_help=True, help="The skill bank of a run.")

_SILENT_S = 600  # a running run whose last heartbeat is older has probably died


# --------------------------------------------------------------------------------------------------------------- runs


@runs.command("list")
def runs_list(root: Root = "runs", store: StoreUrl = "", json: Json = False) -> None:
    """All runs, oldest first."""
    with open_store(root, store) as opened:
        found = opened.runs()
    if json:
        print_json([row.model_dump(mode="json", exclude={"config", "facts"}) for row in found])
        return
    print_table(
        ("run", "status", "steps", "created", "last sign of life"),
        ((row.id, _status(row), row.steps_done, _when(row.created), _when(row.updated)) for row in found),
    )


@runs.command("show")
def runs_show(
    run: Annotated[str, typer.Argument(help='Run id, or "latest".')] = "latest",
    root: Root = "runs",
    store: StoreUrl = "",
    json: Json = False,
) -> None:
    """One run: its steps with their counts and metrics, published versions, failures, log."""
    with open_store(root, store) as opened:
        row = opened.run(run)
        report = _run_report(opened, row)
    if json:
        print_json(report)
        return
    print(f"run {row.id}  {_status(row)}  created {_when(row.created)}  last sign of life {_when(row.updated)}")
    for name, value in row.facts.items():
        shown = _pairs(value) if isinstance(value, dict) else cell(value)
        print(f"  {name}: {short(shown, 200)}")
    for step, content in report["steps"].items():
        print(f"\nstep {step}")
        for node, counts in content["nodes"].items():
            print(f"  {node:16} {_pairs(counts)}")
        if content["metrics"]:
            print(f"  {'metrics':16} {_pairs(content['metrics'])}")
    print(f"\nbank version {report['bank_version']}  failures {_pairs(report['failures'])}")
    for version in report["versions"]:
        state = "published" if version["published"] else "not published"
        print(f"{version['policy']} v{version['version']}  step {version['step']}  {state}  {version['path']}")
    for entry in report["log"]:
        print(f"{entry['at'][:19]}  {entry['kind']}: {one_line(entry['message'])}")


def _run_report(store: Store, row: RunRow) -> dict[str, Any]:
    metrics = store.metrics(row.id)
    stats = store.stats(row.id)
    steps = sorted({*store.steps(row.id), *metrics})
    return {
        **row.model_dump(mode="json"),
        "steps": {
            step: {
                "nodes": store.nodes(row.id, step),
                "metrics": metrics.get(step, {}),
                "stats": [s.model_dump() for s in stats if s.step == step],
            }
            for step in steps
        },
        "bank_version": store.bank_version(row.id),
        "failures": {str(status): count for status, count in store.failure_counts(row.id).items()},
        "versions": [version.model_dump() for version in store.versions(row.id)],
        "log": [entry.model_dump(mode="json") for entry in store.log_entries(row.id)],
    }


def _status(row: RunRow) -> str:
    silent = (datetime.now(UTC) - row.updated).total_seconds()
    if row.status == "running" and silent > _SILENT_S:
        return f"running (silent for {silent / 60:.0f} min)"
    return row.status


def _when(at: datetime) -> str:
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _pairs(values: dict[str, Any]) -> str:
    return "  ".join(
        f"{name} ({_pairs(value)})" if isinstance(value, dict) and value else f"{name} {cell(value)}"
        for name, value in values.items()
        if value != {}
    )


# ----------------------------------------------------------------------------------------------------------- rollouts


@rollouts.command("list")
def rollouts_list(
    run: Run = "latest",
    step: Annotated[int | None, typer.Option("--step", help="Only this step.")] = None,
    role: Annotated[str | None, typer.Option("--role", help="proposer, solver, distiller or judge.")] = None,
    stop: Annotated[str | None, typer.Option("--stop", help="Only this stop reason, e.g. max_turns.")] = None,
    question: Annotated[str | None, typer.Option("--question", help="Only the attempts at this question id.")] = None,
    skill: Annotated[str | None, typer.Option("--skill", help="Only those that loaded this skill.")] = None,
    limit: Limit = 50,
    offset: Offset = 0,
    root: Root = "runs",
    store: StoreUrl = "",
    json: Json = False,
) -> None:
    """Rollouts in the order of their steps, a page at a time."""
    from sesa.types import Role, StopReason

    with open_store(root, store) as opened:
        run_id = opened.run(run).id
        asked, ended = choice(role, list(Role), "--role"), choice(stop, list(StopReason), "--stop")
        rows = opened.rollout_rows(
            run_id,
            step=step,
            role=Role(asked) if asked else None,
            stop_reason=StopReason(ended) if ended else None,
            question_id=question,
            skill_id=skill,
            limit=limit,
            offset=offset,
        )
        posed = {row.id: opened.questions(run_id, proposal_id=row.id) for row in rows if row.role is Role.PROPOSER}
    questions = {row_id: found[0] for row_id, found in posed.items() if found}
    refused = {row_id: question.refused_by for row_id, question in questions.items()}
    if json:
        print_json([{**row.model_dump(mode="json"), "refused_by": refused.get(row.id)} for row in rows])
        return
    print_table(
        (
            "rollout",
            "step",
            "role",
            "stop",
            "refused by",
            "return",
            "turns",
            "searches",
            "tokens",
            "answer or question",
        ),
        (
            (
                row.id,
                row.step,
                row.role,
                row.stop_reason,
                refused.get(row.id),
                row.value,
                row.turns,
                row.searches,
                row.sampled_tokens,
                short(_said(row, questions.get(row.id)), 60),
            )
            for row in rows
        ),
    )


def _said(row: RolloutRow, question: Question | None) -> str:
    if row.error is not None:
        return f"({row.error})"
    return cell((question.text or None) if question else row.answer)


@rollouts.command("show")
def rollouts_show(
    rollout: Annotated[str, typer.Argument(help="Rollout id.")],
    run: Run = "latest",
    tokens: Annotated[bool, typer.Option("--tokens", help="Also the exact messages, token ids, log-probs.")] = False,
    root: Root = "runs",
    store: StoreUrl = "",
    json: Json = False,
) -> None:
    """One rollout: question, skills, every turn, passages, rewards, tokens sampled and trained."""
    from sesa.cli_rollout import collect, show

    with open_store(root, store) as opened:
        view = collect(opened, opened.run(run).id, rollout)
    if json:
        print_json(view.as_json(tokens=tokens))
    else:
        show(view, tokens=tokens)


# ------------------------------------------------------------------------------------------------------------- skills

BankVersion = Annotated[
    int | None, typer.Option("--version", min=0, help="Bank version to look at; default: the current one.")
]


def _bank(store: Store, run_id: str, version: int | None) -> Bank:
    """The skill bank at a version. Raises NotFoundError where it has not come to that version."""
    from sesa.errors import NotFoundError
    from sesa.skills import Bank

    newest = store.bank_version(run_id)
    if version is not None and version > newest:
        raise NotFoundError(f"--version: run {run_id} has no bank version {version}; the newest is {newest}")
    return Bank.from_store(store, run_id, version)


@skills.command("list")
def skills_list(
    run: Run = "latest",
    status: Annotated[str | None, typer.Option("--status", help="active, retired, evicted or refused.")] = None,
    version: BankVersion = None,
    root: Root = "runs",
    store: StoreUrl = "",
    json: Json = False,
) -> None:
    """The skills of a bank version: those in use first, the most helpful on top."""
    from sesa.types import SkillStatus

    with open_store(root, store) as opened:
        bank = _bank(opened, opened.run(run).id, version)
    wanted = choice(status, list(SkillStatus), "--status")
    order = list(SkillStatus)
    found = [skill for skill in bank.skills.values() if wanted is None or skill.status == wanted]
    found.sort(key=lambda skill: (order.index(skill.status), -skill.counters.score, skill.id))
    if json:
        print_json([{**s.model_dump(mode="json"), "score": s.counters.score} for s in found])
        return
    print_table(
        ("skill", "status", "source", "loaded", "helpful", "hurt", "step", "applies when", "what to do"),
        (
            (
                s.id,
                s.status,
                s.source,
                s.counters.retrieved,
                s.counters.helpful,
                s.counters.hurt,
                s.created_step,
                short(s.trigger, 60),
                short(s.description, 80),
            )
            for s in found
        ),
    )


@skills.command("show")
def skills_show(
    skill: Annotated[str, typer.Argument(help="Skill id.")],
    run: Run = "latest",
    version: BankVersion = None,
    root: Root = "runs",
    store: StoreUrl = "",
    json: Json = False,
) -> None:
    """One skill: its text, its numbers, every event with its reason, and rollouts that loaded it."""
    from sesa.errors import NotFoundError
    from sesa.store import nearest

    with open_store(root, store) as opened:
        run_id = opened.run(run).id
        bank = _bank(opened, run_id, version)
        if skill not in bank.skills:
            raise NotFoundError(
                nearest(f"run {run_id}, bank version {bank.version}", "skill", skill, list(bank.skills))
            )
        found = bank.skills[skill]
        events = opened.bank_events(run_id, upto=bank.version, skill_id=skill)
        used = opened.rollout_rows(run_id, skill_id=skill)
    if json:
        print_json(
            {
                **found.model_dump(mode="json"),
                "score": found.counters.score,
                "bank_version": bank.version,
                "events": [event.model_dump(mode="json") for event in events],
                "rollouts": [row.id for row in used],
            }
        )
        return
    counters = found.counters
    print(f"skill {found.id}  {found.status}  {found.source}  step {found.created_step}")
    for label in ("trigger", "description", "avoidance", "query_template"):
        print(f"  {label:16} {cell(one_line(getattr(found, label)) or None)}")
    in_form = counters.retrieved - counters.helpful - counters.hurt
    uncounted = f"  {in_form} failed in form and count for neither" if in_form else ""
    print(f"  {'numbers':16} loaded {counters.retrieved}  helpful {counters.helpful}  hurt {counters.hurt}{uncounted}")
    if found.source == "seed":
        print(f"  {'':16} a seed skill: it stays, whatever its numbers")
    if found.provenance:
        print(f"  {'from':16} {', '.join(found.provenance)}")
    print(f"\nevents up to bank version {bank.version}")
    for event in events:
        detail = {name: value for name, value in event.detail.items() if name != "rollouts"}
        print(
            f"  v{event.version} step {event.step}  {event.kind}: {one_line(event.reason)}  {_pairs(detail)}".rstrip()
        )
    print("\nloaded by" if used else "\nloaded by no rollout")
    for row in used[:SHOWN]:
        print(f"  {row.id}  {row.stop_reason}  return {cell(row.value)}")
    if len(used) > SHOWN:
        print(f"  … and {len(used) - SHOWN} more: sesa rollouts list --run {run_id} --skill {found.id}")
