"""Launch self-play rounds: ``python training/run.py --config configs/cpu.toml --steps 3``."""

from __future__ import annotations

import os

# The trainer shares the cores with idle servers: threads that spin while they wait took four times the processor time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import asyncio
import contextlib
import secrets
import shlex
import shutil
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from sesa.cli_output import MOST_SHOWN, one_line, outside
from sesa.config import RunConfig, config_keys, load_config, stored_config, toml_value
from sesa.consolidation import prime
from sesa.corpus import Corpus, load_corpus
from sesa.errors import BusyError, ConfigError, SesaError, StoreError
from sesa.graphs.context import RunContext
from sesa.graphs.session import open_parts, prepare_model
from sesa.graphs.step import open_graph, run_step
from sesa.graphs.updating import POLICIES, relocate, served_version
from sesa.seeds import load_seeds, read_seeds
from sesa.store import Store, store_location
from sesa.training.console import StageConsole
from sesa.training.estimate import describe, estimate
from sesa.training.facts import run_facts
from sesa.training.report import step_report
from sesa.types import PolicyVersion, SeedAnswer

if TYPE_CHECKING:
    from sesa.training.updater import GrpoUpdater

HEARTBEAT_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit codes: 0 done, 2 for an error with a one-line remedy, 130 after Ctrl-C."""
    try:
        args, overrides = parse_arguments(sys.argv[1:] if argv is None else argv)
        return run(args, overrides)
    except SesaError as error:
        print(f"error: {one_line(str(error), MOST_SHOWN)}", file=sys.stderr)
        return 2
    except (OSError, OverflowError) as error:  # a path or a number from outside that the system refuses
        print(f"error: {one_line(outside(error), MOST_SHOWN)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """Reports a bad argument as every other error: one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}; see --help")


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """The options, and every ``--section.key VALUE`` as an override of the configuration."""
    keys = "\n".join(f"  --{key:36} {text} [{default!r}]" for key, text, default in config_keys())
    parser = _Parser(
        prog="python training/run.py",
        description="Run self-play: propose, validate, solve, update both policies, grow the skill bank.",
        epilog=f"configuration keys (over those of the file):\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="TOML file; those shipped are in configs/")
    parser.add_argument("--steps", type=int, help="steps of the run in all (run.steps)")
    parser.add_argument("--resume", metavar="RUN", help='go on with a run ("latest": the newest)')
    parser.add_argument(
        "--until-trained",
        type=int,
        default=0,
        metavar="MORE",
        help="add up to MORE steps until the solver was updated once",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the configuration and an estimate; start nothing")
    parser.add_argument("--root", help="folder of the runs (run.root)")
    args, rest = parser.parse_known_args(argv)
    if args.until_trained < 0:
        raise ConfigError(f"command line: --until-trained: must not be negative, got {args.until_trained}")
    overrides: dict[str, str] = {}
    while rest:
        name = rest.pop(0)
        if not name.startswith("--") or "." not in name:
            raise ConfigError(f"command line: {name}: unknown argument; see --help")
        key, given, value = name[2:].partition("=")
        if not given:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"command line: --{key}: a value must follow")
            value = rest.pop(0)
        overrides[key] = value
    for option, key in ((args.root, "run.root"), (args.steps, "run.steps")):
        if option is not None:
            overrides[key] = str(option)
    return args, overrides


def run(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Start or resume a run and see it to its end."""
    if args.resume is not None:
        return _resume(args, overrides)
    config = load_config(args.config, overrides)
    if args.dry_run:
        return _dry_run(config)
    run_id = f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    with Store.open(_location(config)) as store:
        return _launch(config, run_id, store, args.until_trained, fresh=True)


def _resume(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    if args.config:
        raise ConfigError("--resume goes on with the configuration stored with the run; leave out --config")
    place = load_config(None, overrides)
    with Store.open(_location(place), create=False) as store:
        row = store.run(args.resume)
        config = stored_config(row.config, row.id)
        changed = sorted(set(overrides) - {"run.root", "run.store", "run.steps"})
        if changed:
            raise ConfigError(f"--resume: {changed[0]} cannot change within a run; start a new one")
        section: dict[str, str | int] = {"root": place.run.root, "store": place.run.store}
        if "run.steps" in overrides:
            section["steps"] = place.run.steps
        config = config.model_copy(update={"run": config.run.model_copy(update=section)})
        if args.dry_run:
            return _dry_run(config)
        return _launch(config, row.id, store, args.until_trained, fresh=False)


def _location(config: RunConfig) -> str | Path:
    return store_location(config.run.root, config.run.store)


def _dry_run(config: RunConfig) -> int:
    for key, _, _ in config_keys():
        value: object = config
        for part in key.split("."):
            value = getattr(value, part)
        print(f"{key} = {toml_value(value)}")
    model_dir = None if config.model.path == "embedded" else Path(config.model.path)
    print(describe(estimate(config, model_dir), config))
    return 0


def _launch(config: RunConfig, run_id: str, store: Store, until_trained: int, *, fresh: bool) -> int:
    folder = Path(config.run.root).resolve() / run_id
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.root: {folder}: cannot be made ({error.strerror}); name another with --root") from None
    place = _place(config)
    more = f" --until-trained {until_trained}" if until_trained else ""
    resume = f"python training/run.py --resume {run_id} --steps {config.run.steps}{more}{place}"
    print(f"run {run_id}   look at it with: sesa runs show {run_id}{place}", flush=True)
    console = StageConsole()

    def ended(status: str) -> None:
        console.close()
        if _note_end(store, run_id, status, folder):
            print(f"{status}; go on with: {resume}", file=sys.stderr, flush=True)

    def interrupted() -> None:
        ended("interrupted")
        sys.stdout.flush()
        # An update may still run in its thread. What it leaves behind is whole or absent, so it is not awaited.
        os._exit(130)

    with run_lock(folder, run_id):
        try:
            asyncio.run(
                _interruptible(play(config, run_id, folder, store, console, until_trained, fresh=fresh), interrupted)
            )
        except sqlite3.Error as error:
            ended("failed")
            checkpoints = folder / "checkpoints.sqlite"
            raise StoreError(
                f"{checkpoints}: {error}; make room or delete it, then resume: the store knows all that was done"
            ) from error
        except Exception:
            ended("failed")
            raise
    print(f"run {run_id} is in {folder}   look at it with: sesa runs show {run_id}{place}")
    return 0


def _place(config: RunConfig) -> str:
    """The options that lead other commands to this run's store."""
    root = "" if config.run.root == "runs" else f" --root {shlex.quote(config.run.root)}"
    return root + (f" --store {shlex.quote(config.run.store)}" if config.run.store else "")


def _note_end(store: Store, run_id: str, status: str, folder: Path) -> bool:
    """Record how the run ended; False where there is nothing to go on with, since the run was never recorded."""
    try:
        if all(row.id != run_id for row in store.runs()):
            shutil.rmtree(folder, ignore_errors=True)  # holds the lock file at most
            return False
        store.set_run_status(run_id, status)
    except SesaError as error:  # a full disk, say: the error that stopped the run is the one to report
        print(f"the run's status could not be recorded as {status}: {error}", file=sys.stderr)
    return True


async def _interruptible(work: Coroutine[None, None, None], interrupted: Callable[[], None]) -> None:
    """Run ``work`` so that SIGTERM cancels it as Ctrl-C does; once it has cleaned up, call ``interrupted``."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        interrupted()


@contextlib.contextmanager
def run_lock(folder: Path, run_id: str) -> Iterator[None]:
    """Hold the run for this process. Raises BusyError where another one has it."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / "run.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BusyError(f"run {run_id} is being run by another process; wait for it or stop it") from None
    try:
        yield
    finally:
        lock.release()


async def play(
    config: RunConfig,
    run_id: str,
    folder: Path,
    store: Store,
    console: StageConsole,
    until_trained: int,
    *,
    fresh: bool,
) -> None:
    """Prepare everything, then run the steps that are still owed."""
    # A step that was begun is finished, also one beyond the number asked for now.
    last = config.run.steps if fresh else max(config.run.steps, *store.steps(run_id), 1)
    if not fresh and "finish" in store.nodes(run_id, last) and (solver_trained(store, run_id) or not until_trained):
        console.say(f"all {last} step(s) are done; for more: --resume {run_id} --steps {last + 1}")
        store.set_run_status(run_id, "finished")
        return
    updater = make_updater(config, folder)  # refuses what it cannot train before anything is recorded
    model_dir = prepare_model(config, console.say)
    corpus, seeds = read_pool(config, console)
    if fresh:
        store.create_run(run_id, config.model_dump(mode="json"), run_facts(model_dir, corpus, len(seeds)))
    else:
        store.set_run_status(run_id, "running")
        store.log(run_id, None, "resume", f"resumed with {len(store.steps(run_id))} step(s) begun")
        relocate(store, run_id, folder, model_dir)
    for policy in POLICIES:
        if not store.versions(run_id, str(policy)):
            store.save_version(run_id, PolicyVersion(policy=policy, version=0, path=str(model_dir), published=True))
    if config.bank.enabled and store.bank_version(run_id) == 0:
        plan = prime(config.bank)
        if not plan.empty:
            store.commit_bank(run_id, step=0, base_version=0, events=plan.events, skills=plan.skills)
    versions = {str(p): served_version(store, run_id, str(p)) for p in POLICIES}
    async with (
        open_parts(
            config,
            model_dir=model_dir,
            corpus=corpus,
            log_dir=folder / "logs",
            policies=POLICIES,
            versions=versions,
            say=console.say,
            progress=console.bars,
        ) as parts,
        open_graph(folder / "checkpoints.sqlite") as graph,
        heartbeats(store, run_id, console),
    ):
        context = RunContext(
            config=config,
            run_id=run_id,
            store=store,
            proposer=parts.serving.client("proposer"),
            solver=parts.serving.client("solver"),
            searcher=parts.searcher,
            seeds=seeds,
            encoder=parts.encoder,
            updater=updater,
            publisher=parts.serving,
            distiller=parts.distiller,
            stage=console,
        )
        step, limit = 1, last + until_trained
        while step <= last:
            if "finish" not in store.nodes(run_id, step):
                console.begin(f"step {step} ")
                await run_step(graph, context, step)
                console.close()
                if updater is not None:
                    for policy in POLICIES:
                        updater.prune(policy, protect=[served_version(store, run_id, str(policy)).version])
            print(step_report(store, run_id, step), flush=True)
            if step == last and until_trained and not solver_trained(store, run_id):
                if last < limit:
                    last += 1
                    console.say(f"the solver was not trained in {step} step(s): going on to another one")
                else:
                    console.say(f"the solver was not trained in {step} step(s): no question split its attempts")
            step += 1
    store.set_run_status(run_id, "finished")


def make_updater(config: RunConfig, folder: Path) -> GrpoUpdater | None:
    """The trainer, None where training is off. Imports torch and trl, which takes some seconds."""
    if not config.training.enabled:
        return None
    from sesa.training.updater import GrpoUpdater

    return GrpoUpdater(config, folder)


def read_pool(config: RunConfig, console: StageConsole) -> tuple[Corpus | None, list[SeedAnswer]]:
    """The corpus and the seed answers; no corpus where passages come over HTTP and seeds from a file."""
    if config.retrieval.kind == "http" and config.corpus.seeds:
        return None, read_seeds(Path(config.corpus.seeds), skip_bad=config.corpus.skip_bad)
    corpus = load_corpus(config.corpus, console.bars)
    return corpus, load_seeds(config.corpus, corpus, console.bars)


def solver_trained(store: Store, run_id: str) -> bool:
    """Whether any step has updated the solver."""
    return any(v.version > 0 for v in store.versions(run_id, "solver"))


@contextlib.asynccontextmanager
async def heartbeats(store: Store, run_id: str, console: StageConsole) -> AsyncIterator[None]:
    """Mark the run as alive while the block runs, and name the stage that is waited for when nothing moves."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await asyncio.to_thread(store.heartbeat, run_id)
            except SesaError as error:  # the next write of a node meets the same trouble and stops the run
                console.say(f"heartbeat: {error}")
            console.heartbeat()

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()


if __name__ == "__main__":
    sys.exit(main())
