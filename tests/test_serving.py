"""Starting, attaching, publishing, restarting and ending servers, with scripted servers in the place of vLLM."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file
from scripted_server import ScriptedServer

from sesa.config import RunConfig, SamplingSection, load_config
from sesa.errors import BusyError, ConfigError, ServerError, SesaError
from sesa.scripted import ByteTemplate
from sesa.server_process import ServerProcess, free_ports, telling_line
from sesa.serving import Serving, label
from sesa.types import Message, PolicyVersion
from sesa.vllm_command import require_memory, vllm_command, vllm_environment

USER = (Message(role="user", content="Who wrote it?"),)
SAMPLING = SamplingSection(max_tokens=60)
SCRIPTED = Path(__file__).parent / "scripted_server.py"


@pytest.fixture(autouse=True)
def _bytes_for_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sesa.serving.ChatTemplate", lambda folder: ByteTemplate())
    monkeypatch.setattr("sesa.control.RESET_LIMIT_S", 0.3)


def weights(folder: Path, seed: int = 0, width: int = 4) -> Path:
    """A folder with config.json and one small safetensors file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    values = np.random.default_rng(seed).normal(size=(width, width)).astype(np.float32)
    save_file({"layer.weight": values}, str(folder / "model.safetensors"))
    return folder


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return weights(tmp_path / "model")


def version(folder: Path, number: int, policy: str = "solver") -> PolicyVersion:
    return PolicyVersion(policy=policy, version=number, path=str(folder))


def config(**overrides: str) -> RunConfig:
    served = {f"serving.{key}": value for key, value in overrides.items()}
    return load_config(None, {"training.enabled": "false", **served})


def attached(servers: Mapping[str, ScriptedServer], **overrides: Any) -> RunConfig:
    given = RunConfig().model_dump()
    given["training"]["enabled"] = False
    given["serving"] |= {"attach": {name: s.url for name, s in servers.items()}, **overrides}
    return RunConfig.model_validate(given)


@pytest.fixture
async def two() -> AsyncIterator[dict[str, ScriptedServer]]:
    async with (
        ScriptedServer(lambda prompt: "solver says", models=("solver",)) as solver,
        ScriptedServer(lambda prompt: "proposer says", models=("proposer",)) as proposer,
    ):
        yield {"proposer": proposer, "solver": solver}


# ------------------------------------------------------------------------------------------- attached, full layout


async def test_publication_replaces_weights_and_drops_the_cache(
    two: dict[str, ScriptedServer], model_dir: Path, tmp_path: Path
) -> None:
    new = weights(tmp_path / "v1", seed=1)
    async with Serving(attached(two), model_dir, tmp_path) as serving:
        await serving.start()
        client = serving.client("solver")
        before = await client.generate(USER, sampling=SAMPLING)
        await serving.publish(version(new, 1))
        after = await client.generate(USER, sampling=SAMPLING)
    assert two["solver"].control == [
        "pause wait",
        f"reload_every_weight {new}",
        "reset_prefix_cache",
        "update_weight_version solver-v0001",
        "resume",
    ]
    assert two["proposer"].control == []
    assert (before.policy_version, after.policy_version) == (0, 1)
    assert before.logprobs != after.logprobs


async def test_versions_given_at_start_are_published(
    two: dict[str, ScriptedServer], model_dir: Path, tmp_path: Path
) -> None:
    new = weights(tmp_path / "v4", seed=4)
    async with Serving(attached(two), model_dir, tmp_path) as serving:
        await serving.start({"solver": version(new, 4)})
        assert serving.client("solver").version == 4
        assert serving.client("proposer").version == 0
    assert two["solver"].weights_path == str(new)
    assert two["proposer"].control == []


