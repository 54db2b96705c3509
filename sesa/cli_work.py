"""Commands that do work: building the corpus, asking, serving, and the doctor."""

from __future__ import annotations

import asyncio
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sesa.cli_options import ConfigFile, Json, Root, Run, StoreUrl, open_store
from sesa.cli_output import cell, choice, indented, note, one_line, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sesa.config import RunConfig
    from sesa.skills import Bank
    from sesa.store import RunRow
    from sesa.types import PolicyVersion, Rollout

corpus = typer.Typer(no_args_is_help=True, help="The corpus and its indexes.")

_WATCH_S = 10.0  # between looks at whether the served model is alive


# ------------------------------------------------------------------------------------------------------------- corpus

CorpusPath = Annotated[str, typer.Option("--corpus", help='"embedded", a JSONL file of passages, or an XML dump.')]
Kind = Annotated[str, typer.Option("--kind", help="bm25, dense or hybrid; default: as configured.")]
Cache = Annotated[str, typer.Option("--cache", help="Folder of the indexes; default: ~/.cache/sesa.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out unusable rows instead of stopping.")]


@corpus.command("build")
def corpus_build(
    path: CorpusPath = "",
    kind: Kind = "",
    config: ConfigFile = "",
    cache: Cache = "",
    skip_bad: SkipBad = False,
    json: Json = False,
) -> None:
    """Read the corpus and build its index; what exists is kept, what was cut off is taken up again."""
    from sesa.retrieval.opening import build
    from sesa.retrieval.progress import shown

    settings = _corpus_config(config, path, kind, cache, skip_bad)
    with shown() as progress:
        report = build(settings, progress)
    _show_corpus(report, json)


@corpus.command("info")
def corpus_info(
    path: CorpusPath = "", config: ConfigFile = "", cache: Cache = "", skip_bad: SkipBad = False, json: Json = False
) -> None:
    """What the corpus holds and which indexes exist; builds none."""
    from sesa.retrieval.opening import corpus_info as describe

    _show_corpus(describe(_corpus_config(config, path, "", cache, skip_bad)), json)


def _corpus_config(config: str, path: str, kind: str, cache: str, skip_bad: bool) -> RunConfig:
    from sesa.config import load_config

    given = {"corpus.path": path, "retrieval.kind": kind, "corpus.cache": cache}
    overrides = {key: value for key, value in given.items() if value}
    return load_config(config or None, overrides | ({"corpus.skip_bad": "true"} if skip_bad else {}))


def _show_corpus(report: dict[str, Any], json: bool) -> None:
    if json:
        print_json(report)
        return
    for name, value in report.items():
        if name != "indexes":
            print(f"{name:12} {one_line(cell(value))}")
    for kind, index in report["indexes"].items():
        state = f"built, {index['bytes'] / 2**20:.1f} MiB in {index['folder']}" if index["built"] else "not built"
        print(f"{kind:12} {state}")


# ---------------------------------------------------------------------------------------------------- ask and serve


def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    run: Run = "latest",
    bank: Annotated[str, typer.Option("--bank", help="on: read the run's skills (SESA-On); off: do not.")] = "on",
    attach: Annotated[str, typer.Option("--attach", help="URL printed by `sesa serve`; empty: start a server.")] = "",
    root: Root = "runs",
    store: StoreUrl = "",
    json: Json = False,
) -> None:
    """Ask the run's newest solver one question; prints its answer, searches, sources and skills."""
    from sesa.errors import ConfigError, ServerError
    from sesa.types import StopReason

    choice(bank, ("on", "off"), "--bank")
    if not question.strip():
        raise ConfigError("QUESTION: is empty; give the question in quotes")
    from sesa.graphs.ask import ask as answer
    from sesa.retrieval.progress import shown

    with open_store(root, store) as opened, shown() as progress:
        row = opened.run(run)
        config = config_of(row)
        if attach:
            serving = config.serving.model_copy(update={"attach": {"solver": attach}})
            config = config.model_copy(update={"serving": serving})
        work = answer(
            config,
            row.id,
            opened,
            question,
            "on" if bank == "on" else "off",
            root=Path(root),
            say=note,
            progress=progress,
        )
        rollout, read = asyncio.run(work)
    if rollout.stop_reason is StopReason.BACKEND_ERROR:
        raise ServerError(rollout.error or "the model server failed")
    if json:
        print_json(_answer_json(question, row.id, rollout, read))
    else:
        _show_answer(rollout, read)


