"""The configuration: who has the last word, what is refused, and what the shipped files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sesa import prompts
from sesa.config import RunConfig, config_keys, load_config, stored_config
from sesa.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = sorted(path.name for path in (ROOT / "configs").glob("*.toml"))
DEFAULTS = {key: default for key, _, default in config_keys()}


def write(folder: Path, **files: str) -> Path:
    """Files NAME.toml with these texts; the path of the first."""
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    return folder / f"{next(iter(files))}.toml"


def refusal(path: Path | None = None, **overrides: str) -> str:
    """The one line with which a configuration is refused; ``__`` stands for the dot in a key."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, {key.replace("__", "."): text for key, text in overrides.items()})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def value(config: RunConfig, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


# ------------------------------------------------------------------------------------------------ the last word


def test_command_line_over_file_over_extended_file_over_default(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        child='extends = "parent.toml"\n[solver]\nrollouts = 7\n[solver.sampling]\ntop_p = 0.5\n',
        parent="[solver]\nrollouts = 6\nmax_turns = 4\n[solver.sampling]\ntemperature = 0.5\n[run]\nseed = 3\n",
    )
    config = load_config(path, {"solver.sampling.top_p": "0.25", "run.steps": "9"})
    assert (config.run.steps, config.run.seed) == (9, 3)
    assert (config.solver.rollouts, config.solver.max_turns) == (7, 4)
    assert (config.solver.sampling.temperature, config.solver.sampling.top_p) == (0.5, 0.25)
    assert config.solver.sampling.max_tokens == DEFAULTS["solver.sampling.max_tokens"]
    assert load_config(tmp_path / "parent.toml").solver.rollouts == 6


def test_without_anything_the_defaults_hold() -> None:
    assert load_config() == RunConfig()
    assert {key: value(load_config(), key) for key in DEFAULTS} == DEFAULTS


def test_a_file_is_found_beside_the_one_that_extends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write(tmp_path / "b", parent="[run]\nsteps = 4\n")
    child = write(tmp_path / "a", child='extends = "../b/parent.toml"\n')
    monkeypatch.chdir(tmp_path / "b")
    assert load_config(child).run.steps == 4


