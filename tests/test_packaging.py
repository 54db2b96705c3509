"""The house's walls: which floor may import which, what the wheel holds, and what must not be in the tree."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from langgraph.graph.state import CompiledStateGraph

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]
# sesa → prompts → agents → graphs → { training, ui }
FLOORS = {"prompts": 1, "agents": 2, "graphs": 3, "training": 4, "ui": 4}
# Where a library may be imported, and nowhere else. `sesa/vllm_worker.py` runs inside the server, beside its vllm.
HOME = {"torch": "training", "trl": "training", "peft": "training", "langgraph": "graphs", "streamlit": "ui"}


def floor_name(module: str) -> str:
    """ "graphs" for sesa.graphs and what is in it, "sesa" for the core."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else "sesa"


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the packages: its floor and its file."""
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).glob("*.py")):
            yield floor_name(package), path


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Every import of a file, wherever it stands: (module, line, whether it stands inside a function)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node.lineno, id(node) in lazy
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            for name in node.names:  # `from sesa import prompts` imports sesa.prompts
                yield f"{node.module}.{name.name}", node.lineno, id(node) in lazy


def broken_rules(floor: str, path: Path) -> Iterator[str]:
    for module, line, lazy in imports(path):
        place = f"{path.parent.name}/{path.name}:{line}: imports {module}"
        top = module.split(".")[0]
        if top in HOME and floor != HOME[top]:
            yield f"{place}, which belongs into {HOME[top]}/"
        if top == "sesa":
            target = floor_name(module)
            level = FLOORS.get(floor, 0)
            aside = FLOORS.get(target, 0) == level and target != floor
            # The command line reaches up when a command runs, so that `sesa --help` answers at once.
            if (FLOORS.get(target, 0) > level or aside) and not (lazy and path.name.startswith("cli_")):
                yield f"{place}: {target} is above or beside {floor}"
        elif top in FLOORS:
            yield f"{place}: the package is sesa.{top}"


# ------------------------------------------------------------------------------------------------- import direction


def test_imports_go_one_way_only() -> None:
    assert [rule for floor, path in modules() for rule in broken_rules(floor, path)] == []


@pytest.mark.parametrize(
    ("floor", "text", "allowed"),
    [
        ("agents", "from sesa.types import Hit", True),
        ("agents", "from sesa import prompts", True),
        ("prompts", "from sesa import agents", False),
        ("sesa", "import sesa.graphs.step", False),
        ("sesa", "def f():\n    from sesa.graphs import step", False),
        ("graphs", "if x:\n    from sesa.training.grpo import y", False),
        ("ui", "from sesa.training import run", False),
        ("training", "import sesa.ui.app", False),
        ("training", "from sesa.graphs.step import run_step", True),
        ("training", "from langgraph.types import Send", False),
        ("graphs", "import torch.nn", False),
        ("training", "import torch.nn", True),
        ("graphs", "import agents", False),
        ("sesa", "import torchmetrics", True),
    ],
)
def test_the_rule_itself_tells_right_from_wrong(floor: str, text: str, allowed: bool, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert (list(broken_rules(floor, path)) == []) is allowed
    lazily = tmp_path / "cli_work.py"
    lazily.write_text(text)
    assert (list(broken_rules(floor, lazily)) == []) is (allowed or text.startswith("def"))


def test_importing_the_core_loads_nothing_heavy() -> None:
    core = [path.stem for floor, path in modules() if floor == "sesa" and path.parent == ROOT / "sesa"]
    names = [f"sesa.{stem}" for stem in core if stem != "__init__"] + ["sesa.retrieval", "sesa.store", "sesa.prompts"]
    heavy = ("torch", "trl", "transformers", "sentence_transformers", "langgraph", "streamlit", "vllm", "litellm")
    code = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_file_changes_the_import_path() -> None:
    for _, path in modules():
        assert "sys.path" not in path.read_text(encoding="utf-8"), path


# -------------------------------------------------------------------------------------------------- folders and names


def test_every_package_folder_is_listed() -> None:
    """A folder that is not listed is left out of the wheel, and nobody notices before it is installed."""
    found = {
        path.parent.relative_to(ROOT).as_posix()
        for path in committed()
        if path.name == "__init__.py" and path.relative_to(ROOT).parts[0] not in ("tests", "benchmarks")
    }
    assert found == set(FOLDERS.values())
    assert set(SETUPTOOLS["packages"]) == set(FOLDERS)


def test_every_module_lies_in_a_package() -> None:
    for path in committed():
        top = path.relative_to(ROOT).parts[0]
        if path.suffix == ".py" and (top == "sesa" or top in FLOORS):
            assert (path.parent / "__init__.py").is_file(), path


def test_no_script_folder_hides_a_library() -> None:
    """`python training/run.py` and `streamlit run ui/app.py` put the script's own folder first on the path."""
    taken = set(sys.stdlib_module_names) | set(metadata.packages_distributions())
    assert {"json", "torch", "langgraph"} <= taken
    stems = {p.stem for folder in ("training", "ui") for p in (ROOT / folder).rglob("*.py") if p.stem != "__init__"}
    assert {"run", "grpo"} <= stems
    assert stems & taken == set()


