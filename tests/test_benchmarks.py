"""The benchmarks run and print what they promise. No timing is asserted here."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripted_server import ScriptedServer

from sesa.config import load_config
from sesa.llm import ByteTemplate

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "rollout_overhead.py"
# Bytes in the place of a tokenizer: no model is needed.
QUICK = ["--rounds", "2", "--rollouts", "24", "--calls", "24", "--at-once", "8", "--delay-ms", "1", "--model", "bytes"]


def overhead(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *QUICK, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_rollout_overhead_prints_its_ratios(tmp_path: Path) -> None:
    done = overhead()
    assert done.returncode == 0, done.stderr
    assert "1 ms and 40 tokens a reply, 8 at once, medians of 2 rounds" in done.stdout
    assert "48 rollouts of two calls in each arm, equal in ids and text" in done.stdout
    number = r"\s+(\d+\.\d+)"
    for line in (
        rf"graph{number} rollouts/s{number} calls/s{number} ms of processor a rollout",
        rf"bare loop{number} rollouts/s{number} calls/s{number} ms of processor a rollout",
        rf"ratio{number} graph to bare loop",
        rf"processor ratio{number} bare loop to graph",
        rf"plain post{number} ms of processor a call\s+1\.00 of the plain post",
        rf"PolicyClient{number} ms of processor a call{number} of the plain post",
        rf"openai library{number} ms of processor a call{number} of the plain post",
    ):
        found = re.search(line, done.stdout)
        assert found, f"{line} is not in {done.stdout}"
        assert all(float(figure) > 0 for figure in found.groups())


def test_rollouts_of_one_call_are_no_comparison(tmp_path: Path) -> None:
    # One turn is not enough for a search and an answer, in either arm.
    config = tmp_path / "one_turn.toml"
    config.write_text("[solver]\nmax_turns = 1\n")
    done = overhead("--config", str(config))
    assert done.returncode == 1
    assert "had 1 calls, not a search and an answer" in done.stderr
    assert "ratio" not in done.stdout


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("rollout_overhead", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "rollout_overhead", module)  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("same", [True, False])
async def test_arms_must_do_the_same_calls(script: ModuleType, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    bare = script.through_bare_loop

    async def other(config: Any, client: Any, number: int) -> Any:
        made = await bare(config, client, number)
        return made if same or number != 5 else [*made[:1], (made[1][0][:-1], *made[1][1:])]  # one prompt id is missing

    monkeypatch.setattr(script, "through_bare_loop", other)
    config = load_config(ROOT / "configs" / "cpu.toml")
    async with ScriptedServer(lambda prompt: "", fixed_tokens=40, max_model_len=10**5) as server:
        bench = script.Bench(config, server.url, ByteTemplate(), 4)
        if same:
            arms = await bench.rollouts(8, 1)
            assert set(arms) == {"graph", "bare loop"}
            # Two calls a rollout, in both arms, also in the rounds that warm up.
            assert len(server.calls) == 2 * 2 * (8 + 4)
        else:
            with pytest.raises(script.NotComparable, match="rollout 5 differs between the arms"):
                await bench.rollouts(8, 1)
