"""Type-check the packages under the names they are imported by.

The folders `agents/`, `graphs/` … are the packages `sesa.agents`, `sesa.graphs` …; a type checker looks packages up by
folder, so it is shown the tree with each folder in its place.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run mypy on the package tree; its exit status."""
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    with tempfile.TemporaryDirectory() as scratch:
        for package, folder in sorted(folders.items()):
            target = Path(scratch, *package.split("."))
            if target.exists():  # lies inside a folder linked already
                continue
            target.mkdir(parents=True)
            for item in (ROOT / folder).iterdir():
                if not item.name.startswith("__pycache__"):
                    (target / item.name).symlink_to(item)
        cache = ROOT / ".mypy_cache"
        command = [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            str(ROOT / "pyproject.toml"),
            "--cache-dir",
            str(cache),
        ]
        return subprocess.run([*command, "-p", "sesa"], cwd=scratch, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