# ------------------------------------------------------------------------------------------------------------ the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of what is committed."""
    folder = tmp_path_factory.mktemp("wheel")
    for path in committed():
        target = folder / "tree" / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, folder / "tree"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_exactly_one_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        tops = {name.split("/")[0] for name in file.namelist()}
        (info,) = (top for top in tops if top.endswith(".dist-info"))
        assert tops == {"sesa", info}
        assert file.read(f"{info}/top_level.txt").decode().split() == ["sesa"]
        assert any(name.startswith(f"{info}/") and name.endswith("LICENSE") for name in file.namelist())


def test_the_wheel_holds_every_module_prompt_and_data_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        held = set(file.namelist())
    for package, folder in FOLDERS.items():
        place = package.replace(".", "/")
        expected = {f"{place}/{path.name}" for path in (ROOT / folder).glob("*.py")}
        assert expected and expected <= held
    assert {f"sesa/prompts/{path.name}" for path in (ROOT / "prompts").glob("*.md")} <= held
    assert {f"sesa/data/{path.name}" for path in (ROOT / "sesa/data").iterdir() if path.is_file()} <= held
    assert "sesa/prompts/solver.md" in held and "sesa/data/seed_skills.json" in held
    assert not any(name.startswith(("sesa/tests", "tests")) for name in held)


def test_what_is_in_the_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    code = (
        "from sesa import prompts, skills, agents, graphs; import sesa.graphs.step, sesa.training.run\n"
        "prompts.load('solver'); skills.seed_skills()\n"
        "print(*(m.__file__ for m in (prompts, skills, agents, graphs, sesa.training.run)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert [Path(name).is_relative_to(tmp_path) for name in done.stdout.split()] == [True] * 5


# ------------------------------------------------------------------------------------------------------- langgraph.json


LISTED: dict[str, str] = json.loads((ROOT / "langgraph.json").read_text(encoding="utf-8"))["graphs"]


def test_langgraph_json_lists_the_four_graphs() -> None:
    assert set(LISTED) == {"proposer", "solver", "distiller", "step"}


@pytest.mark.parametrize("name", sorted(LISTED))
def test_an_entry_of_langgraph_json_is_a_graph_without_a_checkpointer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The platform brings its own; loaded from the file, as it does."""
    file, _, attribute = LISTED[name].partition(":")
    spec = importlib.util.spec_from_file_location(f"listed_{name}", ROOT / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    graph = getattr(module, attribute)
    assert isinstance(graph, CompiledStateGraph)
    assert not graph.checkpointer
    drawn = graph.get_graph()
    reached = {"__start__"} | {edge.target for edge in drawn.edges}
    assert reached == set(drawn.nodes) and len(reached) > 2


# ----------------------------------------------------------------------------------------- what is not in the tree


def committed() -> list[Path]:
    """Every file that is or would be committed."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    skipped = {"build", "dist", "runs", "node_modules"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(p in skipped or p.startswith(".") or p.endswith(".egg-info") for p in path.relative_to(ROOT).parts)
        and "__pycache__" not in path.parts
    ]


# Written in pieces, so that this file does not hold what it looks for.
MACHINE_PATH = re.compile(r"(?<![\w.:/}-])/(?:" + "|".join(["work", "opt", "home", "root", "tmp", "mnt"]) + r")/\w")
ISSUE = re.compile(r"\bissues?\s*(?:#|no\.?\s*)?\d", re.IGNORECASE)
PRIVATE_HOST = re.compile(
    r"https?://(?:[^/\s\"'@]+@|(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))\.\d|[\w.-]+\.(?:internal|corp|lan|intra)\b)"
)


def test_nothing_committed_names_a_machine_an_issue_or_a_private_host() -> None:
    found = []
    for path in committed():
        text = path.read_text(encoding="utf-8", errors="replace")
        for pattern in (MACHINE_PATH, ISSUE, PRIVATE_HOST):
            found += [f"{path.relative_to(ROOT)}: {hit.group()}" for hit in pattern.finditer(text)]
    assert found == []


def test_what_is_looked_for_would_be_found() -> None:
    assert MACHINE_PATH.search("see " + "/" + "work/main") and MACHINE_PATH.search('"' + "/" + 'opt/venv"')
    assert not MACHINE_PATH.search("training/work/x") and not MACHINE_PATH.search("http://h" + "/" + "home/x")
    assert ISSUE.search("iss" + "ue 2") and not ISSUE.search("the issue is")
    assert PRIVATE_HOST.search("http:" + "//10.0.0.1/simple") and PRIVATE_HOST.search("https:" + "//me:pw@host/")
    assert not PRIVATE_HOST.search("http://127.0.0.1:8000")


def test_the_licence_is_the_whole_apache_licence() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert all(f"\n   {n}. " in text for n in range(1, 10)) and "END OF TERMS AND CONDITIONS" in text
