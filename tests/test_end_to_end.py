"""The whole loop on the real parts: vLLM, the embedded model and corpus, TRL, the store; and killed, and resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import aiohttp
import psutil
import pytest

from sesa.config import RunConfig
from sesa.serving import Serving
from sesa.skills import Bank
from sesa.store import Store
from sesa.types import PolicyVersion, Role, Rollout

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[1]
# The demo, with the index that needs no embedding, so that the run's own stages are what takes the time.
DEMO = ("--config", "configs/demo.toml", "--retrieval.kind", "bm25", "--until-trained", "6")


@dataclass(frozen=True)
class Played:
    """A finished run and what it printed."""

    root: Path
    run_id: str
    output: str
    store: Store

    @property
    def config(self) -> RunConfig:
        return RunConfig.model_validate(self.store.run(self.run_id).config)


def launch(root: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "training/run.py", "--root", str(root), *arguments]
    log = (root / "stderr.log").open("a")
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    root = tmp_path_factory.mktemp("runs")
    process = launch(root, *DEMO)
    output, _ = process.communicate(timeout=1700)
    assert process.returncode == 0, (root / "stderr.log").read_text()[-2000:]
    with Store.open(root / "sesa.sqlite", create=False) as store:
        yield Played(root, store.run("latest").id, output, store)


def trained_step(played: Played) -> int:
    """The step that made the solver's first version."""
    return next(v.step for v in played.store.versions(played.run_id, "solver") if v.version == 1)


def test_the_demo_prints_what_the_store_holds(played: Played) -> None:
    step = trained_step(played)
    block = played.output.split(f"step {step} of run {played.run_id}\n")[1]
    store, run = played.store, played.run_id
    questions = store.questions(run, step=step)
    assert f"run {run}   look at it with: sesa runs show {run}" in played.output.splitlines()[0]
    seeds = int(re.search(r"seeds +(\d+)", block)[1])  # type: ignore[index]
    assert seeds == len(store.step_seeds(run, step)) == played.config.proposer.seeds
    valid = int(re.search(r"valid +(\d+)", block)[1])  # type: ignore[index]
    assert valid == sum(q.status == "pass" for q in questions) > 0
    refused = int(re.search(r"refused +(\d+)", block)[1])  # type: ignore[index]
    assert refused == sum(q.status == "fail" for q in questions)
    solved = {r.question_id for r in store.rollouts(run, step=step, role=Role.SOLVER, turns=False)}
    assert len(re.findall(r"^    \S+  success", block, re.MULTILINE)) == len(solved) > 0
    for stats in store.stats(run, step=step):
        if stats.loss is not None:
            assert f"{stats.policy}: loss {stats.loss:.4f}, gradient norm {stats.grad_norm:.3f}" in block
    assert "failures" in block
    assert "skills" in block
    assert "solver v0001" in block


def test_trained_tokens_equal_sampled_tokens(played: Played) -> None:
    rows = [row for row in played.store.trained(played.run_id) if row.dropped is None]
    assert rows
    rollouts = {r.id: r for r in played.store.rollouts(played.run_id, ids=[row.rollout_id for row in rows])}
    for row in rows:
        assert row.trained_tokens == row.sampled_tokens == rollouts[row.rollout_id].sampled_tokens > 0


def test_the_first_update_finds_the_samplers_own_probabilities(played: Played) -> None:
    """Seen elsewhere: tokens or masks that shifted between sampling and training show as a ratio away from one."""
    for stats in played.store.stats(played.run_id):
        if stats.ratio_mean is not None:
            assert abs(stats.ratio_mean - 1.0) <= 0.02, stats


def test_the_bank_is_credited_from_the_rollouts(played: Played) -> None:
    bank = Bank.from_store(played.store, played.run_id)
    attempts = played.store.rollouts(played.run_id, role=Role.SOLVER)
    for skill in bank.skills.values():
        users = [r for r in attempts if r.finished and any(s.loaded and s.id == skill.id for s in r.skills)]
        assert skill.counters.retrieved == len(users)


async def test_published_weights_are_served_and_are_the_trainers_own(played: Played, tmp_path: Path) -> None:
    """Served log-probabilities of a fixed prompt and reply change at once and agree with the trainer's."""
    from sesa.training.logprobs import score
    from sesa.training.sequences import rollout_sequences
    from sesa.training.updater import load_policy

    versions = {v.version: v for v in played.store.versions(played.run_id, "solver")}
    rollout = next(r for r in played.store.rollouts(played.run_id, role=Role.SOLVER) if r.sampled_tokens > 3)
    sequence = rollout_sequences(rollout)[0]
    config = played.config
    model_dir = Path(versions[0].path)
    async with Serving(config, model_dir, tmp_path, policies=("solver",)) as serving:
        await serving.start({"solver": versions[0]})
        client = serving.client("solver")
        before = await served_logprobs(client.url, client.model, list(sequence.ids))
        again = await served_logprobs(client.url, client.model, list(sequence.ids))
        await serving.publish(versions[1])
        after = await served_logprobs(client.url, client.model, list(sequence.ids))
    sampled = [place for place, trained in enumerate(sequence.mask) if trained]
    trainer = {number: score(load_policy(Path(v.path)), sequence) for number, v in versions.items() if number < 2}
    assert fmean(abs(before[i] - again[i]) for i in sampled) < 1e-6
    assert fmean(abs(before[i] - x) for i, x in zip(sampled, trainer[0], strict=True)) < 0.02
    assert fmean(abs(after[i] - x) for i, x in zip(sampled, trainer[1], strict=True)) < 0.02
    assert fmean(abs(after[i] - before[i]) for i in sampled) > 1e-4


