"""`sesa serve` and the serving side of `sesa ask`: ports, attached servers, and what is said about using them."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from sesa import cli, cli_work
from sesa.config import RunConfig
from sesa.graphs.ask import solver_alone
from sesa.scripted import ByteTemplate
from sesa.serving import Serving
from sesa.store import Store

SCRIPTED = Path(__file__).parent / "scripted_server.py"
ANSWER_LIMIT_S = 60.0


def configured(**serving: Any) -> RunConfig:
    given = RunConfig().model_dump()
    given["serving"] |= serving
    return RunConfig.model_validate(given)


def test_asking_leaves_out_what_is_the_proposers_and_the_port_of_the_run(tmp_path: Path) -> None:
    both = {"solver": "http://127.0.0.1:9", "proposer": "http://127.0.0.1:10"}
    asked = solver_alone(configured(attach=both, port=8000))
    assert (asked.serving.attach, asked.serving.port) == ({"solver": both["solver"]}, 0)
    Serving(asked, tmp_path, tmp_path, policies=("solver",))  # which refuses an attachment of no policy of its own
    assert solver_alone(configured(attach={"proposer": both["proposer"]})).serving.attach == {}


@pytest.mark.parametrize(("options", "port"), [([], 8123), (["--port", "0"], 0), (["--port", "8200"], 8200)])
def test_a_port_that_is_given_counts_zero_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], port: int
) -> None:
    settings = configured(port=8123, attach={"solver": "http://127.0.0.1:9"})
    with Store.open(tmp_path / "sesa.sqlite") as store:
        store.create_run("r", settings.model_dump(mode="json"), {})
    seen: list[RunConfig] = []

    async def serve(config: RunConfig, *_: Any) -> None:
        seen.append(config)

    monkeypatch.setattr(cli_work, "_serve", serve)
    monkeypatch.setattr(sys, "argv", ["sesa", "serve", "--root", str(tmp_path), *options])
    with pytest.raises(SystemExit):
        cli.main()
    assert [(config.serving.port, config.serving.attach) for config in seen] == [(port, {})]


async def test_serving_says_how_to_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command itself, up to Ctrl-C; a scripted server stands in for vLLM."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    save_file({"weight": np.zeros((2, 2), np.float32)}, str(model / "model.safetensors"))

    def command(run: RunConfig, folder: Path, tokenizer: Path, name: str, port: int, adapters: object) -> list[str]:
        return [sys.executable, str(SCRIPTED), "--port", str(port), "--models", name]

    monkeypatch.setattr("sesa.serving.vllm_command", command)
    monkeypatch.setattr("sesa.serving.ChatTemplate", lambda folder: ByteTemplate())
    config = RunConfig.model_validate({"model": {"path": str(model)}})
    where = ["--run", "r", "--root", "my runs"]
    serving = asyncio.create_task(cli_work._serve(config, ("solver",), {}, tmp_path / "logs", where))
    out = err = ""
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            while "sesa ask" not in err:
                assert not serving.done(), serving.exception()
                await asyncio.sleep(0.05)
                more = capsys.readouterr()
                out, err = out + more.out, err + more.err
    finally:
        if not serving.done():
            os.kill(os.getpid(), signal.SIGINT)  # as the terminal does
        await serving
    url = out.split()[2]
    assert url.startswith("http://127.0.0.1:") and url.endswith("/v1")
    said = shlex.split(next(line for line in err.splitlines() if "sesa ask" in line).partition("sesa ask ")[2])
    assert said == ["--attach", url.removesuffix("/v1"), *where, "question"]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(url.split(":")[2].split("/")[0]))) != 0, "the server has ended"
