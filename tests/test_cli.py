"""The command line: what it prints, its JSON keys, its exit codes, and how soon it answers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from store_suite import a_failure, a_rollout, a_skill

from sesa import cli
from sesa.config import load_config
from sesa.store import Store, migrations, schema
from sesa.types import (
    Check,
    Invalid,
    LoadedSkill,
    PolicyVersion,
    Question,
    Reward,
    Role,
    Rollout,
    SeedAnswer,
    SkillEvent,
    SkillEventKind,
    StopReason,
    TrainedRow,
    Verdict,
)

SESA = [sys.executable, "-m", "sesa.cli"]

SOLVED, UNTRAINED = a_rollout(1).id, a_rollout(2).id
PROPOSAL = a_rollout(0, role=Role.PROPOSER).id
HOSTILE = "\x1b[2Jwiped \x07"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with one run in its store."""
    root = tmp_path_factory.mktemp("runs")
    with Store.open(root / "sesa.sqlite") as store:
        store.create_run("first", {"run": {"steps": 2}}, {"corpus": "106 articles", "seed_overlap": 0.25})
        seed = SeedAnswer(id="a", answer="Ada")
        passed = Check(name="one_question", verdict=Verdict.PASS)
        failed = Check(name="target_absent", verdict=Verdict.FAIL, reason="the target is in the question")
        common = {"target": "Ada", "seed": seed, "step": 1}
        questions = [
            Question(id="q00000", text="Who wrote it?", aliases=("Ada L.",), checks=(passed,), **common),
            Question(id="q9", text="Who is Ada?", checks=(passed, failed), proposal_id=PROPOSAL, **common),
        ]
        store.save_questions("first", questions)
        loaded = (LoadedSkill(id="s1", similarity=0.625), LoadedSkill(id="s2", similarity=0.125, loaded=False))
        no_bank = {"bank_version": None, "skills": (), "question_id": PROPOSAL}
        good = a_rollout(1, skills=loaded, bank_version=1)
        turn = good.turns[0].model_copy(
            update={"action": Invalid(reason="no action"), "hits": (), "observation": HOSTILE}
        )
        store.save_rollouts(
            "first",
            [
                good,
                a_rollout(2, turns=(turn,), stop_reason=StopReason.MAX_TURNS, skills=(), bank_version=1),
                a_rollout(0, role=Role.PROPOSER, stop_reason=StopReason.ASKED, **no_bank),
            ],
        )
        store.save_rewards(
            "first", {SOLVED: [Reward(name="correct", value=1.0, weight=0.5), Reward(name="f1", value=1 / 3)]}
        )
        update: dict[str, Any] = {"policy": "solver", "version": 1, "step": 1}
        account = TrainedRow(
            rollout_id=SOLVED, sampled_tokens=6, trained_tokens=6, sequences=1, advantage=0.75, **update
        )
        left_out = TrainedRow(rollout_id=UNTRAINED, dropped="no variance", **update)
        store.save_trained("first", [account, left_out])
        created = [
            SkillEvent(version=1, kind=SkillEventKind.CREATED, skill_id=name, reason="primed", step=0)
            for name in ("s1", "s2")
        ]
        store.commit_bank("first", step=0, base_version=0, events=created, skills=[a_skill("s1"), a_skill("s2")])
        numbers = {"retrieved": 2, "helpful": 1, "hurt": 0, "rollouts": [SOLVED]}
        credit = SkillEvent(
            version=2, kind=SkillEventKind.CREDITED, skill_id="s1", reason="step 1", step=1, detail=numbers
        )
        retired = SkillEvent(
            version=2, kind=SkillEventKind.RETIRED, skill_id="s2", reason="hurt more than it helped", step=1
        )
        store.commit_bank("first", step=1, base_version=1, events=[credit, retired])
        store.commit_node("first", 1, "validate", {"valid": 1, "refused": {"target_absent": 1}})
        store.commit_node("first", 1, "finish", {})
        store.save_metrics("first", 1, {"success_rate": 0.5, "loss": float("nan")})
        store.save_version("first", PolicyVersion(policy="solver", version=1, path="w/v0001", step=1, published=True))
        store.save_failures("first", [a_failure(1)], 9)
        store.log("first", 1, "alarm", "valid share fell")
    return root