async def served_logprobs(url: str, model: str, ids: list[int]) -> list[float]:
    """The server's log-probability of each token of a fixed text, given those before it (0 for the first)."""
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as reply:
        answer = await reply.json()
    rows = answer["choices"][0]["prompt_logprobs"]
    return [0.0 if row is None else row[str(token)]["logprob"] for token, row in zip(ids, rows, strict=True)]


def sesa(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sesa.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)


def test_rollouts_show_tells_trained_from_sampled(played: Played) -> None:
    row = next(row for row in played.store.trained(played.run_id) if row.dropped is None)
    done = sesa("rollouts", "show", row.rollout_id, "--root", str(played.root))
    assert done.returncode == 0, done.stderr
    assert re.search(rf"sampled.*{row.sampled_tokens}", done.stdout)
    assert re.search(rf"trained.*{row.trained_tokens}", done.stdout)


@pytest.mark.parametrize("bank", ["on", "off"])
def test_ask_answers_with_and_without_the_bank(played: Played, bank: str) -> None:
    question = "In what year was the company that built the tower founded?"  # a seed skill is about such dates
    done = sesa("ask", "--run", played.run_id, "--root", str(played.root), "--bank", bank, "--json", question)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["question"] == question
    # A model this weak may answer without a search, or search without an answer; never neither.
    assert found["answer"] or found["searches"], found
    assert len(found["passages"]) == sum(len(search["hits"]) for search in found["searches"]), found
    assert bool(found["skills"]) is (bank == "on"), found


def wait_for_attempts(root: Path, process: subprocess.Popen[str], count: int, limit_s: float = 900.0) -> str:
    """Wait until the running run has stored ``count`` solver rollouts; its id."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        assert process.poll() is None, (root / "stderr.log").read_text()[-2000:]
        if (root / "sesa.sqlite").exists():
            with Store.open(root / "sesa.sqlite", create=False) as store:
                for run in store.runs():
                    if store.count_rollouts(run.id, role=Role.SOLVER) >= count:
                        return run.id
        time.sleep(0.2)
    raise AssertionError("the run stored no solver rollouts in time")


def servers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    # The servers themselves, not the guards that hold their command line in their own.
    return [child for child in children if child.cmdline()[1:4] == ["-P", "-m", "vllm.entrypoints.openai.api_server"]]


def test_a_killed_server_and_a_killed_run_lose_nothing(tmp_path: Path) -> None:
    process = launch(tmp_path, *DEMO, "--validity.evidence_check", "false", "--run.concurrency", "4")
    try:
        run_id = wait_for_attempts(tmp_path, process, 2)
        solver = [s for s in servers_of(process) if "--served-model-name solver" in " ".join(s.cmdline())]
        assert solver
        solver[0].kill()
        with Store.open(tmp_path / "sesa.sqlite", create=False) as store:
            wait_for_attempts(tmp_path, process, store.count_rollouts(run_id, role=Role.SOLVER) + 5)
        left = servers_of(process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        psutil.wait_procs(left, timeout=30)
        assert not [s for s in left if s.is_running() and s.status() != psutil.STATUS_ZOMBIE]
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
    with Store.open(tmp_path / "sesa.sqlite", create=False) as store:
        before = {r.id: r for r in store.rollouts(run_id)}
    resumed = launch(tmp_path, "--resume", run_id)
    resumed.communicate(timeout=1200)
    assert resumed.returncode == 0, (tmp_path / "stderr.log").read_text()[-2000:]
    with Store.open(tmp_path / "sesa.sqlite", create=False) as store:
        after = {r.id: r for r in store.rollouts(run_id)}
        assert store.run(run_id).status == "finished"
        assert {key: turns_of(after[key]) for key in before} == {key: turns_of(r) for key, r in before.items()}
        attempts = [r for r in after.values() if r.role is Role.SOLVER]
        questions = {r.question_id for r in attempts}
        config = RunConfig.model_validate(store.run(run_id).config)
        assert len(attempts) == len(questions) * config.solver.rollouts
        lost = [r for r in attempts if not r.finished]
        assert not lost, lost[0].error
        newest: PolicyVersion = store.versions(run_id, "solver")[-1]
        assert newest.version <= store.run(run_id).steps_done


def turns_of(rollout: Rollout) -> object:
    """What was paid for: it never changes, whereas rewards may come later."""
    return rollout.turns, rollout.stop_reason, rollout.skills, rollout.bank_version
