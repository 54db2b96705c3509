"""`python training/run.py` before any server starts: help, dry run, refusals, resuming, one process per run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from sesa.config import RunConfig, config_keys, load_config
from sesa.errors import ConfigError
from sesa.store import Store
from sesa.training.estimate import describe, estimate
from sesa.training.run import main, parse_arguments

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / "training" / "run.py"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory and an empty home; whoever opens a connection fails."""
    home, folder = tmp_path / "home", tmp_path / "cwd"
    home.mkdir()
    folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
    monkeypatch.chdir(folder)

    def no_network(*_: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket.socket, "bind", no_network)
    return folder


def made(folder: Path) -> list[str]:
    """Everything below the folder and the home beside it."""
    return sorted(str(p.relative_to(folder.parent)) for p in folder.parent.rglob("*") if p not in (folder,))


@pytest.fixture
def stored(elsewhere: Path) -> Iterator[Path]:
    """A folder of runs whose store holds the run "first" with some settings of its own."""
    root = elsewhere / "runs"
    config = load_config(None, {"run.steps": "3", "solver.rollouts": "7", "run.root": str(root)})
    with Store.open(root / "sesa.sqlite") as store:
        store.create_run("first", config.model_dump(mode="json"), {})
    yield root


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line with which the command refuses these arguments; exit code 2, nothing on stdout, no traceback."""
    capsys.readouterr()
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").rstrip("\n")


# --------------------------------------------------------------------------------------------------------------- help


def test_help_lists_every_option_and_every_key(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for option in ("--config", "--steps", "--resume", "--until-trained", "--dry-run", "--root"):
        assert option in text
    for key, description, default in config_keys():
        assert f"  --{key} " in text and description in text and f"[{default!r}]" in text
    assert made(elsewhere) == ["home"]


# ------------------------------------------------------------------------------------------------------------ dry run


def test_a_dry_run_prints_configuration_and_estimate_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    assert main(["--config", str(ROOT / "configs/demo.toml"), "--dry-run", "--solver.rollouts", "6", "--steps=2"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    keys = [line.split(" = ")[0] for line in lines if " = " in line]
    assert keys == [key for key, _, _ in config_keys()]
    assert {"solver.rollouts = 6", "run.steps = 2", "distiller.every = 1", 'model.path = "embedded"'} <= set(lines)
    assert "estimate for 2 step(s), as upper bounds (135 million parameters):" in lines
    for word in ("proposals", "model calls", "sampled tokens", "memory: about", "disk: up to"):
        assert word in out
    assert err == "" and made(elsewhere) == ["home"]


def test_what_a_dry_run_prints_is_a_configuration_file(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    given = ["--config", str(ROOT / "configs/paper.toml"), "--run.root", 'a "b" \\c', "--serving.extra_args", '["--x"]']
    main([*given, "--dry-run"])
    printed = [line for line in capsys.readouterr().out.splitlines() if " = " in line]
    file = elsewhere / "printed.toml"
    file.write_text("\n".join(printed))
    args, overrides = parse_arguments(given)
    assert load_config(file) == load_config(args.config, overrides)


def test_an_estimate_counts_upper_bounds() -> None:
    config = load_config(
        None,
        {
            "proposer.seeds": "2",
            "proposer.proposals": "3",
            "proposer.max_turns": "4",
            "proposer.sampling.max_tokens": "10",
            "solver.questions": "5",
            "solver.rollouts": "7",
            "solver.max_turns": "3",
            "solver.sampling.max_tokens": "20",
            "bank.enabled": "false",
        },
    )
    found = estimate(config, None)
    assert (found.proposals, found.questions, found.attempts) == (6, 5, 35)
    assert found.calls == 6 * 4 + 6 + 35 * 3
    assert found.sampled_tokens == 6 * 4 * 10 + 6 * 48 + 35 * 3 * 20
    more = estimate(config.model_copy(update={"run": config.run.model_copy(update={"steps": 10})}), None)
    assert more.calls == found.calls and more.disk > found.disk


def test_an_estimate_counts_the_servers_that_are_started() -> None:
    def memory(layout: str, *attached: str) -> int:
        given = RunConfig().model_dump()
        given["serving"] |= {"layout": layout, "attach": {name: f"http://{name}:1" for name in attached}}
        given["training"]["enabled"] = False
        return estimate(RunConfig.model_validate(given), None).memory

    one = memory("full", "solver")
    assert memory("full") == 2 * one and memory("full", "proposer") == memory("lora") == one > 2**30
    assert memory("full", "solver", "proposer") == memory("lora", "solver", "proposer") == 0


def test_an_estimate_finds_a_model_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_file({"weight": np.zeros((2, 3), np.float32)}, str(tmp_path / "model.safetensors"))
    assert estimate(RunConfig(), Path("~")).parameters == 6


def test_an_estimate_of_a_model_that_is_not_there_says_so(tmp_path: Path) -> None:
    config = load_config(None, {"model.path": str(tmp_path)})
    text = describe(estimate(config, tmp_path), config)
    assert "model size unknown" in text and f"no safetensors in {tmp_path}" in text


def test_an_estimate_of_a_damaged_model_is_refused(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    model = elsewhere.parent / "home"
    (model / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    capsys.readouterr()
    assert main(["--dry-run", "--model.path", str(model)]) == 2
    assert "model.safetensors" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--frobnicate"], "command line: --frobnicate: unknown argument; see --help"),
        (["--step", "3"], "command line: --step: unknown argument; see --help"),
        (["configs/cpu.toml"], "command line: configs/cpu.toml: unknown argument; see --help"),
        (["--steps", "many"], "command line: argument --steps: invalid int value: 'many'; see --help"),
        (["--steps"], "command line: argument --steps: expected one argument; see --help"),
        (["--resume"], "command line: argument --resume: expected one argument; see --help"),
        (["--solver.rollouts"], "command line: --solver.rollouts: a value must follow"),
        (["--solver.rollouts", "--run.seed", "3"], "command line: --solver.rollouts: a value must follow"),
        (["--solver.rolouts", "3"], "command line: solver.rolouts: unknown key; did you mean solver.rollouts?"),
        (["--steps", "0"], "command line: run.steps: Input should be greater than or equal to 1, got 0"),
        (["--until-trained", "-1"], "command line: --until-trained: must not be negative, got -1"),
        (["--config", "none.toml"], "none.toml: no such configuration file; those shipped are in configs/"),
    ],
)
def test_a_bad_command_line_is_one_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    # Were they taken, the missing model would be complained of at once.
    assert refused(capsys, "--model.path", "no-such-model", *argv).endswith(said)
    assert made(elsewhere) == ["home"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[run\n", "not valid TOML"),
        ("[solver]\nrolouts = 5\n", "solver.rolouts: unknown key; did you mean solver.rollouts?"),
        ("[solver]\nrollouts = 'five'\n", "solver.rollouts: Input should be a valid integer"),
        ("[retrieval]\nkind = 'http'\n", "retrieval.url must be set"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_a_bad_file_is_one_line_that_names_it(
    text: str, said: str, dry: bool, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    path = elsewhere.parent / "home" / "bad.toml"
    path.write_text(text)
    line = refused(capsys, "--config", str(path), *(["--dry-run"] if dry else []))
    assert line.startswith(f"{path}: ") and said in line
    assert made(elsewhere) == ["home", "home/bad.toml"]


def test_a_run_that_cannot_begin_leaves_no_run_behind(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    capsys.readouterr()
    assert main(["--model.path", "no-such-model"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: model.path: ") and err.count("\n") == 1
    with Store.open(elsewhere / "runs" / "sesa.sqlite") as store:
        assert store.runs() == []
    assert not [path for path in (elsewhere / "runs").iterdir() if path.is_dir()]


@given(st.lists(st.text(min_size=1, max_size=12).filter(lambda text: not text.startswith("-h")), max_size=4))
def test_any_arguments_are_taken_or_refused_in_one_line(argv: list[str]) -> None:
    try:
        parse_arguments(["--dry-run", *argv])
    except ConfigError as error:
        assert str(error).startswith("command line: ")


def test_arguments_are_read_in_any_order_and_form() -> None:
    args, overrides = parse_arguments(
        ["--run.seed", "3", "--steps", "2", "--bank.min_similarity", "-0.5", "--model.path=a=b", "--resume", "x"]
    )
    assert args.resume == "x" and not args.dry_run
    assert overrides == {"run.seed": "3", "bank.min_similarity": "-0.5", "model.path": "a=b", "run.steps": "2"}


# ------------------------------------------------------------------------------------------------------------ resuming


def test_resuming_without_a_store_or_a_run_says_what_there_is(
    capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    assert "no store there; start a run with `python training/run.py`" in refused(capsys, "--resume", "first")
    assert made(elsewhere) == ["home"]


def test_resuming_an_unknown_run_names_the_nearest(capsys: pytest.CaptureFixture[str], stored: Path) -> None:
    assert "holds no run 'frist'; did you mean first?" in refused(capsys, "--resume", "frist")
    assert not (stored / "frist").exists()


def test_resuming_takes_no_other_configuration(capsys: pytest.CaptureFixture[str], stored: Path) -> None:
    with_file = refused(capsys, "--resume", "first", "--config", str(ROOT / "configs/cpu.toml"))
    assert with_file == "--resume goes on with the configuration stored with the run; leave out --config"
    with_key = refused(capsys, "--resume", "first", "--solver.rollouts", "5")
    assert with_key == "--resume: solver.rollouts cannot change within a run; start a new one"
    assert "did you mean solver.rollouts?" in refused(capsys, "--resume", "first", "--solver.rolouts", "5")
    assert "run.steps: Input should be greater" in refused(capsys, "--resume", "first", "--run.steps", "0")


@pytest.mark.parametrize("arguments", [["--steps", "9"], ["--run.steps", "9"], []])
def test_resuming_goes_on_with_the_stored_configuration_and_more_steps(
    arguments: list[str], capsys: pytest.CaptureFixture[str], stored: Path
) -> None:
    assert main(["--resume", "latest", "--dry-run", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "solver.rollouts = 7" in lines
    assert f"run.steps = {9 if arguments else 3}" in lines
    assert not (stored / "first").exists()


def test_a_moved_folder_of_runs_is_resumed_where_it_lies_now(
    capsys: pytest.CaptureFixture[str], stored: Path, elsewhere: Path
) -> None:
    stored.rename(elsewhere / "moved")
    assert main(["--resume", "first", "--root", "moved", "--dry-run"]) == 0
    assert 'run.root = "moved"' in capsys.readouterr().out.splitlines()


def test_a_run_of_another_version_of_the_program_is_refused(capsys: pytest.CaptureFixture[str], stored: Path) -> None:
    config = RunConfig().model_dump(mode="json")
    config["bank"]["colour"] = "blue"
    with Store.open(stored / "sesa.sqlite") as store:
        store.create_run("old", config, {})
    assert "run old: bank.colour: " in refused(capsys, "--resume", "old")


def test_one_process_at_a_time_has_a_run(capsys: pytest.CaptureFixture[str], stored: Path) -> None:
    """The second is told so, and the run is left as the first has it."""
    (stored / "first").mkdir()
    code = (
        "import sys; from pathlib import Path; from sesa.training.run import run_lock\n"
        "with run_lock(Path(sys.argv[1]), 'first'): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(stored / "first")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with Store.open(stored / "sesa.sqlite") as store:
            before = store.run("first")
        assert main(["--resume", "first"]) == 2
        assert "run first is being run by another process" in capsys.readouterr().err
        with Store.open(stored / "sesa.sqlite") as store:
            assert store.run("first").status == before.status
        holder.communicate("")
    assert holder.returncode == 0


# ------------------------------------------------------------------------------------------------------- as a script


def script(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUN), *argv]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ})


def test_the_script_works_from_any_working_directory(tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "__init__.py").write_text("raise RuntimeError('the wrong agents')")
    done = script(tmp_path, "--config", str(ROOT / "configs/cpu.toml"), "--dry-run")
    assert done.returncode == 0 and done.stderr == ""
    shipped = tomllib.loads((ROOT / "configs/cpu.toml").read_text())["solver"]["rollouts"]
    assert f"solver.rollouts = {shipped}" in done.stdout.splitlines()
    assert [path.name for path in tmp_path.iterdir()] == ["agents"]


def test_the_script_refuses_in_one_line_with_exit_code_2(tmp_path: Path) -> None:
    done = script(tmp_path, "--solver.rolouts", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: command line: solver.rolouts: unknown key; did you mean solver.rollouts?\n"
    assert list(tmp_path.iterdir()) == []