async def test_calls_around_a_publication_have_one_version_each(
    two: dict[str, ScriptedServer], model_dir: Path, tmp_path: Path
) -> None:
    new = weights(tmp_path / "v1", seed=1)
    two["solver"].delay_s = 0.1
    async with Serving(attached(two), model_dir, tmp_path) as serving:
        await serving.start()
        client = serving.client("solver")
        before = [asyncio.create_task(client.generate(USER, sampling=SAMPLING)) for _ in range(4)]
        await asyncio.sleep(0.03)
        publication = asyncio.create_task(serving.publish(version(new, 1)))
        await asyncio.sleep(0.03)
        after = [asyncio.create_task(client.generate(USER, sampling=SAMPLING)) for _ in range(4)]
        await publication
        old, fresh = await asyncio.gather(*before), await asyncio.gather(*after)
    assert {c.policy_version for c in old} == {0}
    assert {c.policy_version for c in fresh} == {1}
    assert {c.logprobs for c in old}.isdisjoint({c.logprobs for c in fresh})


async def test_prefix_cache_that_is_not_reset_is_an_error(
    two: dict[str, ScriptedServer], model_dir: Path, tmp_path: Path
) -> None:
    new = weights(tmp_path / "v1", seed=1)
    two["solver"].prefix_reset_succeeds = False
    async with Serving(attached(two), model_dir, tmp_path) as serving:
        await serving.start()
        with pytest.raises(ServerError, match="reset_prefix_cache: not reset"):
            await serving.publish(version(new, 1))
        assert serving.client("solver").version == 0
        # It may hold new weights with old cache entries: it must not answer.
        assert two["solver"].paused


async def test_attached_server_without_our_reload(
    two: dict[str, ScriptedServer], model_dir: Path, tmp_path: Path
) -> None:
    new = weights(tmp_path / "v1", seed=1)
    two["solver"].methods = ("reload_weights",)
    async with Serving(attached(two), model_dir, tmp_path) as serving:
        await serving.start()
        with pytest.raises(ServerError, match=r"--worker-extension-cls sesa\.vllm_worker\.WeightReload"):
            await serving.publish(version(new, 1))
        assert (await serving.client("solver").generate(USER, sampling=SAMPLING)).policy_version == 0
    async with Serving(attached(two, device="gpu"), model_dir, tmp_path) as serving:
        await serving.start()
        await serving.publish(version(new, 1))
    assert two["solver"].weights_path == str(new)


@pytest.mark.parametrize("fault", ["gone", "empty", "cut-off", "other-shape", "other-names"])
async def test_unfitting_weights_are_refused_before_the_server_is_touched(
    two: dict[str, ScriptedServer], model_dir: Path, tmp_path: Path, fault: str
) -> None:
    new = tmp_path / "v1"
    if fault == "empty":
        new.mkdir()
    elif fault == "other-shape":
        weights(new, width=5)
    elif fault != "gone":
        weights(new)
    if fault == "cut-off":
        file = new / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-20])
    if fault == "other-names":
        save_file({"other.weight": np.zeros((4, 4), np.float32)}, str(new / "model.safetensors"))
    async with Serving(attached(two), model_dir, tmp_path) as serving:
        await serving.start()
        with pytest.raises(ConfigError, match=str(new)) as caught:
            await serving.publish(version(new, 1))
        assert "\n" not in str(caught.value)
        assert two["solver"].control == []
        assert (await serving.client("solver").generate(USER, sampling=SAMPLING)).policy_version == 0


async def test_attached_server_that_was_restarted_gets_its_weights_back(
    two: dict[str, ScriptedServer], model_dir: Path, tmp_path: Path
) -> None:
    new = weights(tmp_path / "v1", seed=1)
    async with Serving(attached(two), model_dir, tmp_path) as serving:
        await serving.start()
        await serving.publish(version(new, 1))
        assert await serving.ensure_alive() == []
        two["solver"].weight_version, two["solver"].weights_path = "default", ""
        before = time.monotonic()
        assert await serving.ensure_alive(before) == ["solver"]
        assert two["solver"].weights_path == str(new)
        assert await serving.ensure_alive(before) == ["solver"]  # another caller whose call the restart cost
        assert await serving.ensure_alive(time.monotonic()) == []


