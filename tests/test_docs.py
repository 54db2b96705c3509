"""The documents say what the program does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sesa.cli import app
from sesa.config import load_config, markdown_table

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(path: Path) -> list[str]:
    """The lines of the document's bash blocks, comments removed."""
    blocks = re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_the_configuration_table_is_the_configuration() -> None:
    """Refresh it with ``python -m sesa.config``."""
    assert markdown_table() in (ROOT / "docs" / "configuration.md").read_text()


@pytest.mark.parametrize(
    "command", [c for d in DOCUMENTS for c in commands(d) if c.startswith("sesa ")], ids=lambda c: c[:60]
)
def test_documented_sesa_commands_exist_with_their_options(command: str) -> None:
    words = shlex.split(command)[1:]
    names = [w for w in words if not w.startswith("-")]
    for depth in (2, 1):
        help_page = CliRunner().invoke(app, [*names[:depth], "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
        if help_page.exit_code == 0:
            break
    assert help_page.exit_code == 0, command
    for option in (w for w in words if w.startswith("--")):
        assert option in help_page.output, f"{command}: no {option}"


@pytest.mark.parametrize("command", [c for d in DOCUMENTS for c in commands(d) if c.startswith("make ")])
def test_documented_make_targets_exist(command: str) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command.split()[1] in targets


@pytest.mark.parametrize("command", [c for d in DOCUMENTS for c in commands(d) if "training/run.py" in c])
def test_documented_runs_name_files_and_options_that_exist(command: str) -> None:
    from sesa.training.run import parse_arguments

    words = shlex.split(command)
    args, overrides = parse_arguments(words[words.index("training/run.py") + 1 :])
    if args.config:
        load_config(ROOT / args.config, overrides)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target