@pytest.fixture
def sesa(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command in this process; returns (exit code, stdout, stderr)."""

    def run(*arguments: str, at: Path | None = root) -> tuple[int, str, str]:
        given = list(arguments) + ([] if at is None else ["--root", str(at)])
        monkeypatch.setattr(sys, "argv", ["sesa", *given])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), out, err

    return run


def lines(text: str) -> list[list[str]]:
    return [line.split("\t") for line in text.splitlines()]


# --------------------------------------------------------------------------------------------------------------- runs


def test_runs_list(sesa: Any) -> None:
    code, out, err = sesa("runs", "list")
    assert (code, err) == (0, "")
    head, row = lines(out)
    assert head == ["run", "status", "steps", "created", "last sign of life"]
    assert row[:3] == ["first", "running", "1"]
    _, out, _ = sesa("runs", "list", "--json")
    assert [list(r) for r in json.loads(out)] == [["id", "status", "created", "updated", "steps_done"]]


def test_runs_show(sesa: Any) -> None:
    code, out, _ = sesa("runs", "show")
    assert code == 0
    for part in (
        "run first",
        "seed_overlap: 0.25",
        "valid 1  refused (target_absent 1)",
        "loss nan  success_rate 0.5",
        "bank version 2",
        "failures pending 1",
        "solver v1  step 1  published",
        "alarm: valid share fell",
    ):
        assert part in out, part
    _, out, _ = sesa("runs", "show", "first", "--json")
    report = json.loads(out)
    assert set(report) == {
        "id",
        "status",
        "created",
        "updated",
        "config",
        "facts",
        "steps_done",
        "steps",
        "bank_version",
        "failures",
        "versions",
        "log",
    }
    assert set(report["steps"]["1"]) == {"nodes", "metrics", "stats"}
    assert report["steps"]["1"]["metrics"] == {"loss": None, "success_rate": 0.5}
    assert report["failures"] == {"pending": 1, "consolidated": 0, "dropped": 0}


# ----------------------------------------------------------------------------------------------------------- rollouts


def test_rollouts_list(sesa: Any) -> None:
    code, out, _ = sesa("rollouts", "list")
    assert code == 0
    head, *rows = lines(out)
    assert head[:6] == ["rollout", "step", "role", "stop", "refused by", "return"]
    assert [row[0] for row in rows] == [PROPOSAL, SOLVED, UNTRAINED]
    assert rows[1][5:] == ["0.8333", "3", "2", "6", "answer 1"]
    assert rows[2][5] == "-"

    def found(*conditions: str) -> list[str]:
        return [row["id"] for row in json.loads(sesa("rollouts", "list", "--json", *conditions)[1])]

    assert found("--role", "proposer") == [PROPOSAL]
    assert found("--stop", "max_turns") == [UNTRAINED]
    assert found("--question", "q00000", "--step", "1") == [SOLVED, UNTRAINED]
    assert found("--step", "2") == []
    assert found("--limit", "1", "--offset", "1") == [SOLVED]
    assert found("--skill", "s1") == [SOLVED] and found("--skill", "s2") == []
    (row, *_) = json.loads(sesa("rollouts", "list", "--json")[1])
    assert set(row) == {
        "id",
        "role",
        "question_id",
        "refused_by",
        "step",
        "sample",
        "stop_reason",
        "value",
        "turns",
        "searches",
        "sampled_tokens",
        "answer",
        "bank_version",
        "error",
    }


def test_rollouts_show(sesa: Any) -> None:
    code, out, _ = sesa("rollouts", "show", SOLVED)
    assert code == 0
    for part in (
        f"rollout {SOLVED}  solver  step 1  sample 1",
        "stop    answered",
        "text    Who wrote it?",
        "target  Ada | Ada L.",
        "skills  bank version 1",
        "loaded      0.625  s1  Two people are compared. → Search twice.",
        "considered  0.125  s2",
        "turn 2  solver v0  prompt 105 tokens  sampled 2  stop",
        "action: search  query 1",
        "1. 0.333 bm25  Title 1  [p1]",
        "action: answer  answer 1",
        "reward  0.8333",
        "correct      1 × 0.5",
        "tokens  sampled 6 = trained 6  in 1 sequence(s)  advantage +0.7500  solver v1",
    ):
        assert part in out, part
    assert "prompt ids" not in out
    code, out, _ = sesa("rollouts", "show", SOLVED, "--tokens")
    assert "prompt ids  0 1 2 3" in out and "token ids   1000 2001" in out and "log-probs   -0.433333 -0.142857" in out
    assert "  user:\n    question 1" in out


def test_rollouts_show_of_one_that_was_left_out(sesa: Any) -> None:
    _, out, _ = sesa("rollouts", "show", UNTRAINED)
    assert "not trained on: no variance" in out and "reward  none given" in out
    assert "action: invalid  no action" in out
    assert "\x1b" not in out and "\x07" not in out and r"\x1b[2Jwiped \x07" in out, "untrusted text drives no terminal"


def test_rollouts_show_of_a_proposal(sesa: Any) -> None:
    _, out, _ = sesa("rollouts", "show", PROPOSAL)
    assert "proposed q9  fail" in out and "text    Who is Ada?" in out
    assert "one_question         pass" in out
    assert "target_absent        fail  the target is in the question" in out
    assert "skills" not in out and "not part of any update" in out


def test_rollouts_show_json(sesa: Any) -> None:
    view = json.loads(sesa("rollouts", "show", SOLVED, "--json")[1])
    assert set(view) == {
        *Rollout.model_fields,
        "value",
        "answer",
        "sampled_tokens",
        "question",
        "evidence_readings",
        "trained",
    }
    assert view["question"]["status"] == "pass" and view["trained"]["trained_tokens"] == view["sampled_tokens"] == 6
    assert [(s["id"], s["loaded"], s["text"]["description"]) for s in view["skills"]] == [
        ("s1", True, "Search twice."),
        ("s2", False, "Search twice."),
    ]
    assert "token_ids" not in view["turns"][0]["call"]
    exact = json.loads(sesa("rollouts", "show", SOLVED, "--json", "--tokens")[1])
    assert [tuple(turn["call"]["logprobs"]) for turn in exact["turns"]] == [t.call.logprobs for t in a_rollout(1).turns]
    assert [tuple(turn["call"]["prompt_ids"]) for turn in exact["turns"]] == [
        t.call.prompt_ids for t in a_rollout(1).turns
    ]


# ------------------------------------------------------------------------------------------------------------- skills


def test_skills_list(sesa: Any) -> None:
    code, out, _ = sesa("skills", "list")
    assert code == 0
    head, *rows = lines(out)
    assert head[:7] == ["skill", "status", "source", "loaded", "helpful", "hurt", "step"]
    assert [row[:6] for row in rows] == [
        ["s1", "active", "distilled", "2", "1", "0"],
        ["s2", "retired", "distilled", "0", "0", "0"],
    ]
    assert [row[0] for row in lines(sesa("skills", "list", "--status", "retired")[1])[1:]] == ["s2"]
    before = json.loads(sesa("skills", "list", "--version", "1", "--json")[1])
    assert [(s["id"], s["status"], s["score"]) for s in before] == [("s1", "active", 0), ("s2", "active", 0)]


def test_skills_show(sesa: Any) -> None:
    code, out, _ = sesa("skills", "show", "s2")
    assert code == 0
    for part in (
        "skill s2  retired",
        "description      Search twice.",
        "avoidance        -",
        "v1 step 0  created: primed",
        "v2 step 1  retired: hurt more than it helped",
        "loaded by no rollout",
    ):
        assert part in out, part
    view = json.loads(sesa("skills", "show", "s1", "--json")[1])
    assert [e["kind"] for e in view["events"]] == ["created", "credited"]
    assert view["rollouts"] == [SOLVED] and view["bank_version"] == 2 and view["score"] == 1


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("runs", "show", "frist"), "holds no run 'frist'; did you mean first?"),
        (("rollouts", "list", "--run", "x"), "holds no run 'x'"),
        (("rollouts", "show", "x"), "run first has no rollout 'x'; see `sesa rollouts list --run first`"),
        (("rollouts", "list", "--role", "solvr"), "--role: no such value 'solvr'; it takes one of proposer, solver"),
        (("rollouts", "list", "--stop", "x"), "--stop: no such value 'x'; it takes one of answered"),
        (("skills", "show", "s3"), "run first, bank version 2: holds no skill 's3'; did you mean s"),
        (("skills", "list", "--version", "99"), "--version: run first has no bank version 99; the newest is 2"),
        (("skills", "show", "s1", "--version", "3"), "--version: run first has no bank version 3; the newest is 2"),
        (("skills", "list", "--status", "old"), "--status: no such value 'old'"),
        (("ask", "Who?", "--bank", "maybe"), "--bank: no such value 'maybe'; it takes one of on, off"),
        (("ask", " "), "QUESTION: is empty"),
        (("serve", "--policy", "judge"), "--policy: no such value 'judge'"),
    ],
)
def test_an_expected_error_is_one_line(sesa: Any, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = sesa(*arguments)
    assert (code, out) == (2, "")
    assert message in err and err.startswith("sesa: ") and err.count("\n") == 1 and "Traceback" not in err


def test_no_store(sesa: Any, tmp_path: Path) -> None:
    for command in (("runs", "list"), ("rollouts", "list"), ("skills", "list"), ("ask", "Who?"), ("serve",)):
        code, _, err = sesa(*command, at=tmp_path / "absent")
        assert code == 2 and err.count("\n") == 1 and "no store there; start a run with" in err, command
    assert not (tmp_path / "absent").exists(), "reading makes nothing"


def test_a_newer_store(sesa: Any, tmp_path: Path) -> None:
    with Store.open(tmp_path / "sesa.sqlite") as store, store._write() as connection:
        newer = {"version": len(migrations.MIGRATIONS) + 1, "applied": "later"}
        connection.execute(sa.insert(schema.schema_version), newer)
    code, _, err = sesa("runs", "list", at=tmp_path)
    assert code == 2 and "newer SESA" in err and err.count("\n") == 1


def test_the_store_by_url(sesa: Any, root: Path) -> None:
    code, out, _ = sesa("runs", "list", "--store", f"sqlite:///{root}/sesa.sqlite", at=None)
    assert code == 0 and lines(out)[1][0] == "first"


def test_corpus_names_a_bad_file(sesa: Any, tmp_path: Path) -> None:
    for command in (("corpus", "info"), ("corpus", "build", "--kind", "bm25")):
        code, _, err = sesa(*command, "--corpus", str(tmp_path / "none.jsonl"), "--cache", str(tmp_path), at=None)
        assert code == 2 and "none.jsonl" in err and err.count("\n") == 1, command
    code, _, err = sesa("corpus", "build", "--kind", "bm52", at=None)
    assert code == 2 and "retrieval.kind" in err and err.count("\n") == 1


def test_corpus_build_and_info(sesa: Any, tmp_path: Path) -> None:
    rows = [{"id": f"p{i}", "title": f"Title {i}", "text": f"Text number {i} about a river."} for i in range(20)]
    (tmp_path / "passages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = ("--corpus", str(tmp_path / "passages.jsonl"), "--cache", str(tmp_path / "cache"))
    code, out, _ = sesa("corpus", "build", "--kind", "bm25", "--json", *where, at=None)
    built = json.loads(out)
    assert code == 0 and built["passages"] == 20 and built["indexes"]["bm25"]["built"]
    assert not built["indexes"]["dense"]["built"]
    code, out, _ = sesa("corpus", "info", *where, at=None)
    assert code == 0 and "passages     20\n" in out and "dense        not built" in out


def test_doctor(sesa: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = sesa("doctor", "--json", at=None)
    findings = json.loads(out)
    assert all(set(f) == {"name", "ok", "detail", "remedy"} for f in findings) and err == ""
    assert code == (0 if all(f["ok"] for f in findings) else 1)
    assert ["python", "yes"] in [row[:2] for row in lines(sesa("doctor", at=None)[1])]
    (tmp_path / "bad.toml").write_text("[run]\nstepz = 1\n")
    code, _, err = sesa("doctor", "--config", str(tmp_path / "bad.toml"), at=None)
    assert code == 2 and "bad.toml: run.stepz: unknown key" in err and err.count("\n") == 1


def test_doctor_that_finds_something(sesa: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file where the folder should be")
    code, out, _ = sesa("doctor", at=None)
    assert code == 1 and [row[1] for row in lines(out) if row[0] == "run folder"] == ["no"]


def test_ctrl_c(sesa: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "runs", interrupted)
    assert sesa("runs", "list")[0] == 130


# ------------------------------------------------------------------------------------------- as a process of its own


def test_help_answers_within_a_second() -> None:
    for arguments in ([], ["rollouts", "show"]):
        seconds = []
        for _ in range(3):  # the best of three: other tests may be using the cores
            start = time.perf_counter()
            done = subprocess.run([*SESA, *arguments, "--help"], capture_output=True, text=True, check=True)
            seconds.append(time.perf_counter() - start)
            assert "Usage" in done.stdout
        assert min(seconds) < 1.0, seconds


def test_help_imports_nothing_heavy() -> None:
    heavy = ("pydantic", "sqlalchemy", "torch", "transformers", "faiss", "langgraph")
    script = (
        "import sys\nfrom sesa import cli\nsys.argv = ['sesa', '--help']\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        f"print([m for m in {heavy} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_exit_codes_of_the_process(root: Path) -> None:
    done = subprocess.run([*SESA, "runs", "show", "x", "--root", str(root)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    done = subprocess.run([*SESA, "runs", "lits"], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_closed_pipe_is_no_traceback(root: Path) -> None:
    command = f"{sys.executable} -m sesa.cli rollouts show {SOLVED} --tokens --root {root} | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith("rollout") and "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_a_terminal_gets_a_table(root: Path) -> None:
    pid, terminal = os.forkpty()
    if pid == 0:
        os.environ |= {"COLUMNS": "200", "TERM": "xterm"}
        os.execv(sys.executable, [*SESA, "runs", "list", "--root", str(root)])
    output = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        output += part
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"first" in output and "─".encode() in output and b"\t" not in output


def test_a_terminal_that_cannot_show_a_character(root: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [*SESA, "rollouts", "show", SOLVED, "--root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert r"compared. \u2192 Search" in done.stdout


def test_interrupted_by_a_signal(tmp_path: Path) -> None:
    """Ctrl-C while the command waits for a store that another process holds open."""
    import sqlite3

    with Store.open(tmp_path / "sesa.sqlite") as store, store._write() as connection:
        connection.execute(sa.delete(schema.schema_version))  # so that opening it migrates, and must wait
    holder = sqlite3.connect(tmp_path / "sesa.sqlite", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    child = subprocess.Popen([*SESA, "runs", "list", "--root", str(tmp_path)], stderr=subprocess.PIPE, text=True)
    time.sleep(1.5)
    child.send_signal(signal.SIGINT)
    time.sleep(0.2)
    holder.execute("ROLLBACK")
    holder.close()
    assert child.wait(40) == 130
    assert child.stderr is not None and "Traceback" not in child.stderr.read()


# ------------------------------------------------------------------------------------- ask, with a model server's help


@pytest.mark.real
async def test_ask_with_and_without_the_bank(tmp_path: Path) -> None:
    """The real command, template, corpus, search, encoder and bank; the server speaks vLLM's interface."""
    from scripted_server import Prompt, ScriptedServer

    from sesa.chat_template import ChatTemplate
    from sesa.embedded import embedded_model
    from sesa.skills import seed_skills

    def script(prompt: Prompt) -> str:
        return (
            "<answer>the Thames</answer>" if "flows through London" in prompt.text else "<search>river London</search>"
        )

    rows = [
        {"id": "thames", "title": "Thames", "text": "The Thames is a river that flows through London."},
        {"id": "seine", "title": "Seine", "text": "The Seine is a river that flows through Paris."},
    ]
    (tmp_path / "passages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = embedded_model()
    async with ScriptedServer(script, template=ChatTemplate(model)) as server:
        config = load_config(
            None,
            {
                "corpus.path": str(tmp_path / "passages.jsonl"),
                "corpus.cache": str(tmp_path / "cache"),
                "model.path": str(model),
                "retrieval.kind": "bm25",
                "bank.min_similarity": "-1.0",
            },
        )
        # As a run that trains on servers of others is configured: the proposer's is none of this command's business.
        attach = {"solver": server.url, "proposer": "http://127.0.0.1:9"}
        serving = config.serving.model_copy(update={"attach": attach})
        config = config.model_copy(update={"serving": serving})
        with Store.open(tmp_path / "sesa.sqlite") as store:
            store.create_run("r", config.model_dump(mode="json"), {})
            store.save_version("r", PolicyVersion(policy="solver", version=0, path=str(model), published=True))
            skills = seed_skills()
            events = [
                SkillEvent(version=1, kind=SkillEventKind.CREATED, skill_id=s.id, reason="primed") for s in skills
            ]
            store.commit_bank("r", step=0, base_version=0, events=events, skills=skills)

        async def ask(*options: str) -> tuple[int, str, str]:
            command = [*SESA, "ask", "Which river flows through the capital?", "--root", str(tmp_path), *options]
            child = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
            out, err = await child.communicate()
            return child.returncode or 0, out.decode(), err.decode()

        code, out, err = await ask("--bank", "on", "--json")
        assert code == 0, err
        reply = json.loads(out)
        assert reply["answer"] == "the Thames" and reply["bank_version"] == 1
        assert set(reply) == {
            "run",
            "question",
            "answer",
            "stop_reason",
            "policy_versions",
            "bank_version",
            "sampled_tokens",
            "searches",  # per search: its query and its hits, as they are stored
            "passages",  # the hits of all searches in one list
            "skills",  # the loaded ones
        }
        assert [s["query"] for s in reply["searches"]] == ["river London"]
        assert len(reply["passages"]) == 2
        assert reply["passages"][0] == {
            "query": "river London",
            "rank": 1,
            "score": reply["searches"][0]["hits"][0]["score"],
            "id": "thames",
            **{name: rows[0][name] for name in ("title", "text")},
        }
        assert reply["searches"][0]["hits"][0]["passage"]["id"] == "thames"
        assert len(reply["skills"]) == 3 and reply["skills"][0]["trigger"]
        assert all(s["loaded"] is True and "similarity" in s for s in reply["skills"])
        code, out, err = await ask("--bank", "off")
        assert code == 0, err
        assert out.startswith("the Thames\n") and "search  river London" in out and "1. Thames  [thames]" in out
        assert out.endswith("skills  off\n") and not any(s.id in out or s.description in out for s in skills)
        prompts = [server.template.decode(call["prompt"]) for call in server.calls]
        assert [any(s.trigger in prompt for s in skills) for prompt in prompts] == [True, True, False, False]

        server.fail_next("400", "400", "400")
        code, out, err = await ask()
        assert code == 2 and out == "" and "scripted failure 400" in err.splitlines()[-1] and "Traceback" not in err


@pytest.mark.real
async def test_serve(tmp_path: Path) -> None:
    """The real server: it answers under the address that is printed, and Ctrl-C ends it and the command."""
    import aiohttp

    from sesa.config import RunConfig

    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    with Store.open(tmp_path / "sesa.sqlite") as store:
        store.create_run("r", RunConfig().model_dump(mode="json"), {})
    child = await asyncio.create_subprocess_exec(*SESA, "serve", "--root", str(tmp_path), stdout=PIPE, stderr=PIPE)
    try:
        assert child.stdout is not None and child.stderr is not None
        line = (await asyncio.wait_for(child.stdout.readline(), 300)).decode()
        assert line.startswith("solver v0  http://127.0.0.1:"), (line, await child.stderr.read())
        url = line.split()[2]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/models") as reply:
                assert [m["id"] for m in (await reply.json())["data"]] == ["solver"]
            child.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(child.wait(), 60) == 0
            said = (await child.stderr.read()).decode()
            assert "Traceback" not in said and f"ask --attach {url.removesuffix('/v1')} --run r" in said
            with pytest.raises(aiohttp.ClientConnectorError):
                await session.get(f"{url}/models")
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
            await child.wait()