def _answer_json(question: str, run_id: str, rollout: Rollout, bank: Bank | None) -> dict[str, Any]:
    searches = [(turn.action.query, turn.hits) for turn in rollout.turns if turn.action.kind == "search"]
    return {
        "run": run_id,
        "question": question,
        "answer": rollout.answer,
        "stop_reason": rollout.stop_reason,
        "policy_versions": rollout.policy_versions,
        "bank_version": rollout.bank_version,
        "sampled_tokens": rollout.sampled_tokens,
        "searches": [
            {"query": query, "hits": [hit.model_dump(mode="json") for hit in hits]} for query, hits in searches
        ],
        "passages": [
            {
                "query": query,
                "rank": hit.rank,
                "score": hit.score,
                "id": hit.passage.id,
                "title": hit.passage.title,
                "text": hit.passage.text,
            }
            for query, hits in searches
            for hit in hits
        ],
        "skills": [
            {**bank.skills[s.id].model_dump(mode="json"), "similarity": s.similarity, "loaded": s.loaded}
            for s in rollout.skills
            if s.loaded and bank is not None
        ],
    }


def _show_answer(rollout: Rollout, bank: Bank | None) -> None:
    print(one_line(rollout.answer) if rollout.answer is not None else f"no answer ({rollout.stop_reason})")
    for turn in rollout.turns:
        if turn.action.kind != "search":
            continue
        print(f"\nsearch  {one_line(turn.action.query)}")
        for hit in turn.hits:
            print(f"  {hit.rank}. {one_line(hit.passage.title)}  [{one_line(hit.passage.id)}]  {hit.score:.3f}")
            print(indented(one_line(hit.passage.text, 240), 5))
        if not turn.hits:
            print("  nothing found")
    if bank is None:
        print("\nskills  off")
        return
    loaded = [skill for skill in rollout.skills if skill.loaded]
    print(f"\nskills  bank version {bank.version}, {len(loaded)} loaded")
    for skill in loaded:
        known = bank.skills[skill.id]
        print(f"  {skill.similarity:.3f}  {skill.id}  {one_line(f'{known.trigger} → {known.description}', 140)}")


def serve(
    run: Run = "latest",
    policy: Annotated[str, typer.Option("--policy", help="solver, proposer or both.")] = "solver",
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="First port; 0: any free one; default: as configured."),
    ] = None,
    root: Root = "runs",
    store: StoreUrl = "",
) -> None:
    """Serve the run's newest weights on an OpenAI-compatible endpoint until Ctrl-C."""
    chosen = choice(policy, ("solver", "proposer", "both"), "--policy")
    policies = ("proposer", "solver") if chosen == "both" else (str(chosen),)
    with open_store(root, store) as opened:
        row = opened.run(run)
        versions = {v.policy: v for v in opened.versions(row.id) if v.published and v.policy in policies}
    config = config_of(row)
    first = config.serving.port if port is None else port
    settings = config.model_copy(update={"serving": config.serving.model_copy(update={"port": first, "attach": {}})})
    where = ["--run", row.id, *(("--root", root) if root != "runs" else ()), *(("--store", store) if store else ())]
    asyncio.run(_serve(settings, policies, versions, Path(root) / row.id / "logs" / "serve", where))


async def _serve(
    config: RunConfig,
    policies: tuple[str, ...],
    versions: dict[str, PolicyVersion],
    log_dir: Path,
    where: Sequence[str],
) -> None:
    """``where`` holds the options by which another command finds the run."""
    from sesa.embedded import resolve_model
    from sesa.files import cache_folder
    from sesa.serving import Serving

    model_dir = await asyncio.to_thread(resolve_model, config.model, cache_folder(config.corpus.cache), note)
    async with Serving(config, model_dir, log_dir, policies=policies, progress=note) as serving:
        await serving.start(versions)
        stop = asyncio.Event()
        for name in (signal.SIGINT, signal.SIGTERM):  # before anything is printed: whoever reads it may answer at once
            asyncio.get_running_loop().add_signal_handler(name, stop.set)
        for policy in policies:
            client = serving.client(policy)
            print(f"{policy} v{client.version}  {client.base_url}/v1  model {client.model}", flush=True)
        note("serving; Ctrl-C ends it")
        if "solver" in policies:
            options = shlex.join(["--attach", serving.client("solver").base_url, *where])
            note(f'ask it: sesa ask {options} "question"')
        while not stop.is_set():
            try:
                await asyncio.wait_for(stop.wait(), _WATCH_S)
            except TimeoutError:
                for restarted in await serving.ensure_alive():
                    note(f"{restarted}: restarted")


def config_of(row: RunRow) -> RunConfig:
    """The configuration that a run was started with. Raises ConfigError where this version cannot read it."""
    from sesa.config import stored_config

    return stored_config(row.config, row.id)


# ------------------------------------------------------------------------------------------------------------- doctor


def doctor(config: ConfigFile = "", json: Json = False) -> None:
    """Check this machine and installation, and say what to do; exit code 1 where something must be done."""
    from sesa.config import load_config
    from sesa.doctor import diagnose

    findings = diagnose(load_config(config) if config else None)
    if json:
        print_json([{"name": f.name, "ok": f.ok, "detail": f.detail, "remedy": f.remedy} for f in findings])
    else:
        print_table(
            ("check", "ok", "found", "remedy"),
            ((f.name, f.ok, f.detail, f.remedy) for f in findings),
        )
    if not all(f.ok for f in findings):
        raise typer.Exit(1)