async def test_attached_server_that_is_not_there(model_dir: Path, tmp_path: Path) -> None:
    given = RunConfig().model_dump()
    given["serving"]["attach"] = {"solver": "http://127.0.0.1:9", "proposer": "http://127.0.0.1:10"}
    serving = Serving(RunConfig.model_validate(given), model_dir, tmp_path)
    with pytest.raises(ServerError, match=r"http://127.0.0.1:\d+: the attached server"):
        await serving.start()


async def test_served_name_of_an_attached_server_is_found(
    two: dict[str, ScriptedServer], model_dir: Path, tmp_path: Path
) -> None:
    two["solver"].models = ("my-model",)
    async with Serving(attached(two), model_dir, tmp_path) as serving:
        await serving.start()
        await serving.client("solver").generate(USER, sampling=SAMPLING)
        assert two["solver"].calls[-1]["model"] == "my-model"
    two["solver"].models = ("one", "other")
    with pytest.raises(ConfigError, match="serves one, other; none is called solver"):
        await Serving(attached(two), model_dir, tmp_path).start()


@pytest.mark.parametrize(
    ("attach", "layout", "says"),
    [
        ({"solver": "http://h:1", "proposer": "http://h:1/v1"}, "full", "two policies on one server"),
        ({"solver": "http://h:1"}, "lora", "has one server"),
    ],
)
def test_attachments_that_cannot_be(attach: dict[str, str], layout: str, says: str, tmp_path: Path) -> None:
    given = RunConfig().model_dump()
    given["training"]["enabled"] = False
    given["serving"] |= {"attach": attach, "layout": layout}
    with pytest.raises(ConfigError, match=says):
        Serving(RunConfig.model_validate(given), tmp_path, tmp_path)


def test_unknown_policy_has_no_client(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="judge: no such policy"):
        Serving(RunConfig(), tmp_path, tmp_path).client("judge")


# ------------------------------------------------------------------------------------------------------ lora layout


def adapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


async def test_adapters_have_a_name_per_version_and_old_ones_go_when_unused(model_dir: Path, tmp_path: Path) -> None:
    async with ScriptedServer(lambda prompt: "x", models=("shared",), delay_s=0.1) as server:
        run = attached({"proposer": server, "solver": server}, layout="lora")
        async with Serving(run, model_dir, tmp_path) as serving:
            await serving.start()
            client = serving.client("solver")
            await client.generate(USER, sampling=SAMPLING)
            assert server.calls[-1]["model"] == "shared"
            await serving.publish(version(adapter(tmp_path / "a1"), 1))
            old = asyncio.create_task(client.generate(USER, sampling=SAMPLING))
            await asyncio.sleep(0.03)
            await serving.publish(version(adapter(tmp_path / "a2"), 2))
            new = await client.generate(USER, sampling=SAMPLING)
            assert (await old).policy_version == 1
            assert new.policy_version == 2
            assert [c["model"] for c in server.calls] == ["shared", "solver-v0001", "solver-v0002"]
            assert server.control == ["load solver-v0001", "load solver-v0002", "unload solver-v0001"]
            assert list(server.adapters) == ["solver-v0002"]
            with pytest.raises(ConfigError, match=r"adapter_config\.json"):
                await serving.publish(version(weights(tmp_path / "full"), 3))


def test_lora_command_names_adapters_and_allows_loading(model_dir: Path) -> None:
    run = config(layout="lora", extra_args='["--max-lora-rank", "128"]')
    command = vllm_command(run, model_dir, model_dir, "shared", 1, {"solver-v0001": "/a"})
    assert "--no-enable-chunked-prefill" in command  # a seeded call whose prompt comes in pieces kills the CPU engine
    assert command[command.index("--lora-modules") + 1] == "solver-v0001=/a"
    assert command[-2:] == ["--max-lora-rank", "128"]
    assert vllm_environment(run)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


# --------------------------------------------------------------------------------------------------- started servers