def test_environment_variables_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen elsewhere: environment variables silently beat the configuration file."""
    path = write(tmp_path, file="[solver]\nrollouts = 7\n")
    before = load_config(path, {"run.steps": "2"})
    for key in DEFAULTS:
        for name in (key, key.replace(".", "_"), key.replace(".", "__"), key.rsplit(".", 1)[-1]):
            for spelling in (name, name.upper(), f"sesa_{name}", f"SESA_{name.upper()}", f"SESA__{name.upper()}"):
                monkeypatch.setenv(spelling, "1")
    monkeypatch.setenv("SESA_CONFIG", "nowhere.toml")
    assert load_config(path, {"run.steps": "2"}) == before


# ------------------------------------------------------------------------------------------------ values as texts


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("run.steps", "12", 12),
        ("training.learning_rate", "3e-5", 3e-5),
        ("training.learning_rate", "1", 1.0),
        ("bank.min_similarity", "-0.5", -0.5),
        ("bank.enabled", "false", False),
        ("retrieval.kind", "bm25", "bm25"),
        ("retrieval.kind", '"bm25"', "bm25"),
        ("run.root", "2026", "2026"),
        ("run.root", "2026-01-01", "2026-01-01"),
        ("run.root", "true", "true"),
        ("run.root", "my runs # old", "my runs # old"),
        ("run.root", "", ""),
        ("serving.extra_args", '["--enforce-eager", "--seed=1"]', ("--enforce-eager", "--seed=1")),
        ("serving.attach.solver", "http://127.0.0.1:8000", None),
    ],
)
def test_a_value_of_the_command_line(key: str, text: str, expected: Any) -> None:
    config = load_config(None, {key: text})
    if key == "serving.attach.solver":
        assert config.serving.attach == {"solver": text}
    else:
        assert value(config, key) == expected and type(value(config, key)) is type(expected)


@given(st.sampled_from(sorted(DEFAULTS)), st.text(max_size=20))
def test_any_text_for_any_key_is_taken_or_refused_in_one_line(key: str, text: str) -> None:
    try:
        load_config(None, {key: text})
    except ConfigError as error:
        assert "\n" not in str(error) and str(error).startswith("command line: ") and key.split(".")[0] in str(error)


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("solver__rolouts", "solver.rollouts"),
        ("sovler", "solver"),
        ("solver__samplng", "solver.sampling"),
        ("solver__sampling__tempurature", "solver.sampling.temperature"),
        ("rollouts", "solver.rollouts"),
        ("reward__f1weight", "reward.f1_weight"),
        ("proposer__rollouts", "solver.rollouts"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key: str, nearest: str, tmp_path: Path) -> None:
    dotted = key.replace("__", ".")
    assert refusal(None, **{key: "1"}) == f"command line: {dotted}: unknown key; did you mean {nearest}?"
    path = write(tmp_path, file=f"{dotted} = 1\n")
    assert refusal(path) == f"{path}: {dotted}: unknown key; did you mean {nearest}?"


def test_a_key_like_no_other_is_refused_with_what_there_is() -> None:
    assert refusal(None, zzz="1").startswith("command line: zzz: unknown key; a configuration has bank, corpus, ")
    assert "training.lr: unknown key; [training] has beta, " in refusal(None, training__lr="1")
    assert ", learning_rate, " in refusal(None, training__lr="1")
    assert refusal(None, sovler__rollouts="1") == "command line: sovler: unknown key; did you mean solver?"


def test_the_file_that_holds_an_unknown_key_is_named_even_when_it_is_extended(tmp_path: Path) -> None:
    path = write(tmp_path, child='extends = "parent.toml"\n', parent="[bank]\ntop = 3\n")
    assert refusal(path).startswith(f"{tmp_path / 'parent.toml'}: bank.top: unknown key")


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ('[run]\nsteps = "5"', "run.steps", "valid integer, got '5'"),
        ("[run]\nsteps = true", "run.steps", "valid integer, got True"),
        ("[run]\nsteps = 1.5", "run.steps", "valid integer, got 1.5"),
        ("[run]\nsteps = 0", "run.steps", "greater than or equal to 1, got 0"),
        ("[run]\nroot = 5", "run.root", "valid string, got 5"),
        ("[bank]\nenabled = 1", "bank.enabled", "valid boolean, got 1"),
        ("[solver]\nrollouts = [5]", "solver.rollouts", "valid integer, got [5]"),
        ("[solver]\nrollouts = { a = 5 }", "solver.rollouts", "valid integer, got {'a': 5}"),
        ("[solver]\nsampling = 5", "solver.sampling", "is a section; set one of its keys"),
        ("solver = 5", "solver", "is a section; set one of its keys"),
        ("[training]\nlearning_rate = nan", "training.learning_rate", "finite number, got nan"),
        ("[training]\nlearning_rate = inf", "training.learning_rate", "finite number, got inf"),
        ('[retrieval]\nkind = "fuzzy"', "retrieval.kind", "'bm25', 'dense', 'hybrid' or 'http', got 'fuzzy'"),
        ('[serving]\nextra_args = "--seed 1"', "serving.extra_args", "valid tuple, got '--seed 1'"),
        ("[serving]\nport = 70000", "serving.port", "less than or equal to 65535, got 70000"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(text: str, key: str, said: str, tmp_path: Path) -> None:
    path = write(tmp_path, file=f"{text}\n")
    message = refusal(path)
    assert message.startswith(f"{path}: {key}: ") and said in message


def test_a_wrong_value_is_blamed_on_where_it_was_set(tmp_path: Path) -> None:
    path = write(tmp_path, child='extends = "parent.toml"\n[run]\nsteps = 2\n', parent="[run]\nsteps = 1\nseed = -1\n")
    assert refusal(path).startswith(f"{tmp_path / 'parent.toml'}: run.seed: ")
    assert refusal(path, run__seed="-2").startswith("command line: run.seed: ")
    assert refusal(path, run__seed="0", run__steps__more="1").startswith("command line: run.steps: ")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"retrieval__kind": "http"}, "retrieval.url must be set"),
        ({"reward__low": "0.5", "reward__high": "0.5"}, "reward.low must be below reward.high"),
        ({"judge__enabled": "true"}, "does not take part in runs yet"),
        ({"validity__min_chars": "2000"}, "validity.min_chars must not exceed validity.max_chars"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(overrides: dict[str, str], said: str, tmp_path: Path) -> None:
    message = refusal(None, **overrides)
    assert message.startswith("command line: ") and said in message
    rows = [f"{key.replace('__', '.')} = {json.dumps(t) if t == 'http' else t}" for key, t in overrides.items()]
    path = write(tmp_path, file="\n".join(rows))
    assert refusal(path).startswith(f"{path}: ")


def test_a_file_that_is_missing_unreadable_or_no_toml_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert refusal(missing) == f"{missing}: no such configuration file; those shipped are in configs/"
    assert refusal(tmp_path).startswith(f"{tmp_path}: is no regular file")
    bad = write(tmp_path, bad="[run\nsteps = 1")
    assert refusal(bad).startswith(f"{bad}: not valid TOML: ") and "line 1" in refusal(bad)
    bad.write_bytes(b"[run]\nroot = '\xff'\n")
    assert refusal(bad).startswith(f"{bad}: cannot be read: ")


def test_extends_in_a_circle_to_nowhere_or_to_several_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, a='extends = "b.toml"', b='extends = "c.toml"', c='extends = "a.toml"')
    assert refusal(path) == f"{path}: extends itself, through a.toml -> b.toml -> c.toml -> a.toml"
    lost = write(tmp_path, d='extends = "gone.toml"')
    assert refusal(lost) == f"{tmp_path / 'gone.toml'}: no such configuration file (asked for by {lost})"
    several = write(tmp_path, e='extends = ["a.toml", "b.toml"]')
    assert "extends: must be the name of one file" in refusal(several)


# ------------------------------------------------------------------------------------------ stored configurations


def test_a_configuration_survives_being_stored() -> None:
    config = load_config(ROOT / "configs/cpu.toml", {"serving.extra_args": '["--a"]', "serving.attach.solver": "u"})
    assert stored_config(json.loads(json.dumps(config.model_dump(mode="json"))), "r") == config


def test_a_stored_configuration_of_another_version_is_refused_in_one_line() -> None:
    stored = RunConfig().model_dump(mode="json")
    stored["bank"]["colour"] = "blue"
    with pytest.raises(ConfigError, match=r"run r: bank\.colour: .*another version of SESA") as caught:
        stored_config(stored, "r")
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------------- the shipped files


def test_every_key_is_described() -> None:
    assert [key for key, text, _ in config_keys() if not text] == []


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_configuration_loads_and_names_prompts_that_exist(name: str) -> None:
    config = load_config(ROOT / "configs" / name)
    assert {config.proposer.prompt, config.solver.prompt} <= set(prompts.names())


def test_the_shipped_configurations_are_the_ones_expected() -> None:
    assert {"cpu.toml", "demo.toml", "gpu.toml", "paper.toml"} <= set(SHIPPED)


PUBLISHED: dict[str, Any] = {
    "proposer.max_turns": 10,
    "solver.max_turns": 10,
    "solver.rollouts": 5,
    "retrieval.top_k": 3,
    "validity.min_words": 11,  # "more than 10 words"
    "validity.min_chars": 10,
    "validity.max_chars": 1000,
    "validity.evidence_check": True,
    "validity.distractors": 4,
    "reward.low": 0.0,
    "reward.high": 1.0,
    "reward.f1_weight": 0.0,
    "reward.format_weight": 0.0,
    "bank.enabled": True,
    "bank.top_k": 3,
    "bank.admit_below": 0.93,
    "bank.max_active": 800,
    "bank.retire_after": 3,
    "bank.seed_skills": True,
    "distiller.every": 10,
    "distiller.min_pending": 20,
    "distiller.max_chosen": 30,
    "distiller.queue": 300,
    "training.learning_rate": 1e-6,
    "training.epsilon": 0.2,
    "training.epsilon_high": 0.285,
    "proposer.sampling.temperature": 1.0,
    "solver.sampling.temperature": 1.0,
}


@pytest.mark.parametrize("key", sorted(PUBLISHED))
def test_paper_toml_holds_the_published_number(key: str) -> None:
    assert value(load_config(ROOT / "configs/paper.toml"), key) == PUBLISHED[key]


def test_paper_toml_has_the_published_batch_and_room_for_the_published_response() -> None:
    config = load_config(ROOT / "configs/paper.toml")
    assert config.proposer.seeds * config.proposer.proposals == 256
    assert config.solver.questions == 0  # every valid question is solved
    assert config.model.max_model_len >= 8192


def test_the_demo_is_the_cpu_configuration_but_for_when_it_distils() -> None:
    cpu, demo = load_config(ROOT / "configs/cpu.toml"), load_config(ROOT / "configs/demo.toml")
    changed = {key for key in DEFAULTS if value(cpu, key) != value(demo, key)}
    assert changed <= {"distiller.every", "distiller.min_pending", "distiller.max_chosen"}
    assert (demo.distiller.every, demo.distiller.min_pending) == (1, 1)  # due in the first step


def test_the_cpu_configuration_needs_nothing_that_is_not_embedded() -> None:
    config = load_config(ROOT / "configs/cpu.toml")
    assert (config.model.path, config.corpus.path, config.retrieval.encoder) == ("embedded",) * 3
    assert config.serving.device == "cpu" and config.model.dtype == "float32"
    assert config.distiller.endpoint == "policy" and not config.judge.enabled


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[run]\nseed = " + "9" * 5000, "cannot be read"),
        ("a = " + "[" * 5000, "cannot be read"),
        ("[corpus]\nseed_pattern = '('", "no regular expression"),
        ("[serving]\nlayout = 'lora'", "training writes whole weights"),
        ("[serving.attach]\nsolvr = 'http://h:1'", "no such policy"),
        ("[solver.sampling]\nmax_tokens = 4096", "must be below model.max_model_len"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(file)


def test_a_long_chain_of_files_ends_in_a_refusal(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.toml").write_text(f'extends = "{number + 1}.toml"')
    with pytest.raises(ConfigError, match="put them into fewer"):
        load_config(tmp_path / "0.toml")


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(b"\xef\xbb\xbf[solver]\nrollouts = 7\n")
    assert load_config(file).solver.rollouts == 7