@pytest.fixture
def scripted_for_vllm(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Serving starts scripted servers; the list holds the weights folder of every start."""
    started: list[Path] = []

    def command(run: RunConfig, folder: Path, tokenizer: Path, name: str, port: int, adapters: object) -> list[str]:
        started.append(folder)
        return [sys.executable, str(SCRIPTED), "--port", str(port), "--models", name]

    monkeypatch.setattr("sesa.serving.vllm_command", command)
    return started


async def test_started_servers_answer_and_leave_nothing(
    scripted_for_vllm: list[Path], model_dir: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    async with Serving(RunConfig(), model_dir, tmp_path / "logs", progress=said.append) as serving:
        await serving.start()
        calls = [await serving.client(p).generate(USER, sampling=SAMPLING) for p in ("solver", "proposer")]
        assert [c.policy for c in calls] == ["solver", "proposer"]
        guards = [s.process.pid for s in serving._servers if s.process]
        assert len(guards) == 2
    assert len([line for line in said if "ready on" in line]) == 2
    assert not [pid for pid in guards if pid and psutil.pid_exists(pid)]
    assert "ready on" in (tmp_path / "logs" / "solver.log").read_text()


async def test_killed_server_comes_back_with_the_weights_it_served(
    scripted_for_vllm: list[Path], model_dir: Path, tmp_path: Path
) -> None:
    new = weights(tmp_path / "v1", seed=1)
    async with Serving(RunConfig(), model_dir, tmp_path) as serving:
        await serving.start()
        await serving.publish(version(new, 1))
        kill_server(serving, "solver")
        assert await serving.ensure_alive() == ["solver"]
        assert scripted_for_vllm[-1] == new
        assert (await serving.client("solver").generate(USER, sampling=SAMPLING)).policy_version == 1
        assert await serving.ensure_alive() == []
        kill_server(serving, "solver")
        # No one looked: the calls themselves find the server dead, one of them restarts it, all are answered.
        before = time.monotonic()
        calls = await asyncio.gather(*(serving.client("solver").generate(USER, sampling=SAMPLING) for _ in range(8)))
        assert {c.policy_version for c in calls} == {1}
        assert await serving.ensure_alive() == []
        assert await serving.ensure_alive(before) == ["solver"]
        kill_server(serving, "solver")
        with pytest.raises(ServerError, match=r"died 3 times \(serving.restarts\)"):
            await serving.ensure_alive()


async def test_one_outage_is_told_to_everybody_it_cost_a_call(
    scripted_for_vllm: list[Path], model_dir: Path, tmp_path: Path
) -> None:
    async with Serving(RunConfig(), model_dir, tmp_path) as serving:
        await serving.start()
        before = time.monotonic()
        kill_server(serving, "solver")
        told = await asyncio.gather(*(serving.ensure_alive(before) for _ in range(16)))
        assert told == [["solver"]] * 16
        assert len(scripted_for_vllm) == 3, "two starts and one restart"
        assert await serving.ensure_alive(time.monotonic()) == []


async def test_failed_publication_ends_the_server_and_the_old_weights_return(
    scripted_for_vllm: list[Path], model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = weights(tmp_path / "v1", seed=1)

    async def fail(self: object) -> None:
        raise ServerError("http://h/reset_prefix_cache: not reset")

    async with Serving(RunConfig(), model_dir, tmp_path) as serving:
        await serving.start()
        monkeypatch.setattr("sesa.control.ServerControl._reset_prefix_cache", fail)
        with pytest.raises(ServerError, match="not reset"):
            await serving.publish(version(new, 1))
        call = await serving.client("solver").generate(USER, sampling=SAMPLING)
        assert call.policy_version == 0
        assert scripted_for_vllm[-1] == model_dir


async def test_start_that_fails_ends_every_server(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(run: RunConfig, folder: Path, tokenizer: Path, name: str, port: int, adapters: object) -> list[str]:
        if name == "solver":
            return [sys.executable, "-c", "import time; time.sleep(1); raise ValueError('no such dtype')"]
        return [sys.executable, str(SCRIPTED), "--port", str(port), "--models", name]

    monkeypatch.setattr("sesa.serving.vllm_command", command)
    serving = Serving(RunConfig(), model_dir, tmp_path)
    with pytest.raises(ServerError) as caught:
        await serving.start()
    assert "ValueError: no such dtype" in str(caught.value)
    assert str(tmp_path / "solver.log") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not [s for s in serving._servers if s.process and s.process.alive]


def kill_server(serving: Serving, policy: str) -> None:
    """Kills the server, not its guard, as the kernel does when memory runs out."""
    process = serving._server_of(policy).process
    assert process is not None
    children = psutil.Process(process.pid).children()
    assert children
    for child in children:
        child.kill()


# ------------------------------------------------------------------------------------------------------ the process


# A server with a child that ignores the polite signal, as an engine that is deep in a computation does.
STUBBORN = """
import signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
if "deaf" in sys.argv: signal.signal(15, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


def start_stubborn(tmp_path: Path, *args: str) -> ServerProcess:
    command = [sys.executable, "-c", STUBBORN, *args]
    return ServerProcess("stubborn", command, os.environ, "http://127.0.0.1:9", tmp_path / "stubborn.log")


async def family(process: ServerProcess) -> list[psutil.Process]:
    """Guard, server and the server's child, once all run."""
    guard = psutil.Process(process.pid)
    for _ in range(200):
        found = [guard, *guard.children(recursive=True)]
        if len(found) == 3 and process.last_lines() == ["up"]:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"did not start: {process.last_lines()}")


def ended(processes: list[psutil.Process], limit_s: float = 10.0) -> bool:
    _, left = psutil.wait_procs(processes, timeout=limit_s)
    return not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


async def test_stop_ends_server_and_its_children(tmp_path: Path) -> None:
    process = start_stubborn(tmp_path)
    await process.start()
    members = await family(process)
    await process.stop()
    assert ended(members)


async def test_deaf_server_is_killed_after_the_limit(tmp_path: Path) -> None:
    process = start_stubborn(tmp_path, "deaf")
    await process.start()
    members = await family(process)
    await process.stop(limit_s=0.5)
    assert ended(members)


async def test_crash_of_the_server_takes_its_children(tmp_path: Path) -> None:
    process = start_stubborn(tmp_path)
    await process.start()
    members = await family(process)
    members[1].kill()
    assert ended(members)


async def test_silent_start_ends_at_the_limit_with_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sesa.server_process.HEARTBEAT_S", 0.3)
    process = start_stubborn(tmp_path)
    said: list[str] = []
    await process.start()
    members = await family(process)
    with pytest.raises(ServerError, match=r"stubborn was not ready within 1 s .*: up \(log: "):
        await process.wait_ready(1.0, said.append)
    assert [line for line in said if "starting" in line]
    assert "stubborn| up" in said
    assert ended(members)


RUN = """
import asyncio, os, sys
from pathlib import Path
from sesa.server_process import ServerProcess
async def main():
    log, server = sys.argv[1:]
    process = ServerProcess("s", [sys.executable, "-c", server], os.environ, "http://h", Path(log))
    await process.start()
    print(process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_end_of_the_run_leaves_no_orphan(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "server.log"
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(log), STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert run.stdout is not None
    process = start_stubborn(tmp_path)
    process.log = log
    guard = psutil.Process(int(run.stdout.readline()))
    for _ in range(200):
        members = [guard, *guard.children(recursive=True)]
        if len(members) == 3 and process.last_lines() == ["up"]:
            break
        await asyncio.sleep(0.05)
    assert len(members) == 3
    run.send_signal(number)
    run.wait(10)
    run.stdout.close()
    assert ended(members)


async def test_killed_guard_takes_the_server(tmp_path: Path) -> None:
    process = start_stubborn(tmp_path)
    await process.start()
    members = await family(process)
    members[0].kill()
    assert ended(members[:2])
    members[2].kill()


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            "usage: api_server.py [--log-level {CRITICAL,ERROR,WARNING}]\n    [--port PORT]\n"
            "api_server.py: error: unrecognized arguments: --no-such-flag",
            "api_server.py: error: unrecognized arguments: --no-such-flag",
        ),
        (
            "(EngineCore pid=7) ERROR 11-30 core.py:900 ValueError: To serve at least one request 2.25 GiB is needed\n"
            "(EngineCore pid=7) ERROR 11-30 core.py:901 Traceback (most recent call last):\n"
            "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.",
            "(EngineCore pid=7) ERROR 11-30 core.py:900 ValueError: To serve at least one request 2.25 GiB is needed",
        ),
        ("loading\nRuntimeError: Engine core initialization failed", "RuntimeError: Engine core initialization failed"),
        (
            "ValidationError: 1 validation error for ModelConfig\n  Value error, max_model_len (100000) is too long\n"
            "    For further information visit",
            "Value error, max_model_len (100000) is too long",
        ),
        ("loading\nalmost there", "almost there"),
        ("", "its log is empty"),
    ],
)
def test_line_of_the_log_that_says_most(log: str, line: str) -> None:
    assert telling_line(log.splitlines()) == line


async def test_log_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = ServerProcess("s", ["true"], os.environ, "http://127.0.0.1:9", tmp_path / "file" / "s.log")
    with pytest.raises(ServerError, match="cannot be started with its log in"):
        await process.start()


# ------------------------------------------------------------------------------------------------ ports and machine


def test_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BusyError, match=f"127.0.0.1:{port}: in use"):
            free_ports("127.0.0.1", port, 1)


def test_port_in_use_on_a_system_that_numbers_its_errors_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(self: socket.socket, address: object) -> None:
        raise OSError(48, "Address already in use")

    monkeypatch.setattr("errno.EADDRINUSE", 48)
    monkeypatch.setattr(socket.socket, "bind", bind)
    with pytest.raises(BusyError, match=r"127\.0\.0\.1:8000: in use"):
        free_ports("127.0.0.1", 8000, 1)


def test_ports_are_distinct_and_in_order() -> None:
    assert len(set(free_ports("127.0.0.1", 0, 5))) == 5
    first = free_ports("127.0.0.1", 0, 1)[0]
    if first < 65000:
        assert free_ports("127.0.0.1", first, 1) == [first]


@pytest.mark.parametrize(("host", "port"), [("203.0.113.1", 0), ("127.0.0.1", 65535)])
def test_address_that_cannot_be_bound(host: str, port: int) -> None:
    with pytest.raises(SesaError, match=r"serving\.host"):
        free_ports(host, port, 2)


def test_servers_that_do_not_fit_are_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sesa.vllm_command.memory_bytes", lambda: (8 * 2**30, 5 * 2**30))
    require_memory(RunConfig(), model_dir, 1)
    with pytest.raises(ServerError, match=r"2 vLLM servers take about 6.0 GiB of memory, 5.0 are free"):
        require_memory(RunConfig(), model_dir, 2)


def test_environment_of_the_caller_does_not_reach_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "18")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    env = vllm_environment(RunConfig())
    assert "VLLM_CPU_KVCACHE_SPACE" not in env
    assert "OMP_NUM_THREADS" not in env
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(map(str, sorted(os.sched_getaffinity(0))))


def test_labels() -> None:
    assert label(PolicyVersion(policy="solver", version=7, path="x")) == "solver-v0007"


def test_guard_of_a_run_that_is_gone_ends_at_once() -> None:
    started = time.monotonic()
    gone = "1"
    command = [
        sys.executable,
        "-P",
        "-m",
        "sesa.process_guard",
        gone,
        sys.executable,
        "-c",
        "import time; time.sleep(60)",
    ]
    assert subprocess.run(command, check=False, timeout=30).returncode != 0
    assert time.monotonic() - started < 20
